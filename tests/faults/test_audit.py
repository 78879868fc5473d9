"""A log whose numbers contradict one another is found, whatever was changed in it, and no sound run ever is."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from faults.audit import audit, main
from pipeline.recipe.schema import Schedule
from pipeline.report.diagnosis_rules import diagnose
from pipeline.report.run_data import RunData, read_run
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.schedules import learning_rate_multiplier
from tests.report.made_runs import falling, noisy
from tests.report.test_diagnosis_of_imported_runs import NEMO, SETTINGS, nanochat_run, nemo_run

STEPS, BATCH, WIDTH, STEP_S, EVERY = 2000, 8192, 256, 0.5, 10
SCHEDULE = {"warmup_steps": 40, "decay_fraction": 0.65, "decay": "linear", "final_fraction": 0.05}
PEAKS = {"embeddings": 0.3, "head": 0.008, "matrices": 0.02, "scalars": 0.005}
PER_BYTE = 0.36  # tokens a byte / ln 2
START = 1.79e9

Row = dict[str, Any]
Mutation = Callable[["Log"], None]


class Log:
    """A run as its files would tell it, before it is read: to be changed in one place."""

    def __init__(
        self,
        *,
        seed: int = 0,
        steps: int = STEPS,
        stage: str = "pretrain",
        optimizer: str = "muon_adamw",
        every: int = EVERY,
        ranks: int = 1,
        sources: tuple[str, ...] = ("books",),
        gpu: bool = False,
        restart_at: int | None = None,
        fork_from: str | None = None,
        noise: float = 0.02,
        load: float = 0.02,
        in_epochs: bool = False,
    ):
        rng = np.random.default_rng(seed)
        self.steps, self.every, self.stage = steps, every, stage
        self.loss = np.asarray(noisy(falling(steps, start=8.3, end=3.2), share=noise, seed=seed))
        norms = np.asarray(noisy(np.linspace(0.9, 0.5, steps), share=0.25, seed=seed + 1))
        took = STEP_S * np.maximum(1 + load * rng.standard_normal(steps), 0.2)
        schedule = Schedule(**SCHEDULE)
        if in_epochs:
            schedule.warmup_steps = min(40, steps // 5)
        grouped = optimizer != "trainer"
        self.recipe: dict[str, Any] = {
            "run": {"fork_from": fork_from} if fork_from else {},
            "data": {"row_tokens": WIDTH, "batch_tokens": BATCH},
            "optimizer": {"type": optimizer},
            "train": {"max_grad_norm": 1.0, "logging_steps": every, "save_steps": steps // 2},
        }
        self.recipe["train"] |= {"num_train_epochs": 2.0} if in_epochs else {"max_steps": steps}
        if grouped:
            groups = {name: {"learning_rate": peak} for name, peak in PEAKS.items()}
            self.recipe["optimizer"] |= {"rate_scale": 0.8, "groups": groups, "schedule": dict(SCHEDULE)}
        else:
            self.recipe["train"] |= {"learning_rate": 3e-4, "lr_scheduler_type": "linear", "warmup_steps": 40}
        self.rows: list[Row] = [{"event": "attempt", "attempt": 1, "step": 0, "time": START + 8, "began": START}]
        now, total, before, attempt, ema = START + 20, 0.0, 0, 1, 0.0
        bpb = "val/bpb" if stage == "pretrain" else "sft/assistant_bpb"
        first = True
        for n, step in enumerate([1, *range(every, steps + 1, every)] if every > 1 else range(1, steps + 1), 1):
            spent = float(took[before:step].sum())
            now, total = now + spent, total + spent
            loss, norm = float(self.loss[step - 1]), float(norms[step - 1])
            ema = 0.9 * ema + 0.1 * loss
            lrm = (
                learning_rate_multiplier(schedule, step - 1, steps)
                if grouped
                else min(step / 40, 1 - (step - 1) / steps)
            )
            step_s, samples = spent / (step - before), step * BATCH // WIDTH
            row: Row = {
                "step": step, "attempt": attempt, "time": now + 0.001, "tokens": step * BATCH,
                "train/loss": loss, "train/perplexity": math.exp(loss), "train/loss_ema": ema / (1 - 0.9**n),
                ("train/bpb" if stage == "pretrain" else "train/assistant_bpb"): PER_BYTE * 1.05 * loss * (1 + 0.03 * rng.standard_normal()),
                "optim/lrm": lrm, "optim/lr": 3e-4 * lrm if not grouped else 0.8 * PEAKS["embeddings"] * lrm,
                "optim/grad_norm": norm, "optim/clip_frac": float(norm > 1.0), "optim/skipped_steps": 0, "optim/nonfinite_steps": 0,
                "perf/step_s": step_s, "perf/tok_per_s": BATCH / step_s, "perf/tok_per_s_per_gpu": BATCH / step_s / ranks,
                "perf/tflops_per_gpu": 7.6e8 * BATCH / step_s / ranks / 1e12, "perf/total_s": total, "perf/lost_steps": 0,
                "perf/goodput_pct": 100 * total / (now - START), "data/wait_s": 0.001, "data/wait_frac": 0.001 / step_s,
                "data/tokens": step * (BATCH - 40), "data/samples": samples, "data/documents": step * 9, "data/bad_rows": 0, "data/retries": 0,
                "data/pad_frac": 0.004, "data/epoch": 1 + step // 1500, "data/pq": step % 1500 // 100, "data/rg": step % 100 // 10,
                "ckpt/age_steps": step - (steps // 2 if step > steps // 2 else 0), "mem/host_rss_gib": 3.0,
            }  # fmt: skip
            if grouped:
                row |= {f"optim/lr/{name}": 0.8 * peak * lrm for name, peak in PEAKS.items()}
            if step > steps // 2:
                row["ckpt/last_good_step"] = steps // 2
            if first:
                row["perf/first_step_s"] = 21.0
            if len(sources) > 1:
                for source, share in zip(sources, (0.75, 0.25), strict=True):
                    row |= {f"data/source/{source}/{key}": row[f"data/{key}"] * share for key in ("tokens", "samples", "documents")}  # fmt: skip
                row |= {"data/epoch": 1 + n % 3, "data/pq": n % 5}
            if ranks > 1:
                row |= {"perf/slowest_rank": 1.02, "perf/slowest_rank_id": n % ranks}
            if gpu:
                row |= {"mem/allocated_gib": 10.0, "mem/peak_allocated_gib": 30.0, "mem/run_peak_allocated_gib": 31.0, "mem/reserved_gib": 34.0}  # fmt: skip
                row |= (
                    {"perf/mfu_pct": row["perf/tflops_per_gpu"] * 3.6 * ranks, "gpu/util_pct": 98.0} if n % 2 else {}
                )
            self.rows.append(row)
            first, before = False, step
            stamp = {"step": step, "attempt": attempt, "tokens": step * BATCH}
            if step % (steps // 8) == 0:
                held = float(np.median(self.loss[max(step - 40, 0) : step])) * 1.02
                now += 3.0
                scored = PER_BYTE * held * (1 + 0.004 * rng.standard_normal())
                self.rows.append(stamp | {"time": now, bpb: scored, "val/loss": held, "perf/eval_s": 3.0})
            if step in (steps // 2, steps):
                now += 0.4
                self.rows.append(stamp | {"time": now, "ckpt/save_s": 0.4})
            if step == restart_at:
                attempt, first, now = 2, True, now + 300
                self.rows.append({"event": "attempt", "attempt": 2, "step": step, "time": now, "began": now - 9})
                now += 12
        self.manifest: dict[str, Any] = {
            "name": "made", "stage": stage, "status": "finished", "attempts": attempt, "world_size": ranks,
            "inputs": {"batch_tokens": BATCH, "max_steps": steps, "validation_bytes": {bpb: 1_000_000}},
            "shares": {name: {"lost": {"padded": 0.004, "cropped": 0.0}} for name in sources},
            "plan": {"parameters": 7_000_000, "steps": steps}, "model": {"parameters": 7_000_000, "flops_per_token": 8e8},
            "results": {"step": steps, "tokens": steps * BATCH, "train/loss": float(self.loss[-1]), "perf/total_s": total},
            "ended": now + 1,
        }  # fmt: skip
        self.manifest["results"] |= {name: row[name] for row in self.rows for name in (bpb, "val/loss") if name in row}
        self.checkpoints = [(steps // 2, 1000, True), (steps, 1000, True)]
        self.path = "nowhere"

    def run(self) -> RunData:
        """The run as the report reads it."""
        rows = [row for row in self.rows if row]
        return RunData(
            run=RunDirectory(self.path),
            recipe=self.recipe,
            manifest=self.manifest,
            rows=rows,
            all_rows=rows,
            samples=[],
            evals=[],
            failure=None,
            checkpoints=self.checkpoints,
        )

    def logged(self, *, since: float = 0.0, name: str = "train/loss") -> list[Row]:
        """The rows with that number after a share of the run."""
        return [row for row in self.rows if name in row and row["step"] > since * self.steps]


def times(name: str, factor: float, *, since: float = 0.0) -> Mutation:
    def change(log: Log) -> None:
        for row in log.logged(since=since, name=name):
            row[name] *= factor

    return change


def growing(name: str, factor: float, *, since: float = 0.0) -> Mutation:
    """Times 1 at `since`, times `factor` at the end."""

    def change(log: Log) -> None:
        for row in log.logged(since=since, name=name):
            row[name] *= 1 + (factor - 1) * (row["step"] / log.steps - since) / (1 - since)
        _follow(log)

    return change


def stuck(*names: str, since: float) -> Mutation:
    def change(log: Log) -> None:
        for name in names:
            rows = log.logged(since=since, name=name)
            for row in rows:
                row[name] = rows[0][name]

    return change


def at(step: int, **values: Any) -> Mutation:
    """Other values in the row of that step; names with __ for /."""

    def change(log: Log) -> None:
        row = next(row for row in log.logged() if row["step"] >= step)
        row |= {name.replace("__", "/"): value for name, value in values.items()}

    return change


def manifest(**sections: Any) -> Mutation:
    def change(log: Log) -> None:
        for name, keys in sections.items():
            log.manifest[name] = log.manifest[name] | keys if isinstance(keys, dict) else keys

    return change


def train_losses(values: Callable[[Log, np.ndarray], np.ndarray]) -> Mutation:
    """Another training loss, with what follows from it; validation stays as it was."""

    def change(log: Log) -> None:
        rows = log.logged()
        steps = np.array([row["step"] for row in rows])
        losses = values(log, steps)
        for row, loss in zip(rows, losses, strict=True):
            row["train/bpb"] *= float(loss) / row["train/loss"]
            row["train/loss"] = float(loss)
        _follow(log)

    return change


def _follow(log: Log) -> None:
    """Let what follows from loss, norm and step time follow again: a sick run is no contradiction."""
    ema, total, before, shift = 0.0, 0.0, 0, 0.0
    for n, row in enumerate(log.logged(), 1):
        ema = 0.9 * ema + 0.1 * row["train/loss"]
        row |= {"train/perplexity": math.exp(row["train/loss"]), "train/loss_ema": ema / (1 - 0.9**n)}
        row["optim/clip_frac"] = float(row["optim/grad_norm"] > 1.0)
        total += row["perf/step_s"] * (row["step"] - before)
        shift, before = total - row["perf/total_s"], row["step"]
        row |= {"perf/total_s": total, "time": row["time"] + shift}
        row["perf/goodput_pct"] = 100 * total / (row["time"] - START)
        row["perf/tok_per_s"] = row["perf/tok_per_s_per_gpu"] = BATCH / row["perf/step_s"]
        row["perf/tflops_per_gpu"] = 7.6e8 * BATCH / row["perf/step_s"] / 1e12
        row["data/wait_frac"] = min(row["data/wait_s"] / row["perf/step_s"], 1.0)
    log.rows.sort(key=lambda row: (row["step"], "train/loss" not in row))
    late = 0.0
    for row in log.rows:
        row["time"] = late = max(late, row["time"])
    log.manifest["results"] |= {"train/loss": log.logged()[-1]["train/loss"], "perf/total_s": total}


def cut(step: int) -> Mutation:
    def change(log: Log) -> None:
        log.rows = [row for row in log.rows if row["step"] <= step]

    return change


def mixed(log: Log) -> None:
    """Rows of another run of another batch in the middle."""
    for row in log.rows:
        if 0.4 * log.steps < row["step"] <= 0.5 * log.steps:
            row |= {name: row[name] // 2 for name in ("tokens", "data/tokens", "data/samples") if name in row}


def swapped(log: Log) -> None:
    places = [i for i, row in enumerate(log.rows) if "train/loss" in row]
    a, b = places[40], places[90]
    log.rows[a], log.rows[b] = log.rows[b], log.rows[a]


def rate(change_multiplier: Callable[[Log, int], float]) -> Mutation:
    """Another multiplier, which the groups' rates follow."""

    def change(log: Log) -> None:
        for row in log.logged():
            factor = change_multiplier(log, row["step"]) / row["optim/lrm"]
            for name in ("optim/lrm", "optim/lr", *(f"optim/lr/{group}" for group in PEAKS)):
                row[name] *= factor

    return change


def _multiplier(log: Log, step: int) -> float:
    return learning_rate_multiplier(Schedule(**SCHEDULE), step, log.steps)


def every(*mutations: Mutation) -> Mutation:
    def change(log: Log) -> None:
        for mutation in mutations:
            mutation(log)

    return change


def all_rates(factor: float) -> Mutation:
    return every(times("optim/lr", factor), *(times(f"optim/lr/{name}", factor) for name in PEAKS))


# What was changed, and the rule that must name it. These are contradictions.
CONTRADICTIONS: dict[str, tuple[Mutation, str]] = {
    # rates
    "every group's rate is ten times the recipe's": (all_rates(10), "every rate is its peak times the schedule"),
    "one group's rate is ten times the recipe's": (times("optim/lr/matrices", 10), "every rate is its peak times the schedule"),
    "one group's rate is 1 % off from the middle on": (times("optim/lr/head", 1.01, since=0.5), "every rate is its peak times the schedule"),
    "optim/lr is no group's rate": (times("optim/lr", 1.5), "every rate is its peak times the schedule"),
    "the recipe's scale is another one": (lambda log: log.recipe["optimizer"].update(rate_scale=1.0), "every rate is its peak times the schedule"),
    "the recipe's peak is another one": (lambda log: log.recipe["optimizer"]["groups"]["head"].update(learning_rate=0.004), "every rate is its peak times the schedule"),
    "one row's rate is another one": (at(1000, **{"optim__lr__scalars": 0.005}), "every rate is its peak times the schedule"),
    "the rate is constant": (rate(lambda log, step: 1.0), "learning rate follows its schedule"),
    "the schedule starts again": (rate(lambda log, step: _multiplier(log, step % 1000)), "learning rate follows its schedule"),
    "the schedule is a hundred steps late": (rate(lambda log, step: _multiplier(log, max(step - 101, 0))), "learning rate follows its schedule"),
    "the warm-up is left out": (rate(lambda log, step: _multiplier(log, max(step, 45))), "learning rate follows its schedule"),
    # counts
    "tokens are half of steps x batch": (times("tokens", 0.5), "tokens are steps times the batch"),
    "tokens are twice steps x batch from the middle on": (times("tokens", 2, since=0.5), "tokens are steps times the batch"),
    "one row's tokens are those of the row before": (at(1000, tokens=990 * BATCH), "tokens are steps times the batch"),
    "the recipe's batch is another one": (lambda log: log.recipe["data"].update(batch_tokens=4096), "tokens are steps times the batch"),
    "the manifest's batch is another one": (manifest(inputs={"batch_tokens": 2 * BATCH}), "tokens are steps times the batch"),
    "samples are those of half the ranks": (times("data/samples", 0.5), "tokens are steps times the batch"),
    "more targets than positions": (times("data/tokens", 1.1), "tokens are steps times the batch"),
    "a count falls once": (at(1000, data__documents=10), "counters only grow"),
    "unreadable rows become fewer": (every(at(500, data__bad_rows=4), at(510, data__bad_rows=1)), "counters only grow"),
    "the time in steps starts again": (lambda log: [row.update({"perf/total_s": row["perf/total_s"] / 3}) for row in log.logged(since=0.5)], "counters only grow"),
    "rows of another run stand between": (mixed, "counters only grow"),
    "two rows have changed places": (swapped, "counters only grow"),
    "the clock goes back an hour": (lambda log: [row.update(time=row["time"] - 3600) for row in log.rows if row["step"] > 1000], "counters only grow"),
    "skipped steps become fewer": (every(at(500, optim__skipped_steps=3), at(600, optim__skipped_steps=0)), "counters only grow"),
    # data
    "no data moves": (stuck("data/samples", "data/tokens", "data/epoch", "data/pq", "data/rg", since=0.0), "the data moves on"),
    "data stands from the middle on": (stuck("data/samples", "data/tokens", "data/epoch", "data/pq", "data/rg", since=0.5), "the data moves on"),
    "targets stand while rows go on": (stuck("data/tokens", since=0.5), "the data moves on"),
    "the position stands while rows are counted": (stuck("data/epoch", "data/pq", "data/rg", since=0.4), "the data moves on"),
    "the pass over the data goes back": (lambda log: [row.update({"data/epoch": 1}) for row in log.logged(since=0.9)], "the data moves on"),
    # losses
    "val/bpb is half as high again": (times("val/bpb", 1.5, since=0.5), "bits per byte follow the loss"),
    "val/bpb is half as high again from the start": (times("val/bpb", 1.5), "bits per byte follow the loss"),
    "one evaluation's val/bpb is a tenth lower": (lambda log: log.logged(name="val/bpb")[4].update({"val/bpb": log.logged(name="val/bpb")[4]["val/bpb"] * 0.9}), "bits per byte follow the loss"),
    "val/loss is in bits": (times("val/loss", 1 / math.log(2)), "bits per byte follow the loss"),
    "perplexity is of another loss": (times("train/perplexity", 1.2, since=0.5), "derived numbers agree with their parts"),
    "the smoothed loss is beyond every loss": (times("train/loss_ema", 0.3, since=0.5), "derived numbers agree with their parts"),
    "the loss is negative": (at(1500, train__loss=-0.5, train__perplexity=math.exp(-0.5)), "derived numbers agree with their parts"),
    "norms above the limit were not clipped": (times("optim/clip_frac", 0.0), "derived numbers agree with their parts"),
    "more than all was clipped": (at(1000, optim__clip_frac=1.2), "derived numbers agree with their parts"),
    # speed and time
    "tokens a second are twice the batch's": (times("perf/tok_per_s", 2), "derived numbers agree with their parts"),
    "FLOPs a token change in the middle": (times("perf/tflops_per_gpu", 1.3, since=0.5), "derived numbers agree with their parts"),
    "waiting is another share of the step": (times("data/wait_frac", 20), "derived numbers agree with their parts"),
    "waiting is more than the step": (at(1000, data__wait_frac=1.4), "derived numbers agree with their parts"),
    "steps take longer than their total": (every(times("perf/step_s", 1.5), times("perf/tok_per_s", 1 / 1.5), times("perf/tflops_per_gpu", 1 / 1.5), times("perf/tok_per_s_per_gpu", 1 / 1.5), times("data/wait_frac", 1 / 1.5)), "times add up"),
    "the time in steps is more than the clock's": (every(times("perf/total_s", 2), times("perf/step_s", 2), times("perf/tok_per_s", 0.5), times("perf/tok_per_s_per_gpu", 0.5), times("perf/tflops_per_gpu", 0.5), times("data/wait_frac", 0.5), manifest(results={"perf/total_s": None})), "times add up"),
    "goodput is another share": (times("perf/goodput_pct", 0.5), "times add up"),
    "goodput is above 100": (times("perf/goodput_pct", 1.3), "derived numbers agree with their parts"),
    "evaluations took longer than the run": (times("perf/eval_s", 100), "times add up"),
    "one interval's time is ten times its own": (lambda log: log.logged()[100].update({"perf/total_s": log.logged()[100]["perf/total_s"] + 40}), "times add up"),
    "the checkpoint's age is another one": (times("ckpt/age_steps", 0.5, since=0.6), "derived numbers agree with their parts"),
    # manifest
    "the plan counts other parameters": (manifest(plan={"parameters": 2_500_000}), "parameters are the model's own"),
    "rows are cut off under a finished manifest": (cut(1500), "the manifest agrees with the rows"),
    "rows go on beyond the planned steps": (manifest(inputs={"max_steps": 1800}), "the manifest agrees with the rows"),
    "the manifest's loss is another one": (manifest(results={"train/loss": 2.9}), "the manifest agrees with the rows"),
    "the manifest's val/bpb is another one": (manifest(results={"val/bpb": 0.9}), "the manifest agrees with the rows"),
    "more attempts than were begun": (manifest(attempts=0), "the manifest agrees with the rows"),
    "a checkpoint of later than the rows": (lambda log: log.checkpoints.append((3000, 1000, True)), "the manifest agrees with the rows"),
    "the manifest's tokens are others": (manifest(results={"tokens": 999}), "the manifest agrees with the rows"),
}  # fmt: skip


def _spikes(*steps: int, factor: float = 2.0) -> Mutation:
    return train_losses(lambda log, at: log.loss[at - 1] * np.where(np.isin(at, steps), factor, 1.0))


def _diverged(log: Log, steps: np.ndarray) -> np.ndarray:
    return log.loss[steps - 1] * np.where(steps > 0.7 * log.steps, 1 + 3 * (steps / log.steps - 0.7), 1.0)


def _rises_at_the_end(log: Log, steps: np.ndarray) -> np.ndarray:
    shape, part = falling(log.steps, start=8.3, end=3.2), 2 * log.steps // 3
    wanted = np.where(steps > part, shape[part] * (1 + 0.045 * (steps - part) / (log.steps - part)), shape[steps - 1])
    return log.loss[steps - 1] / shape[steps - 1] * wanted


def _validation(factor: Callable[[float], float]) -> Mutation:
    """Other validation losses, by the share of the run; bits per byte follow."""

    def change(log: Log) -> None:
        for row in log.logged(name="val/loss"):
            for name in ("val/loss", "val/bpb"):
                row[name] *= factor(row["step"] / log.steps)
                log.manifest["results"][name] = row[name]

    return change


def _unvalidated(log: Log) -> None:
    log.rows = [row for row in log.rows if "val/loss" not in row]
    log.manifest["results"] = {name: value for name, value in log.manifest["results"].items() if "val/" not in name}


def _nan(log: Log) -> None:
    log.logged()[150] |= {"train/loss": math.nan, "train/perplexity": math.nan}


# What is sick without contradicting itself, and the rules that must say trouble; nothing else may.
SICK: dict[str, tuple[Mutation, set[str]]] = {
    "the loss rises by 4.5 % over the last third": (train_losses(_rises_at_the_end), {"loss does not rise"}),
    "the loss diverges and validation does not": (train_losses(_diverged), {"loss does not rise"}),
    "the loss is flat and validation falls": (train_losses(lambda log, steps: np.full(len(steps), 8.3) + log.loss[steps - 1] / 1000), {"loss falls"}),
    "every step takes longer than the one before": (growing("perf/step_s", 1.6), {"step time stays the same"}),
    "the steps wait for rows": (every(times("data/wait_s", 100), times("data/wait_frac", 100)), {"data does not stall the steps"}),
    "validation rises at the end": (_validation(lambda share: 1 + max(share - 0.5, 0)), {"validation keeps falling"}),
    "validation lies far below training": (_validation(lambda share: 0.8), {"validation text is not trained on"}),
    "validation is known by heart": (_validation(lambda share: 1 - 0.8 * share), {"validation text is not trained on"}),
    "no validation at all": (_unvalidated, {"something is held out"}),
    "a loss is NaN": (_nan, {"every number is finite"}),
}  # fmt: skip


def contradictions(data: RunData) -> dict[str, list[str]]:
    return {rule: found.wrong for rule, found in audit(data).items() if found.wrong}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_number_that_contradicts_another_is_found(what):
    mutation, rule = CONTRADICTIONS[what]
    log = Log()
    mutation(log)
    assert rule in contradictions(log.run())


@pytest.mark.parametrize("what", SICK)
def test_a_consistent_sick_run_is_in_trouble_only_for_its_sickness(what):
    mutation, rules = SICK[what]
    log = Log()
    mutation(log)
    assert contradictions(log.run()) == {}
    assert {rule for rule, result in diagnose(log.run()).items() if result.level == "trouble"} == rules


SOUND: dict[str, dict[str, Any]] = {
    "one": {},
    "another seed": {"seed": 1},
    "a third seed": {"seed": 2},
    "a noisy loss": {"noise": 0.06, "seed": 3},
    "short": {"steps": 160, "every": 2},
    "each step logged": {"steps": 400, "every": 1},
    "with AdamW": {"optimizer": "adamw"},
    "with Trainer's own optimizer": {"optimizer": "trainer"},
    "SFT": {"stage": "sft"},
    "SFT in epochs, shorter than its warm-up's default allows": {"stage": "sft", "steps": 160, "every": 2, "in_epochs": True},
    "two ranks": {"ranks": 2},
    "a mixture": {"sources": ("books", "code")},
    "a mixture on two ranks": {"sources": ("books", "code"), "ranks": 2, "seed": 5},
    "a GPU whose columns are not in every row": {"gpu": True},
    "eight GPUs": {"gpu": True, "ranks": 8, "seed": 7},
    "resumed": {"restart_at": 1000},
    "resumed, two ranks": {"restart_at": 500, "ranks": 2, "seed": 4},
    "a loaded machine": {"load": 0.25, "seed": 8},
}  # fmt: skip


@pytest.mark.parametrize("what", SOUND)
def test_a_sound_run_is_healthy_and_contradicts_itself_nowhere(what):
    log = Log(**SOUND[what])
    findings = diagnose(log.run())
    assert [rule for rule, result in findings.items() if result.level == "trouble"] == []
    assert contradictions(log.run()) == {}
    assert sum(result.level == "healthy" for result in findings.values()) + len(audit(log.run())) > 14


@pytest.mark.parametrize("name", ["nanochat", *NEMO])
def test_the_log_of_another_program_is_asked_only_what_holds_for_it(name):
    assert contradictions(nanochat_run() if name == "nanochat" else nemo_run(name, recipe=SETTINGS)) == {}


def test_a_fork_is_sound_although_its_first_steps_are_its_parents():
    log = Log(fork_from="parent@1000")
    ours = [row for row in log.rows if row["step"] >= 1000]
    log.rows = [{"event": "attempt", "attempt": 1, "step": 1000, "time": START + 500, "began": START + 490}, *ours]
    log.manifest["forked_from"] = {"run": "parent", "step": 1000}
    assert contradictions(log.run()) == {}


@pytest.mark.parametrize(("step", "is_sound"), [(0, True), (1000, False)])
def test_an_end_token_not_yet_learned_is_no_contradiction_before_step_1(step, is_sound):
    log = Log(stage="sft")
    first = log.logged(name="val/loss")[0]
    log.rows.insert(1, first | {"step": 0, "tokens": 0, "time": log.rows[0]["time"]})
    (row,) = [row for row in log.rows if "val/loss" in row and row["step"] == step]
    row["sft/assistant_bpb"] /= 2  # the loss has the end of each answer, bits per byte have not
    assert (contradictions(log.run()) == {}) == is_sound


def test_smaller_batches_at_the_beginning_are_no_contradiction():
    log = Log()
    log.recipe["optimizer"]["schedule"] |= {"batch_warmup_steps": 400, "batch_halvings": 2}
    schedule = Schedule(**log.recipe["optimizer"]["schedule"])

    def tokens_at(step):
        return BATCH // 4 * min(step, 200) + BATCH // 2 * max(0, min(step, 400) - 200) + BATCH * max(0, step - 400)

    before = 0
    for row in log.logged():
        step, lrm = row["step"], learning_rate_multiplier(schedule, row["step"] - 1, log.steps)
        row |= {f"optim/lr/{name}": 0.8 * peak * lrm for name, peak in PEAKS.items()} | {"optim/lrm": lrm}
        row["optim/lr"] = row["optim/lr/embeddings"]
        row |= {"data/tokens": tokens_at(step) - 40, "data/samples": tokens_at(step) // WIDTH}
        speed = (tokens_at(step) - tokens_at(before)) / (step - before) / row["perf/step_s"]
        row |= {"perf/tok_per_s": speed, "perf/tok_per_s_per_gpu": speed, "perf/tflops_per_gpu": 7.6e8 * speed / 1e12}
        before = step
    for row in log.rows:
        row |= {"tokens": tokens_at(row["step"])} if "tokens" in row else {}
    log.manifest["results"]["tokens"] = tokens_at(log.steps)
    assert contradictions(log.run()) == {}


def test_a_row_that_a_crash_took_with_it_is_no_contradiction():
    log = Log()
    del log.rows[60]
    assert contradictions(log.run()) == {}


def test_a_contradiction_is_told_with_its_steps_and_both_values():
    log = Log()
    all_rates(10)(log)
    (texts,) = contradictions(log.run()).values()
    assert "optim/lr/embeddings is 0.06 at step 1, where recipe x schedule is 0.006 (and at 200 more of 201)" in texts


def test_the_finished_models_files_hold_the_parameters_that_were_trained(tmp_path):
    run = RunDirectory(tmp_path)
    run.model.mkdir()
    save_file({"a": torch.zeros(700, 10), "b": torch.zeros(50)}, run.model / "model.safetensors")
    log = Log()
    log.path = str(tmp_path)
    log.manifest |= {"model": {"parameters": 7050}, "plan": {"parameters": 7050}}
    assert contradictions(log.run()) == {}
    log.manifest |= {"model": {"parameters": 14100}, "plan": {"parameters": 14100}}
    (wrong,) = contradictions(log.run()).values()
    assert wrong == ["model/ holds 7,050 numbers, the model that was trained had 14,100 parameters"]


def test_a_finished_model_without_padding_rows_has_the_trained_parameters(tmp_path):
    run = RunDirectory(tmp_path)
    run.model.mkdir()
    save_file(
        {"wte": torch.zeros(500, 10), "head": torch.zeros(500, 10), "b": torch.zeros(50)},
        run.model / "model.safetensors",
    )
    log = Log()
    log.path = str(tmp_path)
    log.manifest["inputs"] = {**log.manifest.get("inputs", {}), "tokenizer": {"size": 500}}
    for built, wrong in ((10_050 + 12 * 20, 0), (10_050 + 12 * 20 + 1, 1), (10_050 + 300 * 20, 1)):
        log.manifest |= {"model": {"parameters": built}, "plan": {"parameters": built}}
        assert len(contradictions(log.run())) == wrong, built


def test_a_run_of_files_is_audited_as_it_was_written(tmp_path, capsys):
    log, run = Log(steps=160, every=2, restart_at=80), RunDirectory(tmp_path)
    for row in log.rows:
        append_row(run.metrics, row)
    run.manifest.write_text(json.dumps(log.manifest))
    run.recipe.write_text(json.dumps(log.recipe))
    found = audit(replace(read_run(str(tmp_path)), checkpoints=log.checkpoints))
    assert {"times add up", "counters only grow", "the manifest agrees with the rows"} <= set(found)
    assert {rule: of_rule.wrong for rule, of_rule in found.items() if of_rule.wrong} == {}

    assert main([str(tmp_path)]) == 0
    log.manifest["results"]["train/loss"] = 2.9
    run.manifest.write_text(json.dumps(log.manifest))
    assert main([str(tmp_path)]) == 1
    assert "the manifest agrees with the rows: train/loss ended at 2.9 by the manifest" in capsys.readouterr().out
