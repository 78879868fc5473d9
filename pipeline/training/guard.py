"""Checks of numbers in training: no update from, and no checkpoint with, one that is not finite; spikes by recipe."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.metrics import AROUND, ENOUGH, HIGH_NORM, Numbers, RecentValues
from pipeline.model.finite import first_nonfinite
from pipeline.process.errors import DataError, DivergedError
from pipeline.process.progress import write
from pipeline.recipe.schema import Monitor
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import from_every_rank, num_ranks
from pipeline.training.nonfinite import NonFiniteReport

# After this many optimizer steps in a row that the fp16 loss scaler skipped, the run is taken as diverged.
MAX_SCALER_SKIPS = 20
# monitor.max_skips counts skipped steps among this many. Not over the whole run: a few bad rows must not end a long
# run. Not in a row: a run that loses every second step trains on half of its data.
AMONG_STEPS = 1000
CHECKED = ("optim/grad_norm", "train/loss")


def refuse_nonfinite(tensors: Mapping[str, Tensor], *, where: str, instead: str) -> None:
    """Raise DataError for numbers that no training can continue from. Every rank calls it, with its part of a sharded
    model."""
    for name in from_every_rank(first_nonfinite(tensors)):
        if name is not None:
            error = DataError(f"{where}: {name} holds a NaN or an infinity, which every step would spread. {instead}")
            error.of_all_ranks = True
            raise error


@dataclass(frozen=True)
class UpdateCheck:
    """The result of a step's check. norm: of its gradient; skip: the gradients are to be dropped, without which the
    update changes nothing; loss_is_finite: else the step's loss belongs in no average."""

    norm: float
    skip: bool = False
    loss_is_finite: bool = True


class StepGuard:
    """Checks every step before its update, and every state before it is saved.

    is_first: whether this rank prints and records. state_dict: what a resumed run must know of the steps before it.
    """

    def __init__(self, run: RunDirectory, monitor: Monitor, *, is_first: bool = True):
        self.run, self.monitor, self.is_first = run, monitor, is_first
        self.skipped_steps = 0  # over the whole run, by the fp16 loss scaler too
        self.nonfinite_steps = 0  # over the whole run
        self.norms: list[float | None] = []  # of the steps since the last log; None of one that was not finite
        self.scaler_skips_in_a_row = 0
        self.skips: list[int] = []  # the steps skipped by recipe, of the last AMONG_STEPS
        self.recent = {name: RecentValues() for name in CHECKED}

    def state_dict(self) -> dict[str, Any]:
        return {
            "skipped_steps": self.skipped_steps,
            "nonfinite_steps": self.nonfinite_steps,
            "norms": self.norms,
            "scaler_skips_in_a_row": self.scaler_skips_in_a_row,
            "skips": self.skips,
            "recent": {name: list(values) for name, values in self.recent.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_steps = state["skipped_steps"]
        self.scaler_skips_in_a_row = state["scaler_skips_in_a_row"]
        self.nonfinite_steps = state.get("nonfinite_steps", 0)
        self.norms = list(state.get("norms", []))
        self.skips = list(state["skips"])
        self.recent = {name: RecentValues(state["recent"][name]) for name in CHECKED}

    def check_update(
        self,
        norm: Tensor | float,
        *,
        step: int,
        losses: list[Tensor],
        scaler_is_used: bool,
        find_cause: Callable[[float], NonFiniteReport],
        find_rows: Callable[[], list[list]],
    ) -> UpdateCheck:
        """Return whether the update may be made, or raise DivergedError. Every rank calls it.

        losses: of this rank's micro-steps. find_cause: of a norm that is not finite; find_rows: the rows of the step.
        """
        # 1. All is finite: the update is made, unless the recipe skips spikes and this is one.
        numbers = self._read(norm, losses)
        value = numbers[0]
        self.norms.append(value if math.isfinite(value) else None)
        if all(map(math.isfinite, numbers)):
            self.scaler_skips_in_a_row = 0
            skip = self.monitor.on_spike == "skip" and self._skip_spike(numbers, step, find_rows)
            return UpdateCheck(value, skip=skip)
        # 2. It is not. The fp16 scaler may try with a smaller scale; else the recipe says what follows.
        self.nonfinite_steps += 1
        if scaler_is_used:  # its way to find a scale: it skips such a step by itself
            self.scaler_skips_in_a_row += 1
            self.skipped_steps += 1
            if self.scaler_skips_in_a_row < MAX_SCALER_SKIPS:
                finite = all(math.isfinite(loss.item()) for loss in losses)
                return UpdateCheck(value, loss_is_finite=all(from_every_rank(finite)))
        report = find_cause(value)
        self._skip_nonfinite(report, step)
        return UpdateCheck(value, skip=True, loss_is_finite=report.loss_is_finite)

    def _read(self, norm: Tensor | float, losses: list[Tensor]) -> list[float]:
        """Return the step's norm, and its loss where on_spike needs it: here, and nowhere else in a step, the host
        waits."""
        # Where only a NaN ends or skips a step, the norm alone shows it: a NaN in the loss is one in the gradients.
        if self.monitor.on_spike != "skip":
            return [float(norm)]
        loss = torch.stack(losses).sum()
        numbers = torch.stack([torch.as_tensor(norm).to(loss), loss])
        if (ranks := num_ranks()) > 1:
            torch.distributed.all_reduce(numbers)  # so that ranks agree to the last bit
        return (numbers / ranks).tolist()

    def _skip_nonfinite(self, report: NonFiniteReport, step: int) -> None:
        scaled = self.scaler_skips_in_a_row >= MAX_SCALER_SKIPS
        may_skip = self.monitor.on_nonfinite == "skip" and not report.is_parameter and not scaled
        fork = f"run.fork_from={self.run.name}@STEP"
        if report.is_parameter:
            advice = (
                "Run the same command again; if it happens again at this step, lower the learning rates in a new run "
                f"with {fork}."
            )
        elif scaled:
            advice = (
                f"The fp16 loss scaler has skipped {MAX_SCALER_SKIPS} steps in a row: use bf16, or lower the learning "
                "rates in a new run."
            )
        else:
            advice = (
                "Set monitor.on_nonfinite: skip to skip such steps, or lower the learning rates in a new run with "
                f"{fork}."
            )
        self._skip_step(
            "nonfinite", step, reason=report.text(), advice=advice, may_skip=may_skip, events=[report.facts()]
        )

    def _skip_spike(self, numbers: list[float], step: int, find_rows: Callable[[], list[list]]) -> bool:
        """Return whether the step has a spike, and record that it is skipped."""
        spikes = []
        for name, value in zip(CHECKED, numbers, strict=True):
            if facts := self._find_spike(name, value):
                spikes.append(facts)
        if not spikes:
            return False
        rows = find_rows()
        reason = " and ".join(
            f"{spike['name']} is {spike['value']:.4g}, above {spike['highest_usual']:.4g}, the highest usual"
            for spike in spikes
        )
        advice = (
            f"Lower the learning rates in a new run with run.fork_from={self.run.name}@STEP, or set monitor.on_spike: "
            "warn."
        )
        events = [spike | {"rows": rows} for spike in spikes]
        self._skip_step("spike", step, reason=reason, advice=advice, may_skip=True, events=events)
        return True

    def _find_spike(self, name: str, value: float) -> dict[str, Any] | None:
        """Return the facts of a value far above its recent ones, and add it to them; else None."""
        recent = self.recent[name]
        highest = recent.highest_usual()
        usual = statistics.median(recent or [0.0])
        recent.append(value)
        if highest is None or value <= highest:
            return None
        return {"name": name, "value": value, "highest_usual": highest, "usual": usual}

    def report_spikes(self, last_step: int, logged: Mapping[str, Sequence[float | None]]) -> None:
        """Record spikes of the steps that were just logged, or end the run. Every rank has the same numbers.

        last_step: the number of steps made; logged: values of the steps up to it, None of a skipped one.
        """
        # 1. Each value against those before it. The first ones had none: they are looked at once there are enough.
        found: list[dict[str, Any]] = []
        for name, values in logged.items():
            for step, value in enumerate(values, last_step + 1 - len(values)):
                if value is None:
                    continue
                if facts := self._find_spike(name, value):
                    found.append({"step": step} | facts)
                if name == "train/loss" and len(self.recent[name]) == ENOUGH + AROUND:
                    for ago, early in self.recent[name].early_spikes():
                        self._record("spike", step=step - ago, name=name, **early)
        # 2. In the order of steps: recorded, the end of the run where the recipe says so, or a line.
        found.sort(key=lambda spike: spike["step"])
        shown = []
        for spike in found:
            self._record("spike", **spike)
            text = "step {step}: {name} is {value:.4g}, usually {highest_usual:.4g} at most".format_map(spike)
            if self.monitor.on_spike == "stop":
                error = DivergedError(
                    f"{text}; monitor.on_spike is stop. The checkpoints before it are whole: lower the learning rates "
                    f"in a new run with run.fork_from={self.run.name}@STEP, or set monitor.on_spike: warn."
                )
                error.facts = spike
                raise error
            # Small ones of the norm are many and harmless; the report counts them.
            if spike["name"] == "train/loss" or spike["value"] >= HIGH_NORM * spike["usual"]:
                shown.append(text)
        if shown and self.is_first:
            write(f"spike: {'; '.join(shown[:3])}. A single one is harmless while the loss keeps falling")

    def _skip_step(
        self, event: str, step: int, *, reason: str, advice: str, may_skip: bool, events: list[dict[str, Any]]
    ) -> None:
        """Record the step as skipped, or end the run where the recipe does not skip, or not that often."""
        # 1. One skip more, unless that is one too many.
        if may_skip:
            self.skips = [s for s in self.skips if s > step - AMONG_STEPS] + [step]
            if len(self.skips) > self.monitor.max_skips:
                may_skip = False
                reason += (
                    f", after {len(self.skips) - 1} skipped steps of the last {AMONG_STEPS} (monitor.max_skips is "
                    f"{self.monitor.max_skips})"
                )
        # 2. Recorded either way; steps of metrics.jsonl are counted from 1.
        action = "skip" if may_skip else "stop"
        for facts in events:
            self._record(event, step=step + 1, action=action, **facts)
        if not may_skip:
            error = DivergedError(
                f"step {step}: {reason}; the update was not made, and the checkpoints before it are good. {advice}"
            )
            error.facts = {"step": step, **events[0]}
            raise error
        if self.is_first:
            print(f"{event}: step {step} is skipped: {reason}", flush=True)
        self.skipped_steps += 1

    def read(self, *, max_norm: float) -> Numbers:
        """Return, of the steps since the last reading, the largest and the median norm and the share of those above
        max_norm (inf: nothing is clipped), and the counts of the whole run."""
        numbers: Numbers = {
            "optim/nonfinite_steps": self.nonfinite_steps,
            "optim/skipped_steps": self.skipped_steps,
        }
        if finite := [norm for norm in self.norms if norm is not None]:
            numbers |= {"optim/grad_norm": max(finite), "optim/grad_norm_median": statistics.median(finite)}
        if max_norm < math.inf and self.norms:
            clipped = sum(norm is not None and norm > max_norm for norm in self.norms)
            numbers["optim/clip_frac"] = clipped / len(self.norms)
        self.norms = []
        return numbers

    def check_state(self, tensors: Mapping[str, Tensor], *, step: int, consequence: str) -> None:
        """Raise DivergedError for a parameter or optimizer state that is not finite, also one that no loss shows.
        Every rank calls it."""
        found = {rank: name for rank, name in enumerate(from_every_rank(first_nonfinite(tensors))) if name}
        if not found:
            return
        name = next(iter(found.values()))
        facts = {"tensor": name, "ranks": list(found)}
        self._record("nonfinite", step=step, action="stop", **facts)
        error = DivergedError(
            f"after {step} steps: {name} is not finite, so {consequence}; the checkpoints before it are good. Lower "
            f"the learning rates in a new run with run.fork_from={self.run.name}@STEP, or run the same command again."
        )
        error.facts = {"step": step, **facts}
        raise error

    def finite_metrics(
        self, metrics: dict[str, Any], *, step: int, parameters: Callable[[], Mapping[str, Tensor]]
    ) -> dict[str, Any]:
        """Return the metrics that are finite. The others are printed and recorded, and end no run whose parameters are
        finite: the forward pass on held-out text overflowed, and the checkpoint is already saved."""
        bad = {}
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and not math.isfinite(value):
                bad[name] = str(value)
        if not bad:
            return metrics
        self.check_state(parameters(), step=step, consequence="the evaluation says nothing")
        self._record("nonfinite", step=step, action="warn", metrics=bad)
        if self.is_first:
            listed = ", ".join(f"{name} is {value}" for name, value in bad.items())
            print(
                f"nonfinite: after {step} steps {listed}, though every parameter is finite. These numbers are not "
                "logged; look at the validation data, or try train.bf16=false.",
                flush=True,
            )
        return {name: value for name, value in metrics.items() if name not in bad}

    def _record(self, event: str, *, step: int, **facts: Any) -> None:
        if self.is_first:
            self.run.add_event(event, step=step, attempt=self.run.read_manifest().get("attempts", 1), **facts)
