"""The report of a run of a million logged steps: seconds, memory, and the size of its page.

    python benchmarks/report_scale.py [--rows 1000000] [--limit-s 20]

The rows are made here, with the names, digits and restarts of a real run's. Timed is the command a person types, imports
included. Ends with status 1 above the limit, or when the page is larger than 2 MB.
"""

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUPS = ("embeddings", "value_embeddings", "head", "matrices", "scalars", "x0_lambdas", "gates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--limit-s", type=float, default=20.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "long"
        write_long_run(run, rows=arguments.rows)
        size = (run / "metrics.jsonl").stat().st_size
        started, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, "-m", "pipeline.report", run], check=True, cwd=ROOT)
        seconds, after = time.perf_counter() - started, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        page = (run / "report" / "report.html").stat().st_size
    print(
        f"{arguments.rows:,} rows, {size / 2**20:,.0f} MiB of metrics.jsonl: {seconds:.1f} s ({cpu:.1f} s of processor)"
    )
    print(f"peak memory {peak:.2f} GiB, report.html {page / 1e6:.2f} MB")
    sys.exit(seconds > arguments.limit_s or page > 2e6)


def write_long_run(run: Path, *, rows: int) -> None:
    """A run of that many logged steps, validated a thousand times, restarted twice, its last line torn."""
    run.mkdir(parents=True)
    (run / "run_manifest.json").write_text(json.dumps({"name": "long", "stage": "pretrain", "world_size": 8}))
    (run / "recipe.yaml").write_text("train:\n  max_grad_norm: 1.0\n")
    noise = [random.Random(n).random() for n in range(9973)]
    with open(run / "metrics.jsonl", "w") as file:
        clock, attempt = 1.79e9, 0
        for step in range(1, rows + 1):
            if step in (1, rows // 3, rows // 2):
                attempt += 1
                start = 0 if attempt == 1 else step - 50
                file.write(json.dumps({"event": "attempt", "attempt": attempt, "step": start, "time": clock}) + "\n")
            clock += 0.25
            row = _row(step, attempt, clock, noise[step % 9973], rows)
            file.write(json.dumps(row) + "\n")
            if step % max(rows // 1000, 1) == 0:
                stamp = {name: row[name] for name in ("step", "attempt", "time", "tokens")}
                scores = {"val/bpb": 2.5 - step / rows, "val/loss": row["train/loss"] + 0.01, "perf/eval_s": 12.5}
                file.write(json.dumps(stamp | scores) + "\n")
        file.write('{"step": 12, "train/lo')


def _row(step: int, attempt: int, clock: float, noise: float, rows: int) -> dict[str, float]:
    loss, multiplier = 3 + 8 * math.exp(-9 * step / rows) + noise / 5, 1 - step / rows
    tokens_per_s = 1e6 * (1 + noise / 50)
    row = {
        "step": step,
        "attempt": attempt,
        "time": clock,
        "tokens": step * 524_288,
        "train/loss": loss,
        "train/loss_ema": loss - noise / 6,
        "perf/step_s": 0.25 + noise / 100,
        "perf/tok_per_s": tokens_per_s,
        "perf/tok_per_s_per_gpu": tokens_per_s / 8,
        "perf/tflops_per_gpu": 400 + noise,
        "perf/mfu_pct": 40 + noise,
        "perf/eta_s": (rows - step) / 4 + noise,
        "perf/total_s": step / 4 + noise,
        "data/wait_s": noise / 1000,
        "data/wait_frac": noise / 250,
        "optim/grad_norm": 0.3 + noise,
        "optim/lr": 0.3 * multiplier,
        "optim/lrm": multiplier,
        "data/tokens": step * 520_000,
        "data/samples": step * 256,
        "data/epoch": 1,
        "data/pq": step % 300,
        "data/rg": step % 50,
        "mem/allocated_gib": 20 + noise,
        "mem/device_used_gib": 60 + noise,
        "gpu/power_w": 600 + 50 * noise,
        "gpu/util_pct": 98 + noise,
    }
    return row | {f"optim/lr/{name}": 0.1 * (n + 1) * multiplier for n, name in enumerate(GROUPS)}


if __name__ == "__main__":
    main()
