"""Speed and memory of real training steps at a depth: tokens/s, both MFUs, and the most memory that was taken.

    python benchmarks/train_steps.py [--depth 12] [--steps 50] [--recipe recipes/fineweb_d24.yaml] [section.key=value ...]

Runs the pretraining entry itself on this machine's first device, on the built-in text (what the text says does not change
the time), without evaluations and checkpoints. The first fifth of the steps, which compiles and warms up, is left out; of
the others the median counts. Prints one line of JSON. Two ways are compared by calls in turns, A B A B, in one session.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHOWN = ("perf/step_s", "perf/tok_per_s", "perf/mfu_pct", "perf/bf16_mfu_pct")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "fineweb_d24.yaml"))
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = train(options, Path(folder))
    timed = [row for row in rows if "perf/step_s" in row and row["step"] > options.steps / 5]
    medians = {name: statistics.median(row[name] for row in timed) for name in SHOWN if name in timed[0]}
    told = {"depth": options.depth, "steps": options.steps, "overrides": options.overrides, **medians, **memory()}
    print(json.dumps(told))


def train(options: argparse.Namespace, folder: Path) -> list[dict]:
    """The rows of metrics.jsonl of a run of so many steps."""
    from pipeline.artifacts.rows import read_rows
    from pipeline.pretrain import main as pretrain

    fixed = [
        f"run.directory={folder}",
        "run.name=steps",
        f"model.depth={options.depth}",
        f"train.max_steps={options.steps}",
        "data.sources=[{id: tandem:quickstart_text}]",
        "train.logging_steps=1",
        "train.save_strategy=no",
        "train.eval_strategy=no",
        "evals.bpb.at_start=false",
        "evals.bpb.tokens=2048",
        "evals.bpb.document_bytes=2048",
        "samples.every_steps=0",
        "monitor.trackers=[]",
    ]
    given = {override.partition("=")[0] for override in options.overrides}
    pretrain([options.recipe, *(f for f in fixed if f.partition("=")[0] not in given), *options.overrides])
    return read_rows(folder / "steps" / "metrics.jsonl")


def memory() -> dict[str, float | str]:
    """The device's name and the most memory that training took of it, in GiB (on a CPU the process's)."""
    import torch

    from pipeline.hardware.device import device_info

    if device_info().kind == "cuda":
        return {"device": device_info().name, "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    return {"device": device_info().name, "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


if __name__ == "__main__":
    main()
