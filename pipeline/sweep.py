"""`python -m pipeline.sweep RECIPE key=v1,v2 ...`: what other values do to a recipe, judged against the noise of its
seeds.

Many runs of one recipe with other values and seeds: the values, the verdicts, the runs, the search by Optuna, the
sweep itself.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipeline.evals.intervals import student_t, two_sided
from pipeline.hardware.accelerators import device_without_torch, leave_accelerators, visible_gpus
from pipeline.metrics import BPB_OF_STAGE, SFT_BPB, VAL_BPB_DOCUMENTS, metric_of
from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.probe import NotMeasured, measure
from pipeline.process.commands import command, program, whole_number
from pipeline.process.errors import CannotWriteError, InputMissingError, RecipeError, TandemError, first_line
from pipeline.process.progress import Bar, seconds_text, write
from pipeline.process.storage import lock, read_json, write_json, write_text
from pipeline.recipe import Recipe, dump_recipe, read_recipe
from pipeline.recipe.layers import EXCLUSIVE, read_layers
from pipeline.recipe.located_yaml import Problems
from pipeline.recipe.resolve import resolve_start, step_rows
from pipeline.report.comparison import CHANCE, SECTION, comparison_panels
from pipeline.report.run_data import RunData, filled_table, number, read_run, table
from pipeline.run_dir.checkpoints import step_of
from pipeline.run_dir.failures import exit_with_status
from pipeline.run_dir.rows import last_attempts, open_rows, row_of
from pipeline.run_dir.run_directory import SWEEP_TAG, RunDirectory, find_run

EXAMPLES = """examples:
  {0} quickstart_pretrain optimizer.schedule.warmup_steps=20,40,80
      the recipe itself with 3 seeds, then each value with the same seeds; a table says better, worse or not shown
  {0} ladder 'model.depth=6,8' train.max_steps=200 --equal time
      200 steps of the recipe; the depths get as many as fit into the same measured time
  {0} own_text 'data.sources=[{{files: my_folder}}]' 'optimizer.groups.matrices.learning_rate=tag(log, interval(0.005, 0.08))' --trials 20
      a search by Optuna (pip install 'tandem-llm[sweep]'); its dashboard reads the storage in sweeps/NAME/optuna.db
  {0} fineweb_d12 train.max_grad_norm=0.5,1,2 --parallel 8 --launcher 'sbatch --wait --job-name {{name}} --gpus 8 --wrap {{command}}'
      each run as a job of its own

The same command goes on where it was stopped. With another value and the same --name (or recipe) the table grows:
sweeps/NAME/sweep.json holds it for scripts. Values are written as Hydra writes them: key=v1,v2, key=choice(v1,v2),
key=range(start,stop,step), key=interval(low,high), key=tag(log, interval(low,high)), key=int(interval(low,high)).
"""  # noqa: E501

# The values that a sweep tries, written as Hydra's multirun and its Optuna sweeper write them.
#
# `a=1,2,3`, `a=choice(1,2)` and `a=range(2,8,2)` are lists; `a=interval(1e-3,1e-1)`, alone or inside `int(...)` and
# `tag(log, ...)`, is searched. `a=1` alone is an override of every run, the baseline included.

OPENING, CLOSING = "([{", ")]}"
NUMBER = r"\s*([-+0-9.eE_]+)\s*"
INTERVAL = re.compile(rf"interval\({NUMBER},{NUMBER}\)")
RANGE = re.compile(r"range\(\s*(-?\d+)\s*,\s*(-?\d+)\s*(?:,\s*([1-9]\d*)\s*)?\)")
WRAPPED = re.compile(r"(tag\(\s*log\s*,\s*|int\()(.+)\)$")


@dataclass(frozen=True)
class Axis:
    """The values that one key may have: texts as the command line takes them, or an interval."""

    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_int: bool = False
    is_log: bool = False

    def ends(self) -> list[str]:
        """Return the first and the last value, of an interval its ends."""
        texts = self.values or [str(int(end)) if self.is_int else repr(end) for end in (self.low, self.high)]
        return [texts[0], texts[-1]]

    def suggest(self, trial: Any, key: str) -> str:
        """Return the text of what an Optuna trial is to try."""
        if self.values:
            return trial.suggest_categorical(key, list(self.values))
        if self.is_int:
            return str(trial.suggest_int(key, int(self.low), int(self.high), log=self.is_log))
        return repr(trial.suggest_float(key, self.low, self.high, log=self.is_log))


def without(words: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the overrides whose key is none of the others', which are keys or overrides."""
    return [word for word in words if word.partition("=")[0] not in {other.partition("=")[0] for other in others}]


def read_space(words: list[str]) -> tuple[list[str], dict[str, Axis]]:
    """Return the overrides of every run, and the axes by key."""
    fixed, axes = [], {}
    for word in words:
        key, equals, text = word.partition("=")
        axis = _axis(key, text) if equals else None
        if axis is None:
            fixed.append(word)
        elif key in axes:
            raise RecipeError(f"command line: {key}: is given twice. Write all of its values in one list.")
        else:
            axes[key] = axis
    if both := axes.keys() & {word.partition("=")[0] for word in fixed}:
        raise RecipeError(
            f"command line: {', '.join(sorted(both))}: has one value for every run and a list. Give one of the two."
        )
    return fixed, axes


def grid(axes: dict[str, Axis]) -> list[dict[str, str]]:
    """Return every combination of the values, the last key turning fastest. Raises RecipeError for an interval."""
    if searched := [key for key, axis in axes.items() if not axis.values]:
        raise RecipeError(
            f"command line: {', '.join(searched)}: is an interval, which no grid goes through. Give --trials N for a "
            "search, or a list."
        )
    combinations = itertools.product(*(axis.values for axis in axes.values()))
    return [dict(zip(axes, values, strict=True)) for values in combinations]


def _axis(key: str, text: str) -> Axis | None:
    """Return the axis that the text writes; None where it is one value."""
    inner, is_int, is_log = text.strip(), False, False
    while wrapped := WRAPPED.match(inner):
        is_int, is_log = is_int or wrapped[1] == "int(", is_log or wrapped[1] != "int("
        inner = wrapped[2].strip()
    if found := INTERVAL.fullmatch(inner):
        try:
            low, high = float(found[1]), float(found[2])
        except ValueError:
            low = high = 0.0
        if not low < high or (is_log and low <= 0):
            raise RecipeError(
                f"command line: {key}: {text} is no interval to search: two numbers, the lower one first, above 0 "
                "with tag(log, ...)."
            )
        return Axis(low=low, high=high, is_int=is_int, is_log=is_log)
    if found := RANGE.fullmatch(inner):
        values = tuple(map(str, range(int(found[1]), int(found[2]), int(found[3] or 1))))
    elif inner.startswith("choice(") and inner.endswith(")"):
        values = tuple(_split(inner[len("choice(") : -1]))
    elif len(parts := _split(inner)) > 1:
        values = tuple(parts)
    else:
        return None
    if not all(values) or not values:
        raise RecipeError(f"command line: {key}: {text} has an empty value. Write key=v1,v2 without spaces.")
    return Axis(tuple(dict.fromkeys(values)))


def _split(text: str) -> list[str]:
    """Return the parts between the commas that stand in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in OPENING + CLOSING:
            depth += 1 if letter in OPENING else -1
        elif letter == "," and not depth:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]


# Verdicts of better or worse than the baseline: paired by seed, corrected for the number of candidates; as table,
# page, JSON.

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
    """Return mean difference, its 95 % interval and p by the paired t test; of one difference, or of equal ones, the
    mean alone."""
    centre, count = mean(differences), len(differences)
    if count < 2 or not (error := stdev(differences) / math.sqrt(count)):
        return {"difference": centre, "interval": None, "p": None}
    reach = student_t(CHANCE, count - 1) * error
    p = two_sided(centre / error, count - 1)
    return {"difference": centre, "interval": [centre - reach, centre + reach], "p": p}


def holm(chances: Sequence[float]) -> list[float]:
    """Return each chance corrected for their number: below 0.05 then means that any of these is a false call in 5 % of
    tables.

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
    """Return difference, interval, p, p_holm and verdict of each candidate, None where they are not known. better:
    lower or higher."""
    found = [_test(baseline, figures) for figures in candidates]
    tested = [one for one in found if one["p"] is not None]
    for one, p in zip(tested, holm([one["p"] for one in tested]), strict=True):
        is_better = (one["difference"] < 0) == (better == "lower")
        one |= {"p_holm": p, "verdict": "not shown" if p >= CHANCE else "better" if is_better else "worse"}
    return found


def _test(baseline: Sequence[Figure], figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the paired test over the seeds that both have; its verdict says why where there is none."""
    none = dict.fromkeys(("difference", "interval", "p", "p_holm"))
    if diverged := diverged_text([one.status for one in figures]):  # the seeds that are left are its luckier ones
        return none | {"verdict": diverged}
    values = {one.seed: one for one in baseline if one.value is not None}
    both = [(values[one.seed], one) for one in figures if one.value is not None and one.seed in values]
    if not both:
        return none | {"verdict": next((one.status for one in figures if one.status != "finished"), NOT_RUN)}
    if any(one.protocol != other.protocol for one, other in both):
        return none | {"verdict": "not comparable"}
    # Both have one
    return none | {"verdict": "not shown"} | paired([other.value - one.value for one, other in both])  # type: ignore[operator]


def diverged_text(statuses: Sequence[str]) -> str:
    """Return "diverged" and how many of the runs that were made did; "" where none did."""
    count = sum(status.startswith(DIVERGED_STATUS) for status in statuses)
    return f"diverged ({count} of {sum(status != NOT_RUN for status in statuses)})" if count else ""


def least_difference(spread: float | None, count: int) -> float | None:
    """Return the difference that so many pairs would just tell if pairing took no noise away. spread: standard
    deviation over seeds."""
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
        f"Noise: {record['metric']} of the baseline over {count_of(base)} seeds is {base['mean']:.6g}, standard "
        f"deviation {base['stdev']:.2g}. So many seeds tell a difference of about {base['least_difference']:.2g} or "
        "more, less where candidate and baseline move together."
    )


def markdown(record: dict[str, Any]) -> str:
    """Return the table and what is beside it. It holds no times of runs: a sweep that was interrupted has the same
    bytes."""
    head = [
        "",
        "steps",
        "ms a step",
        "seeds",
        record["metric"],
        "difference",
        "95 % interval",
        "p",
        "p (Holm)",
        "verdict",
    ]
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
                entry["verdict"],
            ]
        )
    tested = sum(entry["p"] is not None for entry in record["candidates"])
    notes = [
        noise_text(record),
        f"Each candidate has {EQUAL[record['equal']]}. {record['better'].capitalize()} is better. The test is a "
        f"paired t test by seed; better and worse are called below p = {CHANCE} after Holm's correction for the "
        f"{tested} candidates that could be tested. The intervals are of one candidate each.",
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
    """Write sweep.html: the table, curves of one seed of each candidate, and all runs. runs: by the paths in the
    record."""
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


# The runs: ordinary run directories, each made by a process of the ordinary entry, one after another or side by side.

PACKAGE = Path(__file__).parent
POLL_S, LOOK_S = 0.1, 2.0  # between looks at the processes, and at what runs have written
TAIL_BYTES = 2**16  # of metrics.jsonl, some 50 rows: what is read every LOOK_S takes time from the runs
NOT_RUN = "not run"
DIVERGED_STATUS = "failed (status 76,"  # the one failure that is a result: the same steps would come to the same end
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
        return made(NOT_RUN)
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
    return figure.status.startswith(("finished", DIVERGED_STATUS))


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


class RefusedError(RecipeError):
    """A candidate that the recipe refuses: an end for a grid, a failed trial for a search."""


class Runs:
    """Starts, waits and counts. launcher: a command line with {command} in it, by which each run is started instead.
    tags: of each run."""

    def __init__(
        self,
        recipe: str,
        stage: str,
        *,
        metric: str,
        parallel: int,
        launcher: str | None,
        logs: Path,
        tags: Sequence[str],
    ):
        if launcher is not None and "{command}" not in launcher:
            raise RecipeError(
                "--launcher: has no {command}, so nothing would be started. Write it where the run's command belongs."
            )
        self.recipe, self.stage, self.metric, self.parallel, self.launcher, self.logs, self.tags = (
            recipe, stage, metric, parallel, launcher, logs, tags,
        )  # fmt: skip
        self.started: list[_Started] = []
        self.signal = 0
        self.count = self.ended = self.ended_steps = 0
        self.bar = Bar("sweep", unit="steps")

    def expect(self, runs: int, steps: Sequence[int | None]) -> None:
        """Say how many runs are to be made, and how long each is where that is known."""
        self.count = runs
        self.bar.total = sum(filter(None, steps)) if None not in steps else None

    def make(self, jobs: Sequence[Job], *, when_ended: Callable[[], object]) -> None:
        """Make the runs that are not final. After a signal, to the sweep or to one of them, the others save and
        TandemError is raised."""
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
            self.started.clear()

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
                raise RefusedError(f"{one.job.label}, seed {one.job.seed}: {last_line.removeprefix('error: ')}")
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
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    start_new_session=True,
                    preexec_fn=prepare,
                )
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
        # Of every run: latest: passes over its tag, and it publishes nothing, since all would go to one repository.
        own = [f"run.tags={json.dumps(self.tags, ensure_ascii=False)}", "hub.id=null"]
        command = [
            sys.executable,
            *map(str, files),
            self.recipe,
            self.recipe,
            *job.overrides,
            f"train.seed={job.seed}",
            f"run.name={job.path.name}",
            *own,
        ]
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
    """Return the environment of a run that has one of so many parts of this machine, and what its process does first:
    GPUs where there are any, else cores, whose number decides the threads and so the last bits of sums."""
    environ = dict(os.environ)
    if count := len(visible_gpus(environ)):
        named = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = list(filter(None, named)) or [str(gpu) for gpu in range(count)]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot::slots] or [gpus[slot % len(gpus)]])
        return environ, None
    if not hasattr(os, "sched_setaffinity"):
        return environ, None
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // slots)
    first = slot * each % len(cores)
    return environ, partial(os.sched_setaffinity, 0, cores[first : first + each])


# A search by Optuna: its samplers propose, its pruners give up, its storage holds the trials.

# What makes the runs of so many seeds of these values, and returns their figures; None for one that has none.
Try = Callable[[dict[str, str], int], Sequence[float | None]]


def search(
    axes: dict[str, Axis], attempt: Try, options: argparse.Namespace, *, name: str, folder: Path, better: str
) -> None:
    """Make options.trials trials, those of earlier calls included; the pruner is asked after every seed, or as many as
    run side by side.

    A proposal follows from the earlier trials and its own number alone, so a search that was interrupted proposes the
    same.
    """
    optuna = _optuna()
    from sqlalchemy.exc import SQLAlchemyError  # comes with it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = options.storage or f"sqlite:///{folder / 'optuna.db'}"
    pruner = _make_named(optuna.pruners, options.pruner, "--pruner")
    direction = "minimize" if better == "lower" else "maximize"
    try:
        study = optuna.create_study(
            study_name=name, storage=storage, direction=direction, pruner=pruner, load_if_exists=True
        )
    except SQLAlchemyError as error:
        raise RecipeError(f"--storage: {storage} cannot be opened ({error}). Give another URL.") from None
    for n in range(options.trials):
        study.sampler = _make_named(optuna.samplers, options.sampler, "--sampler", seed=n)
        known = study.get_trials(deepcopy=False)
        if n < len(known) and known[n].state.is_finished():
            continue
        # A trial that was under way when the sweep was stopped goes on under its number.
        trial = optuna.trial.Trial(study, known[n]._trial_id) if n < len(known) else study.ask()
        values = _suggest(trial, axes, options.sampler)
        try:
            value, state = _make_runs(trial, partial(attempt, values), options, optuna.trial.TrialState)
        except RefusedError as error:
            write(f"trial {n}: {first_line(error)}")
            value, state = None, optuna.trial.TrialState.FAIL
        study.tell(trial, value, state=state)


def _suggest(trial: Any, axes: dict[str, Axis], sampler: str) -> dict[str, str]:
    values = {}
    for key, axis in axes.items():
        try:
            values[key] = axis.suggest(trial, key)
        except (ValueError, ImportError) as error:
            # Other values than the study began with; a sampler that lacks a package.
            raise RecipeError(
                f"command line: {key}: Optuna's {sampler} chooses no value ({error}). For other values than earlier "
                "trials had give another --name, else another --sampler."
            ) from None
    return values


def _make_runs(
    trial: Any, attempt: Callable[[int], Sequence[float | None]], options: argparse.Namespace, states: Any
) -> tuple[float | None, Any]:
    """Run seed by seed; return value and state that the trial ends with."""
    reported = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
    seeds: int = options.seeds
    for count in [*range(options.parallel, seeds, options.parallel), seeds]:
        values = [value for value in attempt(count) if value is not None]
        if len(values) < count:
            return None, states.FAIL
        if count not in reported:
            trial.report(mean(values), step=count)
        if count < seeds and trial.should_prune():
            return None, states.PRUNED
    return mean(values), states.COMPLETE


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise RecipeError(
            "--trials: a search needs Optuna, which is not installed. Run pip install 'tandem-llm[sweep]' (or pip "
            "install optuna), or give lists of values for a grid."
        ) from None
    return optuna


def _make_named(module: Any, name: str, option: str, **arguments: Any) -> Any:
    """Return an object of the class of that name, made of these arguments alone."""

    def make(name: str) -> Any:
        try:
            return getattr(module, name)(**arguments)
        except TypeError:  # no class, an abstract one, or one that asks for more
            return None

    if name in module.__all__ and (made := make(name)) is not None:
        return made
    with warnings.catch_warnings(action="ignore"):  # of experimental ones
        names = [one for one in module.__all__ if make(one) is not None]
    raise RecipeError(
        f"{option}: {name} is none of Optuna's, or needs arguments of its own. Write one of {', '.join(names)}."
    )


# The sweep: its record, and the command.

PROBE_S = 10.0  # of steps, for each candidate of --equal time
MOST_CORNERS = 16  # of a search's space that are looked at before it begins
# Keys that are of all runs together, or that no figure follows from; each with all below it.
COMMON = (
    "run.name", "run.stage", "run.directory", "run.mirror", "run.resume", "run.note", "run.tags", "run.code_folder",
    "run.trust_code", "run.hardware", "run.gpu_hour_cost", "run.keep_every_steps", "run.keep_best", "data.cache_dir",
    "monitor.trackers", "monitor.project", "hub",
)  # fmt: skip


def why_never_logged(metric: str, recipe: Recipe) -> str | None:
    """Return why no run of the recipe logs the metric, as far as that is known before the first one."""
    is_chat, evals = recipe.stage == "sft", recipe.evals
    reasons = (
        (("sft/", "train/assistant_bpb"), not is_chat, "it is of SFT, and this recipe is a pretraining."),
        (("val/bpb", "train/bpb"), is_chat, f"it is of a pretraining, and this recipe is SFT. Take {SFT_BPB}."),
        ((VAL_BPB_DOCUMENTS,), evals.bpb.document_bytes == 0, "evals.bpb.document_bytes is 0. Set it."),
        (
            ("core/", "core_partial/"),
            evals.core.every_steps is None,
            "CORE is not scored. Set evals.core.every_steps.",
        ),
        (("chat/",), evals.chat.every_steps is None, "chat tasks are not scored. Set evals.chat.every_steps."),
        (("text/",), True, f"it is made by `{command('evals')}`, not by a run."),
    )
    return next((why for names, never, why in reasons if never and metric.startswith(names)), None)


class Sweep:
    """The record of a sweep (sweep.json), and what it takes to make its runs."""

    def __init__(self, options: argparse.Namespace, fixed: list[str]):
        self.options, self.fixed = options, fixed
        recipe = self._recipe([])
        if recipe.train.get("use_cpu"):
            leave_accelerators()
        self.device = device_without_torch()
        self.processes = whole_number(os.environ, "NPROC", max(1, self.device.count // options.parallel), least=1)
        usual = BPB_OF_STAGE[recipe.stage]
        self.metric = options.metric or usual
        known = metric_of(self.metric)
        if known is None or known.better is None:
            raise RecipeError(
                f"--metric: {self.metric} is no number of which more or less is better. docs/metrics.md lists them."
            )
        if reason := why_never_logged(self.metric, recipe):
            raise RecipeError(f"--metric: no run of {options.recipe} logs {self.metric}: {reason}")
        self.better: str = known.better
        self.figures: dict[Path, Figure] = {}
        # Not the metric: the same runs are judged by another one. What `latest:` means decides sizes, so there it is
        # what is given.
        is_open = (recipe.model.start_from or "").startswith("latest:")
        given = read_layers(str(recipe.path), fixed, Problems()).plain() if is_open else dump_recipe(recipe)
        digest = _digest([given, options.equal, usual])
        self.folder = Path("sweeps", options.name or f"{Path(str(recipe.path)).stem}-{digest[:6]}")
        # Runs of another baseline under the same --name, whose record is gone or elsewhere, are not taken for ours.
        self.runs_prefix = f"{options.name}-{digest[:6]}" if options.name else self.folder.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held = lock(self.folder / ".lock")
        if self._held is None:
            raise CannotWriteError(f"{self.folder}: another sweep is writing it. Wait for it, or give another --name.")
        self.study = self.folder.name if self.metric == usual else f"{self.folder.name} {self.metric}"
        earlier = self._earlier(digest) or {}
        self.starts: dict[str, str] = earlier.get("start_from", {})
        self.fixed = self._pinned(fixed)
        self.recipe, self.plan = self._recipe([]), self.plan_of([])
        self.record = earlier or {
            "name": self.folder.name,
            "recipe": options.recipe,
            "fixed": fixed,
            "equal": options.equal,
            "baseline_sha256": digest,
            "complete": False,
            "baseline": self._new({}, [], self.plan.steps, self._step_s([]) if options.equal == "time" else None),
            "candidates": [],
        }
        self.record |= {"metric": self.metric, "better": self.better, "start_from": self.starts}

    def _earlier(self, digest: str) -> dict[str, Any] | None:
        """Return the record of an earlier call."""
        file = self.folder / "sweep.json"
        record = read_json(file) if file.exists() else None
        if record is not None and record.get("baseline_sha256") != digest:
            raise RecipeError(
                f"{file}: is of another baseline (recipe, fixed values or --equal), so its table cannot grow. Give "
                "another --name."
            )
        return record

    @staticmethod
    def _new(values: dict[str, str], overrides: list[str], steps: int | None, step_s: float | None) -> dict[str, Any]:
        return {"values": values, "overrides": overrides, "steps": steps, "step_s": step_s, "runs": []}

    def _recipe(self, overrides: list[str]) -> Recipe:
        return read_recipe([self.options.recipe, *self._words(overrides), "run.name=sweep"])

    def _words(self, overrides: list[str]) -> list[str]:
        """Return the overrides of every run, and these on top."""
        return [*without(self.fixed, overrides), *overrides]

    def _pinned(self, overrides: list[str]) -> list[str]:
        """Return the overrides with the folder that model.start_from meant at first, where it names a run: one that
        ends, or saves, while the sweep is made would change what later runs begin from."""
        recipe = read_recipe([self.options.recipe, *self._words(overrides), "run.name=sweep-start"])
        start = recipe.model.start_from or ""
        if start not in self.starts:
            if not start.startswith("latest:") and (not start or find_run(start, recipe.run.directory) is None):
                return overrides
            folder = str(resolve_start(recipe).model.start_from)
            if step_of(Path(folder)):
                raise RecipeError(
                    f"{recipe.where('model.start_from')}: {start} has not finished, and the checkpoint that it has "
                    "now goes when newer ones come, before the sweep is made. Let it finish first, or stop it and "
                    "name that checkpoint's folder."
                )
            # A path beside the recipe comes before one in the working folder.
            beside = Path(str(recipe.path)).parent / folder
            self.starts[start] = os.path.abspath(folder) if beside.exists() and beside != Path(folder) else folder
        return [*without(overrides, ["model.start_from"]), f"model.start_from={self.starts[start]}"]

    def plan_of(self, overrides: list[str]) -> Plan:
        return make_plan(self._recipe(overrides), self.device, processes=self.processes)

    def _step_s(self, overrides: list[str]) -> float:
        """Return the measured seconds of a step."""
        memory, given = self.plan_of(overrides).memory, [self.options.recipe, *self._words(overrides)]
        needed, what = memory.total if memory else None, " ".join(overrides) or "the recipe"
        print(f"measuring the steps of {what}, some {PROBE_S:.0f} s", flush=True)
        try:
            on_cpu = self.device.kind == "cpu"
            probe = measure(given, processes=self.processes, seconds=PROBE_S, on_cpu=on_cpu, needed_bytes=needed)
            return probe.step_s
        except NotMeasured as reason:
            raise TandemError(
                f"--equal time: {what} was not measured, since {reason}. Give tokens or flops."
            ) from None

    def _step_s_in_turns(self, overrides: list[str]) -> float:
        """Return the seconds of a candidate's step where the baseline's takes what is recorded of it: both are
        measured now, one after the other, as a machine's speed changes from minute to minute."""
        return self._step_s(overrides) / self._step_s([]) * self.record["baseline"]["step_s"]

    def entry(self, values: dict[str, str]) -> dict[str, Any]:
        """Return the candidate's entry in the record, with its budget where it is new; the baseline's where it is the
        same recipe."""
        for entry in self.record["candidates"]:
            if entry["values"] == values:
                return entry
        try:
            overrides = self._pinned([f"{key}={value}" for key, value in values.items()])
            digest, plan = _digest(dump_recipe(self._recipe(overrides))), self.plan_of(overrides)
        except RecipeError as error:
            raise RefusedError(f"{label(values)}: {error}") from None
        if digest == _digest(dump_recipe(self.recipe)):
            return self.record["baseline"]
        if same := [entry for entry in self.record["candidates"] if entry.get("recipe_sha256") == digest]:
            return same[0]  # another spelling: 0.50 and .5
        step_s = self._step_s_in_turns(overrides) if self.options.equal == "time" else None
        steps = self._steps(plan, step_s)
        if steps is not None and steps < 1:
            raise RefusedError(f"{label(values)}: not one step fits into the baseline's budget.")
        if steps != plan.steps:
            overrides.append(f"train.max_steps={steps}")
        entry = self._new(values, overrides, steps, step_s) | {"recipe_sha256": digest}
        self.record["candidates"].append(entry)
        return entry

    def refuse_search(self, axes: dict[str, Axis]) -> None:
        """Raise what is wrong with all corners of the space: it is with a key, and not with how some values go
        together."""
        corners = list(itertools.islice(itertools.product(*(axis.ends() for axis in axes.values())), MOST_CORNERS))
        for corner in corners:
            try:
                self.plan_of([f"{key}={value}" for key, value in zip(axes, corner, strict=True)])
                return
            except RecipeError as error:
                if corner is corners[-1]:
                    raise RecipeError(f"{label(dict(zip(axes, corner, strict=True)))}: {error}") from None

    def _steps(self, plan: Plan, step_s: float | None) -> int | None:
        """Return how many steps a candidate gets."""
        equal, base = self.options.equal, self.plan
        if equal == "none" or (equal == "tokens" and base.steps is None):  # epochs are equal tokens
            return plan.steps
        if base.steps is None or base.tokens is None:
            raise RecipeError(
                f"--equal {equal}: the recipe's horizon is in epochs, of which the steps are not known yet. Give "
                "train.max_steps=N or run.tokens=N."
            )
        rows = step_rows(plan.recipe)
        if step_s is not None:  # of a whole batch
            batches = base.tokens / base.batch_tokens * self.record["baseline"]["step_s"] / step_s
            return rows.steps(int(batches) * rows.full)
        if equal == "tokens":
            return rows.steps(base.tokens // plan.recipe.data.row_tokens)
        each = None if plan.sizes is None else plan.sizes.flops_per_token("nanochat")
        if each is None or base.flops is None:
            raise RecipeError("--equal flops: the FLOPs of this model are not known. Give --equal tokens or time.")
        # The thousandth of a row: a quotient that ought to be whole may come out just below.
        return rows.steps(int(base.flops / (each * plan.recipe.data.row_tokens) + 1e-3))

    def jobs(self, entry: dict[str, Any], seeds: int) -> list[Job]:
        """Return the runs of the first so many seeds."""
        overrides, first = entry["overrides"], self.recipe.train.get("seed", 42)
        budget = overrides and overrides[-1].startswith("train.max_steps=")
        # By the run's own seed and tags, and in place of the baseline's horizon.
        fixed = without(
            self.fixed, ("train.seed", "run.tags", "hub.id", *overrides, *(EXCLUSIVE[0] if budget else ()))
        )
        name = f"{self.runs_prefix}-{_digest(overrides)[:6] if overrides else 'baseline'}"
        return [
            Job(
                Path(self.recipe.run.directory, f"{name}-s{seed}"),
                seed,
                (*fixed, *overrides),
                entry["steps"],
                label(entry["values"]),
            )
            for seed in range(first, first + seeds)
        ]

    def figure(self, job: Job) -> Figure:
        if job.path not in self.figures or not is_final(self.figures[job.path]):
            self.figures[job.path] = figure_of(job, self.metric)
        return self.figures[job.path]

    def update(self, *, complete: bool = False) -> str:
        """Judge what there is by now and write it; return the Markdown."""
        entries = [self.record["baseline"], *self.record["candidates"]]
        found = [[self.figure(job) for job in self.jobs(entry, self.options.seeds)] for entry in entries]
        for entry, figures in zip(entries, found, strict=True):
            values = [figure.value for figure in figures if figure.value is not None]
            entry["runs"] = [asdict(figure) for figure in figures]
            entry["mean"], entry["stdev"] = (
                mean(values) if values else None,
                stdev(values) if len(values) > 1 else None,
            )
        entries[0]["least_difference"] = least_difference(entries[0]["stdev"], count_of(entries[0]))
        entries[0]["verdict"] = ", ".join(filter(None, ["baseline", diverged_text([one.status for one in found[0]])]))
        for entry, verdict in zip(entries[1:], judge_all(found[0], found[1:], better=self.better), strict=True):
            entry |= verdict
        self.record["complete"] = complete
        return write_results(self.record, self.folder)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def main(argv: list[str]) -> int:
    options = _options(argv)
    fixed, axes = read_space(options.values)
    _check(options, fixed, axes)
    sweep = Sweep(options, fixed)
    if options.trials:  # a recipe that refuses a key does so before the baseline is trained
        sweep.refuse_search(axes)
    entries = [] if options.trials else [sweep.entry(values) for values in grid(axes)]
    logs = sweep.folder / "logs"
    runs = Runs(
        options.recipe,
        str(sweep.recipe.stage),
        metric=sweep.metric,
        parallel=options.parallel,
        launcher=options.launcher,
        logs=logs,
        tags=[*sweep.recipe.run.tags, SWEEP_TAG + sweep.folder.name],
    )
    baseline = sweep.jobs(sweep.record["baseline"], options.seeds)
    others = list(
        dict.fromkeys(job for entry in entries for job in sweep.jobs(entry, options.seeds) if job not in baseline)
    )
    to_make = [job for job in baseline + others if not is_final(sweep.figure(job))]
    searched = options.trials * options.seeds
    runs.expect(len(to_make) + searched, [job.steps for job in to_make] + [sweep.plan.steps] * searched)
    count = len(baseline + others) + searched
    print(f"{sweep.folder}: {count} runs, {len(to_make) + searched} of them to make; the baseline first", flush=True)
    sweep.update()
    runs.make(baseline, when_ended=sweep.update)
    if failed := [figure for job in baseline if (figure := sweep.figure(job)).value is None]:
        diverged = diverged_text([sweep.figure(job).status for job in baseline])
        why = (
            f"the baseline {diverged}, and by the seeds that are left nothing can be judged. Make the recipe stable "
            "first, by a lower rate for one."
        )
        raise TandemError(
            f"{failed[0].run}: {failed[0].status}; "
            f"{why if diverged else 'without the baseline nothing can be judged.'} {logs} holds what the runs printed."
        )
    print(noise_text(sweep.record), flush=True)
    if options.trials:

        def attempt(values: dict[str, str], seeds: int) -> list[float | None]:
            jobs = sweep.jobs(sweep.entry(values), seeds)
            sweep.update()  # with its budget, before its first run
            runs.make(jobs, when_ended=sweep.update)
            return [sweep.figure(job).value for job in jobs]

        search(axes, attempt, options, name=sweep.study, folder=sweep.folder, better=sweep.better)
    else:
        runs.make(others, when_ended=sweep.update)
    runs.bar.close()
    text = sweep.update(complete=True)
    finished = {str(path): read_run(str(path)) for path, figure in sweep.figures.items() if figure.value is not None}
    print(f"\n{text}\n{write_page(sweep.record, finished, sweep.folder)}\n{sweep.folder / 'sweep.json'}")
    return 0


def _check(options: argparse.Namespace, fixed: list[str], axes: dict[str, Axis]) -> None:
    given = {word.partition("=")[0] for word in fixed} | axes.keys()
    if "run.name" in given or "train.seed" in axes:
        raise RecipeError(
            "command line: run.name and a list for train.seed: a sweep names its runs and chooses their seeds. Give "
            "--name and --seeds."
        )
    if common := [key for key in sorted(axes) if any(f"{key}.".startswith(f"{one}.") for one in COMMON)]:
        raise RecipeError(
            f"command line: {', '.join(common)}: is the same for all runs of a sweep, so it has no values to compare. "
            "Give one value, or leave it out."
        )
    if any(word.startswith("hub.id=") and word != "hub.id=null" for word in fixed):
        raise RecipeError(
            "command line: hub.id: all runs would go to one repository, so a sweep publishes none. Leave it out, and "
            f"publish the run that you choose: {command('hub')} push RUN --id NAMESPACE/NAME."
        )
    if options.equal != "none" and (horizons := axes.keys() & set(EXCLUSIVE[0])):
        raise RecipeError(
            f"command line: {', '.join(sorted(horizons))}: candidates of other lengths are not of equal "
            f"{options.equal}. Give --equal none."
        )
    if options.trials and not axes:
        raise RecipeError("--trials: there is nothing to search. Give key=interval(low,high) or key=v1,v2.")


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("sweep"),
        usage=(
            f"{program('sweep')} RECIPE [key=value ...] key=v1,v2 ... [--seeds N] [--equal "
            "tokens|flops|time|none] [--trials N] ..."
        ),
        description=(
            "Train a recipe with other values and several seeds, and say which are better than the recipe as it is."
        ),
        epilog=EXAMPLES.format(program("sweep")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a recipe's YAML file, or the name of a shipped one")
    add(
        "values",
        metavar="key=value",
        nargs="*",
        help="one value: for every run, the baseline too; several: what is tried, every combination",
    )
    add(
        "--seeds",
        metavar="N",
        type=_count,
        default=3,
        help="of each candidate and the baseline: train.seed and those after it (default 3)",
    )
    add(
        "--equal",
        choices=EQUAL,
        default="tokens",
        help="what every candidate has as much of as the baseline (default tokens); time: in steps, by a probe",
    )
    add("--metric", metavar="NAME", help="what is judged (default val/bpb, in SFT sft/assistant_bpb; docs/metrics.md)")
    add("--name", help="of the folder under sweeps/ (default: the recipe's, with 6 digits of its keys)")
    add(
        "--parallel",
        metavar="N",
        type=_count,
        default=1,
        help="runs side by side, each with its part of the GPUs or cores (default 1)",
    )
    add(
        "--launcher",
        metavar="COMMAND",
        help="a command line that starts each run, with {command} in it, and {name} for the run's name",
    )
    add(
        "--trials",
        metavar="N",
        type=_count,
        default=0,
        help="search by Optuna with so many candidates instead of a grid",
    )
    add("--sampler", metavar="CLASS", default="TPESampler", help="of Optuna (default TPESampler)")
    add(
        "--pruner",
        metavar="CLASS",
        default="MedianPruner",
        help="of Optuna, asked after each seed; NopPruner never stops (default MedianPruner)",
    )
    add("--storage", metavar="URL", help="of Optuna (default: sweeps/NAME/optuna.db)")
    return parser.parse_intermixed_args(argv)


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError
    return count


if __name__ == "__main__":
    exit_with_status(main)
