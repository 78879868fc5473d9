"""The system calls that a single-threaded Python program needs to compute; the kernel refuses every other one.

No sockets, no processes or threads, no signals, no opening for writing, no changes to files, namespaces, limits or keys, no
debugging of others, no io_uring, no bpf. What is not listed is refused, so a call that a later kernel adds is refused too.
Sources: linux/seccomp.h, linux/audit.h and the syscall tables of Linux 6.1: x86_64, and the generic one of aarch64, which
has not been run yet; choose.py tries the filter before it counts as safe.
"""

import ctypes
import errno
import os
import platform
import struct

from pipeline.evals.sandbox.libc import call

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|{JEQ,JGE,JSET}, BPF_RET
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
# Numbers on x86_64 and aarch64; None where there is no such call.
# fmt: off
HARMLESS = {
    "read": (0, 63), "pread64": (17, 67), "readv": (19, 65), "write": (1, 64), "writev": (20, 66), "lseek": (8, 62),
    "close": (3, 57), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "getdents64": (217, 61), "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214),
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
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Not F_SETOWN: with O_ASYNC it sends a signal to any process of the user.
FCNTL_COMMANDS = (0, 1, 2, 3, 1030)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FIRST_RECENT = 424  # since Linux 5.1 calls have one number on all machines


class FilterProgram(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One step of the filter; the jumps count the steps that are left out."""
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def compute_only() -> bytes:
    """The filter for this machine; OSError where its system calls are not known here."""
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
    # The C library tries clone3 and the like first and falls back on an older call only where the kernel has no such one.
    code += [instruction(AT_LEAST, FIRST_RECENT, if_false=1), instruction(RETURN, ERRNO | errno.ENOSYS), refuse]
    return b"".join(code)


def _load(argument: int, *, high: bool = False) -> bytes:
    """Half of the argument; both machines store the low half first."""
    return instruction(LOAD, 16 + 8 * argument + 4 * high)


def install(code: bytes) -> None:
    """Filter this thread's system calls from now on, for good. Needs no_new_privs."""
    program = FilterProgram(len(code) // 8, code)
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
