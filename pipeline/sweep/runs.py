"""The runs of a sweep: ordinary run directories, each made by a process of the ordinary entry, one after another or side by side."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.hardware.device import visible_gpus
from pipeline.process.errors import CannotWriteError, InputMissingError, RecipeError, TandemError
from pipeline.process.progress import Bar, seconds_text, write
from pipeline.report.run_data import read_run
from pipeline.run_dir.rows import last_attempts, open_rows, row_of
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sweep.verdict import Figure

PACKAGE = Path(__file__).parents[1]
POLL_S, LOOK_S = 0.1, 2.0  # between looks at the processes, and at what runs have written
TAIL_BYTES = 2**16  # of metrics.jsonl, some 50 rows: what is read every LOOK_S takes time from the runs
DIVERGED = 76  # the one failure that is a result: the same steps would come to the same end
STOPPED = {75, 130}  # by a signal, after a whole checkpoint


@dataclass(frozen=True)
class Job:
    """One run: its directory, the command line behind the recipe, its length where it is known."""

    path: Path
    seed: int
    overrides: tuple[str, ...]
    steps: int | None
    label: str


def figure_of(job: Job, metric: str) -> Figure:
    """Return the result of the run by now."""
    made = partial(Figure, str(job.path), job.seed)
    try:
        data = read_run(str(job.path))
    except InputMissingError:
        return made("not run")
    if data.failure:
        return made(f"failed (status {data.failure['status']}, {data.failure['class']})")
    if data.manifest.get("status") != "finished":
        return made("not finished")
    score = next((score for score in data.newest_scores.values() if score.name == metric), None)
    value = score.value if score else data.last(metric)
    return made(
        "finished" if value is not None else f"finished without {metric}", value, score.protocol if score else None
    )


def is_final(figure: Figure) -> bool:
    """Return whether another start would change nothing."""
    return figure.status.startswith(("finished", f"failed (status {DIVERGED},"))


@dataclass
class _Started:
    """A run under way. process: None where another process trains it: it is waited for, and then looked at again."""

    job: Job
    slot: int
    process: subprocess.Popen | None
    began: float

    def has_ended(self, *, queued: bool) -> bool:
        """Return whether the run is over. queued: a command that has ended well may have only put it into a queue."""
        run = RunDirectory(self.job.path)
        if self.process is None:
            return not run.in_use()
        if self.process.poll() is None:
            return False
        if self.process.returncode or not queued:
            return True
        failed = run.failure.exists() and run.failure.stat().st_mtime > self.began
        return (failed or run.read_manifest().get("status") == "finished") and not run.in_use()

    def trains_elsewhere(self) -> bool:
        """Return whether another process had the run, or took its lock before ours could."""
        if self.process is None:
            return True
        return self.process.returncode == CannotWriteError.status and RunDirectory(self.job.path).in_use()


class Runs:
    """Starts, waits and counts. launcher: a command line with {command} in it, by which each run is started instead."""

    def __init__(self, recipe: str, stage: str, *, metric: str, parallel: int, launcher: str | None, logs: Path):
        if launcher is not None and "{command}" not in launcher:
            raise RecipeError(
                "--launcher: has no {command}, so nothing would be started. Write it where the run's command belongs."
            )
        self.recipe, self.stage, self.metric, self.parallel, self.launcher, self.logs = recipe, stage, metric, parallel, launcher, logs  # fmt: skip
        self.started: list[_Started] = []
        self.signal = 0
        self.count = self.ended = self.ended_steps = 0
        self.bar = Bar("sweep", unit="steps")

    def expect(self, runs: int, steps: Sequence[int | None]) -> None:
        """Say how many runs are to be made, and how long each is where that is known."""
        self.count = runs
        self.bar.total = sum(filter(None, steps)) if None not in steps else None

    def make(self, jobs: Sequence[Job], *, when_ended: Callable[[], object]) -> None:
        """Make the runs that are not final. After a signal, to the sweep or to one of them, the others save and TandemError is raised."""
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) is not signal.SIG_IGN:  # which nohup has made of SIGHUP
                signal.signal(number, self._forward)
        waiting = [job for job in jobs if not is_final(figure_of(job, self.metric))]
        looked = 0.0
        try:
            while waiting or self.started:
                for one in [one for one in self.started if one.has_ended(queued=self.launcher is not None)]:
                    self.started.remove(one)
                    if one.trains_elsewhere() and not is_final(figure_of(one.job, self.metric)):
                        waiting.insert(0, one.job)
                    else:
                        self._end(one, when_ended)
                if self.signal and all(one.process is None or one.process.poll() is not None for one in self.started):
                    raise self._stopped()  # what others have is not ours to wait for
                while waiting and len(self.started) < self.parallel and not self.signal:
                    self._start(waiting.pop(0))
                if time.monotonic() - looked > LOOK_S:
                    self.bar.reach(self.ended_steps + sum(map(_step, self.started)))
                    looked = time.monotonic()
                is_running = [one.process is not None and one.process.poll() is None for one in self.started]
                time.sleep(POLL_S if any(is_running) else LOOK_S)  # locks of queued runs are on a shared disk
        finally:
            for one in self.started:  # after an error of ours
                if one.process is not None:
                    one.process.terminate()
                    one.process.wait()

    def _end(self, one: _Started, when_ended: Callable[[], object]) -> None:
        figure = figure_of(one.job, self.metric)
        if self.signal:
            return
        if one.process is not None and one.process.returncode in STOPPED:
            self._forward(signal.SIGINT if one.process.returncode == 130 else signal.SIGTERM, None)
            return
        self.ended += 1
        self.ended_steps += one.job.steps or 0
        self.bar.reach(self.ended_steps)
        result = f"{self.metric} {figure.value:.5f}" if figure.value is not None else figure.status
        if figure.value is None and one.process is not None:
            code = one.process.returncode
            *_, last_line = self._log(one.job).read_text(errors="replace").strip().splitlines() or [""]
            if code == RecipeError.status:  # so it is for every seed
                raise RecipeError(f"{one.job.label}, seed {one.job.seed}: {last_line.removeprefix('error: ')}")
            result += f", status {code}: {last_line} ({self._log(one.job)})"
        left = f"; {self.bar.text(time.monotonic())}" if self.bar.total and self.ended < self.count else ""
        took = seconds_text(time.time() - one.began)
        write(f"[{self.ended}/{self.count}] {one.job.label}, seed {one.job.seed}: {result} ({took}{left})")
        when_ended()

    def _start(self, job: Job) -> None:
        slot = min(set(range(self.parallel)) - {one.slot for one in self.started})
        if RunDirectory(job.path).in_use():
            write(f"{job.path}: another process trains it; waiting for that")
            self.started.append(_Started(job, slot, None, time.time()))
            return
        command = self.command(job)
        environ, prepare = dict(os.environ), None
        if self.launcher is None and self.parallel > 1:
            environ, prepare = _share(slot, self.parallel)
        self.logs.mkdir(parents=True, exist_ok=True)
        with open(self._log(job), "ab") as log:
            try:
                # A session of its own: a Ctrl-C comes once, from here.
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True, preexec_fn=prepare)  # fmt: skip
            except OSError as error:
                raise RecipeError(
                    f"--launcher: {command[0]}: {error.strerror}. Name a program that is there."
                ) from None
        self.started.append(_Started(job, slot, process, time.time()))
        if self.signal:  # which came while it was started
            process.send_signal(self.signal)

    def command(self, job: Job) -> list[str]:
        """Return the command that makes the run, through the launcher where there is one."""
        files = [PACKAGE / "launch" / "launch.py", PACKAGE / f"{self.stage}.py"]
        command = [sys.executable, *map(str, files), self.recipe, self.recipe, *job.overrides, f"train.seed={job.seed}", f"run.name={job.path.name}"]  # fmt: skip
        if self.launcher is None:
            return command
        found: list[str] = []
        for word in shlex.split(self.launcher):
            word = word.replace("{name}", job.path.name)
            found += command if word == "{command}" else [word.replace("{command}", shlex.join(command))]
        return found

    def _log(self, job: Job) -> Path:
        return self.logs / f"{job.path.name}.log"

    def _forward(self, number: int, _frame: object) -> None:
        self.signal = number
        for one in self.started:
            if one.process is not None and one.process.poll() is None:
                one.process.send_signal(number)

    def _stopped(self) -> TandemError:
        name = signal.Signals(self.signal).name
        error = TandemError(f"stopped by {name}; the runs have saved. Run the same command again to go on.")
        error.status = 130 if self.signal == signal.SIGINT else 75
        return error


def _step(one: _Started) -> int:
    """Return the newest step in the last rows of the run's metrics."""
    try:
        with open_rows(one.job.path / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            rows = last_attempts([row for line in file if (row := row_of(line))])  # the first line may be half a row
    except FileNotFoundError:
        return 0
    return max((row["step"] for row in rows if "step" in row), default=0)


def _share(slot: int, slots: int) -> tuple[dict[str, str], Callable[[], None] | None]:
    """Return the environment of a run that has one of so many parts of this machine, and what its process does first: GPUs where
    there are any, else cores, whose number decides the threads and so the last bits of sums."""
    environ = dict(os.environ)
    if count := len(visible_gpus(environ)):
        gpus = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu] or list(
            map(str, range(count))
        )
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot::slots] or [gpus[slot % len(gpus)]])
        return environ, None
    if not hasattr(os, "sched_setaffinity"):
        return environ, None
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // slots)
    first = slot * each % len(cores)
    return environ, partial(os.sched_setaffinity, 0, cores[first : first + each])
