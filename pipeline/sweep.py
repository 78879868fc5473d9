"""`python -m pipeline.sweep RECIPE key=v1,v2 ...`: train a recipe with other values and judge them against the noise
of its seeds."""

import argparse
import ast
import hashlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipeline.evals.intervals import student_t, two_sided
from pipeline.hardware.accelerators import device_without_torch, leave_accelerators, visible_gpus
from pipeline.metrics import BPB_OF_STAGE, metric_of
from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.probe import NotMeasured, measure
from pipeline.process.commands import command, program, whole_number
from pipeline.process.errors import CannotWriteError, InputMissingError, RecipeError, TandemError, first_line
from pipeline.process.progress import seconds_text
from pipeline.process.storage import lock, read_json, write_json, write_text
from pipeline.recipe import Recipe, dump_recipe, read_recipe
from pipeline.recipe.layers import EXCLUSIVE, read_layers
from pipeline.recipe.located_yaml import Problems
from pipeline.recipe.start_from import resolve_start
from pipeline.report.comparison import CHANCE
from pipeline.report.markdown import filled_table
from pipeline.report.run_data import read_run
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.failures import exit_with_status
from pipeline.run_dir.run_directory import SWEEP_TAG, find_run

EXAMPLES = """examples:
  {0} quickstart_pretrain optimizer.schedule.warmup_steps=20,40,80
      the recipe itself with 3 seeds, then each value with the same seeds; a table says better, worse or not shown
  {0} ladder 'model.depth=6,8' train.max_steps=200 --equal time
      200 steps of the recipe; the depths get as many as fit into the same measured time
  {0} own_text 'data.sources=[{{files: my_folder}}]' 'optimizer.groups.matrices.learning_rate=FloatDistribution(0.005, 0.08, log=True)' --trials 20
      a search by Optuna (pip install 'tandem-llm[sweep]'); its dashboard reads sweeps/NAME/optuna.db

The same command continues where it was stopped. With another value and the same --name (or recipe) the table grows:
sweeps/NAME/sweep.json holds it for scripts.
"""  # noqa: E501
EQUAL = {
    "tokens": "the same tokens",
    "flops": "the same training FLOPs (nanochat's formula)",
    "time": "the same time in steps by a probe",
    "none": "its own horizon",
}
# Keys that are the same for all runs, or that no figure follows from; each with all below it.
COMMON = (
    "run.name", "run.stage", "run.directory", "run.mirror", "run.resume", "run.note", "run.tags", "run.code_folder",
    "run.trust_code", "run.hardware", "run.gpu_hour_cost", "run.keep_every_steps", "run.keep_best", "data.cache_dir",
    "monitor.trackers", "monitor.project", "hub",
)  # fmt: skip
# As Optuna writes its distributions: FloatDistribution(0.1, 0.9), IntDistribution(2, 64, log=True).
DISTRIBUTION = re.compile(r"(Float|Int)Distribution\(.*\)")
COMMA = re.compile(r",(?![^\[{]*[\]}])")  # outside brackets
PACKAGE = Path(__file__).parent
POLL_S = 0.1
PROBE_S = 10.0  # of steps, for each candidate of --equal time
NOT_RUN = "not run"
DIVERGED_STATUS = "failed (status 76,"  # the one failure that is a result: the same steps would come to the same end
STOPPED = {75, 130}  # by a signal, after a whole checkpoint


class RefusedError(RecipeError):
    """A candidate that the recipe refuses: an end for a grid, a failed trial for a search."""


@dataclass(frozen=True)
class Figure:
    """The result of one run. value: of the metric, None where it has none, for the reason `status`."""

    run: str
    seed: int
    status: str
    value: float | None = None
    protocol: str | None = None  # two figures compare only under the same one

    @property
    def is_final(self) -> bool:
        """Return whether another start would change nothing."""
        return self.status.startswith(("finished", DIVERGED_STATUS))


@dataclass(frozen=True)
class Job:
    """One run: its directory, seed, and the overrides of its recipe."""

    path: Path
    seed: int
    overrides: tuple[str, ...]
    label: str


def key_of(override: str) -> str:
    return override.partition("=")[0]


def without(overrides: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the overrides whose key is none of these."""
    return [override for override in overrides if key_of(override) not in keys]


def read_space(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the overrides of every run, and by key the values to try; a distribution is the one value of its key."""
    fixed: list[str] = []
    space: dict[str, list[str]] = {}
    for word in words:
        key, _, text = word.partition("=")
        values = [text] if DISTRIBUTION.fullmatch(text) else COMMA.split(text)
        if len(values) == 1 and not is_distribution(values):
            fixed.append(word)
        elif not all(values):
            raise RecipeError(f"command line: {key}: {text} has an empty value. Write key=v1,v2 without spaces.")
        elif key in space:
            raise RecipeError(f"command line: {key}: is given twice. Write all of its values in one list.")
        else:
            space[key] = list(dict.fromkeys(values))
    if both := space.keys() & set(map(key_of, fixed)):
        raise RecipeError(
            f"command line: {', '.join(sorted(both))}: has one value for every run and a list. Give one of the two."
        )
    return fixed, space


def is_distribution(values: Sequence[str]) -> bool:
    return len(values) == 1 and DISTRIBUTION.fullmatch(values[0]) is not None


def grid(space: dict[str, list[str]]) -> list[dict[str, str]]:
    """Return every combination of the values, the last key turning fastest."""
    if searched := [key for key, values in space.items() if is_distribution(values)]:
        raise RecipeError(
            f"command line: {', '.join(searched)}: a distribution has no list of values. Give --trials N for a "
            "search, or a list."
        )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def distributions(space: dict[str, list[str]]) -> dict[str, Any]:
    """Return the values to try as Optuna's distributions."""
    try:
        from optuna import distributions as optuna
    except ImportError:
        raise RecipeError(
            "--trials: a search needs Optuna, which is not installed. Run pip install 'tandem-llm[sweep]', or give "
            "lists of values for a grid."
        ) from None
    found = {}
    for key, values in space.items():
        if not is_distribution(values):
            found[key] = optuna.CategoricalDistribution(values)
            continue
        try:
            call: Any = ast.parse(values[0], mode="eval").body
            arguments = map(ast.literal_eval, call.args)
            named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            found[key] = getattr(optuna, call.func.id)(*arguments, **named)
        except (SyntaxError, TypeError, ValueError, AttributeError) as error:
            raise RecipeError(
                f"command line: {key}: Optuna does not take {values[0]} ({error}). Write FloatDistribution(LOW, HIGH, "
                "log=True) or IntDistribution(LOW, HIGH)."
            ) from None
    return found


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
    if score is not None:
        return made("finished", score.value, score.protocol)
    value = data.last(metric)
    return made(f"finished without {metric}") if value is None else made("finished", value)


def paired(differences: Sequence[float]) -> dict[str, Any]:
    """Return mean difference, its 95 % interval and p by the paired t test; of one difference, or of equal ones, the
    mean alone."""
    centre, count = mean(differences), len(differences)
    error = stdev(differences) / math.sqrt(count) if count > 1 else 0
    if not error:
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
        one["p_holm"] = p
        if p < CHANCE:
            is_better = (one["difference"] < 0) == (better == "lower")
            one["verdict"] = "better" if is_better else "worse"
    return found


def _test(baseline: Sequence[Figure], figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the paired test over the seeds that both have; its verdict says why where there is none."""
    none = dict.fromkeys(("difference", "interval", "p", "p_holm"))
    if diverged := diverged_text(figures):  # the seeds that are left are its luckier ones
        return none | {"verdict": diverged}
    base = {figure.seed: figure for figure in baseline if figure.value is not None}
    # Pairs of the same seed: what the seed alone does falls out of the difference.
    differences = []
    for figure in figures:
        if figure.value is not None and figure.seed in base:
            if figure.protocol != base[figure.seed].protocol:
                return none | {"verdict": "not comparable"}
            differences.append(figure.value - base[figure.seed].value)  # type: ignore[operator]
    if not differences:
        return none | {"verdict": next((one.status for one in figures if one.status != "finished"), NOT_RUN)}
    return none | {"verdict": "not shown"} | paired(differences)


def diverged_text(figures: Sequence[Figure]) -> str:
    """Return "diverged" and how many of the runs that were made did; "" where none did."""
    count = sum(figure.status.startswith(DIVERGED_STATUS) for figure in figures)
    made = sum(figure.status != NOT_RUN for figure in figures)
    return f"diverged ({count} of {made})" if count else ""


def noise_text(record: dict[str, Any]) -> str:
    """Return what the baseline's seeds alone do."""
    base = record["baseline"]
    if base["stdev"] is None:
        return "One seed: the noise is not known, and nothing can be shown. Give --seeds 3 or more."
    return (
        f"Noise: {record['metric']} of the baseline is {base['mean']:.6g}, standard deviation {base['stdev']:.2g} over "
        f"its seeds. They show a difference of about {base['least_difference']:.2g} or more."
    )


def markdown(record: dict[str, Any]) -> str:
    """Return the table and its notes. It holds no times of runs: a sweep that was interrupted has the same bytes."""
    head = ["", "steps", "seeds", record["metric"], "difference", "95 % interval", "p (Holm)", "verdict"]
    rows = []
    for entry in [record["baseline"], *record["candidates"]]:
        average, difference, interval, p = (entry.get(name) for name in ("mean", "difference", "interval", "p_holm"))
        rows.append(
            [
                label(entry["values"]),
                entry["steps"],
                sum(run["value"] is not None for run in entry["runs"]),
                _shown(average, "{:.5f}"),
                _shown(difference, "{:+.5f}"),
                interval and "{:+.5f} to {:+.5f}".format(*interval),
                _shown(p, "{:.3g}"),
                entry["verdict"],
            ]
        )
    notes = [
        noise_text(record),
        f"Each candidate has {EQUAL[record['equal']]}. {record['better'].capitalize()} is better. The test is a "
        f"paired t test by seed; better and worse are called below p = {CHANCE} after Holm's correction for all "
        "candidates. The intervals are of one candidate each.",
    ]
    if not record["complete"]:
        notes.append("The sweep has not ended: the same command continues it.")
    return f"# {record['name']}\n\n{filled_table(head, rows)}\n" + "\n\n".join(notes) + "\n"


def _shown(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def label(values: dict[str, str]) -> str:
    """Return what a candidate is called."""
    return ", ".join(f"{key}={value}" for key, value in values.items()) or "baseline"


class Runs:
    """Make runs by the ordinary entry, `parallel` at a time. tags: of each run."""

    def __init__(self, recipe: str, stage: str, *, metric: str, parallel: int, logs: Path, tags: Sequence[str]):
        self.recipe, self.stage, self.metric, self.tags = recipe, stage, metric, tags
        self.parallel, self.logs = parallel, logs
        self.started: dict[int, tuple[Job, subprocess.Popen, float]] = {}  # by slot, with the time of the start
        self.signal = 0

    def make(self, jobs: Sequence[Job], *, when_ended: Callable[[], object]) -> None:
        """Make the runs that are not final. After a signal, to the sweep or to one of them, the others save and
        TandemError is raised."""
        for one in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(one) is not signal.SIG_IGN:  # which nohup has made of SIGHUP
                signal.signal(one, self._forward)
        waiting = [job for job in jobs if not figure_of(job, self.metric).is_final]
        try:
            while self.started or (waiting and not self.signal):
                free = sorted(set(range(self.parallel)) - self.started.keys())
                if waiting and free and not self.signal:
                    self._start(waiting.pop(0), free[0])
                for slot, (_, process, _) in list(self.started.items()):
                    if process.poll() is not None:
                        self._end(*self.started.pop(slot), when_ended)
                time.sleep(POLL_S)
        finally:
            for _, process, _ in self.started.values():  # after an error of ours
                process.terminate()
                process.wait()
            self.started.clear()
        if self.signal:
            name = signal.Signals(self.signal).name
            error = TandemError(f"stopped by {name}; the runs have saved. Run the same command again to continue.")
            error.status = 130 if self.signal == signal.SIGINT else 75
            raise error

    def _start(self, job: Job, slot: int) -> None:
        environ, prepare = _share(slot, self.parallel)
        # A sweep's runs publish nothing: all would go to one repository.
        own = [f"run.tags={json.dumps(self.tags, ensure_ascii=False)}", "hub.id=null"]
        files = [str(PACKAGE / "launch" / "launch.py"), str(PACKAGE / f"{self.stage}.py")]
        words = [self.recipe, self.recipe, *job.overrides, f"train.seed={job.seed}", f"run.name={job.path.name}", *own]
        self.logs.mkdir(parents=True, exist_ok=True)
        with open(self._log(job), "ab") as log:
            # A session of its own: a Ctrl-C comes once, from here.
            process = subprocess.Popen(
                [sys.executable, *files, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self.started[slot] = (job, process, time.time())
        if self.signal:  # which came while it was started
            process.send_signal(self.signal)

    def _end(self, job: Job, process: subprocess.Popen, began: float, when_ended: Callable[[], object]) -> None:
        if self.signal:
            return
        if process.returncode in STOPPED:
            number = signal.SIGINT if process.returncode == 130 else signal.SIGTERM
            self._forward(number, None)
            return
        figure = figure_of(job, self.metric)
        if figure.value is not None:
            result = f"{self.metric} {figure.value:.5f}"
        else:
            *_, last_line = self._log(job).read_text(errors="replace").strip().splitlines() or [""]
            if process.returncode == RecipeError.status:  # so it is for every seed
                raise RefusedError(f"{job.label}, seed {job.seed}: {last_line.removeprefix('error: ')}")
            result = f"{figure.status}, status {process.returncode}: {last_line} ({self._log(job)})"
        print(f"{job.label}, seed {job.seed}: {result} ({seconds_text(time.time() - began)})", flush=True)
        when_ended()

    def _log(self, job: Job) -> Path:
        return self.logs / f"{job.path.name}.log"

    def _forward(self, number: int, _frame: object) -> None:
        self.signal = number
        for _, process, _ in self.started.values():
            if process.poll() is None:
                process.send_signal(number)


def _share(slot: int, slots: int) -> tuple[dict[str, str], Callable[[], None] | None]:
    """Return the environment of a run that has one of so many parts of this machine, and what its process does first:
    GPUs where there are any, else cores, whose number decides the threads and so the last bits of sums."""
    environ = dict(os.environ)
    if slots == 1:
        return environ, None
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


def search(
    space: dict[str, list[str]],
    attempt: Callable[[dict[str, str]], Sequence[float | None]],
    *,
    trials: int,
    study: str,
    file: Path,
    better: str,
) -> None:
    """Make so many trials by Optuna, those of earlier calls included.

    attempt makes the runs of these values, and returns the figures of their seeds. A proposal follows from the earlier
    trials and its own number alone, so a search that was interrupted proposes the same.
    """
    proposed = distributions(space)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction: Any = "minimize" if better == "lower" else "maximize"
    made = optuna.create_study(study_name=study, storage=f"sqlite:///{file}", direction=direction, load_if_exists=True)
    for number in range(trials):
        # A sampler for each trial, so that its proposal does not depend on where this process began.
        made.sampler = optuna.samplers.TPESampler(seed=number)
        known = made.get_trials(deepcopy=False)  # the last may have been under way when the sweep was stopped
        if number < len(known) and known[number].state.is_finished():
            continue
        trial = made.ask() if number == len(known) else optuna.trial.Trial(made, known[number]._trial_id)
        try:
            values = {key: str(trial._suggest(key, one)) for key, one in proposed.items()}
        except ValueError as error:  # the study began with other values
            raise RecipeError(f"command line: {error}. For other values give another --name.") from None
        figures: Sequence[float | None] = [None]
        try:
            figures = attempt(values)
        except RefusedError as error:
            print(f"trial {number}: {first_line(error)}", flush=True)
        if None in figures:  # the seeds that are left are its luckier ones
            made.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            made.tell(trial, mean(figures))  # type: ignore[type-var]


class Sweep:
    """The record of a sweep (sweep.json), and what it takes to make its runs."""

    def __init__(self, options: argparse.Namespace, fixed: list[str]):
        self.options, self.fixed = options, fixed
        recipe = self._recipe([])
        if recipe.train.get("use_cpu"):
            leave_accelerators()
        self.device = device_without_torch()
        self.processes = whole_number(os.environ, "NPROC", max(1, self.device.count // options.parallel), least=1)
        self.metric = options.metric or BPB_OF_STAGE[recipe.stage]
        known = metric_of(self.metric)
        if known is None or known.better is None:
            raise RecipeError(
                f"--metric: {self.metric} is no number of which more or less is better. docs/metrics.md lists them."
            )
        self.better: str = known.better
        self.figures: dict[Path, Figure] = {}
        # What `latest:` means decides sizes, so there the digest is of what is given.
        is_open = (recipe.model.start_from or "").startswith("latest:")
        given = read_layers(str(recipe.path), fixed, Problems()).plain() if is_open else dump_recipe(recipe)
        digest = _digest([given, options.equal, BPB_OF_STAGE[recipe.stage]])
        self.folder = Path("sweeps", options.name or f"{Path(str(recipe.path)).stem}-{digest[:6]}")
        # Runs of another baseline under the same --name, whose record is gone or elsewhere, are not taken for ours.
        self.runs_prefix = f"{options.name}-{digest[:6]}" if options.name else self.folder.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held = lock(self.folder / ".lock")
        if self._held is None:
            raise CannotWriteError(f"{self.folder}: another sweep is writing it. Wait for it, or give another --name.")
        earlier = self._earlier(digest) or {}
        # What `latest:` means is kept from the first call: a run that ends meanwhile would change it.
        self.fixed = earlier.get("pinned") or self._pinned(recipe)
        self.recipe = self._recipe([])
        self.plan = self.plan_of([])
        self.record = earlier
        if not earlier:
            step_s = self._step_s([]) if options.equal == "time" else None
            self.record = {
                "name": self.folder.name,
                "recipe": options.recipe,
                "fixed": fixed,
                "equal": options.equal,
                "baseline_sha256": digest,
                "complete": False,
                "baseline": _entry({}, [], self.plan.steps, step_s),
                "candidates": [],
            }
        self.record |= {"metric": self.metric, "better": self.better, "pinned": self.fixed}

    def _earlier(self, digest: str) -> dict[str, Any] | None:
        """Return the record of an earlier call."""
        file = self.folder / "sweep.json"
        if not file.exists():
            return None
        record = read_json(file)
        if record.get("baseline_sha256") != digest:
            raise RecipeError(
                f"{file}: is of another baseline (recipe, fixed values or --equal), so its table cannot grow. Give "
                "another --name."
            )
        return record

    def _words(self, overrides: list[str]) -> list[str]:
        """Return the overrides of every run, and these over them."""
        return [*without(self.fixed, [key_of(one) for one in overrides]), *overrides]

    def _recipe(self, overrides: list[str]) -> Recipe:
        words = [self.options.recipe, *self._words(overrides), "run.name=sweep"]
        return read_recipe(words, earlier=EarlierRuns())

    def _pinned(self, recipe: Recipe) -> list[str]:
        """Return the overrides of every run, with the folder that model.start_from means now where it names a run: one
        that ends while the sweep is made would change what later runs begin from."""
        start = recipe.model.start_from or ""
        if not start.startswith("latest:") and (not start or find_run(start, recipe.run.directory) is None):
            return self.fixed
        folder = os.path.abspath(str(resolve_start(recipe).model.start_from))
        return [*without(self.fixed, ["model.start_from"]), f"model.start_from={folder}"]

    def plan_of(self, overrides: list[str]) -> Plan:
        return make_plan(self._recipe(overrides), self.device, processes=self.processes)

    def _step_s(self, overrides: list[str]) -> float:
        """Return the measured seconds of a step."""
        memory = self.plan_of(overrides).memory
        what = " ".join(overrides) or "the recipe"
        print(f"measuring the steps of {what}, some {PROBE_S:.0f} s", flush=True)
        given = [self.options.recipe, *self._words(overrides)]
        needed = memory.total if memory else None
        try:
            on_cpu = self.device.kind == "cpu"
            probe = measure(given, processes=self.processes, seconds=PROBE_S, on_cpu=on_cpu, needed_bytes=needed)
            return probe.step_s
        except NotMeasured as reason:
            raise TandemError(
                f"--equal time: {what} was not measured, since {reason}. Give tokens or flops."
            ) from None

    def entry(self, values: dict[str, str]) -> dict[str, Any]:
        """Return the candidate's entry in the record, with its budget where it is new; the baseline's where it is the
        same recipe."""
        for entry in self.record["candidates"]:
            if entry["values"] == values:
                return entry
        # 1. The same recipe under another spelling is the same candidate.
        overrides = [f"{key}={value}" for key, value in values.items()]
        try:
            digest, plan = _digest(dump_recipe(self._recipe(overrides))), self.plan_of(overrides)
        except RecipeError as error:
            raise RefusedError(f"{label(values)}: {error}") from None
        if digest == _digest(dump_recipe(self.recipe)):
            return self.record["baseline"]
        for entry in self.record["candidates"]:
            if entry.get("recipe_sha256") == digest:  # another spelling: 0.50 and .5
                return entry
        # 2. As many steps as the budget gives it.
        step_s = None
        if self.options.equal == "time":
            # The baseline is measured again now, as a machine's speed changes from minute to minute.
            step_s = self._step_s(overrides) / self._step_s([]) * self.record["baseline"]["step_s"]
        steps = self._steps(plan, step_s)
        if steps is not None and steps < 1:
            raise RefusedError(f"{label(values)}: not one step fits into the baseline's budget.")
        if steps != plan.steps:
            overrides.append(f"train.max_steps={steps}")
        entry = _entry(values, overrides, steps, step_s) | {"recipe_sha256": digest}
        self.record["candidates"].append(entry)
        return entry

    def check_search(self, space: dict[str, list[str]]) -> None:
        """Raise what is wrong with a key before the baseline is trained: the first values of a search must be right."""
        values = {}
        for key, one in distributions(space).items():
            values[key] = space[key][0]
            if is_distribution(space[key]):
                values[key] = str(one.low)
        try:
            self.plan_of([f"{key}={value}" for key, value in values.items()])
        except RecipeError as error:
            raise RecipeError(f"{label(values)}: {error}") from None

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
        rows, row_tokens = plan.recipe.step_rows, plan.recipe.data.row_tokens
        if step_s is not None:  # of a whole batch
            batches = base.tokens / base.batch_tokens * self.record["baseline"]["step_s"] / step_s
            return rows.steps(int(batches) * rows.full)
        if equal == "tokens":
            return rows.steps(base.tokens // row_tokens)
        each = None
        if plan.sizes is not None:
            each = plan.sizes.flops_per_token("nanochat")
        if each is None or base.flops is None:
            raise RecipeError("--equal flops: the FLOPs of this model are not known. Give --equal tokens or time.")
        # The thousandth of a row: a quotient that ought to be whole may come out just below.
        return rows.steps(int(base.flops / (each * row_tokens) + 1e-3))

    def jobs(self, entry: dict[str, Any], seeds: int) -> list[Job]:
        """Return the runs of the first so many seeds."""
        overrides, first = entry["overrides"], self.recipe.train.get("seed", 42)
        replaced = ["train.seed", "run.tags", "hub.id", *map(key_of, overrides)]
        if overrides and overrides[-1].startswith("train.max_steps="):  # in place of the baseline's horizon
            replaced += EXCLUSIVE[0]
        words = (*without(self.fixed, replaced), *overrides)
        suffix = _digest(overrides)[:6] if overrides else "baseline"
        name = f"{self.runs_prefix}-{suffix}"
        folder, what = Path(self.recipe.run.directory), label(entry["values"])
        return [Job(folder / f"{name}-s{seed}", seed, words, what) for seed in range(first, first + seeds)]

    def figure(self, job: Job) -> Figure:
        if job.path not in self.figures or not self.figures[job.path].is_final:
            self.figures[job.path] = figure_of(job, self.metric)
        return self.figures[job.path]

    def update(self, *, complete: bool = False) -> str:
        """Judge what there is by now and write it; return the Markdown."""
        entries = [self.record["baseline"], *self.record["candidates"]]
        found = []
        for entry in entries:
            figures = [self.figure(job) for job in self.jobs(entry, self.options.seeds)]
            found.append(figures)
            values = [figure.value for figure in figures if figure.value is not None]
            entry["runs"] = [asdict(figure) for figure in figures]
            entry["mean"] = mean(values) if values else None
            entry["stdev"] = stdev(values) if len(values) > 1 else None
        base, count = entries[0], sum(figure.value is not None for figure in found[0])
        base["least_difference"] = base["stdev"]
        if base["stdev"]:  # what so many pairs would just tell if pairing took no noise away
            base["least_difference"] *= student_t(CHANCE, count - 1) * math.sqrt(2 / count)
        base["verdict"] = ", ".join(filter(None, ["baseline", diverged_text(found[0])]))
        for entry, verdict in zip(entries[1:], judge_all(found[0], found[1:], better=self.better), strict=True):
            entry |= verdict
        self.record["complete"] = complete
        text = markdown(self.record)
        write_json(self.folder / "sweep.json", self.record)
        write_text(self.folder / "sweep.md", text)
        return text


def _entry(values: dict[str, str], overrides: list[str], steps: int | None, step_s: float | None) -> dict[str, Any]:
    return {"values": values, "overrides": overrides, "steps": steps, "step_s": step_s, "runs": []}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def main(argv: list[str]) -> int:
    options = _options(argv)
    fixed, space = read_space(options.values)
    _check(options, fixed, space)
    sweep = Sweep(options, fixed)
    if options.trials:
        sweep.check_search(space)
    entries = [] if options.trials else [sweep.entry(values) for values in grid(space)]
    logs = sweep.folder / "logs"
    tags = [*sweep.recipe.run.tags, SWEEP_TAG + sweep.folder.name]
    runs = Runs(
        options.recipe, str(sweep.recipe.stage), metric=sweep.metric, parallel=options.parallel, logs=logs, tags=tags
    )
    baseline = sweep.jobs(sweep.record["baseline"], options.seeds)
    others = [job for entry in entries for job in sweep.jobs(entry, options.seeds)]
    jobs = list(dict.fromkeys([*baseline, *others]))
    to_make = sum(not sweep.figure(job).is_final for job in jobs)
    print(f"{sweep.folder}: {len(jobs)} runs, {to_make} of them to make; {options.trials} trials", flush=True)
    sweep.update()
    runs.make(baseline, when_ended=sweep.update)
    _require_baseline([sweep.figure(job) for job in baseline], logs)
    print(noise_text(sweep.record), flush=True)
    if options.trials:

        def attempt(values: dict[str, str]) -> list[float | None]:
            jobs = sweep.jobs(sweep.entry(values), options.seeds)
            sweep.update()  # with its budget, before its first run
            runs.make(jobs, when_ended=sweep.update)
            return [sweep.figure(job).value for job in jobs]

        study = sweep.folder.name
        if options.metric:
            study += f" {options.metric}"
        file = sweep.folder / "optuna.db"
        search(space, attempt, trials=options.trials, study=study, file=file, better=sweep.better)
    else:
        runs.make(jobs, when_ended=sweep.update)
    text = sweep.update(complete=True)
    print(f"\n{text}\n{sweep.folder / 'sweep.json'}\nCurves: {command('report')} RUN RUN ...")
    return 0


def _require_baseline(figures: Sequence[Figure], logs: Path) -> None:
    """Raise TandemError where a run of the baseline has no figure: nothing can be judged then."""
    failed = [figure for figure in figures if figure.value is None]
    if not failed:
        return
    why = "without the baseline nothing can be judged."
    if diverged := diverged_text(figures):
        why = f"the baseline {diverged}, so nothing can be judged. Make the recipe stable first, by a lower rate."
    raise TandemError(f"{failed[0].run}: {failed[0].status}; {why} {logs} holds what the runs printed.")


def _check(options: argparse.Namespace, fixed: list[str], space: dict[str, list[str]]) -> None:
    if "run.name" in {*map(key_of, fixed), *space} or "train.seed" in space:
        raise RecipeError(
            "command line: run.name and a list for train.seed: a sweep names its runs and chooses their seeds. Give "
            "--name and --seeds."
        )
    sections = tuple(f"{one}." for one in COMMON)
    if common := [key for key in sorted(space) if f"{key}.".startswith(sections)]:
        raise RecipeError(
            f"command line: {', '.join(common)}: is the same for all runs of a sweep, so it has no values to compare. "
            "Give one value, or leave it out."
        )
    if any(word.startswith("hub.id=") and word != "hub.id=null" for word in fixed):
        raise RecipeError(
            "command line: hub.id: all runs would go to one repository, so a sweep publishes none. Leave it out, and "
            f"publish the run that you choose: {command('hub')} push RUN --id NAMESPACE/NAME."
        )
    if options.equal != "none" and (horizons := space.keys() & set(EXCLUSIVE[0])):
        raise RecipeError(
            f"command line: {', '.join(sorted(horizons))}: candidates of other lengths are not of equal "
            f"{options.equal}. Give --equal none."
        )
    if options.trials and not space:
        raise RecipeError("--trials: there is nothing to search. Give key=v1,v2 or key=FloatDistribution(LOW, HIGH).")


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("sweep"),
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
        default=[],
        help="one value: for every run; several: every combination is tried",
    )
    add("--seeds", metavar="N", type=_count, default=3, help="of each candidate: train.seed and those after it")
    add("--equal", choices=EQUAL, default="tokens", help="what every candidate has as much of as the baseline")
    add("--metric", metavar="NAME", help="what is judged (default val/bpb, in SFT sft/assistant_bpb; docs/metrics.md)")
    add("--name", help="of the folder under sweeps/ (default: the recipe's, with 6 digits of its keys)")
    add("--parallel", metavar="N", type=_count, default=1, help="runs at a time, each on its part of GPUs or cores")
    add("--trials", metavar="N", type=_count, default=0, help="search by Optuna with so many candidates, no grid")
    return parser.parse_intermixed_args(argv)


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError
    return count


if __name__ == "__main__":
    exit_with_status(main)
