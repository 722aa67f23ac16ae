"""Programs that try to escape from a sandbox, to outlive it or to exhaust the machine: the files in hostile/.

A program follows a line `=== name [language, how it ends]` and prints ESCAPED if its attack succeeded. It ends as
`contained` (it tried and could report), `stopped` (time, memory or processes ran out), `died` (a signal or an exit
code) or `any` of these. `{secret}`, `{folder}`, `{port}` and `{name}` are replaced by things that exist on the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HELPERS = """
import os, sys, ctypes, socket, time, signal
libc = ctypes.CDLL(None, use_errno=True)

def refused(what, function, *args):
    try:
        function(*args)
    except (OSError, MemoryError, ValueError) as error:
        print(what, "refused:", type(error).__name__, error)
    else:
        print("ESCAPED", what)

def call(number, *args):
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(number), *args) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def write(path, text="x"):
    with open(path, "w") as file:
        file.write(text)

def read(path):
    with open(path, "rb") as file:
        file.read(100)
"""
FRAMES = {"python": (HELPERS, "\nprint('contained')\n"), "bash": ("", "\necho contained\n")}
TITLE = re.compile(r"^=== (?P<name>.+) \[(?P<language>\w+), (?P<ends>\w+)\]$", re.MULTILINE)


@dataclass(frozen=True)
class Hostile:
    name: str
    code: str
    ends: str = "contained"
    language: str = "python"
    files: dict[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()


def book(path: Path) -> Iterator[Hostile]:
    _, *parts = TITLE.split(path.read_text())
    for name, language, ends, code in zip(*(parts[n::4] for n in range(4)), strict=True):
        before, after = FRAMES.get(language, ("", ""))
        yield Hostile(name, f"{before}{code.strip()}{after}", ends, language)


SEES_OTHERS = """
import os, time
for folder in ("/tmp", "/mnt", "/dev/shm", "/tmp/work", "/var/tmp"):
    try:
        if any("rally-run" in name for name in os.listdir(folder)):
            print("ESCAPED")
        open(f"{folder}/rally-run", "w").close()
    except OSError:
        pass
time.sleep(0.3)
print("contained")
"""
ASKED_FOR = (
    *("/etc/shadow", "{secret}", "../../../../{secret}", "link", "fifo"),
    *("/dev/zero", "/proc/1/environ", "."),
)
GIVEN_FILES = [
    Hostile("files with names that climb", "print('contained')", "died", files={"../../../etc/rally-hostile": b"x"}),
    Hostile("files with absolute names", "print('contained')", "died", files={"/usr/rally-hostile": b"x"}),
    Hostile("files over the cap", "print('contained')", "died", files={"big": bytes(40 << 20)}),
    Hostile(
        "fetching what is not its own",
        "import os\nos.symlink('{secret}', 'link')\nos.mkfifo('fifo')\nprint('contained')",
        fetch=ASKED_FOR,
    ),
    *(Hostile(f"files of another run, {n}", SEES_OTHERS) for n in range(3)),
]

BOOKS = sorted((Path(__file__).parent / "hostile").glob("*.txt"))
PROGRAMS = [*(program for path in BOOKS for program in book(path)), *GIVEN_FILES]
