"""What a subject shares with the driver: arguments, the journal of its steps, the place where it waits for the kill.

Standard library only, and nothing else of this repository is imported: a trainer elsewhere may copy this one file.
"""

import argparse
import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOLD = "hold"  # the driver's file in the subject's folder: {"step": 8}, or {"step": 11, "save": 10}
PATIENCE_S = 600  # a subject whose driver is gone does not wait forever
SMALLEST_LIMIT = 32 * 1024  # bytes; the journal and the log of a short training stay below it


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return what the driver says: folder, rows, epochs, batch, save_every, workers, and what follows from them.

    batch is that of all ranks together. rank, ranks and rank_batch come from RANK and WORLD_SIZE. steps are those of
    whole epochs; max_steps ends two steps earlier, for a trainer that is given a number of steps.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the subject keeps its checkpoints and journal"
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step, over all ranks")
    parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--workers", type=int, default=0, help="processes of the data loader, per rank")
    given = parser.parse_args(argv)
    given.rank = int(os.environ.get("RANK", "0"))
    given.ranks = int(os.environ.get("WORLD_SIZE", "1"))
    given.rank_batch = given.batch // given.ranks
    given.steps = given.rows * given.epochs // given.batch
    given.max_steps = given.steps - 2
    return given


def row_ids(row: int, *, length: int = 16, vocabulary: int = 128) -> list[int]:
    """Return the ids of a row: its number first, then ids that follow from it and can be learned."""
    return [row, *((row * 7 + place * 3) % vocabulary for place in range(1, length))]


class Journal:
    """The lines of `steps.RANK.jsonl` that the driver judges by."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"steps.{os.environ.get('RANK', '0')}.jsonl"
        hold = self.folder / HOLD
        self.hold = json.loads(hold.read_text()) if hold.exists() else {}

    def start(self, step: int) -> None:
        """Note the step that this start continues from: 0 for a new training, k when checkpoint k was loaded."""
        self._write({"start": step})

    def step(self, step: int, rows: Iterable[int | str], loss: float | None = None) -> None:
        """Note a step, counted from 1, with this rank's rows and loss; wait here if it is where the cut falls.

        Call it after the optimizer's step and before the checkpoint of that step, in the process of the trainer.
        """
        self._write({"step": step, "rows": list(rows), "loss": None if loss is None else float(loss)})
        if step == self.hold.get("save"):
            self._die_in_a_file()
        if step >= self.hold.get("step", sys.maxsize):
            self._wait_to_be_killed()

    def end(self, step: int, weights: Any) -> None:
        """Note the regular end and the final weights: a model with a state_dict, or nested tensors and numbers."""
        self._write({"end": step, "weights": digest(weights)})

    def _write(self, entry: dict) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")

    def _wait_to_be_killed(self) -> None:
        parent = os.getppid()
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends and os.getppid() == parent:
            time.sleep(0.02)
        os._exit(1)

    def _die_in_a_file(self) -> None:
        """End this process, as a kill would, at half the size that the largest file of the last checkpoint has.

        The kernel does it (SIGXFSZ): at the same byte in every run, also in files that a compiled library writes.
        """
        largest = 0
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                largest = max(largest, path.stat().st_size)
        if largest // 2 < SMALLEST_LIMIT:
            return
        self._write({"limit": largest // 2})
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, largest // 2))


def digest(weights: Any) -> str:
    """Return a hash of the values, the same for the same bits."""
    found = hashlib.sha256()
    _feed(found, weights)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dict):
        for key in sorted(value):
            found.update(str(key).encode())
            _feed(found, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(found, item)
    elif hasattr(value, "detach"):  # a tensor; numpy has no bfloat16, and every one of its values is a float32
        value = value.detach().cpu().contiguous()
        if "bfloat16" in str(value.dtype):
            value = value.float()
        found.update(value.numpy().tobytes())
    else:
        found.update(repr(value).encode())
