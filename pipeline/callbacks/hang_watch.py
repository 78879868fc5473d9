"""A run that makes no progress or has lost a rank ends, with every rank's stacks, instead of holding its machines for
hours."""

import faulthandler
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from transformers import TrainerCallback

from pipeline.monitor.heartbeat import beats
from pipeline.process.errors import HangError
from pipeline.process.storage import raise_if_moved, read_json, write_json
from pipeline.run_dir.failures import leave
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.meters import RankStepTimer
from pipeline.training.ranks import Ranks
from pipeline.training.stages import ORDER, place_of

Place = dict[str, Any]  # where a rank is: what place_of gives, and its rank, host, process and step


class Stacks:
    """One rank's files in stacks/attempt-<n>/: where it stood when the run hung or lost a rank, for people and the
    other ranks."""

    def __init__(self, run: RunDirectory, *, rank: int, attempt: int):
        self.folder, self.rank = run.path / "stacks" / f"attempt-{attempt}", rank

    def _text(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def open(self) -> IO[str]:
        """Open this rank's empty file for stacks, in advance, since a process that hangs may not be able to."""
        for left in self.folder.parent.glob(f"attempt-*/rank-{self.rank}.txt"):
            if left.stat().st_size == 0:  # of an attempt that was killed
                _remove(left)
        raise_if_moved(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        return open(self._text(self.rank), "w", encoding="utf-8")

    def trains(self, rank: int) -> bool:
        """Return whether that rank has begun to train in this attempt and not come to the end of it."""
        return self._text(rank).exists()

    def touch(self) -> None:
        """Say that this rank works: it is alive, and those that wait for it need not wonder."""
        os.utime(self._text(self.rank))

    def touched(self) -> dict[int, float]:
        """Return by other rank that trains when it last touched its file; by the clock of the file system, to be
        compared with itself only."""
        touched = {}
        for text in self.folder.glob("rank-*.txt"):
            rank = int(text.stem.removeprefix("rank-"))
            if rank != self.rank:
                touched[rank] = text.stat().st_mtime
        return touched

    def publish(self, place: Place) -> None:
        """Write where this rank is: from now on every rank knows that the run is at an end."""
        write_json(self.folder / f"rank-{self.rank}.json", place)

    def places(self) -> dict[int, Place]:
        """Return what ranks have reported, by rank."""
        places = []
        with suppress(OSError):  # of a disk that is away: read again in a second
            places = [read_json(path) for path in self.folder.glob("rank-*.json")]
        return {place["rank"]: place for place in places}

    def clear(self) -> None:
        """Remove this rank's empty file at the end of its training."""
        _remove(self._text(self.rank))
        with suppress(OSError):  # not empty: stacks of an earlier attempt
            self.folder.parent.rmdir()


def _remove(text: Path) -> None:
    text.unlink(missing_ok=True)
    with suppress(OSError):  # not empty: another rank's file
        text.parent.rmdir()


TICK_S = 1.0
ANSWER_S = 10.0  # in which the other ranks report where they are
LOST_S = 5.0  # in which a rank's own error in a collective comes first: it says more
# Times the timeout for the first step and the first evaluation under torch.compile, which beat only when they are
# compiled.
COMPILING = 10
COMPILING_S = 1800.0


class HangWatch(TrainerCallback):
    """A thread on every rank that looks once a second for progress, for lost ranks and for what other ranks have
    reported.

    It watches from the first step to the end of the last checkpoint. The waits before that are watched elsewhere:
    preparation says every 10 s what it waits for and notices the end of its process, and collectives have
    train.ddp_timeout.
    """

    def __init__(self, run: RunDirectory, *, timeout: float | None, attempt: int, ranks: Ranks, timer: RankStepTimer):
        self.run, self.timeout, self.attempt, self.ranks, self.timer = run, timeout, attempt, ranks, timer
        self.evaluated = False  # in this start
        self.over = threading.Event()
        self.touched: dict[int, float] = {}
        self.touched_at = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.state, self.first_step = state, state.global_step
        self.compiles = bool(args.torch_compile)
        self.stacks = Stacks(self.run, rank=self.ranks.own, attempt=self.attempt)
        self.file = self.stacks.open()
        self.training_thread = threading.get_ident()
        self.thread = threading.Thread(target=self._watch_to_the_end, name="hang watch", daemon=True)
        self.thread.start()

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated = True

    def on_train_end(self, args, state, control, **kwargs):
        self.over.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.file.close()
        self.stacks.clear()

    def limit(self) -> float | None:
        """Return seconds without progress that are allowed now."""
        if self.timeout is None or not self.compiles:
            return self.timeout
        first = self.state.global_step <= self.first_step
        if not first and not self.evaluated:
            first = self._place()["stage"] == "evaluation"
        if first:
            return max(COMPILING * self.timeout, COMPILING_S)
        return self.timeout

    def _watch_to_the_end(self) -> None:
        try:
            self._watch()
        except Exception as error:  # else nobody would watch any more, and nobody know
            leave(HangError(f"{self.run.path}: the watch for hangs failed ({error}). Run the same command again."))

    def _watch(self) -> None:
        last, since, woken, lost_since = None, time.monotonic(), time.monotonic(), None
        logged_at = 0.0
        while not self.over.wait(min(TICK_S, (self.timeout or 5 * TICK_S) / 5)):
            # 1. Whether the training has made progress, or was stopped as a whole: by Ctrl-Z or a paused machine.
            now, limit = time.monotonic(), self.limit()
            progress = (self.state.global_step, beats())
            if progress != last or now - woken > 5 * TICK_S:
                last, since = progress, now
            woken = now
            if limit is not None:
                # By a thread of C, which writes the stacks even while something holds Python's lock and stops this
                # one.
                with suppress(RuntimeError):  # no memory for its stack just now: the next round tries again
                    faulthandler.dump_traceback_later(limit + ANSWER_S, file=self.file)
            # 2. Which ranks are lost; others that are gone came to their end.
            gone = [rank for rank in self.ranks.gone() if self.stacks.trains(rank)]
            lost_since = (lost_since or now) if gone else None
            # 3. Whether the silence is too long: not while this rank waits for others that work.
            silent = limit is not None and now - since > limit
            if limit is not None:
                if since == now and now - logged_at > limit / 10:
                    logged_at = now
                    with suppress(OSError):
                        self.stacks.touch()
                others_work = now - since > limit / 10 and self._others_work(now, within_s=limit / 2)
                silent = silent and not (others_work and self._place()["waits"])
            # 4. The end: for one of these reasons, or another rank's.
            if silent or self.stacks.places() or (lost_since is not None and now - lost_since > LOST_S):
                verdict = self._verdict(silent_s=now - since, gone=gone)
                if verdict.of_all_ranks:
                    time.sleep(1.0)  # the rank that says it leaves first: the end of this one would end its collective
                leave(verdict)

    def _others_work(self, now: float, *, within_s: float) -> bool:
        """Return whether another rank has touched its file lately: who waits for its save or samples makes no progress
        itself."""
        with suppress(OSError):
            if (touched := self.stacks.touched()) != self.touched:
                self.touched, self.touched_at = touched, now
        return now - self.touched_at < within_s

    def _place(self) -> Place:
        """Return the stage this rank's training is in, whether it waits there for other ranks, and its line."""
        frame = sys._current_frames().get(self.training_thread)
        place = place_of(frame) if frame else {"stage": "step", "waits": False, "line": "?"}
        place["waits"] = place["waits"] or (place["stage"] == "forward+backward" and self.timer.waits)
        return place

    def _verdict(self, *, silent_s: float, gone: list[int]) -> HangError:
        """Share where every rank is, and return who is behind."""
        here = self._place()
        about: Place = {"rank": self.ranks.own, "host": socket.gethostname(), "process": os.getpid()}
        about |= {"step": self.state.global_step, **here, "silent_s": round(silent_s, 1), "gone": gone}
        with suppress(OSError):  # a disk that is full or away may be why it hangs
            self.file.write(place_text(about) + "\n\n")
            self.file.flush()
            faulthandler.dump_traceback(self.file)
        with suppress(OSError):
            self.stacks.publish(about)
        # The other ranks see that this one has reported, and report in their turn.
        world, ends = len(self.ranks.all), time.monotonic() + ANSWER_S
        places = {self.ranks.own: about} | self.stacks.places()
        while len(places) + len(gone) < world and time.monotonic() < ends:
            time.sleep(0.1)
            places = {self.ranks.own: about} | self.stacks.places()
        lost: set[int] = set()
        for place in places.values():
            lost.update(place["gone"])
        if lost:
            error = self.ranks.lost(sorted(lost), self.run, step=self.state.global_step)
        else:
            error = self._hang(places, world)
        error.of_all_ranks = self.ranks.own != min(places)  # one rank says it for all
        return error

    def _hang(self, places: dict[int, Place], world: int) -> HangError:
        stacks = f"Every rank's stacks are in {self.stacks.folder}."
        mute = [rank for rank in range(world) if rank not in places]
        if mute:
            behind = " and ".join(f"rank {rank}" for rank in mute)
            what = (
                f"{behind} gave no answer within {ANSWER_S:.0f} s: stopped, cut off from the run directory, or stuck "
                "in foreign code"
            )
        else:
            what = "the run waits for " + " and ".join(map(place_text, behind_of(places)))
        silent_s = max(place["silent_s"] for place in places.values())
        return HangError(
            f"{self.run.path}: no progress for {silent_s:.0f} s "
            f"(run.hang_timeout: {self.timeout:g}): {what}. {stacks} Run the same command again to continue from the "
            "last checkpoint."
        )


def behind_of(places: dict[int, Place]) -> list[Place]:
    """Return the places of the ranks that the others wait for; of all when every one waits in a collective."""
    working = [place for place in places.values() if not place["waits"]]

    def progress(place: Place) -> tuple[int, int]:
        return place["step"], ORDER.index(place["stage"])

    if not working:
        return list(places.values())
    first = min(map(progress, working))
    return [place for place in working if progress(place) == first]


def place_text(place: Place) -> str:
    stage = f"collective ({place['stage']})" if place["waits"] else place["stage"]
    who = f"rank {place['rank']} (process {place['process']} on {place['host']})"
    return f"{who} at step {place['step']} in {stage}, {place['line']}"
