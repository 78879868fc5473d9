"""The cause of a step that failed: where a number that is not finite began, and which micro-batch fits when memory ran
out.

Which micro-batch fits is tried on the spot instead of estimated.
"""

import gc
import math
import traceback
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.data.loader import on_device
from pipeline.data.rows import rows_of_micro_batch
from pipeline.hardware.device import batch_rank
from pipeline.model.build import first_nonfinite
from pipeline.process.errors import OutOfMemoryError, first_line
from pipeline.recipe.batch import KEY
from pipeline.run_dir.failures import is_out_of_memory
from pipeline.training.distributed import from_every_rank, preserved_rng
from pipeline.training.stages import stage_of

if TYPE_CHECKING:
    from pipeline.training.trainer import TandemTrainer

# Where a number that is not finite began: the parameter, the loss or the gradient, and the rows that were read for it.

SHOWN = 8  # rows that a message names; failure.json and metrics.jsonl hold all


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The first bad tensor of a step, the same on every rank.

    ranks, micro_step: where it was seen first, as far as that is known. rows: [source, file, row group, row] of the
    document that begins each row read there; of a parameter, each row of the update before. loss_is_finite: of this
    step.
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
    """Compute the step's gradients again, one micro-step at a time and before they are summed over ranks or clipped:
    those at hand no longer tell where it began. Another dropout may hide it."""
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


def rows_of(
    trainer: "TandemTrainer", step: int, ranks: Iterable[int] | None = None, micro_step: int = 0
) -> list[list]:
    """Return [source, file, row group, row] of the rows of a step, or of those that some ranks read in one
    micro-step."""
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


# Memory ran out in a step: which micro-batch fits.

RESERVE = 1 << 24  # bytes for what a run takes beside its steps, such as the stacks of threads that start later


def out_of_memory(trainer: "TandemTrainer", error: BaseException) -> OutOfMemoryError:
    """Return the error for the user. The training is over: its activations are gone, its gradients are dropped to try
    smaller micro-batches."""
    came_through = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    stage, step, recipe = stage_of(came_through[::-1]), trainer.state.global_step, trainer.recipe
    what = f"memory ran out at step {step} in {stage} ({first_line(error)})"
    if stage == "evaluation":
        rows = recipe.evals.bpb.batch_rows or trainer.args.per_device_eval_batch_size
        return OutOfMemoryError(
            f"{recipe.where('evals.bpb.batch_rows')}: {what}, with {rows} rows at once. Set it to {max(1, rows // 2)} "
            "or lower; the scores stay the same."
        )
    if stage != "forward+backward":
        return OutOfMemoryError(
            f"{recipe.path}: {what}, where the size of the micro-batch does not matter. Take a smaller model, more "
            "processes or more memory."
        )
    micro_batch = trainer.args.per_device_train_batch_size
    begin = f"{recipe.where(KEY)}: {what}, with {micro_batch} rows of {trainer.rows.row_tokens} tokens"
    if trainer.is_sharded:  # nothing can be tried: a forward needs all ranks
        return OutOfMemoryError(
            f"{begin}. Set {KEY} to {max(1, micro_batch // 2)} or lower, or train.gradient_checkpointing: true; the "
            "global batch and the training stay the same."
        )
    fitting = fitting_micro_batch(trainer)
    if fitting is None:
        return OutOfMemoryError(
            f"{begin}, and no smaller number fits either. Set train.gradient_checkpointing: true, shorten "
            "data.row_tokens, or take a smaller model."
        )
    accumulation = ""
    if "gradient_accumulation_steps" in recipe.train:  # which would make another batch of a run that has not begun
        steps = trainer.args.gradient_accumulation_steps * micro_batch // fitting
        accumulation = f" and train.gradient_accumulation_steps to {steps}"
    return OutOfMemoryError(
        f"{begin}; {fitting} fit, as was just tried. Set {KEY} to {fitting}{accumulation}; the global batch and the "
        "training stay the same."
    )


def fitting_micro_batch(trainer: "TandemTrainer") -> int | None:
    """Return the largest divisor of the micro-batch, itself left out, of which two forward and backward passes fit;
    None: not even 1.

    A divisor, so that the rows of a step are dealt out as evenly as before.
    """
    micro_batch = trainer.args.per_device_train_batch_size
    for rows in range(micro_batch // 2, 0, -1):
        if micro_batch % rows == 0 and fits(trainer, rows, step=trainer.state.global_step, reserve=RESERVE):
            return rows
    return None


def fits(trainer: "TandemTrainer", rows: int, *, step: int, reserve: int = 0) -> bool:
    """Return whether forward, backward and the optimizer's state fit with that micro-batch, beside `reserve` bytes.

    On this rank alone, with its rows of the step, without DDP and not compiled: the other ranks wait in a collective.
    No gradient is left, and the random state does not move.
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
