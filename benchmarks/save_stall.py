"""How long a save holds the training up: written by a process of its own, against written before the next step.

    python benchmarks/save_stall.py [--depth 6] [--pairs 10] [--folder DIR]

Both ways save the same model and optimizer state through the same code; the second waits for the file. Pair by pair, so
that a busy machine slows both. The second line: steps while a checkpoint is being written beside them, against steps alone.
--folder: on the disk that is measured; default the system's temporary folder.
"""

import statistics
import tempfile
from pathlib import Path

import torch
from common import DEVICE, arguments, compared, seconds, show

from pipeline.model.build import build_model
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.checkpoint import CheckpointSaver, ModelFiles
from pipeline.training.optimizer_state import optimizer_tensors


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


class Training:
    """A GPT-2 of depth x 64 with AdamW, and steps on random rows."""

    def __init__(self, depth: int):
        sizes = {"n_layer": depth, "n_embd": 64 * depth, "n_head": depth, "n_positions": 256, "vocab_size": 32768}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        self.model = build_model("tandem", sizes, seed=0).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.files = ModelFiles(NoTokenizer())
        self.ids = torch.randint(0, 32768, (2, 256), device=DEVICE)

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def large(self, folder: Path) -> dict:
        weights = self.files.write(self.model, folder)
        state = optimizer_tensors(self.optimizer, self.model)
        return {"model.safetensors": (weights, {"format": "pt"}), "optimizer.safetensors": (state, None)}


def compare(training: Training, saver: CheckpointSaver, *, pairs: int) -> tuple[list, list]:
    """Seconds of pairs: a save's stall and the whole save; a step beside the writer and one alone."""
    stalls, steps = [], []

    def save(number: int, *, wait: bool) -> None:
        saver.save(number, write_small=training.large)
        if wait:
            saver.wait()

    for number in range(0, 2 * pairs + 2, 2):
        stall = seconds(lambda: save(number + 1, wait=False))  # noqa: B023
        beside = []
        while saver.process is not None and saver.process.poll() is None:
            beside.append(seconds(training.step))
        saver.wait()
        stalls.append((stall, seconds(lambda: save(number + 2, wait=True))))  # noqa: B023
        alone = [seconds(training.step) for _ in beside]
        if beside:  # a writer may be done before the first of them
            steps.append((statistics.median(beside), statistics.median(alone)))
    return stalls[1:], steps[1:]  # the first takes the memory


def main() -> None:
    options = arguments(__doc__, depth=6, pairs=10, folder=tempfile.gettempdir())
    training = Training(options.depth)
    training.step()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = RunDirectory(Path(folder) / "run")
        run.checkpoints.mkdir(parents=True)
        saver = CheckpointSaver(run, keep=1, every=None, best=False)
        stalls, steps = compare(training, saver, pairs=options.pairs)
        size = sum(file.stat().st_size for file in run.checkpoints.rglob("*") if file.is_file())
    rows = [{"ours": "stall", "other": "whole save", "mb": size / 1e6, **compared(stalls)}]
    if steps:
        rows.append({"ours": "step beside the writer", "other": "step alone", "mb": size / 1e6, **compared(steps)})
    show(options, rows)


if __name__ == "__main__":
    main()
