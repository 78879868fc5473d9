"""Exit statuses and error messages of the entries, failure.json, and handlers of the signals that stop a run."""

import errno
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

import pipeline
from pipeline.process import commands
from pipeline.process.errors import (
    CannotWriteError,
    DamagedFileError,
    DiskFullError,
    Interrupted,
    OutOfMemoryError,
    Preempted,
    RecipeError,
    Stopped,
    TandemError,
    first_line,
    from_rust_panic,
)
from pipeline.process.secrets import redact_output, redacted
from pipeline.process.storage import DISK_FULL, raise_if_moved, write_json
from pipeline.run_dir.run_directory import RunDirectory

_current_run: RunDirectory | None = None
_leaving = threading.Lock()  # taken by the thread that ends the process
_NO_SUCH_CALL = (
    "its file system cannot do what a whole file needs: renaming, locking or deleting",
    "Move run.directory and data.cache_dir to another one",
)
_BAD_DISK = ("cannot be written or read", "Look after the disk or move run.directory")
_NO_RIGHTS = ("this user may not read or write it", "Change its rights or run as the user that owns it")
_TOO_LARGE = (
    "the file became larger than this process (ulimit -f) or the file system allows",
    "Raise the limit or move run.directory",
)
# Number of the system's error -> what is wrong, and what to do.
CANNOT_WRITE = {
    **dict.fromkeys((errno.EXDEV, errno.EBUSY, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP), _NO_SUCH_CALL),
    **dict.fromkeys((errno.EIO, errno.EROFS), _BAD_DISK),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _NO_RIGHTS),
    errno.EFBIG: _TOO_LARGE,
}
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
    """Print what a thread raised, unless the run's directory has moved: the run ends for that, and TensorBoard's
    thread meets it first."""
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
    _hear_signals()
    _open_standard_streams()
    redact_output()  # whoever prints: an error of a library may repeat the token it was given
    try:
        if sys.flags.optimize > 1:
            raise RecipeError(
                "command line: python -OO (or PYTHONOPTIMIZE=2) takes the docstrings away, which transformers reads "
                "when it is imported. Use -O at most."
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


def _hear_signals() -> None:
    """Let Ctrl-C be a KeyboardInterrupt again (pipeline/__init__.py), and SIGTERM and SIGHUP an end with a sentence; a
    training has `Signals` for them."""
    if signal.getsignal(signal.SIGINT) is pipeline.leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    own = os.getpid()

    def stop(number: int, frame: Any) -> None:
        if os.getpid() != own:  # a forked child, which ends as whoever stops it expects
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not is_leaving():
            raise Stopped(number)

    for number in NUMBERS:
        if number != signal.SIGINT and signal.getsignal(number) in (signal.SIG_DFL, pipeline.leave_at_once):
            signal.signal(number, stop)


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


def is_leaving() -> bool:
    return _leaving.locked()


def leave(outcome: int | BaseException, *, all_stop: Callable[[], bool] = lambda: True) -> NoReturn:
    """End the process from any thread; the first one to come has the word.

    all_stop: asked when it is a stop, and whether all ranks make it. It may wait for them: from now on an error that
    another thread meets because a rank has left is not reported.
    """
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()
    # What the user, the script and the next start are told is worth something each on its own: a closed terminal or a
    # full disk takes one of them away, and never the end itself.
    status, message = (outcome, "") if isinstance(outcome, int) else _classify(outcome)
    message = redacted(message)
    agreed = status in (0, Preempted.status, Interrupted.status) and all_stop()
    reported = False
    with suppress(OSError, ValueError):
        reported = _report_status(status, message, first_rank_only=agreed)
    with suppress(Exception):
        if isinstance(outcome, BaseException):
            _print_error(outcome, status, message)
        sys.stdout.flush()
    # Not sys.exit: threads of trackers or a process group that lost a peer must not hold the status back. Several
    # ranks that agreed to stop leave with 0, since torch's launcher takes any other status for a crash; the script
    # reads the file.
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    os._exit(0 if agreed and reported and several else status)


def _report_status(status: int, message: str, *, first_rank_only: bool) -> bool:
    """Write one line of status, then the message, to $TANDEM_STATUS; the first rank that fails has the word."""
    path = os.environ.get("TANDEM_STATUS")
    if not path:
        return False
    if not first_rank_only or int(os.environ.get("LOCAL_RANK", 0)) == 0:  # each machine has its own file
        try:
            with open(path, "x") as file:
                file.write(f"{status}\n{message}\n")
        except FileExistsError:
            pass
    return True


def has_reported_error(run: RunDirectory) -> bool:
    """Return whether another rank of this machine has said why the run ends; on a full disk only the status file can
    tell."""
    path = os.environ.get("TANDEM_STATUS")
    return run.failure.exists() or bool(path and os.path.exists(path))


def _classify(error: BaseException) -> tuple[int, str]:
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        if code == 2:  # argparse has printed the mistake
            code = 64
        return code, str(error.code or "")
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
        # Each host has its own output.
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
    if panic := from_rust_panic(error):
        return panic
    if isinstance(error, Stopped):
        name = signal.Signals(error.args[0]).name
        return Preempted(f"{name} ended it before it was done; what was written is whole. Run the same command again.")
    # safetensors and tokenizers have the system's error in their words only.
    number = error.errno if isinstance(error, OSError) else None
    if type(error).__name__ == "SafetensorError" or type(error) is Exception:
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else None
    where = getattr(error, "filename2", None) or getattr(error, "filename", None)
    if not where:
        where = _current_run.path if _current_run else "disk"
    if number in DISK_FULL:
        return DiskFullError(
            f"{where}: no space is left. Free some or move run.directory; then run the same command again."
        )
    if number is not None and _current_run is not None:
        try:
            raise_if_moved(_current_run.path, after_error=number in (errno.ENOENT, errno.ESTALE))
        except CannotWriteError as moved:
            return moved
    if number == errno.ELOOP:
        return DamagedFileError(f"{where}: is a link that leads back to itself, so it cannot be used. Remove it.")
    if number in CANNOT_WRITE:
        what, remedy = CANNOT_WRITE[number]
        return CannotWriteError(
            f"{where}: {what} ({os.strerror(number)}); every checkpoint that was whole still is. {remedy}; then run "
            "the same command again."
        )
    if isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error):
        return CannotWriteError(
            f"{error.strerror}: no file can be written and removed there. Set TMPDIR to a folder that can."
        )
    if is_out_of_memory(error):
        if _current_run is None:  # a chat, an evaluation, a look at data
            return OutOfMemoryError(
                f"memory ran out ({first_line(error)}). Take a smaller model or less at once, or a device with more "
                "memory."
            )
        return OutOfMemoryError(
            f"memory ran out outside of a step ({first_line(error)}). Lower train.per_device_train_batch_size, which "
            "leaves the training as it is, or take a device with more memory."
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
    """Write the run's report by another process: this one may be out of memory, or hang in any import. Return
    None, or what kept it from being written; the command can be run again at any time."""
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
    record = {
        "status": status,
        "class": type(error).__name__,
        "message": redacted(message),
        "facts": getattr(error, "facts", None),
        "time": time.time(),
        "rank": int(os.environ.get("RANK", 0)),
        "traceback": None,
    }
    if not isinstance(error, TandemError):
        record["traceback"] = [*map(redacted, traceback.format_exception(error))]
    try:
        write_json(_current_run.failure, record)
    except CannotWriteError:
        return  # the run directory is gone, which is what is reported
    except OSError as second:
        print(f"failure.json could not be written: {second}", file=sys.stderr)


# SIGTERM, SIGHUP, Ctrl-C and the launcher's death, heard in any phase: also while the main thread sits in a long call.
#
# Python runs signal handlers between two bytecodes of the main thread, which may be minutes away: in a compilation, a
# tokenizer's training, a collective that waits for another rank. Here the number goes through a pipe to a thread.

# Those that the system has: Windows knows no SIGHUP.
NUMBERS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name))
POLL_S = 0.25  # how soon the launcher's death and another rank's signal are seen
# A scheduler may signal every process of a job, and launchers hand on what they get: within this time it is one
# signal.
SAME_SIGNAL_S = 1.0
MEETING_S = 3.0  # that a rank that leaves at once waits for the others to come with it
SAVING_S = 600.0  # that a rank which has stopped waits for those that still write its checkpoint
COMPILATION_S = 8.0  # that a compilation may take after a signal


class Signals:
    """Made before anything long. Before the first step of a start and after its last one a signal ends the process at
    once: nothing can be lost. In between it is in `received`, and the training saves and stops
    (callbacks/stop_signals.py); only a compilation is not waited for. A second signal leaves at once.

    `accelerate launch` hands signals on to nobody: the death of the launcher counts as SIGTERM.
    """

    def __init__(self) -> None:
        self.received = 0
        self.training = self.stopping = self.compiling = False
        self.where = "before the first step of this start; nothing is lost"
        # Launchers leave their variables behind; started without one, the shell may end and the run continues.
        launched = any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in os.environ)
        self.launcher = os.getppid() if launched else None
        self.store: Any = None
        self._first: float | None = None  # when this process itself was first signalled
        self._since = 0.0  # when the first signal of any rank was heard
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._heard = [n for n in NUMBERS if signal.getsignal(n) is not signal.SIG_IGN]  # nohup has SIGHUP ignored
        for number in self._heard:
            signal.signal(number, _leave_it_to_the_thread)
        # A forked child shares the pipe: what it gets before it has left it would be taken for ours.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=self._forget)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def connect(self, store: Any) -> None:
        """store: what all ranks read and write (torch.distributed.Store), None for one rank alone."""
        self.store = store

    def raise_if_stopped(self, *, step: int, first: Callable[[], None] | None = None) -> None:
        """After training: when a signal has ended it, call `first`, which another signal ends, and leave with the
        signal's status."""
        self.training = False
        self.where = "after the last step, while the finished model was being written; every checkpoint is whole"
        if self.stopping:
            self.where = f"at step {step}; checkpoint-{step} is whole"
            if first:
                first()
            self._meet("stopped", wait_s=SAVING_S)  # A launcher ends the other ranks as soon as one has left.
            raise self._outcome(self.where)
        if self.received:  # too late to be agreed upon
            self._leave_at_once()

    def _forget(self) -> None:
        """In a forked child: its signals are its own."""
        signal.set_wakeup_fd(-1)
        for number in self._heard:
            signal.signal(number, signal.SIG_DFL)
        _unblock()

    def _listen(self) -> None:
        while True:
            if select.select([self._reader], [], [], POLL_S)[0]:
                for number in self._reader.recv(64):
                    if number in self._heard:
                        self._hear(number)
            if self.launcher is not None and os.getppid() != self.launcher and not self.received:
                self._hear(signal.SIGTERM)
            self._ask_the_others()
            if self.received and self.training and self.compiling and time.monotonic() - self._since > COMPILATION_S:
                self.where = "while a step was being compiled; it continues from the newest whole checkpoint"
                self._leave_at_once()

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if self._first is not None:
            if self.launcher is None or now - self._first > SAME_SIGNAL_S:
                os._exit(128 + number)
            return
        self._first = now
        self._take(number)
        self._print_signal("received", number)
        if not (self.training or is_leaving()):
            self._leave_at_once()

    def _take(self, number: int) -> None:
        if not self.received:
            self.received, self._since = number, time.monotonic()

    def _leave_at_once(self) -> None:
        self._print_signal("leaving", self.received)
        leave(self._outcome(self.where), all_stop=lambda: self._meet("left"))

    def _outcome(self, where: str) -> TandemError:
        orphaned = self.launcher is not None and os.getppid() != self.launcher
        name = "the end of the launcher" if orphaned else signal.Signals(self.received).name
        kind = Interrupted if self.received == signal.SIGINT else Preempted
        return kind(f"{name} {where}. Run the same command again to go on.")

    # ---- between ranks; the store's server may have died with the first of them ----

    def _print_signal(self, word: str, number: int) -> None:
        if self.store is not None:
            try:
                self.store.set(word, str(number))
            except RuntimeError:
                self.store = None

    def _ask_the_others(self) -> None:
        if self.store is None:
            return
        try:
            if not self.received and self.store.check(["received"]):
                self._take(int(self.store.get("received")))
            leaving = int(self.store.get("leaving")) if self.store.check(["leaving"]) else 0
        except RuntimeError:
            self.store = None
            return
        if leaving and not is_leaving():
            self._take(leaving)
            self._leave_at_once()

    def _meet(self, word: str, *, wait_s: float = MEETING_S) -> bool:
        """Wait until every rank has come here; False when one has not come in time."""
        store = self.store  # which the listener takes away when its server has died
        if store is None:
            return False
        ends = time.monotonic() + wait_s
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        try:
            here = store.add(word, 1)
            while here < ranks and time.monotonic() < ends:
                time.sleep(0.02)
                here = store.add(word, 0)
        except RuntimeError:
            return False
        return here >= ranks


class KeyboardSignals:
    """Stands for `Signals` where a training is a call of another program, such as a notebook.

    Ctrl-C in training is in `received`, and the training saves and stops; a second one, and one outside of training,
    is a KeyboardInterrupt. SIGTERM and SIGHUP stay that program's.
    """

    def __init__(self) -> None:
        self.received = 0
        self.training = self.stopping = self.compiling = False

    def __enter__(self) -> Self:
        self._before = None
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: Any) -> None:
        if self.received or not self.training:
            raise KeyboardInterrupt
        self.received = number

    def connect(self, store: Any) -> None:
        """There is one rank."""

    def raise_if_stopped(self, *, step: int, first: Callable[[], None] | None = None) -> None:
        """Raise Interrupted when Ctrl-C has ended the training, after `first`."""
        self.training = False
        if self.stopping:
            if first:
                first()
            raise Interrupted(f"Ctrl-C at step {step}; checkpoint-{step} is whole. Call the same again to go on.")


def _leave_it_to_the_thread(number: int, frame: Any) -> None:
    """A handler must exist for the number to reach the pipe."""


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
