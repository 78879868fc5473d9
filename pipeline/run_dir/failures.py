"""The end of an entry: its exit status, its one sentence, and failure.json."""

import errno
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pipeline.process import commands
from pipeline.process.errors import (
    CannotWriteError,
    DamagedFileError,
    DiskFullError,
    Interrupted,
    OutOfMemoryError,
    Preempted,
    RecipeError,
    TandemError,
    first_line,
    of_panic,
)
from pipeline.process.secrets import redact_output, redacted, release_output
from pipeline.process.storage import close_leases, raise_if_moved, write_json
from pipeline.run_dir.run_directory import RunDirectory

_current_run: RunDirectory | None = None
_leaving = threading.Lock()  # taken by the thread that ends the process
REPORT_S = 60.0  # longest time that an end by failure waits for its report; three seconds are usual


def record_failures_in(run: RunDirectory) -> None:
    """From now on a failure of this process is also written to the run's failure.json.

    The script that waits for $TANDEM_STATUS finds the run's directory in $TANDEM_STATUS.run, also when this is killed.
    """
    global _current_run
    _current_run = run
    threading.excepthook = _thread_failed
    if path := os.environ.get("TANDEM_STATUS"):
        Path(f"{path}.run").write_text(str(run.path.resolve()))


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    """Print what a thread raised, unless the run's directory has moved: the run ends for that, and TensorBoard's thread meets it first."""
    if isinstance(args.exc_value, OSError) and _current_run is not None:
        try:
            raise_if_moved(_current_run.path, after_error=True)
        except CannotWriteError:
            return
    threading.__excepthook__(args)


def exit_with_status(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run an entry and leave the process with the status of how it ended.

    A TandemError is printed as its sentence; anything else is our bug and keeps its traceback. The status is also
    written to $TANDEM_STATUS, because `accelerate launch` does not hand it on.
    """
    _open_standard_streams()
    _count_cores_for_compiler()
    redact_output()  # whoever prints: an error of a library may repeat the token it was given
    try:
        if sys.flags.optimize > 1:
            raise RecipeError(
                "command line: python -OO (or PYTHONOPTIMIZE=2) takes the docstrings away, which transformers reads when it is imported. Use -O "
                "at most."
            )
        outcome: int | BaseException = main(sys.argv[1:]) or 0
    except BaseException as error:
        outcome = error
    # Nothing of ours ends a run by SystemExit; its status of 0 would say that the run has finished.
    if isinstance(outcome, SystemExit) and _current_run is not None:
        last = traceback.extract_tb(outcome.__traceback__)[-1]
        outcome = RecipeError(
            f"{last.filename}:{last.lineno}: raised {outcome!r}, so the run ended unfinished. Remove it."
        )
    leave(outcome)


def _open_standard_streams() -> None:
    """Give the process the streams that its shell closed, and let no character that they cannot encode end it.

    Else the next file that is opened is number 1 or 2, which C libraries and children print to.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r", encoding="utf-8"))
        with suppress(AttributeError, ValueError):  # not a stream of the interpreter
            getattr(sys, name).reconfigure(errors="backslashreplace" if number else "replace")


def _count_cores_for_compiler() -> None:
    """Set the number of torch's compile threads where the system refuses to say which cores are usable: importing its compiler
    would fail with that call."""
    try:
        os.sched_getaffinity(0)
    except OSError:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, os.cpu_count() or 1)))
    except AttributeError:  # macOS, where torch counts otherwise
        pass


def is_leaving() -> bool:
    return _leaving.locked()


def leave(outcome: int | BaseException, *, all_stop: Callable[[], bool] = lambda: True) -> NoReturn:
    """End the process from any thread; the first one to come has the word.

    all_stop: asked when it is a stop, and whether all ranks make it. It may wait for them: from now on an error that another
    thread meets because a rank has left is not reported.
    """
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()
    # What the user, the script and the next start are told is worth something each on its own: a closed terminal or a full
    # disk takes one of them away, and never the end itself.
    status, message = (outcome, "") if isinstance(outcome, int) else _classify(outcome)
    message = redacted(message)
    agreed = status in (0, Preempted.status, Interrupted.status) and all_stop()
    reported = False
    with suppress(OSError, ValueError):
        reported = _report_status(status, message, first_rank_only=agreed)
    with suppress(Exception):
        if isinstance(outcome, BaseException):
            _print_error(outcome, status, message)
        release_output()
    with suppress(Exception):
        close_leases()
    # Not sys.exit: threads of trackers or a process group that lost a peer must not hold the status back. Several ranks
    # that agreed to stop leave with 0, since torch's launcher takes any other status for a crash; the script reads the file.
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    os._exit(0 if agreed and reported and several else status)


def _report_status(status: int, message: str, *, first_rank_only: bool) -> bool:
    """Write one line of status, then the message, to $TANDEM_STATUS; the first rank that fails has the word."""
    path = os.environ.get("TANDEM_STATUS")
    if not path:
        return False
    if not first_rank_only or int(os.environ.get("LOCAL_RANK", 0)) == 0:  # each machine has a file of its own
        try:
            with open(path, "x") as file:
                file.write(f"{status}\n{message}\n")
        except FileExistsError:
            pass
    return True


def has_been_told(run: RunDirectory) -> bool:
    """Return whether another rank of this machine has said why the run ends; on a full disk only the status file can tell."""
    path = os.environ.get("TANDEM_STATUS")
    return run.failure.exists() or bool(path and os.path.exists(path))


def _classify(error: BaseException) -> tuple[int, str]:
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        return (64 if code == 2 else code), str(error.code or "")  # 2: argparse has printed the mistake
    converted = _as_tandem_error(error)
    if isinstance(converted, TandemError):
        return converted.status, str(converted)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    return 1, f"{type(error).__name__}: {error}"


def _print_error(error: BaseException, status: int, message: str) -> None:
    """On stderr, and in failure.json."""
    if isinstance(error, SystemExit):
        return
    failed = _current_run is not None and status not in (0, 75, 130) and not _current_run.failure.exists()
    if failed:
        _write_failure(error, status, message)  # of the first rank that fails: the launcher then ends the others
    if isinstance(_as_tandem_error(error), TandemError):
        rank = int(os.environ.get("RANK", 0))
        # Each host has an output of its own.
        if int(os.environ.get("LOCAL_RANK", rank)) == 0 or not getattr(error, "of_all_ranks", False):
            what = message if status in (75, 130) else f"error: {message}"
            print(what if rank == 0 else f"rank {rank}: {what}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print(message, file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stderr.flush()
    if failed and _current_run is not None and _current_run.failure.exists():
        write_report(_current_run, limit_s=REPORT_S)  # last: nobody waits for it to learn what happened


def _as_tandem_error(error: BaseException) -> BaseException:
    if panic := of_panic(error):
        return panic
    # safetensors and tokenizers have the system's error in their words only.
    from_rust = type(error).__name__ == "SafetensorError" or type(error) is Exception
    match = re.search(r"\(os error (\d+)\)", str(error)) if from_rust else None
    number = int(match[1]) if match else error.errno if isinstance(error, OSError) else None
    where = getattr(error, "filename2", None) or getattr(error, "filename", None)
    where = where or (_current_run.path if _current_run else "disk")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"{where}: no space is left. Free some or move run.directory; then run the same command again."
        )
    if number is not None and _current_run is not None:
        try:
            raise_if_moved(_current_run.path, after_error=number in (errno.ENOENT, errno.ESTALE))
        except CannotWriteError as moved:
            return moved
    if number in (errno.EXDEV, errno.EBUSY, errno.ENOSYS, errno.ENOTSUP):
        return CannotWriteError(
            f"{where}: its file system cannot do what a whole file needs ({os.strerror(number)}: renaming, locking or deleting); every "
            "checkpoint that was whole still is. Move run.directory and data.cache_dir to another one; then run the same command again."
        )
    if number in (errno.EIO, errno.EROFS):
        return CannotWriteError(
            f"{where}: cannot be written or read ({os.strerror(number)}); every checkpoint that was whole still is. Look "
            "after the disk or move run.directory; then run the same command again."
        )
    if number == errno.ELOOP:
        return DamagedFileError(f"{where}: is a link that leads back to itself, so it cannot be used. Remove it.")
    if number in (errno.EACCES, errno.EPERM):
        return CannotWriteError(
            f"{where}: this user may not read or write it ({os.strerror(number)}); every checkpoint that was whole still is. "
            "Mend its rights or run as the user that owns it; then run the same command again."
        )
    if isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error):
        return CannotWriteError(
            f"{error.strerror}: no file can be written and removed there. Set TMPDIR to a folder that can."
        )
    if is_out_of_memory(error):
        if _current_run is None:  # a chat, an evaluation, a look at data
            return OutOfMemoryError(
                f"memory ran out ({first_line(error)}). Take a smaller model or less at once, or a device with more memory."
            )
        return OutOfMemoryError(
            f"memory ran out outside of a step ({first_line(error)}). Lower train.per_device_train_batch_size, which leaves the training as it is, "
            "or take a device with more memory."
        )
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, torch's allocator on the CPU, or Python found no more memory."""
    if isinstance(error, TandemError):
        return False
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's, which this room does not import
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )


def write_report(run: RunDirectory, *, limit_s: float | None = None) -> str | None:
    """Write the run's report by a process of its own: this one may be out of memory, or hang in any import. Return None, or what
    kept it from being written; the command can be run again at any time."""
    command = [sys.executable, "-m", "pipeline.report", str(run.path.resolve())]
    try:
        done = subprocess.run(
            command,
            cwd=commands.ROOT,
            env=commands.environment(),
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


def _write_failure(error: BaseException, status: int, message: str) -> None:
    assert _current_run is not None
    try:
        write_json(
            _current_run.failure,
            {
                "status": status,
                "class": type(error).__name__,
                "message": redacted(message),
                "facts": getattr(error, "facts", None),
                "time": time.time(),
                "rank": int(os.environ.get("RANK", 0)),
                "traceback": None
                if isinstance(error, TandemError)
                else [redacted(line) for line in traceback.format_exception(error)],
            },
        )
    except CannotWriteError:
        return  # the run directory is gone, which is what is reported
    except OSError as second:
        print(f"failure.json could not be written: {second}", file=sys.stderr)
