"""Messages for operating-system errors that a user can fix, such as a full disk, with advice."""

from __future__ import annotations

import errno

_ADVICE = {
    errno.ENOSPC: "free space on that disk and run the same command again: a run resumes from its last checkpoint",
    errno.EDQUOT: "free space in your quota and run the same command again: a run resumes from its last checkpoint",
    errno.EROFS: "choose a writable folder",
    errno.EACCES: "choose another path, or change its permissions",
    errno.EPERM: "choose another path, or change its permissions",
    errno.EEXIST: "choose another name: the path already exists",
    errno.ENOTDIR: "choose another folder: a part of that path is a file",
    errno.EISDIR: "name a file: that is a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and run the same command again",
    errno.EADDRINUSE: "choose another port",
}


def os_error_message(error: OSError) -> str | None:
    """The message, or None for an error that a user cannot fix, which needs its traceback."""
    advice = _ADVICE.get(error.errno or 0)
    if advice is None:
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}; {advice}"
