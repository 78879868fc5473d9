"""The process that sandbox.py starts for one program: a supervisor, whose child puts up the walls and executes the
program.

    sandbox.py --(JSON line, program)--> supervisor --("go" + token)--> worker: walls, "ready", the program
               <--(JSON line)----------            <--(token | reason)--

The token is made after the fork and waits in the pipe while the program runs, in no variable of its process; the
worker takes it from there when the program has run to its end. Ending early, in whatever way, is therefore no pass.
"""

import builtins
import ctypes
import errno
import json
import math
import os
import platform
import select
import signal
import struct
import sys
import time
import types
from contextlib import suppress
from typing import Any, NoReturn

# Isolation of a program from the machine: a filter of system calls, limits, namespaces, Landlock.
#
# Each function changes the calling process for good and raises OSError where the kernel does not grant it.
# Sources: setrlimit(2), namespaces(7), pivot_root(2), linux/landlock.h, linux/capability.h, linux/prctl.h.

try:
    import resource  # now: behind the walls nothing is found any more
except ImportError:  # Windows, where programs are not run
    resource = None  # type: ignore[assignment]

# Calls of the C library that Python has no name for.

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


# The system calls that a single-threaded Python program needs to compute; the kernel refuses every other one.

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
    """Return one step of the filter; the jumps count the steps that are left out."""
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


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18)  # fmt: skip
MNT_DETACH = 2
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # on every machine
LANDLOCK_READ = 1 << 2 | 1 << 3  # files, folders
LANDLOCK_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # rights since ABI
LANDLOCK_TCP, LANDLOCK_TCP_ABI = 3, 4  # bind, connect
LANDLOCK_SCOPES, LANDLOCK_SCOPES_ABI = 3, 6  # abstract Unix sockets and signals of others
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


def die_with_parent() -> None:
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Make processes that outlive their parent children of this one, whatever session they made."""
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def drop_privileges() -> None:
    """Lose every capability, and the way to gain one: root's could poison memory pages by madvise(2)."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24))


def enter_namespaces() -> None:
    """Enter own namespaces of users, network, IPC and host name; the next child is the first process of its own
    process tree."""
    user, group = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise OSError(error.errno, f"{name}: {error.strerror}") from error


def hide_files(folders: list[str]) -> None:
    """Mount a root folder that holds nothing but these, read-only, in a namespace of mounts. Needs
    enter_namespaces."""
    call("unshare", CLONE_NEWNS)  # not together with the others: pivot_root takes along all processes that share it
    root = "/proc"  # any folder that holds none of them
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"tmpfs", root.encode(), b"tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, b"size=64k,mode=755")
    for folder in folders:
        place = root + folder
        os.makedirs(place)
        call("mount", folder.encode(), place.encode(), None, MS_BIND | MS_REC, None)
        # Flags of the mount that a user namespace may not take away.
        kept = os.statvfs(place).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        call("mount", None, place.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, None)
    call("mount", None, root.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    os.chdir(root)
    call("pivot_root", b".", b".")  # the old root lies over the new one, and goes
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def restrict_to(folders: list[str]) -> None:
    """Restrict this process by Landlock: read these folders and open no other file; what the kernel's version also
    knows is refused: TCP, signals."""
    abi = call("syscall", LANDLOCK_CREATE_RULESET, None, 0, 1)
    files = LANDLOCK_FILES[max(known for known in LANDLOCK_FILES if known <= abi)]
    tcp = LANDLOCK_TCP if abi >= LANDLOCK_TCP_ABI else 0
    scopes = LANDLOCK_SCOPES if abi >= LANDLOCK_SCOPES_ABI else 0
    # A kernel that knows a shorter structure takes zeros behind it.
    rules = call("syscall", LANDLOCK_CREATE_RULESET, struct.pack("=QQQ", files, tcp, scopes), 24, 0)
    for folder in folders:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", LANDLOCK_READ, place))
        call("syscall", LANDLOCK_ADD_RULE, rules, 1, rule, 0)
        os.close(place)
    call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


# The processes.

READY, GO, SETUP_S = b"ready", b"go", 30.0
MOST_LETTERS = 300  # of a reason: all that a program can tell
MOST_BYTES = 4096


def main() -> None:
    """Answer the request on stdin with one JSON line: {"reason", "seconds"}, or {"failed"} where a wall cannot be put
    up."""
    sys.path.pop()  # the place this package was imported from
    request = json.loads(sys.stdin.buffer.readline())
    program = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    try:
        answer = supervise(program, **request)
    except OSError as error:
        answer = {"failed": str(error)}
    print(json.dumps(answer))


def supervise(program: str, *, mechanisms: list[str], timeout_s: float, memory_bytes: int, parent: int) -> dict:
    """Return what became of the program. The time begins when it does; nothing of it is alive on return."""
    if sys.platform == "linux":
        if "namespaces" in mechanisms:
            enter_namespaces()
        die_with_parent()
        adopt_orphans()
        if os.getppid() != parent:
            os._exit(1)
    token_read, token_write = os.pipe()
    answer_read, answer_write = os.pipe()
    cpu_s = math.ceil(timeout_s) + 1
    worker = os.fork()
    if worker == 0:
        try:
            os.close(token_write)
            os.close(answer_read)
            work(program, token_read, answer_write, mechanisms=mechanisms, cpu_s=cpu_s, memory_bytes=memory_bytes)
        finally:
            os._exit(1)
    os.close(token_read)
    os.close(answer_write)
    try:
        first = read_line(answer_read, until=time.monotonic() + SETUP_S)
        if first != READY:
            return {"failed": first.decode(errors="replace") or "the worker ended before the program"}
        token = os.urandom(16).hex().encode()
        os.write(token_write, GO + token + b"\n")
        began = time.monotonic()
        answer = read_line(answer_read, until=began + timeout_s)
        status, cpu_used_s = end(worker, until=began if answer else began + timeout_s)
        seconds = time.monotonic() - began
    finally:
        if not {"namespaces", "seccomp"} & set(mechanisms):  # either leaves no process behind
            end_orphans(worker)
    if answer == token:
        reason = "passed"
    elif answer:
        message = answer.decode(errors="replace")[:MOST_LETTERS]
        reason = "".join(letter if letter.isprintable() else " " for letter in message)  # no commands to a terminal
        if reason.partition(":")[0] not in ("wrong", "forbidden", "memory"):
            reason = "forbidden: it wrote into the sandbox's own pipe"
    else:
        reason = cause_of(status, cpu_used_s=cpu_used_s, cpu_s=cpu_s, timeout_s=timeout_s)
    return {"reason": reason, "seconds": seconds}


def read_line(descriptor: int, *, until: float) -> bytes:
    """Return the line without its end; empty when the other side ends or the time is up before there is a whole
    one."""
    read = b""
    while (left := until - time.monotonic()) > 0 and select.select([descriptor], [], [], left)[0]:
        some = os.read(descriptor, MOST_BYTES)
        read += some
        if b"\n" in read or len(read) >= MOST_BYTES:
            return read.partition(b"\n")[0][:MOST_BYTES]
        if not some:
            break
    return b""


def end(worker: int, *, until: float) -> tuple[int | None, float]:
    """Wait for the worker, kill it when the time is up; its status, None if it had to be killed, and the CPU seconds
    it used."""
    ended, status, used = os.wait4(worker, os.WNOHANG)
    while not ended and time.monotonic() < until:
        time.sleep(0.002)
        ended, status, used = os.wait4(worker, os.WNOHANG)
    if ended:
        return status, used.ru_utime + used.ru_stime
    os.kill(worker, signal.SIGKILL)
    used = os.wait4(worker, 0)[2]
    return None, used.ru_utime + used.ru_stime


def end_orphans(worker: int) -> None:
    """Kill what a program that was not walled in left: its process group, and on Linux all its descendants."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    while sys.platform == "linux" and (orphans := children()):
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)


def children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.append(int(name))
    return found


def cause_of(status: int | None, *, cpu_used_s: float, cpu_s: int, timeout_s: float) -> str:
    """Return why a program that said nothing ended; status None where it was killed because its time was up."""
    if status is None:
        return f"time: more than {timeout_s:g} s"
    if os.WIFEXITED(status):
        return f"wrong: it left before its end (exit status {os.WEXITSTATUS(status)})"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_used_s >= cpu_s - 0.5):
        return f"time: more than {cpu_s} s of CPU"
    if number == signal.SIGKILL:
        return "memory: the kernel killed it"
    if number == signal.SIGSYS:
        return "forbidden: a system call of another machine"
    return f"wrong: it crashed ({signal.Signals(number).name})"


def work(
    program: str, token_read: int, answer_write: int, *, mechanisms: list[str], cpu_s: int, memory_bytes: int
) -> NoReturn:
    """Put up the walls, execute the program, say how it ended. Only this function's own variables are used after it
    began."""
    write, leave, read = os.write, os._exit, os.read
    try:
        put_up_walls(mechanisms, cpu_s=cpu_s, memory_bytes=memory_bytes)
    except OSError as error:
        write(answer_write, str(error).encode() + b"\n")
        leave(1)
    write(answer_write, READY + b"\n")
    if read(token_read, len(GO)) != GO:
        leave(1)  # the supervisor is gone
    for name in [name for name in sys.modules if name.partition(".")[0] == "pipeline"]:
        del sys.modules[name]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    describe, names = explain, vars(builtins)
    names_before = dict(names)
    try:
        exec(compile(program, "<program>", "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        answer = describe(error)
    else:
        changed = [name for name in {**names, **names_before} if names.get(name) is not names_before.get(name)]
        answer = b"forbidden: it changed Python's own names\n" if changed else read(token_read, MOST_BYTES)
    write(answer_write, answer)
    leave(0)


def put_up_walls(mechanisms: list[str], *, cpu_s: int, memory_bytes: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    os.setsid()
    folders = readable_folders()
    if sys.platform == "linux":
        die_with_parent()
    if "namespaces" in mechanisms:
        hide_files(folders)
    limit(cpu_s=cpu_s, memory_bytes=memory_bytes)
    if sys.platform == "linux":
        drop_privileges()
    if "landlock" in mechanisms:
        restrict_to(folders)
    if "seccomp" in mechanisms:
        install(compute_only())


def explain(error: BaseException) -> bytes:
    """Return one line, as the last one of a traceback, behind its kind. The program may have made str() fail or
    endless."""
    kind = (
        "memory" if isinstance(error, MemoryError) else "forbidden" if isinstance(error, PermissionError) else "wrong"
    )
    try:
        text = str(error)[:MOST_LETTERS]
    except BaseException:
        text = "(its message cannot be made)"
    line = " ".join(f"{kind}: {type(error).__name__[:MOST_LETTERS]}: {text}".split())
    return line.removesuffix(":")[:MOST_LETTERS].encode("utf-8", "backslashreplace") + b"\n"
