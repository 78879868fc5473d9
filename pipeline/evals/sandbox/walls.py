"""What keeps a program from the machine: limits, namespaces, Landlock; the filter of system calls is in seccomp.py.

Each function changes the calling process for good and raises OSError where the kernel does not grant it.
Sources: setrlimit(2), namespaces(7), pivot_root(2), linux/landlock.h, linux/capability.h, linux/prctl.h.
"""

import ctypes
import os
import resource
import signal
import struct
import sys

from pipeline.evals.sandbox.libc import call

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)  # fmt: skip
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
    """Python's library and the shared objects it loads: all that a program may read. None is named below another one."""
    found: list[str] = []
    names = [*sys.path, f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    for folder in sorted({os.path.abspath(name) for name in names if os.path.isdir(name)}):
        if not any(os.path.commonpath([folder, outer]) == outer for outer in found):
            found.append(folder)
    return found


def limit(*, cpu_s: int, memory_bytes: int) -> None:
    """Bound CPU seconds, address space, files; no core dump. Root is exempt from the number of processes."""
    limits = {"CPU": cpu_s, "AS": memory_bytes, "FSIZE": FILE_BYTES, "NOFILE": OPEN_FILES, "CORE": 0, "NPROC": 0, "MEMLOCK": 0}  # fmt: skip
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        except (OSError, ValueError):
            if sys.platform == "linux":  # macOS refuses some of them
                raise


def die_with_parent() -> None:
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Processes that outlive their parent become children of this one, whatever session they made."""
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def drop_privileges() -> None:
    """Lose every capability, and the way to gain one: root's could poison memory pages by madvise(2)."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24))


def enter_namespaces() -> None:
    """Own users, network, IPC and host name; the next child is the first process of its own process tree."""
    user, group = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise OSError(error.errno, f"{name}: {error.strerror}") from error


def hide_files(folders: list[str]) -> None:
    """Have a root folder that holds nothing but these, read-only, in a namespace of mounts. Needs enter_namespaces."""
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
    """By Landlock: read these folders and open no other file; what the kernel's version also knows is refused: TCP, signals."""
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
