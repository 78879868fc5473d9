"""Where a number that is not finite began: the parameter, the loss or the gradient, and the rows that were read for it."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.data.batches import rows_of_micro_batch
from pipeline.model.finite import first_nonfinite
from pipeline.training.agreement import from_every_rank
from pipeline.training.loader import on_device
from pipeline.training.rng import preserved_rng

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
        """For metrics.jsonl and failure.json."""
        return {"tensor": self.tensor, "ranks": self.ranks, "micro_step": self.micro_step, "rows": self.rows}


def find_cause(trainer: Any, model: Any, losses: list[Tensor], norm: float) -> Cause:
    """The cause of a gradient norm that is not finite. Every rank calls it; the gradients are gone afterwards.

    losses: of this rank's micro-steps. The host waits for the device here: nothing hurries any more.
    """
    step = trainer.state.global_step
    said = from_every_rank((first_nonfinite(trainer.model.state_dict()), [loss.item() for loss in losses]))
    bad_parameters = {rank: name for rank, (name, _) in enumerate(said) if name}
    if bad_parameters:
        name = next(iter(bad_parameters.values()))
        since = f"since the update of step {step - 1}" if step else "before the first step"
        before = rows_of(trainer, step - 1) if step else []
        tensor = f"the parameter {name} is not finite {since}"
        finite = all(math.isfinite(loss) for _, of_rank in said for loss in of_rank)
        return Cause(tensor=tensor, is_parameter=True, ranks=[*bad_parameters], rows=before, loss_is_finite=finite)
    for micro_step, of_micro_step in enumerate(zip(*(of_rank for _, of_rank in said), strict=True)):
        bad = {rank: loss for rank, loss in enumerate(of_micro_step) if not math.isfinite(loss)}
        if bad:
            rows = [row for rank in bad for row in rows_of(trainer, step, rank, micro_step)]
            tensor = f"the loss is {next(iter(bad.values()))}"
            return Cause(tensor=tensor, ranks=[*bad], micro_step=micro_step, rows=rows, loss_is_finite=False)
    return _gradient(trainer, model, norm)


def _gradient(trainer: Any, model: Any, norm: float) -> Cause:
    """Makes the step's gradients again, one micro-step at a time and before they are summed over ranks or clipped: those
    at hand no longer tell where it began. Another dropout may hide it."""
    step, args = trainer.state.global_step, trainer.args
    rows = trainer.rows
    mine = {"rank": args.process_index, "world_size": args.world_size, "rows": args.per_device_train_batch_size}
    targets = torch.tensor(float(max(rows.num_targets(step), 1)), device=args.device)
    sharded = trainer.is_fsdp_enabled  # its backward sums over ranks in any case, so that the rank stays unknown
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
                read = [row for rank in ranks for row in rows_of(trainer, step, rank, micro_step)]
                tensor = f"the gradient of {next(iter(bad.values()))} is not finite"
                return Cause(tensor=tensor, ranks=ranks, micro_step=micro_step, rows=read)
        model.zero_grad()
    tensor = f"the norm of the gradient is {norm}, though each gradient was finite when the step was made again"
    return Cause(tensor=tensor, ranks=[*range(args.world_size)], rows=rows_of(trainer, step))


def rows_of(trainer: Any, step: int, rank: int | None = None, micro_step: int = 0) -> list[list]:
    """[source, file, row group, row] of the rows of a step, or of those that one rank reads in one micro-step."""
    origins = trainer.rows.origins(step)
    if rank is not None:
        args = trainer.args
        numbers = rows_of_micro_batch(
            micro_step,
            rank=rank,
            world_size=args.world_size,
            rows=args.per_device_train_batch_size,
            total=len(origins),
        )
        origins = [origins[number] for number in numbers if number is not None]
    inputs = trainer.run.read_manifest().get("inputs", {}).get("sources", [])
    files = {source["name"]: [file["label"] for file in source["files"]] for source in inputs}
    return [
        [source, files[source][file] if source in files else f"file {file}", group, row]
        for source, file, group, row in origins
    ]
