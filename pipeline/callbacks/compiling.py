"""The first step under torch.compile, which takes longest and says nothing by itself."""

import time
from contextlib import ExitStack, suppress
from pathlib import Path

from transformers import TrainerCallback

from pipeline.process.progress import seconds_text, waiting, write

UNKNOWN = "takes from seconds to a few minutes"


class Compiling(TrainerCallback):
    """Says before the first step that it is compiled and how long that took last, and shows the time until it is done.

    cache: the folder of the compiled kernels, where the time is kept for the next start; None: nowhere.
    """

    def __init__(self, cache: Path | None):
        self.kept = cache / "first_step_s.txt" if cache else None
        self.shown, self.began = ExitStack(), 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if self.began or not args.torch_compile or not state.is_world_process_zero:
            return
        self.began = time.monotonic()
        write(f"compiling: the first step of a start {self._last() or UNKNOWN}; the others are faster for it")
        self.shown.enter_context(waiting("compiling", after_s=1.0))

    def on_step_end(self, args, state, control, **kwargs):
        if self.began and self.kept:
            with suppress(OSError):  # of a full or foreign disk: then the next start does not know
                self.kept.parent.mkdir(parents=True, exist_ok=True)
                self.kept.write_text(f"{time.monotonic() - self.began:.0f}")
            self.kept = None
        self.shown.close()

    def on_train_end(self, args, state, control, **kwargs):
        self.shown.close()

    def _last(self) -> str | None:
        """Return how long the last compiled first step took on this machine, where one is known."""
        with suppress(OSError, ValueError):
            if self.kept:
                return f"takes longer, about {seconds_text(max(float(self.kept.read_text()), 1))} as last time"
        return None
