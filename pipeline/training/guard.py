"""Checks and diagnoses of a training step: non-finite numbers, out of memory, a lost rank.

Which micro-batch fits is tried on the spot instead of estimated.
"""

import gc
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.data.rows import on_device, rows_of_micro_batch
from pipeline.hardware import batch_rank
from pipeline.metrics import RecentValues
from pipeline.model.build import first_nonfinite
from pipeline.process.errors import DataError, DivergedError, HangError, OutOfMemoryError, first_line
from pipeline.recipe.resolve import KEY
from pipeline.recipe.schema import Monitor
from pipeline.run_dir.failures import is_out_of_memory
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import from_every_rank, num_ranks, preserved_rng
from pipeline.training.muon import alike

if TYPE_CHECKING:
    from pipeline.training.trainer import TandemTrainer

# Tensors that must hold finite numbers only: what is loaded, what is about to be saved and, by their norm, gradients.


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all, 0-dimensional float32 on the device, also of 16-bit gradients, whose own norm would have their few bits."""
    wide = [g if g.dtype.itemsize >= 4 else torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    if len(parts := alike(wide)) > 1:
        return torch.linalg.vector_norm(torch.stack([total_norm(part) for part in parts]))
    norm = torch.nn.utils.get_total_norm(wide)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def refuse_nonfinite(tensors: Mapping[str, Tensor], *, where: str, instead: str) -> None:
    """Raise DataError for numbers that no training can go on from. Every rank calls it, with its part of a sharded model."""
    if name := next(filter(None, from_every_rank(first_nonfinite(tensors))), None):
        error = DataError(f"{where}: {name} holds a NaN or an infinity, which every step would spread. {instead}")
        error.of_all_ranks = True
        raise error


# Where a number that is not finite began: the parameter, the loss or the gradient, and the rows that were read for it.

SHOWN = 8  # rows that a message names; failure.json and metrics.jsonl hold all


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The first bad tensor of a step, the same on every rank.

    ranks, micro_step: where it was seen first, as far as that is known. rows: [source, file, row group, row] of the
    document that begins each row read there; of a parameter, each row of the update before. loss_is_finite: of this step.
    """

    tensor: str
    is_parameter: bool = False
    ranks: list[int]
    micro_step: int | None = None
    rows: list[list]
    loss_is_finite: bool = True

    def text(self) -> str:
        rows = "; ".join(
            f"{source} {file} row group {group} row {row}" for source, file, group, row in self.rows[:SHOWN]
        )
        more = f" and {len(self.rows) - SHOWN} more, which failure.json lists" if len(self.rows) > SHOWN else ""
        return f"{self.tensor}{self._place()} (rows: {rows}{more})" if rows else f"{self.tensor}{self._place()}"

    def _place(self) -> str:
        if self.micro_step is None:
            return ""
        several = "s" if len(self.ranks) > 1 else ""
        return f" on rank{several} {', '.join(map(str, self.ranks))} in micro-step {self.micro_step}"

    def facts(self) -> dict[str, Any]:
        """Return the facts for metrics.jsonl and failure.json."""
        return {"tensor": self.tensor, "ranks": self.ranks, "micro_step": self.micro_step, "rows": self.rows}


def find_cause(trainer: "TandemTrainer", model: Any, losses: list[Tensor], norm: float) -> Cause:
    """Return the cause of a gradient norm that is not finite. Every rank calls it; the gradients are gone afterwards.

    losses: of this rank's micro-steps. The host waits for the device here: nothing hurries any more.
    """
    step = trainer.state.global_step
    of_ranks = from_every_rank((first_nonfinite(trainer.model.state_dict()), [loss.item() for loss in losses]))
    bad_parameters = {rank: name for rank, (name, _) in enumerate(of_ranks) if name}
    if bad_parameters:
        name = next(iter(bad_parameters.values()))
        since = f"since the update of step {step - 1}" if step else "before the first step"
        before = rows_of(trainer, step - 1) if step else []
        tensor = f"the parameter {name} is not finite {since}"
        finite = all(math.isfinite(loss) for _, of_rank in of_ranks for loss in of_rank)
        return Cause(tensor=tensor, is_parameter=True, ranks=[*bad_parameters], rows=before, loss_is_finite=finite)
    for micro_step, of_micro_step in enumerate(zip(*(of_rank for _, of_rank in of_ranks), strict=True)):
        bad = {rank: loss for rank, loss in enumerate(of_micro_step) if not math.isfinite(loss)}
        if bad:
            rows = rows_of(trainer, step, bad, micro_step)
            tensor = f"the loss is {next(iter(bad.values()))}"
            return Cause(tensor=tensor, ranks=[*bad], micro_step=micro_step, rows=rows, loss_is_finite=False)
    return _gradient(trainer, model, norm)


def _gradient(trainer: "TandemTrainer", model: Any, norm: float) -> Cause:
    """Compute the step's gradients again, one micro-step at a time and before they are summed over ranks or clipped: those
    at hand no longer tell where it began. Another dropout may hide it."""
    step, args = trainer.state.global_step, trainer.args
    rows = trainer.rows
    own = rows.micro_rows(step, args.per_device_train_batch_size)
    mine = {"rank": trainer.batch_rank, "world_size": trainer.batch_ranks, "rows": own}
    targets = torch.tensor(float(max(rows.num_targets(step), 1)), device=args.device)
    sharded = trainer.is_sharded  # its backward sums over ranks in any case, so that the rank stays unknown
    with preserved_rng():
        for micro_step in range(args.gradient_accumulation_steps):
            model.zero_grad()
            with nullcontext() if sharded else trainer.accelerator.no_sync(model=model):
                batch = on_device(rows.micro_batch(step, micro_step, **mine), args.device)
                trainer.forward_backward(model, batch, targets)
            # Backwards from the loss: the order in which gradients are made, and a NaN spreads.
            made = {n: p.grad for n, p in reversed([*trainer.model.named_parameters()]) if p.grad is not None}
            bad = {rank: name for rank, name in enumerate(from_every_rank(first_nonfinite(made))) if name}
            if bad:
                model.zero_grad()
                ranks = [*range(args.world_size)] if sharded else [*bad]
                read = rows_of(trainer, step, ranks, micro_step)
                tensor = f"the gradient of {next(iter(bad.values()))} is not finite"
                return Cause(tensor=tensor, ranks=ranks, micro_step=micro_step, rows=read)
        model.zero_grad()
    tensor = f"the norm of the gradient is {norm}, though each gradient was finite when the step was made again"
    return Cause(tensor=tensor, ranks=[*range(args.world_size)], rows=rows_of(trainer, step))


def rows_of(trainer: "TandemTrainer", step: int, ranks: Iterable[int] | None = None, micro_step: int = 0) -> list[list]:
    """Return [source, file, row group, row] of the rows of a step, or of those that some ranks read in one micro-step."""
    origins = trainer.rows.origins(step)
    if ranks is not None:
        numbers = [
            number
            for rank in sorted({batch_rank(rank) for rank in ranks})
            for number in rows_of_micro_batch(
                micro_step,
                rank=rank,
                world_size=trainer.batch_ranks,
                rows=trainer.rows.micro_rows(step, trainer.args.per_device_train_batch_size),
                total=len(origins),
            )
        ]
        origins = [origins[number] for number in numbers if number is not None]
    inputs = trainer.run.read_manifest().get("inputs", {}).get("sources", [])
    files = {source["name"]: [file["label"] for file in source["files"]] for source in inputs}
    return [
        [source, files[source][file] if source in files else f"file {file}", group, row]
        for source, file, group, row in origins
    ]


# The guard: no update from, and no checkpoint with, a number that is not finite; by recipe no update from a spike.

# After this many optimizer steps in a row that the fp16 loss scaler skipped, the run is taken as diverged.
MAX_SCALER_SKIPS = 20
# monitor.max_skips counts skipped steps among this many. Not "in all": a few bad rows must not end a long run. Not "in a row":
# a run that loses every second step trains on half of its data.
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
        """Return the norm as a number, once the update may be made; else take the gradients away, without which it changes nothing,
        or raise DivergedError. Every rank calls it."""
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
        """Return the step's norm, and its loss where on_spike needs it: here, and nowhere else in a step, the host waits."""
        if self.monitor.on_spike != "skip":
            return [float(norm)]
        loss = torch.stack(self.losses).sum()
        numbers = torch.stack([torch.as_tensor(norm).to(loss), loss])
        if (ranks := num_ranks()) > 1:
            torch.distributed.all_reduce(numbers)  # so that ranks agree to the last bit
        return (numbers / ranks).tolist()

    def _check_nonfinite(self, trainer: "TandemTrainer", model: torch.nn.Module, norm: float) -> None:
        cause = find_cause(trainer, model, self.losses, norm)
        scaled = self.scaler_skips_in_a_row >= MAX_SCALER_SKIPS
        skip = self.monitor.on_nonfinite == "skip" and not cause.is_parameter and not scaled
        if cause.is_parameter:
            advice = (
                "The same command goes on from the last checkpoint; if it happens again at the same step, lower the learning rates in a "
                f"new run with run.fork_from={self.run.name}@STEP, and if not, suspect the hardware."
            )
        elif scaled:
            advice = f"The fp16 loss scaler has skipped {MAX_SCALER_SKIPS} steps in a row. Use bf16, or lower the learning rates in a new run."
        else:
            advice = (
                "The same command would meet it again: set monitor.on_nonfinite: skip to leave such steps out, or lower the learning "
                f"rates in a new run with run.fork_from={self.run.name}@STEP."
            )
        self._leave_out(
            trainer, model, "nonfinite", reason=cause.text(), advice=advice, skip=skip, events=[cause.facts()]
        )
        self._keep_loss_finite(trainer, cause.loss_is_finite)

    def _check_spike(self, trainer: "TandemTrainer", model: torch.nn.Module, numbers: list[float]) -> None:
        spikes = []
        for name, value in zip(WATCHED, numbers, strict=True):
            highest = self.recent[name].highest_usual()
            self.recent[name].append(value)
            if highest is not None and value > highest:
                spikes.append({"name": name, "value": value, "highest_usual": highest})
        if not spikes:
            return
        rows = rows_of(trainer, trainer.state.global_step)
        reason = " and ".join(
            f"{s['name']} is {s['value']:.4g}, above {s['highest_usual']:.4g}, the highest usual" for s in spikes
        )
        advice = f"Lower the learning rates in a new run with run.fork_from={self.run.name}@STEP, or set monitor.on_spike: warn to go on."
        self._leave_out(
            trainer,
            model,
            "spike",
            reason=reason,
            advice=advice,
            skip=True,
            events=[s | {"rows": rows} for s in spikes],
        )

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
                reason += f", after {len(self.skips) - 1} steps left out of the last {AMONG_STEPS}, and monitor.max_skips is {self.monitor.max_skips}"
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
        """Take a step whose loss is not finite out of train/loss and train/bpb, which would stay NaN, and its average for ever."""
        if not is_finite:
            trainer.loss_sum.undo()
            trainer.text.undo()

    def read(self, *, max_norm: float) -> dict[str, float]:
        """Return, of the steps since the last reading, the share whose norm was above max_norm (inf: nothing is clipped), and the counts
        of the whole run."""
        numbers: dict[str, float] = {
            "optim/nonfinite_steps": self.nonfinite_steps,
            "optim/skipped_steps": self.skipped_steps,
        }
        if max_norm < math.inf and self.norms:
            clipped = sum(norm is not None and norm > max_norm for norm in self.norms)
            numbers["optim/clip_frac"] = clipped / len(self.norms)
        self.norms = []
        return numbers

    # ---- states and evaluations ----

    def check_state(self, trainer: "TandemTrainer", optimizer: Mapping[str, Tensor], *, so: str) -> None:
        """Raise DivergedError for a parameter or optimizer state that is not finite, also one that no loss shows. so: what
        follows. Every rank calls it."""
        step = trainer.state.global_step
        found = from_every_rank(first_nonfinite({**trainer.model.state_dict(), **optimizer}))
        if name := next(filter(None, found), None):
            facts = {"tensor": name, "ranks": [rank for rank, bad in enumerate(found) if bad]}
            self._record(trainer, "nonfinite", step=step, action="stop", **facts)
            error = DivergedError(
                f"after {step} steps: {name} is not finite, so {so}, and the checkpoints before it are good. "
                f"Lower the learning rates in a new run with run.fork_from={self.run.name}@STEP, or run the same command again where "
                "the hardware is the cause."
            )
            error.facts = {"step": step, **facts}
            raise error

    def check_evaluation(self, trainer: "TandemTrainer", metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics that are finite. The others are said and recorded, and end no run whose parameters are finite: it is
        the forward pass on held-out text that overflowed, the training is sound and its checkpoint already saved."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        bad = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
        if bad:
            self.check_state(trainer, {}, so="the evaluation says nothing")
            self._record(trainer, "nonfinite", step=trainer.state.global_step, action="warn", metrics=bad)
            if trainer.is_world_process_zero():
                print(
                    f"nonfinite: after {trainer.state.global_step} steps {', '.join(f'{n} is {v}' for n, v in bad.items())}, though every parameter "
                    "is finite. The numbers are left out and the training goes on; look at the validation data, or try train.bf16=false.",
                    flush=True,
                )
        return {name: value for name, value in metrics.items() if name not in bad}

    def _record(self, trainer: "TandemTrainer", event: str, *, step: int, **facts: Any) -> None:
        if trainer.is_world_process_zero():
            self.run.add_event(event, step=step, attempt=self.run.read_manifest().get("attempts", 1), **facts)


# Where a thread stands in the training, read from its Python frames: the training itself keeps no record of it.

PACKAGE = str(Path(__file__).parents[1])
# Functions of ours by name, and the stage that they are, in the order in which a step that was made leads to the next one.
STAGES = {
    "save_checkpoint": "save",
    "_wait_for_writer": "save",
    "evaluate": "evaluation",
    "sample": "sampling",
    "get_batch_samples": "data",
    "training_step": "forward+backward",
}
ORDER = ["step", *dict.fromkeys(STAGES.values())]  # step: whatever else, as the update and callbacks
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")


def stage_of(frames: list[FrameType]) -> str:
    """Return the stage that the innermost function of ours belongs to. frames: innermost first."""
    for frame in frames:
        name = frame.f_code.co_name
        if name in STAGES and frame.f_code.co_filename.startswith(PACKAGE):
            return STAGES[name]
    return "step"


def place_of(running: FrameType) -> dict[str, Any]:
    """Return the stage of a running thread, whether it waits for other ranks, and the innermost line that is not a library's."""
    frames = [frame for frame, _ in traceback.walk_stack(running)]
    waits = any(frame.f_code.co_filename.endswith(COLLECTIVES) for frame in frames)
    own = next((frame for frame in frames if "site-packages" not in frame.f_code.co_filename), frames[0])
    line = f"{Path(own.f_code.co_filename).name}:{own.f_lineno} {own.f_code.co_name}"
    return {"stage": stage_of(frames), "waits": waits, "line": line}


# Memory ran out in a step: which micro-batch fits.

RESERVE = 1 << 24  # bytes for what a run takes beside its steps, such as the stacks of threads that start later


def out_of_memory(trainer: "TandemTrainer", error: BaseException) -> OutOfMemoryError:
    """Return the error for the user. The training is over: its gradients are dropped to try smaller micro-batches."""
    came_through = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    stage, step, recipe = stage_of(came_through[::-1]), trainer.state.global_step, trainer.recipe
    what = f"memory ran out at step {step} in {stage} ({first_line(error)})"
    if stage == "evaluation":
        rows = recipe.evals.bpb.batch_rows or trainer.args.per_device_eval_batch_size
        return OutOfMemoryError(
            f"{recipe.where('evals.bpb.batch_rows')}: {what}, with {rows} rows at once. Set it to {max(1, rows // 2)} or lower; the scores stay the same."
        )
    if stage != "forward+backward":
        return OutOfMemoryError(
            f"{recipe.path}: {what}, where the size of the micro-batch does not matter. Take a smaller model, more processes or more memory."
        )
    traceback.clear_frames(error.__traceback__)  # which hold the activations
    micro_batch = trainer.args.per_device_train_batch_size
    begin = f"{recipe.where(KEY)}: {what}, with {micro_batch} rows of {trainer.rows.row_tokens} tokens"
    if trainer.is_sharded:  # nothing can be tried: a forward needs all ranks
        return OutOfMemoryError(
            f"{begin}. Set {KEY} to {max(1, micro_batch // 2)} or lower, or train.gradient_checkpointing: true; the global batch and the training "
            "stay the same."
        )
    fitting = fitting_micro_batch(trainer)
    if fitting is None:
        return OutOfMemoryError(
            f"{begin}, and no smaller number fits either. Set train.gradient_checkpointing: true, shorten data.row_tokens, or take a smaller model."
        )
    accumulation = ""
    if "gradient_accumulation_steps" in recipe.train:  # which would make another batch of a run that has not begun
        steps = trainer.args.gradient_accumulation_steps * micro_batch // fitting
        accumulation = f" and train.gradient_accumulation_steps to {steps}"
    return OutOfMemoryError(
        f"{begin}; {fitting} fit, as was just tried. Set {KEY} to {fitting}{accumulation}; the global batch and the training stay the same."
    )


def fitting_micro_batch(trainer: "TandemTrainer") -> int | None:
    """Return the largest divisor of the micro-batch, itself left out, of which two forward and backward passes fit; None: not even 1.

    A divisor, so that the rows of a step are dealt out as evenly as before.
    """
    micro_batch = trainer.args.per_device_train_batch_size
    for rows in range(micro_batch // 2, 0, -1):
        if micro_batch % rows == 0 and fits(trainer, rows, step=trainer.state.global_step, reserve=RESERVE):
            return rows
    return None


def fits(trainer: "TandemTrainer", rows: int, *, step: int, reserve: int = 0) -> bool:
    """Return whether forward, backward and the optimizer's state fit with that micro-batch, beside `reserve` bytes.

    On this rank alone, with its rows of the step, without DDP and not compiled: the other ranks wait in a collective. No
    gradient is left, and the random state does not move.
    """
    model, args = trainer.accelerator.unwrap_model(trainer.model), trainer.args
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()  # nothing without CUDA
    state = []
    try:
        # What the first update will take, where it was not made: two numbers a parameter are the most of ours.
        made = trainer.optimizer.state if trainer.optimizer is not None else {}
        unmade = [p for p in model.parameters() if p.requires_grad and not made.get(p)]
        state = [torch.empty_like(p) for p in unmade for _ in range(2)]
        state.append(torch.empty(reserve, dtype=torch.uint8, device=args.device))
        for micro_step in range(2):  # the second one has the gradients beside its activations
            batch = trainer.rows.micro_batch(
                step, micro_step, rank=args.process_index, world_size=args.world_size, rows=rows
            )
            batch = on_device(batch, args.device)
            with preserved_rng(), trainer.accelerator.autocast():  # which the model has itself once it is prepared
                loss = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(1.0, device=args.device))
            loss.backward()
            del loss, batch
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return False
    finally:
        state.clear()
        model.zero_grad(set_to_none=True)


@contextmanager
def explained_errors(trainer: "TandemTrainer") -> Iterator[None]:
    """Raise OutOfMemoryError or HangError in the place of the library's error; every other one goes its way."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            explained: Exception = out_of_memory(trainer, error)
        elif gone := trainer.ranks.found_gone():
            explained = trainer.ranks.lost(gone, trainer.run, step=trainer.state.global_step)
        elif trainer.ranks.on_other_hosts() and _is_of_connection(error):
            explained = HangError(
                f"{trainer.run.path}: the connection to another host broke at step {trainer.state.global_step} ({first_line(error)}). "
                "The last checkpoint is whole. Run the same command again to go on from it."
            )
        else:
            raise
        traceback.clear_frames(error.__traceback__)
        raise explained from error


def _is_of_connection(error: BaseException) -> bool:
    """Return whether a collective lost its peer: NCCL has a class for that, gloo its file's name in the text."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)
