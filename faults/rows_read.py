"""Which rows a run really trained on: the tokens of every row that has a weight, by step, as each rank was given them."""

import hashlib
import json
import os
from collections import Counter, defaultdict
from pathlib import Path


def record_rows(path: Path) -> None:
    """From now on this process appends a line per micro-batch: its step and the hash of each row that counts."""
    from pipeline.data.rows import TrainingRows

    read = TrainingRows.micro_batch

    def micro_batch(self, step, micro_step, **how):
        batch = read(self, step, micro_step, **how)
        labels = batch.get("shift_labels", batch.get("labels"))
        rows = [
            hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]
            for ids, targets in zip(batch["input_ids"], labels, strict=True)
            if bool((targets != -100).any())
        ]
        with open(path, "a") as file:
            file.write(json.dumps({"step": step, "process": os.getpid(), "rows": rows}) + "\n")
        return batch

    TrainingRows.micro_batch = micro_batch


def rows_by_step(paths: list[tuple[Path, int, int]]) -> dict[int, Counter]:
    """Rows of the steps that count: of each (file of an attempt, first step, end step)."""
    steps: dict[int, Counter] = defaultdict(Counter)
    for path, first, end in paths:
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # torn by the kill; that step is made again
            if first <= entry["step"] < end:
                steps[entry["step"]].update(entry["rows"])
    return steps
