"""What a process does that its user did not ask for, noted by an audit hook: files changed elsewhere, programs started, code run.

The hook sees what Python does, also in forks; a file that a compiled library writes by itself is found by comparing folders (trial.py).
"""

import os
import sys
from pathlib import Path

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEVICES = ("/dev/null", "/dev/tty", "/dev/shm/", "/proc/self/", "/memfd:")
# Event: the places of its arguments that are paths, and of the descriptors of the folders that these are relative to.
CHANGES = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
}
STARTS = ("os.system", "os.exec", "os.spawn", "os.posix_spawn", "subprocess.Popen", "pty.spawn")
OWN_PROGRAMS = (sys.executable, "git", "nvidia-smi", "lscpu", "uname", "ldconfig", "gcc", "cc", "c++", "g++")


def watch(log: str, folder: str, allowed: list[str]) -> None:
    """Note in a file, a line each. folder: where the hostile thing lies, of which no code may run. allowed: where files may change."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    root = os.path.realpath(folder)
    places = tuple(os.path.realpath(place) for place in allowed)
    busy = False

    def note(kind: str, what: object) -> None:
        os.write(descriptor, f"{kind}\t{str(what)[:300]!r}\n".encode())

    def changed(path: object, at: object = None) -> None:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, (str, os.PathLike)):
            return  # an open descriptor: its opening was seen
        if isinstance(at, int) and at >= 0 and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{at}"), path)
        # The file itself may be a link that is replaced; what is written through a link is its target.
        real = os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
        if str(real).startswith(DEVICES) or str(path).startswith(DEVICES):
            return
        if not any(real == place or real.startswith(place + "/") for place in places):
            note("outside", real)

    def hook(event: str, given: tuple) -> None:
        nonlocal busy
        if busy:
            return
        busy = True
        try:
            if event == "open":
                path, _, flags = given
                if isinstance(flags, int) and flags & WRITING:
                    changed(os.path.realpath(path) if isinstance(path, (str, bytes)) else path)
            elif event in CHANGES:
                if event == "os.mkdir" and os.path.isdir(given[0]):
                    return  # it is asked for also where it lies
                for name, at in CHANGES[event]:
                    changed(given[name], given[at] if at is not None else None)
            elif event in STARTS:
                started(given)
            elif event == "exec":
                ran(getattr(given[0], "co_filename", ""))
            elif event == "ctypes.dlopen" and given[0]:
                ran(str(given[0]))
            elif event == "socket.connect":
                address = given[1]
                if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
                    note("reached", address)
        except OSError:
            pass  # the call itself will meet it
        finally:
            busy = False

    def started(given: tuple) -> None:
        words = given[1] if len(given) > 1 and given[1] else given[0]
        first = os.fsdecode(words[0] if isinstance(words, (list, tuple)) else words)
        program = given[0] if isinstance(given[0], str) else first
        if first not in OWN_PROGRAMS and Path(program).name not in OWN_PROGRAMS and program not in OWN_PROGRAMS:
            note("executed", f"program {words}")

    def ran(file: str) -> None:
        if os.path.isabs(file) and os.path.realpath(file).startswith(root + "/"):
            note("executed", f"code of {file}")

    sys.dont_write_bytecode = True  # beside a module that the user named
    sys.addaudithook(hook)
