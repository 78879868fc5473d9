"""Where a number that is not finite began: the parameter, the loss or the gradient, and the rows that were read."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.data.rows import rows_of_micro_batch
from pipeline.hardware.device import batch_rank
from pipeline.model.finite import first_nonfinite
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import from_every_rank, num_ranks

SHOWN = 8  # rows that a message names; failure.json and metrics.jsonl hold all


@dataclass(frozen=True, kw_only=True)
class NonFiniteReport:
    """The first bad tensor of a step, the same on every rank.

    ranks, micro_step: where it was seen first, as far as that is known. rows: [source, file, row group, row] of the
    document at the start of each row that was read there; of a parameter, each row of the update before.
    loss_is_finite: of this step.
    """

    tensor: str
    is_parameter: bool = False
    ranks: list[int]
    micro_step: int | None = None
    rows: list[list]
    loss_is_finite: bool = True

    def text(self) -> str:
        text = self.tensor
        if self.micro_step is not None:
            name = "rank" if len(self.ranks) == 1 else "ranks"
            text += f" on {name} {', '.join(map(str, self.ranks))} in micro-step {self.micro_step}"
        if self.rows:
            rows = [f"{source} {file} row group {group} row {row}" for source, file, group, row in self.rows[:SHOWN]]
            more = ""
            if len(self.rows) > SHOWN:
                more = f" and {len(self.rows) - SHOWN} more, which failure.json lists"
            text += f" (rows: {'; '.join(rows)}{more})"
        return text

    def facts(self) -> dict[str, Any]:
        """Return the facts for metrics.jsonl and failure.json."""
        return {"tensor": self.tensor, "ranks": self.ranks, "micro_step": self.micro_step, "rows": self.rows}


@dataclass(frozen=True)
class RowOrigins:
    """Finds where the rows of a step come from. rows: TrainingRows; batch_ranks: ranks that read different rows."""

    rows: Any
    run: RunDirectory
    micro_batch: int
    batch_ranks: int

    def of_step(self, step: int) -> list[list]:
        """Return [source, file, row group, row] of the rows of a step."""
        return self._named(self.rows.origins(step))

    def of_micro_step(self, step: int, micro_step: int, ranks: Iterable[int]) -> list[list]:
        """Return the same of the rows that some ranks read in one micro-step."""
        origins = self.rows.origins(step)
        rows = self.rows.micro_rows(step, self.micro_batch)
        found = []
        for rank in sorted({batch_rank(rank) for rank in ranks}):
            numbers = rows_of_micro_batch(
                micro_step, rank=rank, world_size=self.batch_ranks, rows=rows, total=len(origins)
            )
            found += [origins[number] for number in numbers if number is not None]  # None fills a last micro-batch
        return self._named(found)

    def _named(self, origins: list[tuple]) -> list[list]:
        inputs = self.run.read_manifest().get("inputs", {}).get("sources", [])
        files = {source["name"]: [file["label"] for file in source["files"]] for source in inputs}
        named = []
        for source, file, group, row in origins:
            label = f"file {file}"  # of a source that the manifest does not list
            if source in files:
                label = files[source][file]
            named.append([source, label, group, row])
        return named


def find_nonfinite(
    parameters: Mapping[str, Tensor],
    *,
    step: int,
    norm: float,
    losses: list[Tensor],
    origins: RowOrigins,
    gradients: Iterator[dict[str, Tensor]],
    one_gradient: bool,
) -> NonFiniteReport:
    """Return where a gradient norm that is not finite comes from. Every rank calls it.

    losses: of this rank's micro-steps; gradients: of the step's micro-steps, computed again and not yet summed over
    ranks: those at hand no longer tell where it began. one_gradient: the ranks share a sharded model, whose backward
    sums in any case.
    """
    losses_of_ranks = from_every_rank([loss.item() for loss in losses])

    # 1. A parameter: then the update before is to blame, and its rows.
    bad_parameters = _of_bad_ranks(first_nonfinite(parameters))
    if bad_parameters:
        name = next(iter(bad_parameters.values()))
        since, rows = "before the first step", []
        if step > 0:
            since, rows = f"since the update of step {step - 1}", origins.of_step(step - 1)
        return NonFiniteReport(
            tensor=f"the parameter {name} is not finite {since}",
            is_parameter=True,
            ranks=list(bad_parameters),
            rows=rows,
            loss_is_finite=all(math.isfinite(sum(of_rank)) for of_rank in losses_of_ranks),
        )

    # 2. The loss of a micro-step.
    for micro_step, of_micro_step in enumerate(zip(*losses_of_ranks, strict=True)):
        bad = {rank: loss for rank, loss in enumerate(of_micro_step) if not math.isfinite(loss)}
        if bad:
            return NonFiniteReport(
                tensor=f"the loss is {next(iter(bad.values()))}",
                ranks=list(bad),
                micro_step=micro_step,
                rows=origins.of_micro_step(step, micro_step, bad),
                loss_is_finite=False,
            )

    # 3. A gradient, backwards from the loss: the order in which gradients are made, and a NaN spreads.
    all_ranks = list(range(num_ranks()))
    for micro_step, made in enumerate(gradients):
        names = _of_bad_ranks(first_nonfinite(dict(reversed(made.items()))))
        if names:
            ranks = all_ranks if one_gradient else list(names)
            return NonFiniteReport(
                tensor=f"the gradient of {next(iter(names.values()))} is not finite",
                ranks=ranks,
                micro_step=micro_step,
                rows=origins.of_micro_step(step, micro_step, ranks),
            )
    return NonFiniteReport(
        tensor=f"the norm of the gradient is {norm}, though each gradient was finite when the step was made again",
        ranks=all_ranks,
        rows=origins.of_step(step),
    )


def _of_bad_ranks(name: str | None) -> dict[int, str]:
    """Return by rank the name of the tensor that is not finite, of those that have one."""
    return {rank: name for rank, name in enumerate(from_every_rank(name)) if name}
