"""The runs of a sweep: ordinary run directories, each made by a process of the ordinary entry, one after another or side by side."""

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipeline.evals.intervals import student_t, two_sided
from pipeline.hardware import visible_gpus
from pipeline.process.errors import CannotWriteError, InputMissingError, RecipeError, TandemError
from pipeline.process.progress import Bar, seconds_text, write
from pipeline.process.storage import write_json, write_text
from pipeline.report.comparison import CHANCE, SECTION, comparison_panels
from pipeline.report.run_data import RunData, filled_table, number, read_run, table
from pipeline.run_dir.rows import last_attempts, open_rows, row_of
from pipeline.run_dir.run_directory import RunDirectory

# Verdicts of better or worse than the baseline: paired by seed, corrected for the number of candidates; as table, page, JSON.

EQUAL = {
    "tokens": "the same tokens",
    "flops": "the same training FLOPs (nanochat's formula)",
    "time": "the same time in steps by a probe",
    "none": "its own horizon",
}


@dataclass(frozen=True)
class Figure:
    """The result of one run. value: of the metric, None where it has none, for the reason `status`."""

    run: str
    seed: int
    status: str
    value: float | None = None
    protocol: str | None = None  # two figures compare only under the same one


def paired(differences: Sequence[float]) -> dict[str, Any]:
    """Return mean difference, its 95 % interval and p by the paired t test; of one difference, or of equal ones, the mean alone."""
    centre, count = mean(differences), len(differences)
    if count < 2 or not (error := stdev(differences) / math.sqrt(count)):
        return {"difference": centre, "interval": None, "p": None}
    reach = student_t(CHANCE, count - 1) * error
    return {
        "difference": centre,
        "interval": [centre - reach, centre + reach],
        "p": two_sided(centre / error, count - 1),
    }


def holm(chances: Sequence[float]) -> list[float]:
    """Return each chance corrected for their number: below 0.05 then means that any of these is a false call in 5 % of tables.

    Source: Holm, A simple sequentially rejective multiple test procedure (1979).
    """
    corrected, largest = [0.0] * len(chances), 0.0
    for place, n in enumerate(sorted(range(len(chances)), key=lambda n: chances[n])):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[n]))
        corrected[n] = largest
    return corrected


def judge_all(
    baseline: Sequence[Figure], candidates: Sequence[Sequence[Figure]], *, better: str
) -> list[dict[str, Any]]:
    """Return difference, interval, p, p_holm and verdict of each candidate, None where they are not known. better: lower or higher."""
    found = [_test(baseline, figures) for figures in candidates]
    tested = [one for one in found if one["p"] is not None]
    for one, p in zip(tested, holm([one["p"] for one in tested]), strict=True):
        is_better = (one["difference"] < 0) == (better == "lower")
        one |= {"p_holm": p, "verdict": "not shown" if p >= CHANCE else "better" if is_better else "worse"}
    return found


def _test(baseline: Sequence[Figure], figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the paired test over the seeds that both have; its verdict says why where there is none."""
    none = dict.fromkeys(("difference", "interval", "p", "p_holm"))
    values = {one.seed: one for one in baseline if one.value is not None}
    both = [(values[one.seed], one) for one in figures if one.value is not None and one.seed in values]
    if not both:
        return none | {"verdict": next((one.status for one in figures if one.status != "finished"), "not run")}
    if any(one.protocol != other.protocol for one, other in both):
        return none | {"verdict": "not comparable"}
    return none | {"verdict": "not shown"} | paired([other.value - one.value for one, other in both])  # type: ignore[operator]  # both have one


def least_difference(spread: float | None, count: int) -> float | None:
    """Return the difference that so many pairs would just tell if pairing took no noise away. spread: standard deviation over seeds."""
    return None if spread is None else student_t(CHANCE, count - 1) * spread * math.sqrt(2 / count)


# The record as people and programs read it.


def count_of(entry: dict[str, Any]) -> int:
    """Return how many of its runs have a figure."""
    return sum(run["value"] is not None for run in entry["runs"])


def noise_text(record: dict[str, Any]) -> str:
    """Return what the baseline's seeds alone do."""
    base = record["baseline"]
    if base["stdev"] is None:
        return "One seed: the noise is not known, and nothing can be shown. Give --seeds 3 or more."
    return (
        f"Noise: {record['metric']} of the baseline over {count_of(base)} seeds is {base['mean']:.6g}, standard deviation {base['stdev']:.2g}. "
        f"So many seeds tell a difference of about {base['least_difference']:.2g} or more, less where candidate and baseline move together."
    )


def markdown(record: dict[str, Any]) -> str:
    """Return the table and what is beside it. It holds no times of runs: a sweep that was interrupted has the same bytes."""
    head = ["", "steps", "ms a step", "seeds", record["metric"], "difference", "95 % interval", "p", "p (Holm)", "verdict"]  # fmt: skip
    rows = []
    for entry in [record["baseline"], *record["candidates"]]:
        low_high = entry.get("interval")
        rows.append(
            [
                label(entry["values"]),
                entry["steps"],
                number(entry["step_s"] and 1000 * entry["step_s"]),
                count_of(entry),
                None if entry["mean"] is None else f"{entry['mean']:.5f}",
                None if entry.get("difference") is None else f"{entry['difference']:+.5f}",
                f"{low_high[0]:+.5f} to {low_high[1]:+.5f}" if low_high else None,
                *(number(entry.get(name), 3) for name in ("p", "p_holm")),
                entry.get("verdict", "baseline"),
            ]
        )
    tested = sum(entry["p"] is not None for entry in record["candidates"])
    notes = [
        noise_text(record),
        f"Each candidate has {EQUAL[record['equal']]}. {record['better'].capitalize()} is better. The test is a paired t test by seed; better and worse are called below "
        f"p = {CHANCE} after Holm's correction for the {tested} candidates that could be tested. The intervals are of one candidate each.",
        "" if record["complete"] else "The sweep has not ended: the same command goes on.",
    ]
    return f"# {record['name']}\n\n{filled_table(head, rows)}\n" + "\n\n".join(filter(None, notes)) + "\n"


def label(values: dict[str, str]) -> str:
    """Return what a candidate is called."""
    return ", ".join(f"{key}={value}" for key, value in values.items()) or "baseline"


def write_results(record: dict[str, Any], folder: Path) -> str:
    """Write sweep.json and sweep.md; return the Markdown."""
    text = markdown(record)
    write_json(folder / "sweep.json", record)
    write_text(folder / "sweep.md", text)
    return text


def write_page(record: dict[str, Any], runs: dict[str, RunData], folder: Path) -> Path:
    """Write sweep.html: the table, curves of one seed of each candidate, and all runs. runs: by the paths in the record."""
    from pipeline.report.page import page  # Bokeh takes a second

    drawn, rows = [], []
    for entry in [record["baseline"], *record["candidates"]]:
        name = label(entry["values"])
        of_entry = [runs[run["run"]] for run in entry["runs"] if run["run"] in runs]
        drawn += [replace(data, manifest={**data.manifest, "name": name}) for data in of_entry[:1]]
        rows += [[name, run["seed"], run["run"], run["value"], run["status"]] for run in entry["runs"]]
    panels, axes = comparison_panels(drawn) if drawn else ([], {})
    _, _, head = markdown(record).partition("\n\n")
    sections = {SECTION: "One seed of each.\n", "Runs": table(["", "seed", "run", record["metric"], "status"], rows)}
    looks: dict[str, Any] = {"picture": None, "unfolded": (SECTION,), "one_legend": True}
    html = page(record["name"], sections, kind="sweep", head=head, panels=panels, axes=axes, **looks)
    write_text(folder / "sweep.html", html)
    return folder / "sweep.html"


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
        for one in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(one) is not signal.SIG_IGN:  # which nohup has made of SIGHUP
                signal.signal(one, self._forward)
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
