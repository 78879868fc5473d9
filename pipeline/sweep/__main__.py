"""`python -m pipeline.sweep RECIPE key=v1,v2 ...`: what other values do to a recipe, judged against the noise of its seeds."""

import argparse
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipeline.hardware import device_without_torch, leave_accelerators
from pipeline.metrics import SFT_BPB, VAL_BPB, metric_of
from pipeline.preflight.plan import NotMeasured, Plan, make_plan, measure
from pipeline.process.commands import program, whole_number
from pipeline.process.errors import CannotWriteError, RecipeError, TandemError
from pipeline.process.storage import lock, read_json
from pipeline.recipe import Recipe, dump_recipe, read_recipe
from pipeline.recipe.layers import EXCLUSIVE
from pipeline.recipe.resolve import step_rows
from pipeline.report.run_data import read_run
from pipeline.run_dir.failures import exit_with_status
from pipeline.sweep.runs import (
    EQUAL,
    Figure,
    Job,
    Runs,
    count_of,
    figure_of,
    is_final,
    judge_all,
    label,
    least_difference,
    noise_text,
    write_page,
    write_results,
)
from pipeline.sweep.search import Axis, grid, read_space, search

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
"""


PROBE_S = 10.0  # of steps, for each candidate of --equal time


class Sweep:
    """The record of a sweep (sweep.json), and what it takes to make its runs."""

    def __init__(self, options: argparse.Namespace, fixed: list[str]):
        self.options, self.fixed = options, fixed
        recipe = self.recipe = self._recipe([])
        if recipe.train.get("use_cpu"):
            leave_accelerators()
        self.device = device_without_torch()
        self.processes = whole_number(os.environ, "NPROC", max(1, self.device.count // options.parallel), least=1)
        self.metric = options.metric or (SFT_BPB if recipe.stage == "sft" else VAL_BPB)
        known = metric_of(self.metric)
        if known is None or known.better is None:
            raise RecipeError(
                f"--metric: {self.metric} is no number of which more or less is better. docs/metrics.md lists them."
            )
        self.better: str = known.better
        self.plan = self.plan_of([])
        self.figures: dict[Path, Figure] = {}
        digest = _digest([dump_recipe(recipe), options.equal, self.metric])
        self.folder = Path("sweeps", options.name or f"{Path(str(recipe.path)).stem}-{digest[:6]}")
        # Runs of another baseline under the same --name, whose record is gone or elsewhere, are not taken for ours.
        self.runs_prefix = f"{options.name}-{digest[:6]}" if options.name else self.folder.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held = lock(self.folder / ".lock")
        if self._held is None:
            raise CannotWriteError(f"{self.folder}: another sweep is writing it. Wait for it, or give another --name.")
        self.record = self._earlier(digest) or {
            "name": self.folder.name,
            "recipe": options.recipe,
            "fixed": fixed,
            "metric": self.metric,
            "better": self.better,
            "equal": options.equal,
            "baseline_sha256": digest,
            "complete": False,
            "baseline": self._new({}, [], self.plan.steps, self._step_s([]) if options.equal == "time" else None),
            "candidates": [],
        }

    def _earlier(self, digest: str) -> dict[str, Any] | None:
        """Return the record of an earlier call."""
        file = self.folder / "sweep.json"
        record = read_json(file) if file.exists() else None
        if record is not None and record.get("baseline_sha256") != digest:
            raise RecipeError(
                f"{file}: is of another baseline (recipe, fixed values, --equal or --metric), so its table cannot grow. Give another --name."
            )
        return record

    @staticmethod
    def _new(values: dict[str, str], overrides: list[str], steps: int | None, step_s: float | None) -> dict[str, Any]:
        return {"values": values, "overrides": overrides, "steps": steps, "step_s": step_s, "runs": []}

    def _recipe(self, overrides: list[str]) -> Recipe:
        return read_recipe([self.options.recipe, *self.fixed, *overrides, "run.name=sweep"])

    def plan_of(self, overrides: list[str]) -> Plan:
        return make_plan(self._recipe(overrides), self.device, processes=self.processes)

    def _step_s(self, overrides: list[str]) -> float:
        """Return the measured seconds of a step."""
        memory, given = self.plan_of(overrides).memory, [self.options.recipe, *self.fixed, *overrides]
        needed, what = memory.total if memory else None, " ".join(overrides) or "the recipe"
        print(f"measuring the steps of {what}, some {PROBE_S:.0f} s", flush=True)
        try:
            return measure(given, self.device, processes=self.processes, seconds=PROBE_S, needed_bytes=needed).step_s
        except NotMeasured as reason:
            raise TandemError(f"--equal time: {what} was not measured, since {reason}. Give tokens or flops.") from None

    def entry(self, values: dict[str, str]) -> dict[str, Any]:
        """Return the candidate's entry in the record, with its budget where it is new; the baseline's where it is the same recipe."""
        for entry in self.record["candidates"]:
            if entry["values"] == values:
                return entry
        overrides = [f"{key}={value}" for key, value in values.items()]
        if dump_recipe(self._recipe(overrides)) == dump_recipe(self.recipe):
            return self.record["baseline"]
        plan = self.plan_of(overrides)
        step_s = self._step_s(overrides) if self.options.equal == "time" else None
        steps = self._steps(plan, step_s)
        if steps is not None and steps < 1:
            raise RecipeError(f"command line: {' '.join(overrides)}: not one step fits into the baseline's budget.")
        if steps != plan.steps:
            overrides.append(f"train.max_steps={steps}")
        self.record["candidates"].append(entry := self._new(values, overrides, steps, step_s))
        return entry

    def _steps(self, plan: Plan, step_s: float | None) -> int | None:
        """Return how many steps a candidate gets."""
        equal, base = self.options.equal, self.plan
        if equal == "none" or (equal == "tokens" and base.steps is None):  # epochs are equal tokens
            return plan.steps
        if base.steps is None or base.tokens is None:
            raise RecipeError(
                f"--equal {equal}: the recipe's horizon is in epochs, of which the steps are not known yet. Give train.max_steps=N or run.tokens=N."
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
        replaced = (
            "train.seed",
            *(EXCLUSIVE[0] if budget else ()),
        )  # by the run's own seed, and in place of the baseline's horizon
        fixed = [word for word in self.fixed if word.partition("=")[0] not in replaced]
        name = f"{self.runs_prefix}-{_digest(overrides)[:6] if overrides else 'baseline'}"
        return [
            Job(Path(self.recipe.run.directory, f"{name}-s{seed}"), seed, (*fixed, *overrides), entry["steps"], label(entry["values"]))
            for seed in range(first, first + seeds)
        ]  # fmt: skip

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
            entry["mean"], entry["stdev"] = mean(values) if values else None, stdev(values) if len(values) > 1 else None
        entries[0]["least_difference"] = least_difference(entries[0]["stdev"], count_of(entries[0]))
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
        sweep.plan_of([f"{key}={axis.first()}" for key, axis in axes.items()])
    entries = [] if options.trials else [sweep.entry(values) for values in grid(axes)]
    logs = sweep.folder / "logs"
    runs = Runs(options.recipe, str(sweep.recipe.stage), metric=sweep.metric, parallel=options.parallel, launcher=options.launcher, logs=logs)  # fmt: skip
    baseline = sweep.jobs(sweep.record["baseline"], options.seeds)
    others = [job for entry in entries for job in sweep.jobs(entry, options.seeds) if job not in baseline]
    to_make = [job for job in baseline + others if not is_final(sweep.figure(job))]
    searched = options.trials * options.seeds
    runs.expect(len(to_make) + searched, [job.steps for job in to_make] + [sweep.plan.steps] * searched)
    count = len(baseline + others) + searched
    print(f"{sweep.folder}: {count} runs, {len(to_make) + searched} of them to make; the baseline first", flush=True)
    sweep.update()
    runs.make(baseline, when_ended=sweep.update)
    if failed := [figure for job in baseline if (figure := sweep.figure(job)).value is None]:
        raise TandemError(
            f"{failed[0].run}: {failed[0].status}; without the baseline nothing can be judged. {logs} holds what the runs printed."
        )
    print(noise_text(sweep.record), flush=True)
    if options.trials:

        def attempt(values: dict[str, str], seeds: int) -> list[float | None]:
            jobs = sweep.jobs(sweep.entry(values), seeds)
            sweep.update()  # with its budget, before its first run
            runs.make(jobs, when_ended=sweep.update)
            return [sweep.figure(job).value for job in jobs]

        search(axes, attempt, options, name=sweep.folder.name, folder=sweep.folder, better=sweep.better)
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
            "command line: run.name and a list for train.seed: a sweep names its runs and chooses their seeds. Give --name and --seeds."
        )
    if options.equal != "none" and (horizons := axes.keys() & set(EXCLUSIVE[0])):
        raise RecipeError(
            f"command line: {', '.join(sorted(horizons))}: candidates of other lengths are not of equal {options.equal}. Give --equal none."
        )
    if options.trials and not axes:
        raise RecipeError("--trials: there is nothing to search. Give key=interval(low,high) or key=v1,v2.")


# fmt: off
def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("sweep"),
        usage=f"{program('sweep')} RECIPE [key=value ...] key=v1,v2 ... [--seeds N] [--equal tokens|flops|time|none] [--trials N] ...",
        description="Train a recipe with other values and several seeds, and say which are better than the recipe as it is.",
        epilog=EXAMPLES.format(program("sweep")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a recipe's YAML file, or the name of a shipped one")
    add("values", metavar="key=value", nargs="*", help="one value: for every run, the baseline too; several: what is tried, every combination")
    add("--seeds", metavar="N", type=_count, default=3, help="of each candidate and the baseline: train.seed and those after it (default 3)")
    add("--equal", choices=EQUAL, default="tokens", help="what every candidate has as much of as the baseline (default tokens); time: in steps, by a probe")
    add("--metric", metavar="NAME", help="what is judged (default val/bpb, in SFT sft/assistant_bpb; docs/metrics.md)")
    add("--name", help="of the folder under sweeps/ (default: the recipe's, with 6 digits of its keys)")
    add("--parallel", metavar="N", type=_count, default=1, help="runs side by side, each with its part of the GPUs or cores (default 1)")
    add("--launcher", metavar="COMMAND", help="a command line that starts each run, with {command} in it, and {name} for the run's name")
    add("--trials", metavar="N", type=_count, default=0, help="search by Optuna with so many candidates instead of a grid")
    add("--sampler", metavar="CLASS", default="TPESampler", help="of Optuna (default TPESampler)")
    add("--pruner", metavar="CLASS", default="MedianPruner", help="of Optuna, asked after each seed; NopPruner never stops (default MedianPruner)")
    add("--storage", metavar="URL", help="of Optuna (default: sweeps/NAME/optuna.db)")
    return parser.parse_intermixed_args(argv)
# fmt: on


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError
    return count


if __name__ == "__main__":
    exit_with_status(main)
