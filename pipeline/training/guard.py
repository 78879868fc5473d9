"""Checks of a training step: non-finite numbers, out of memory, a lost rank. What caused them: training/causes.py."""

import math
import statistics
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.metrics import AROUND, ENOUGH, HIGH_NORM, RecentValues
from pipeline.model.build import first_nonfinite
from pipeline.process.errors import DataError, DivergedError, HangError, first_line
from pipeline.process.progress import write
from pipeline.recipe.schema import Monitor
from pipeline.run_dir.failures import is_out_of_memory
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import from_every_rank, num_ranks
from pipeline.training.muon import alike

if TYPE_CHECKING:
    from pipeline.training.trainer import TandemTrainer

# Tensors that must hold finite numbers only: what is loaded, what is about to be saved and, by their norm, gradients.


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all, 0-dimensional float32 on the device, also of 16-bit gradients, whose own norm would
    have their few bits."""
    wide = [g if g.dtype.itemsize >= 4 else torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    if len(parts := alike(wide)) > 1:
        return torch.linalg.vector_norm(torch.stack([total_norm(part) for part in parts]))
    norm = torch.nn.utils.get_total_norm(wide)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def refuse_nonfinite(tensors: Mapping[str, Tensor], *, where: str, instead: str) -> None:
    """Raise DataError for numbers that no training can go on from. Every rank calls it, with its part of a sharded
    model."""
    if name := next(filter(None, from_every_rank(first_nonfinite(tensors))), None):
        error = DataError(f"{where}: {name} holds a NaN or an infinity, which every step would spread. {instead}")
        error.of_all_ranks = True
        raise error


# The guard: no update from, and no checkpoint with, a number that is not finite; by recipe no update from a spike.

# After this many optimizer steps in a row that the fp16 loss scaler skipped, the run is taken as diverged.
MAX_SCALER_SKIPS = 20
# monitor.max_skips counts skipped steps among this many. Not "in all": a few bad rows must not end a long run. Not "in
# a row": a run that loses every second step trains on half of its data.
AMONG_STEPS = 1000
WATCHED = ("optim/grad_norm", "train/loss")


class StepGuard:
    """Checks every step before its update, and every state before it is saved.

    state_dict: what a resumed run must know of the steps before it.
    """

    def __init__(self, run: RunDirectory, monitor: Monitor):
        self.run, self.monitor = run, monitor
        self.losses: list[Tensor] = []  # of this rank's micro-steps since begin(), on the device
        self.skipped_steps = 0  # over the whole run, by the fp16 loss scaler too
        self.nonfinite_steps = 0  # over the whole run
        self.norms: list[float | None] = []  # of the steps since the last log; None of one that was not finite
        self.scaler_skips_in_a_row = 0
        self.skips: list[int] = []  # the steps left out by recipe, as far as they still count
        self.recent = {name: RecentValues() for name in WATCHED}

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
        self.skipped_steps, self.scaler_skips_in_a_row = state["skipped_steps"], state["scaler_skips_in_a_row"]
        self.nonfinite_steps, self.norms = state.get("nonfinite_steps", 0), list(state.get("norms", []))
        self.skips = list(state["skips"])
        self.recent = {name: RecentValues(state["recent"][name]) for name in WATCHED}

    # ---- steps ----

    def begin(self) -> None:
        """Begin a step."""
        self.losses = []

    def check_update(self, trainer: "TandemTrainer", model: torch.nn.Module, norm: Tensor | float) -> float:
        """Return the norm as a number, once the update may be made; else take the gradients away, without which it
        changes nothing, or raise DivergedError. Every rank calls it."""
        numbers = self._read(norm)
        self.norms.append(numbers[0] if math.isfinite(numbers[0]) else None)
        if all(map(math.isfinite, numbers)):
            self.scaler_skips_in_a_row = 0
            if self.monitor.on_spike == "skip":
                self._check_spike(trainer, model, numbers)
            return numbers[0]
        self.nonfinite_steps += 1
        scaler = trainer.accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            # Its way to find a scale: it leaves such a step out by itself.
            self.scaler_skips_in_a_row, self.skipped_steps = self.scaler_skips_in_a_row + 1, self.skipped_steps + 1
            if self.scaler_skips_in_a_row < MAX_SCALER_SKIPS:
                finite = all(math.isfinite(loss.item()) for loss in self.losses)
                self._keep_loss_finite(trainer, all(from_every_rank(finite)))
                return numbers[0]
        self._check_nonfinite(trainer, model, numbers[0])
        return numbers[0]

    def _read(self, norm: Tensor | float) -> list[float]:
        """Return the step's norm, and its loss where on_spike needs it: here, and nowhere else in a step, the host
        waits."""
        if self.monitor.on_spike != "skip":
            return [float(norm)]
        loss = torch.stack(self.losses).sum()
        numbers = torch.stack([torch.as_tensor(norm).to(loss), loss])
        if (ranks := num_ranks()) > 1:
            torch.distributed.all_reduce(numbers)  # so that ranks agree to the last bit
        return (numbers / ranks).tolist()

    def _check_nonfinite(self, trainer: "TandemTrainer", model: torch.nn.Module, norm: float) -> None:
        from pipeline.training.causes import find_cause

        cause = find_cause(trainer, model, self.losses, norm)
        scaled = self.scaler_skips_in_a_row >= MAX_SCALER_SKIPS
        skip = self.monitor.on_nonfinite == "skip" and not cause.is_parameter and not scaled
        if cause.is_parameter:
            advice = (
                "The same command goes on from the last checkpoint; if it happens again at the same step, lower the "
                f"learning rates in a new run with run.fork_from={self.run.name}@STEP, and if not, suspect the "
                "hardware."
            )
        elif scaled:
            advice = (
                f"The fp16 loss scaler has skipped {MAX_SCALER_SKIPS} steps in a row. Use bf16, or lower the learning "
                "rates in a new run."
            )
        else:
            advice = (
                "The same command would meet it again: set monitor.on_nonfinite: skip to leave such steps out, or "
                f"lower the learning rates in a new run with run.fork_from={self.run.name}@STEP."
            )
        reason, events = cause.text(), [cause.facts()]
        self._leave_out(trainer, model, "nonfinite", reason=reason, advice=advice, skip=skip, events=events)
        self._keep_loss_finite(trainer, cause.loss_is_finite)

    def _check_spike(self, trainer: "TandemTrainer", model: torch.nn.Module, numbers: list[float]) -> None:
        spikes = list(filter(None, map(self._spike, WATCHED, numbers)))
        if not spikes:
            return
        from pipeline.training.causes import rows_of

        rows = rows_of(trainer, trainer.state.global_step)
        message = "{name} is {value:.4g}, above {highest_usual:.4g}, the highest usual"
        reason = " and ".join(map(message.format_map, spikes))
        advice = (
            f"Lower the learning rates in a new run with run.fork_from={self.run.name}@STEP, or set monitor.on_spike: "
            "warn to go on."
        )
        events = [s | {"rows": rows} for s in spikes]
        self._leave_out(trainer, model, "spike", reason=reason, advice=advice, skip=True, events=events)

    def _spike(self, name: str, value: float) -> dict[str, Any] | None:
        """Return the facts of a value far above its recent ones, which it then is one of; else None."""
        recent = self.recent[name]
        highest, usual = recent.highest_usual(), statistics.median(recent or [0.0])
        recent.append(value)
        if highest is None or value <= highest:
            return None
        return {"name": name, "value": value, "highest_usual": highest, "usual": usual}

    def report_spikes(self, trainer: "TandemTrainer", logged: Mapping[str, Sequence[float | None]]) -> None:
        """Record spikes of the steps that were just logged, or end the run. Every rank has the same numbers."""
        found: list[dict[str, Any]] = []
        for name, values in logged.items():
            for step, value in enumerate(values, trainer.state.global_step + 1 - len(values)):
                if value is None:  # left out of the averages, or skipped by the fp16 loss scaler: optim/skipped_steps
                    continue
                if facts := self._spike(name, value):
                    found.append({"step": step} | facts)
                if name == "train/loss" and len(self.recent[name]) == ENOUGH + AROUND:
                    for ago, early in self.recent[name].early_spikes():
                        self._record(trainer, "spike", step=step - ago, name=name, **early)
        found.sort(key=lambda spike: spike["step"])
        shown = []
        for spike in found:
            self._record(trainer, "spike", **spike)
            text = "step {step}: {name} is {value:.4g}, usually {highest_usual:.4g} at most".format_map(spike)
            if self.monitor.on_spike == "stop":
                error = DivergedError(
                    f"{text}; monitor.on_spike is stop. The checkpoints before it are whole. Lower the learning rates "
                    f"in a new run with run.fork_from={self.run.name}@STEP, or set monitor.on_spike: warn to go on."
                )
                error.facts = spike
                raise error
            # Small ones of the norm are many and harmless; the report counts them.
            if spike["name"] == "train/loss" or spike["value"] >= HIGH_NORM * spike["usual"]:
                shown.append(text)
        if shown and trainer.is_world_process_zero():
            write(f"spike: {'; '.join(shown[:3])}. A single one is harmless while the loss goes on falling")

    def _leave_out(
        self,
        trainer: "TandemTrainer",
        model: torch.nn.Module,
        event: str,
        *,
        reason: str,
        advice: str,
        skip: bool,
        events: list[dict[str, Any]],
    ) -> None:
        """Leave the step out, or end the run where the recipe does not skip, or not that often."""
        step = trainer.state.global_step
        if skip:
            self.skips = [s for s in self.skips if s > step - AMONG_STEPS] + [step]
            if len(self.skips) > self.monitor.max_skips:
                skip = False
                reason += (
                    f", after {len(self.skips) - 1} steps left out of the last {AMONG_STEPS}, and monitor.max_skips "
                    f"is {self.monitor.max_skips}"
                )
        for facts in events:
            self._record(trainer, event, step=step + 1, action="skip" if skip else "stop", **facts)
        if not skip:
            error = DivergedError(
                f"step {step}: {reason}; the update was not made, and the checkpoints before it are good. {advice}"
            )
            error.facts = {"step": step, **events[0]}
            raise error
        if trainer.is_world_process_zero():
            print(f"{event}: step {step} is left out: {reason}", flush=True)
        self.skipped_steps += 1
        model.zero_grad()  # optimizers leave a parameter without a gradient as it is

    def _keep_loss_finite(self, trainer: "TandemTrainer", is_finite: bool) -> None:
        """Take a step whose loss is not finite out of train/loss and train/bpb, which would stay NaN, and its average
        for ever."""
        if not is_finite:
            trainer.loss_sum.undo()
            trainer.text.undo()

    def read(self, *, max_norm: float) -> dict[str, float]:
        """Return, of the steps since the last reading, the largest and the median norm and the share of those above
        max_norm (inf: nothing is clipped), and the counts of the whole run."""
        numbers: dict[str, float] = {
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

    # ---- states and evaluations ----

    def check_state(self, trainer: "TandemTrainer", optimizer: Mapping[str, Tensor], *, so: str) -> None:
        """Raise DivergedError for a parameter or optimizer state that is not finite, also one that no loss shows. so:
        what follows. Every rank calls it."""
        step = trainer.state.global_step
        found = from_every_rank(first_nonfinite({**trainer.model.state_dict(), **optimizer}))
        if name := next(filter(None, found), None):
            facts = {"tensor": name, "ranks": [rank for rank, bad in enumerate(found) if bad]}
            self._record(trainer, "nonfinite", step=step, action="stop", **facts)
            error = DivergedError(
                f"after {step} steps: {name} is not finite, so {so}, and the checkpoints before it are good. Lower "
                f"the learning rates in a new run with run.fork_from={self.run.name}@STEP, or run the same command "
                "again where the hardware is the cause."
            )
            error.facts = {"step": step, **facts}
            raise error

    def check_evaluation(self, trainer: "TandemTrainer", metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics that are finite. The others are said and recorded, and end no run whose parameters are
        finite: it is the forward pass on held-out text that overflowed, the training is sound and its checkpoint
        already saved."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        bad = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
        if bad:
            self.check_state(trainer, {}, so="the evaluation says nothing")
            self._record(trainer, "nonfinite", step=trainer.state.global_step, action="warn", metrics=bad)
            if trainer.is_world_process_zero():
                print(
                    f"nonfinite: after {trainer.state.global_step} steps "
                    f"{', '.join(f'{n} is {v}' for n, v in bad.items())}, though every parameter is finite. The "
                    "numbers are left out and the training goes on; look at the validation data, or try "
                    "train.bf16=false.",
                    flush=True,
                )
        return {name: value for name, value in metrics.items() if name not in bad}

    def _record(self, trainer: "TandemTrainer", event: str, *, step: int, **facts: Any) -> None:
        if trainer.is_world_process_zero():
            self.run.add_event(event, step=step, attempt=self.run.read_manifest().get("attempts", 1), **facts)


@contextmanager
def explained_errors(trainer: "TandemTrainer") -> Iterator[None]:
    """Raise OutOfMemoryError or HangError in the place of the library's error; every other one goes its way."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            # The activations go before the lookup: on a CPU its import needs the memory that they hold.
            traceback.clear_frames(error.__traceback__)
            from pipeline.training.causes import out_of_memory

            explained: Exception = out_of_memory(trainer, error)
        elif gone := trainer.ranks.found_gone():
            explained = trainer.ranks.lost(gone, trainer.run, step=trainer.state.global_step)
        elif trainer.ranks.on_other_hosts() and _is_of_connection(error):
            explained = HangError(
                f"{trainer.run.path}: the connection to another host broke at step {trainer.state.global_step} "
                f"({first_line(error)}). The last checkpoint is whole. Run the same command again to go on from it."
            )
        else:
            raise
        traceback.clear_frames(error.__traceback__)
        raise explained from error


def _is_of_connection(error: BaseException) -> bool:
    """Return whether a collective lost its peer: NCCL has a class for that, gloo its file's name in the text."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)
