"""Seconds from a command to its first training step, as run_pretrain.sh starts one process and by `accelerate launch`.

    python benchmarks/start_up.py [--pairs 5] [--compile false] [--recipe recipes/quickstart_pretrain.yaml]

Two starts of each way are not counted: the first of all prepares the data. Then runs in turns, each ended at its first row
in metrics.jsonl. ours_s, other_s and ratio are of the wall; cpu_s is what the processes of such a start have used by then,
which other programs on the machine disturb less; first_step_s is the run's own figure, from the start of its process.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
from common import DEVICE, ROOT, TRAIN_ONLY, arguments, compared, show

ENTRY = str(ROOT / "pipeline" / "pretrain.py")
CONFIG = "cpu" if DEVICE == "cpu" else "single_gpu"
WAYS = {
    "ours": [str(ROOT / "pipeline" / "launch" / "launch.py"), ENTRY, ""],
    "other": [
        *("-m", "accelerate.commands.launch"),
        *("--config_file", str(ROOT / "accelerate_configs" / f"{CONFIG}.yaml"), ENTRY),
    ],
}
LIMIT_S = 600.0


def main() -> None:
    recipe = str(ROOT / "recipes" / "quickstart_pretrain.yaml")
    options = arguments(__doc__, pairs=5, compile="false", recipe=recipe)
    found: dict[str, list[dict[str, float]]] = {"ours": [], "other": []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs + 1):
            for way in list(WAYS)[:: -1 if pair % 2 else 1]:
                found[way].append(first_step(way, options, Path(folder), f"{way}{pair}"))
    ours, other = ([start["wall_s"] for start in found[way][1:]] for way in WAYS)
    row = compared(list(zip(ours, other, strict=True)))
    for name in ("cpu_s", "first_step_s"):
        row |= {f"{way}_{name}": median(start[name] for start in found[way][1:]) for way in WAYS}
    show(options, [{"ours": "run_pretrain.sh", "other": "accelerate launch", **row}])


def first_step(way: str, options, folder: Path, name: str) -> dict[str, float]:
    overrides = [
        f"run.name={name}",
        f"run.directory={folder}",
        f"data.cache_dir={folder / 'cache'}",
        f"train.torch_compile={options.compile}",
        "train.logging_steps=1",
        *TRAIN_ONLY,
    ]
    metrics = folder / name / "metrics.jsonl"
    started = time.time()
    process = psutil.Popen(
        [sys.executable, *WAYS[way], options.recipe, *overrides],
        env={**os.environ, "NPROC": "1", "HF_HUB_OFFLINE": "1"},
        stdout=sys.stderr,
    )
    row = next(rows(metrics, process))
    used = cpu_s(process)
    process.terminate()
    process.wait()
    return {"wall_s": row["time"] - started, "cpu_s": used, "first_step_s": row["perf/first_step_s"]}


def rows(metrics: Path, process: psutil.Popen) -> Iterator[dict]:
    """The rows of steps, as they come."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends and process.poll() is None:
        if metrics.exists():
            written = (
                json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")
            )
            yield from (row for row in written if "train/loss" in row)
        time.sleep(0.01)
    sys.exit(f"{metrics}: no step was made; what was started says why above.")


def cpu_s(process: psutil.Popen) -> float:
    """Of the process and those below it, also those that have ended."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += sum(one.cpu_times()[:4])  # user, system, and those of its ended children
        except psutil.NoSuchProcess:
            continue
    return total


if __name__ == "__main__":
    main()
