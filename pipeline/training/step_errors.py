"""Errors of libraries in a step, translated for the user: out of memory, with the micro-batch that fits; lost ranks."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.process.errors import HangError, OutOfMemoryError, first_line
from pipeline.recipe.batch import KEY
from pipeline.run_dir.failures import is_out_of_memory
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.ranks import Ranks

RESERVE = 1 << 24  # bytes that a run takes besides its steps, such as the stacks of threads that start later


@contextmanager
def translate_errors(
    run: RunDirectory, ranks: Ranks, *, step: Callable[[], int], out_of_memory: Callable[[BaseException], Exception]
) -> Iterator[None]:
    """Raise OutOfMemoryError or HangError in the place of the library's error; every other one passes."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            translated = out_of_memory(error)
        elif gone := ranks.found_gone():
            translated = ranks.lost(gone, run, step=step())
        elif ranks.on_other_hosts and _is_of_connection(error):
            translated = HangError(
                f"{run.path}: the connection to another host broke at step {step()} ({first_line(error)}). Run the "
                "same command again to continue from the last checkpoint."
            )
        else:
            raise
        traceback.clear_frames(error.__traceback__)
        raise translated from error


def _is_of_connection(error: BaseException) -> bool:
    """Return whether a collective lost its peer: NCCL has a class for that, gloo its file's name in the text."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


@dataclass(frozen=True, kw_only=True)
class MemoryAdvice:
    """The numbers of a run that decide how much memory a step takes, for the message when it runs out.

    where: gives the file and line of a key; eval_rows: of one forward pass of an evaluation. accumulation: micro-steps
    of a recipe that says how many, else None. fits: tries a micro-batch; None where nothing can be tried.
    """

    path: Path | str | None
    where: Callable[[str], str]
    micro_batch: int
    row_tokens: int
    eval_rows: int
    accumulation: int | None
    fits: Callable[[int], bool] | None

    def error(self, error: BaseException, *, step: int, stage: str) -> OutOfMemoryError:
        """Return the error for the user."""
        # 1. Where the micro-batch does not matter.
        begin = f"memory ran out at step {step} in {stage} ({first_line(error)})"
        if stage == "evaluation":
            return OutOfMemoryError(
                f"{self.where('evals.bpb.batch_rows')}: {begin}, with {self.eval_rows} rows at once. Set it to "
                f"{max(1, self.eval_rows // 2)} or lower; the scores stay the same."
            )
        if stage != "forward+backward":
            return OutOfMemoryError(
                f"{self.path}: {begin}, where the size of the micro-batch does not matter. Take a smaller model, more "
                "processes or more memory."
            )
        # 2. A smaller one: half, where nothing can be tried, else the largest that fits.
        begin = f"{self.where(KEY)}: {begin}, with {self.micro_batch} rows of {self.row_tokens} tokens"
        same = "the global batch and the training stay the same."
        if self.fits is None:
            return OutOfMemoryError(
                f"{begin}. Set {KEY} to {max(1, self.micro_batch // 2)} or lower, or train.gradient_checkpointing: "
                f"true; {same}"
            )
        fitting = self._fitting_micro_batch()
        if fitting is None:
            return OutOfMemoryError(
                f"{begin}, and no smaller number fits either. Set train.gradient_checkpointing: true, shorten "
                "data.row_tokens, or take a smaller model."
            )
        accumulation = ""
        if self.accumulation is not None:  # kept as it is, it would make another global batch
            steps = self.accumulation * self.micro_batch // fitting
            accumulation = f" and train.gradient_accumulation_steps to {steps}"
        return OutOfMemoryError(
            f"{begin}; {fitting} fit, as was just tried. Set {KEY} to {fitting}{accumulation}; {same}"
        )

    def _fitting_micro_batch(self) -> int | None:
        """Return the largest smaller divisor of the micro-batch that fits; None: not even 1.

        A divisor, so that the rows of a step are dealt out as evenly as before.
        """
        assert self.fits is not None
        for rows in range(self.micro_batch // 2, 0, -1):
            if self.micro_batch % rows == 0 and self.fits(rows):
                return rows
        return None
