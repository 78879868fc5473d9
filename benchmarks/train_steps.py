"""Speed and memory of real training steps at a depth: tokens/s, both MFUs, and the most memory that was taken.

    python benchmarks/train_steps.py [--depth 12] [--steps 50] [--recipe recipes/fineweb_d24.yaml] [section.key=value ...]

Runs the pretraining entry itself on this machine's first device, on random words (what the text says does not change the
time, its vocabulary does), without evaluations and checkpoints. The first fifth of the steps, which compiles and warms up, is left out; of
the others the median counts, with the first and last decile of the step's seconds. Two ways are compared by calls in turns,
A B A B, in one session, or by quarter_hour.py.
"""

import argparse
import resource
import statistics
import tempfile
from pathlib import Path

import torch
from common import DEVICE, ROOT, TRAIN_ONLY, show, write_words

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
    show(options, [measured(rows, options.steps)])


def measured(rows: list[dict], steps: int) -> dict[str, float]:
    """Medians of the steps after the first fifth, and the most memory that training took."""
    timed = [row for row in rows if "perf/step_s" in row and row["step"] > steps / 5]
    medians = {name: statistics.median(row[name] for row in timed) for name in SHOWN if name in timed[0]}
    seconds = [row["perf/step_s"] for row in timed]
    deciles = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds
    spread = {"step_s_p10": deciles[0], "step_s_p90": deciles[-1]}
    return {**medians, **spread, "loss": timed[-1]["train/loss"], "peak_memory_gib": peak_memory_gib()}


def train(options: argparse.Namespace, folder: Path) -> list[dict]:
    """The rows of metrics.jsonl of a run of so many steps."""
    from pipeline.pretrain import main as pretrain
    from pipeline.run_dir.rows import read_rows

    given = {override.partition("=")[0] for override in options.overrides}
    fixed = [
        f"run.directory={folder}",
        "run.name=steps",
        f"model.depth={options.depth}",
        f"train.max_steps={options.steps}",
        "train.logging_steps=1",
        *TRAIN_ONLY,
        "monitor.trackers=[]",
    ]
    if "data.sources" not in given:
        fixed.append(f"data.sources=[{{files: {write_words(folder / 'words.jsonl')}}}]")
    pretrain([options.recipe, *(f for f in fixed if f.partition("=")[0] not in given), *options.overrides])
    return read_rows(folder / "steps" / "metrics.jsonl")


def peak_memory_gib() -> float:
    """The most memory that training took of the device; on a CPU the process's."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
