"""The process that sandbox.py starts for one program: it locks itself in and executes the program.

Input: a line of JSON and the program. Output: "ready" or why a lock is missing, then "passed" or "kind: what happened".
Sources: setrlimit(2), linux/landlock.h, linux/seccomp.h, linux/prctl.h.
"""

import ctypes
import errno
import json
import os
import platform
import signal
import struct
import sys
import types
from typing import Any, NoReturn

try:
    import resource  # now: once locked in, the program's process finds nothing any more
except ImportError:  # Windows, where programs are not run
    resource = None  # type: ignore[assignment]

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Return the result of the function; raise OSError with its name where it fails or does not exist."""
    # An int is passed as 64 bits: a C int would leave half of a register of `syscall` and `prctl` undefined.
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    try:
        result = getattr(_libc, name)(*wide)
    except AttributeError as error:
        raise OSError(f"{name}: this C library has no such function") from error
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|{JEQ,JGE,JSET}, BPF_RET
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
# The system calls that a single-threaded Python program needs to compute; the kernel refuses every other one.
# Numbers on x86_64 and aarch64; None where there is no such call.
# fmt: off
HARMLESS = {
    "read": (0, 63), "pread64": (17, 67), "readv": (19, 65), "write": (1, 64), "writev": (20, 66), "lseek": (8, 62),
    "close": (3, 57), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "getdents64": (217, 61), "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102), "pause": (34, None),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160), "getrandom": (318, 278), "getcpu": (309, 168),
    "sched_getaffinity": (204, 123), "sched_yield": (24, 124), "futex": (202, 98), "set_robust_list": (273, 99),
    "rseq": (334, 293), "set_tid_address": (218, 96), "arch_prctl": (158, None), "getrlimit": (97, 163),
    "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94),
}
# fmt: on
OPEN, OPENAT, FCNTL, PRLIMIT64, IOCTL = (2, None), (257, 56), (72, 25), (302, 261), (16, 29)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Not F_SETOWN: with O_ASYNC it sends a signal to any process of
# the user.
FCNTL_COMMANDS = (0, 1, 2, 3, 1030)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FIRST_RECENT = 424  # since Linux 5.1 calls have one number on all machines


class FilterProgram(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one step of the filter; a jump is the number of steps to skip."""
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def compute_only() -> bytes:
    """Return the filter for this machine; OSError where its system calls are not known here."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known here")
    column = list(ARCHITECTURES).index(machine)

    code = [
        instruction(LOAD, ARCHITECTURE),
        instruction(EQUAL, ARCHITECTURES[machine], if_true=1),
        instruction(RETURN, KILL_PROCESS),  # 32-bit calls have other numbers
        instruction(LOAD, NUMBER),
    ]

    def rule(numbers: tuple[int, int | None], body: list[bytes]) -> None:
        number = numbers[column]
        if number is not None:
            code.extend([instruction(EQUAL, number, if_false=len(body)), *body])

    allow, refuse = instruction(RETURN, ALLOW), instruction(RETURN, ERRNO | errno.EPERM)
    for numbers in HARMLESS.values():
        rule(numbers, [allow])
    for numbers, flags in ((OPEN, 1), (OPENAT, 2)):
        rule(numbers, [_load(flags), instruction(ANY_BIT, WRITING, if_false=1), refuse, allow])
    commands = [instruction(EQUAL, c, if_true=len(FCNTL_COMMANDS) - i) for i, c in enumerate(FCNTL_COMMANDS)]
    rule(FCNTL, [_load(1), *commands, refuse, allow])
    # Reading a limit: no new one is given, both halves of its address are 0.
    unset = [_load(2), instruction(EQUAL, 0, if_false=3), _load(2, high=True), instruction(EQUAL, 0, if_false=1)]
    rule(PRLIMIT64, [*unset, allow, refuse])
    rule(IOCTL, [instruction(RETURN, ERRNO | errno.ENOTTY)])  # as if no file were a terminal
    # The C library tries clone3 and the like first and falls back on an older call only where the kernel has no such
    # one.
    code += [instruction(AT_LEAST, FIRST_RECENT, if_false=1), instruction(RETURN, ERRNO | errno.ENOSYS), refuse]
    return b"".join(code)


def _load(argument: int, *, high: bool = False) -> bytes:
    """Return the instruction that loads half of the argument; both machines store the low half first."""
    return instruction(LOAD, 16 + 8 * argument + 4 * high)


def install(code: bytes) -> None:
    """Filter this thread's system calls from now on, for good. Needs no_new_privs."""
    program = FilterProgram(len(code) // 8, code)
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # on every machine
LANDLOCK_READ = 1 << 2 | 1 << 3  # files, folders
LANDLOCK_FILES = (1 << 13) - 1  # all that the first version knows; the system calls of later rights are refused
CAPABILITY_VERSION_3 = 0x20080522
FILE_BYTES = 16 << 20
OPEN_FILES = 64


def readable_folders() -> list[str]:
    """Return Python's library and the shared objects it loads: all that a program may read. None is named below
    another one."""
    found: list[str] = []
    names = [*sys.path, f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    for folder in sorted({os.path.abspath(name) for name in names if os.path.isdir(name)}):
        if not any(os.path.commonpath([folder, outer]) == outer for outer in found):
            found.append(folder)
    return found


def limit(*, cpu_s: int, memory_bytes: int) -> None:
    """Bound CPU seconds, address space, files; no core dump. Root is exempt from the number of processes."""
    limits = {
        "CPU": cpu_s,
        "AS": memory_bytes,
        "FSIZE": FILE_BYTES,
        "NOFILE": OPEN_FILES,
        "CORE": 0,
        "NPROC": 0,
        "MEMLOCK": 0,
    }
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        except (OSError, ValueError):
            if sys.platform == "linux":  # macOS refuses some of them
                raise


def drop_privileges() -> None:
    """Lose every capability, and the way to gain one: root's could poison memory pages by madvise(2)."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24))


def restrict_to(folders: list[str]) -> None:
    """Let this process read these folders by Landlock, and open no other file."""
    rules = call("syscall", LANDLOCK_CREATE_RULESET, struct.pack("=Q", LANDLOCK_FILES), 8, 0)
    for folder in folders:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", LANDLOCK_READ, place))
        call("syscall", LANDLOCK_ADD_RULE, rules, 1, rule, 0)
        os.close(place)
    call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def lock_in(*, cpu_s: int, memory_bytes: int, safe: bool) -> None:
    """Bound what this process takes; safe: also close files, network and other processes to it."""
    folders = readable_folders()
    if sys.platform == "linux":
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    limit(cpu_s=cpu_s, memory_bytes=memory_bytes)
    if safe:
        drop_privileges()
        restrict_to(folders)
        install(compute_only())


READY, PASSED = b"ready\n", b"passed\n"
MOST_LETTERS = 300  # of a reason


def main() -> NoReturn:
    """Execute the program and write how it ended. Only names of this function are used after it began."""
    sys.path.pop()  # the place this package was imported from
    request = json.loads(sys.stdin.buffer.readline())
    program = sys.stdin.buffer.read()
    answers, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    write, leave, describe, passed = os.write, os._exit, explain, PASSED
    try:
        lock_in(**request)
    except OSError as error:
        write(answers, str(error).encode() + b"\n")
        leave(1)
    write(answers, READY)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pipeline"]:
        del sys.modules[name]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(program, "<program>", "exec", dont_inherit=True), vars(module))
        answer = passed
    except BaseException as error:
        answer = describe(error)
    write(answers, answer)
    leave(0)


def explain(error: BaseException) -> bytes:
    """Return one line: the kind of failure and the error. The program may have made str() fail or endless."""
    kinds: dict[type[BaseException], str] = {MemoryError: "memory", PermissionError: "forbidden"}
    try:
        text = str(error)[:MOST_LETTERS]
    except BaseException:
        text = "(its message cannot be made)"
    line = " ".join(f"{kinds.get(type(error), 'wrong')}: {type(error).__name__[:MOST_LETTERS]}: {text}".split())
    return line.removesuffix(":")[:MOST_LETTERS].encode("utf-8", "backslashreplace") + b"\n"
