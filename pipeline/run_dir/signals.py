"""SIGTERM, SIGHUP, Ctrl-C and the launcher's death, heard in any phase: also while the main thread sits in a long call.

Python runs signal handlers between two bytecodes of the main thread, which may be minutes away: in a compilation, a
tokenizer's training, a collective that waits for another rank. Here the number goes through a pipe to a thread.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pipeline.process.errors import Interrupted, Preempted, TandemError
from pipeline.run_dir.failures import is_leaving, leave

# Those that the system has: Windows knows no SIGHUP.
NUMBERS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name))
POLL_S = 0.25  # how soon the launcher's death and another rank's signal are seen
# A scheduler may signal every process of a job, and launchers hand on what they get: within this time it is one signal.
SAME_SIGNAL_S = 1.0
MEETING_S = 3.0  # that a rank that leaves at once waits for the others to come with it
SAVING_S = 600.0  # that a rank which has stopped waits for those that still write its checkpoint
COMPILATION_S = 8.0  # that a compilation may go on after a signal


class Signals:
    """Made before anything long. Before the first step of a start and after its last one a signal ends the process at once:
    nothing can be lost. In between it stands in `received`, and the training saves and stops (callbacks/stopping.py);
    only a compilation is not waited for. A second signal leaves at once.

    `accelerate launch` hands signals on to nobody: the death of the launcher counts as SIGTERM.
    """

    def __init__(self) -> None:
        self.received = 0
        self.training = self.stopping = self.compiling = False
        self.where = "before the first step of this start; nothing is lost"
        # Launchers leave their variables behind; started without one, the shell may end and the run goes on.
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

    def raise_if_stopped(self, *, step: int, first: Callable[[], None] = lambda: None) -> None:
        """After training: when a signal has ended it, call `first`, which another signal ends, and leave with the signal's status."""
        self.training = False
        self.where = "after the last step, while the finished model was being written; every checkpoint is whole"
        if self.stopping:
            self.where = f"at step {step}; checkpoint-{step} is whole"
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
                self.where = "while a step was being compiled; it goes on from the newest whole checkpoint"
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


def _leave_it_to_the_thread(number: int, frame: Any) -> None:
    """A handler must exist for the number to reach the pipe."""


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
