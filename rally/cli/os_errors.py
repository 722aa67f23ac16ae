"""What the system refuses (a full disk, a folder that may not be written) is one sentence that says what to do."""

from __future__ import annotations

import errno

_ADVICE = {
    errno.ENOSPC: "make room on that disk and give the same command again: a run goes on from its last checkpoint",
    errno.EDQUOT: "make room in your quota and give the same command again: a run goes on from its last checkpoint",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a place that you may use, or change its permissions",
    errno.EPERM: "choose a place that you may use, or change its permissions",
    errno.EEXIST: "choose another name: something else lies there",
    errno.ENOTDIR: "choose another folder: a part of that path is a file",
    errno.EISDIR: "name a file: that is a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and give the same command again",
    errno.EADDRINUSE: "choose another port",
}


def system_sentence(refusal: OSError) -> str | None:
    """The sentence, if a user can do something about it; anything else is a bug of ours that needs its traceback."""
    advice = _ADVICE.get(refusal.errno or 0)
    if advice is None:
        return None
    where = "" if refusal.filename is None else f"{refusal.filename}: "
    return f"{where}{refusal.strerror}; {advice}"
