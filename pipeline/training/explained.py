"""What an error that ended the training means for the user: memory that ran out, or a rank that was lost."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.artifacts.failures import is_out_of_memory
from pipeline.training.out_of_memory import out_of_memory


@contextmanager
def explained_errors(trainer: Any) -> Iterator[None]:
    """Raise OutOfMemoryError or HangError in the place of the library's error; every other one goes its way."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            explained: Exception = out_of_memory(trainer, error)
        elif gone := trainer.ranks.found_gone():
            explained = trainer.ranks.lost(gone, trainer.run, step=trainer.state.global_step)
        else:
            raise
        traceback.clear_frames(error.__traceback__)
        raise explained from error
