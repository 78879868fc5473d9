"""How long a save holds the training up: written by a process of its own, against written before the next step.

    python benchmarks/save_stall.py [--depth 6] [--pairs 10] [--folder DIR]

Both ways save the same model and optimizer state through the same code; the second waits for the file. Pair by pair, so
that a busy machine slows both. Also: how much slower steps are while a checkpoint is being written beside them. Prints a
table and, as the last line, the same as JSON. Times hold for the machine and disk they name only.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from pipeline.artifacts.run_directory import RunDirectory
from pipeline.hardware.device import device_info
from pipeline.model.build import build_model
from pipeline.training.checkpoint import ModelFiles
from pipeline.training.optimizer_state import optimizer_tensors
from pipeline.training.saver import CheckpointSaver


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


class Training:
    """A GPT-2 of depth x 64 with AdamW, and steps on random rows."""

    def __init__(self, depth: int, device: str):
        sizes = {"n_layer": depth, "n_embd": 64 * depth, "n_head": depth, "n_positions": 256, "vocab_size": 32768}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        self.model = build_model("tandem", sizes, seed=0).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.files = ModelFiles(NoTokenizer())
        self.ids = torch.randint(0, 32768, (2, 256), device=device)

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def large(self, folder: Path) -> dict:
        weights = self.files.write(self.model, folder)
        state = optimizer_tensors(self.optimizer, self.model)
        return {"model.safetensors": (weights, {"format": "pt"}), "optimizer.safetensors": (state, None)}


def seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(training: Training, saver: CheckpointSaver, *, pairs: int) -> dict[str, float]:
    """Median seconds and ratios: stall of a save, and steps beside a writer against steps alone."""
    stalls, beside, alone, number = [], [], [], 0
    for _ in range(pairs + 1):
        number += 1
        stall = seconds(lambda: saver.save(number, write_small=training.large))  # noqa: B023
        steps = []
        while saver.process is not None and saver.process.poll() is None:
            steps.append(seconds(training.step))
        saver.wait()
        number += 1
        started = time.perf_counter()
        saver.save(number, write_small=training.large)
        saver.wait()
        stalls.append((stall, time.perf_counter() - started))
        beside.append(statistics.median(steps))
        alone.append(statistics.median(seconds(training.step) for _ in steps))
    stalls, beside, alone = stalls[1:], beside[1:], alone[1:]  # the first takes the memory
    return {
        "stall_s": statistics.median(own for own, _ in stalls),
        "written_s": statistics.median(waited for _, waited in stalls),
        "stall_ratio": statistics.median(own / waited for own, waited in stalls),
        "step_beside_writer_ratio": statistics.median(b / a for b, a in zip(beside, alone, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--folder", help="on the disk that is measured; default the system's temporary folder")
    options = parser.parse_args()
    device = "cuda" if device_info().kind == "cuda" else "cpu"
    training = Training(options.depth, device)
    training.step()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = RunDirectory(Path(folder) / "run")
        run.checkpoints.mkdir(parents=True)
        found = compare(training, CheckpointSaver(run, keep=1, every=None, best=False), pairs=options.pairs)
        size = sum(file.stat().st_size for file in run.checkpoints.rglob("*") if file.is_file())
    print(f"{device_info().name}, checkpoint of {size / 1e6:.0f} MB, torch {torch.__version__}")
    print(f"stall of the training   {found['stall_s']:.3f} s")
    print(f"the whole save          {found['written_s']:.3f} s")
    print(f"ratio                   {found['stall_ratio']:.3f}")
    print(f"steps beside the writer {found['step_beside_writer_ratio']:.2f} x a step alone")
    print(json.dumps({"device": device_info().name, "bytes": size, **vars(options), **found}))


if __name__ == "__main__":
    main()
