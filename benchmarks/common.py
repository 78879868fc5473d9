"""What every benchmark here shares: two ways in turns in one process, their ratio with its spread, a table and JSON.

A busy machine slows both ways of a pair alike, so ratios are taken pair by pair; times hold for the machine they name only.
"""

import argparse
import json
import random
import statistics
import string
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from pipeline.hardware.device import device_info

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if device_info().kind == "cuda" else "cpu"
# Overrides for a run that only trains, watched as ever: what is left of evaluating is the last one.
TRAIN_ONLY = [
    "train.save_strategy=no",
    "train.eval_strategy=no",
    "evals.bpb.at_start=false",
    "evals.bpb.tokens=2048",
    "evals.bpb.document_bytes=2048",
    "samples.every_steps=0",
]

Clock = Callable[[], float]


def wait_for_device() -> None:
    """Let the device end what it was given, so that a clock read afterwards counts it."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Time of one call by that clock, the device's work included."""
    wait_for_device()
    started = clock()
    work()
    wait_for_device()
    return clock() - started


def in_turns(
    ours: Callable[[], Any],
    other: Callable[[], Any],
    *,
    pairs: int,
    warm_up: int = 2,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Run both so many times, A B B A; see `compared`."""
    times = []
    for pair in range(warm_up + pairs):
        if pair % 2:
            others = seconds(other, clock)
            own = seconds(ours, clock)
        else:
            own = seconds(ours, clock)
            others = seconds(other, clock)
        times.append((own, others))
    return compared(times[warm_up:])


def compared(times: list[tuple[float, float]]) -> dict[str, float]:
    """Median seconds of each way, and of the pairs' ratios (ours / other) the median, first and last decile."""
    ratios = [own / other for own, other in times]
    deciles = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios
    return {
        "ours_s": statistics.median(own for own, _ in times),
        "other_s": statistics.median(other for _, other in times),
        "ratio": statistics.median(ratios),
        "ratio_p10": deciles[0],
        "ratio_p90": deciles[-1],
    }


def write_words(path: Path, *, words: int = 60_000, documents: int = 4000) -> Path:
    """Write documents of random words, from which a tokenizer learns a vocabulary of 32,768; the built-in text gives 700."""
    draw = random.Random(0)
    known = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9))) for _ in range(words)]
    lines = (json.dumps({"text": " ".join(draw.choices(known, k=500))}) for _ in range(documents))
    path.write_text("\n".join(lines) + "\n")
    return path


def arguments(doc: str, **defaults: Any) -> argparse.Namespace:
    """The options of a script: its docstring as help, and `--name value` for each of the defaults; --threads always."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    if "threads" not in defaults:
        parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def show(options: argparse.Namespace, rows: list[Mapping[str, Any]]) -> None:
    """Print the rows as a table, and on the last line everything as JSON."""
    facts = {"device": device_info().name, "torch": torch.__version__, **vars(options)}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_text(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(json.dumps({**facts, "results": list(rows)}, default=str))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
