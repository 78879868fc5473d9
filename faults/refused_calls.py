"""Runs a command for which the kernel refuses some system calls, as file systems and sandboxes of other machines do.

    python -m faults.refused_calls fsync=EINVAL,flock=ENOLCK COMMAND ...

The filter holds for every process that the command starts.
"""

import errno
import os
import platform
import sys

from pipeline.contrib.sandbox_child import (
    ALLOW,
    ARCHITECTURES,
    EQUAL,
    ERRNO,
    LOAD,
    NUMBER,
    RETURN,
    call,
    install,
    instruction,
)

PR_SET_NO_NEW_PRIVS = 38
# Numbers on x86_64 and aarch64, of all calls that do the same.
CALLS = {
    "fsync": ((74, 75), (82, 83)),
    "flock": ((73,), (32,)),
    "memfd_create": ((319,), (279,)),
    "sched_getaffinity": ((204,), (123,)),
    "rename": ((82, 264, 316), (38, 276)),
    "unlink": ((87, 263), (35,)),
}


def is_possible() -> bool:
    return sys.platform == "linux" and platform.machine() in ARCHITECTURES


def refusing(asked: str) -> bytes:
    column = list(ARCHITECTURES).index(platform.machine())
    code = [instruction(LOAD, NUMBER)]
    for name, error in (rule.split("=") for rule in asked.split(",")):
        for number in CALLS[name][column]:
            refuse = instruction(RETURN, ERRNO | getattr(errno, error))
            code += [instruction(EQUAL, number, if_false=1), refuse]
    return b"".join([*code, instruction(RETURN, ALLOW)])


if __name__ == "__main__":
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    install(refusing(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
