"""TensorBoard under the same names as metrics.jsonl; what fails in it is told once and never stops a run."""

import html
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class TensorBoard(TrainerCallback):
    """Writes events; after a restart what an earlier attempt wrote beyond `start_step` is purged. Values are float32."""

    def __init__(self, folder: Path, *, start_step: int):
        self.folder, self.start_step = folder, start_step
        self.writer: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with self._told_once():
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(str(self.folder), purge_step=self.start_step + 1 if self.start_step else 0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for the row: add_scalar would make, queue and write one for each of its numbers.
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
            values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in numbers.items()]
            with self._told_once():
                self.writer.file_writer.add_summary(Summary(value=values), state.global_step)

    def add_samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        """As a table of texts, shown as they are: Markdown and HTML that a model wrote do nothing."""
        if self.writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
            from tensorboard.plugins.text.metadata import create_summary_metadata

            cells = ["prompt", "text"]
            for prompt, text in zip(prompts, texts, strict=True):
                cells += [f"<pre>{html.escape(prompt)}</pre>", f"<pre>{html.escape(text)}</pre>"]
            table = TensorProto(
                dtype="DT_STRING",
                string_val=[cell.encode() for cell in cells],
                tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in (len(cells) // 2, 2)]),
            )
            metadata = create_summary_metadata(display_name="samples", description="")
            with self._told_once():
                self.writer.file_writer.add_summary(
                    Summary(value=[Summary.Value(tag="samples", metadata=metadata, tensor=table)]), step
                )

    def on_train_end(self, args, state, control, **kwargs):
        if self.writer is not None:
            with self._told_once():
                self.writer.close()
            self.writer = None

    @contextmanager
    def _told_once(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of its files, of its packages: none of them is worth a training run
            self.writer = None
            print(
                f"TensorBoard stopped taking numbers ({str(error) or type(error).__name__}); the run goes on without it. "
                "metrics.jsonl has every number.",
                flush=True,
            )
