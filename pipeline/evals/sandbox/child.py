"""The process that run.py starts for one program: a supervisor, whose child puts up the walls and executes the program.

    run.py --(JSON line, program)--> supervisor --("go" + token)--> worker: walls, "ready", the program
           <--(JSON line)----------            <--(token | reason)--

The token is made after the fork and waits in the pipe while the program runs, in no variable of its process; the worker takes
it from there when the program has run to its end. Ending early, in whatever way, is therefore no pass.
"""

import builtins
import json
import math
import os
import select
import signal
import sys
import time
import types
from contextlib import suppress
from typing import NoReturn

from pipeline.evals.sandbox import walls
from pipeline.evals.sandbox.walls import compute_only, install

READY, GO, SETUP_S = b"ready", b"go", 30.0
MOST_LETTERS = 300  # of a reason: all that a program can tell
MOST_BYTES = 4096


def main() -> None:
    """Answer the request on stdin with one JSON line: {"reason", "seconds"}, or {"failed"} where a wall cannot be put up."""
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
            walls.enter_namespaces()
        walls.die_with_parent()
        walls.adopt_orphans()
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
    """Return the line without its end; empty when the other side ends or the time is up before there is a whole one."""
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
    """Wait for the worker, kill it when the time is up; its status, None if it had to be killed, and the CPU seconds it used."""
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
    """Put up the walls, execute the program, say how it ended. Only this function's own variables are used after it began."""
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
    folders = walls.readable_folders()
    if sys.platform == "linux":
        walls.die_with_parent()
    if "namespaces" in mechanisms:
        walls.hide_files(folders)
    walls.limit(cpu_s=cpu_s, memory_bytes=memory_bytes)
    if sys.platform == "linux":
        walls.drop_privileges()
    if "landlock" in mechanisms:
        walls.restrict_to(folders)
    if "seccomp" in mechanisms:
        install(compute_only())


def explain(error: BaseException) -> bytes:
    """Return one line, as the last one of a traceback, behind its kind. The program may have made str() fail or endless."""
    kind = (
        "memory" if isinstance(error, MemoryError) else "forbidden" if isinstance(error, PermissionError) else "wrong"
    )
    try:
        text = str(error)[:MOST_LETTERS]
    except BaseException:
        text = "(its message cannot be made)"
    line = " ".join(f"{kind}: {type(error).__name__[:MOST_LETTERS]}: {text}".split())
    return line.removesuffix(":")[:MOST_LETTERS].encode("utf-8", "backslashreplace") + b"\n"
