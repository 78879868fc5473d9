"""TensorBoard under the same names as metrics.jsonl."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class TensorBoard(TrainerCallback):
    """Writes events; after a restart what an earlier attempt wrote beyond `start_step` is purged."""

    def __init__(self, folder: Path, *, start_step: int):
        self.folder, self.start_step = folder, start_step
        self.writer: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder), purge_step=self.start_step + 1 if self.start_step else 0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for the row: add_scalar would make, queue and write one for each of its numbers.
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
            values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in numbers.items()]
            self.writer.file_writer.add_summary(Summary(value=values), state.global_step)

    def add_text(self, step: int, name: str, text: str) -> None:
        if self.writer is not None:
            self.writer.add_text(name, text, step)

    def on_train_end(self, args, state, control, **kwargs):
        if self.writer is not None:
            self.writer.close()
            self.writer = None
