"""How much faster Muon's matrices are updated stacked by shape than one by one.

    python benchmarks/optimizer_step.py [--layers 4] [--width 256] [--pairs 20] [--threads N]

Both ways run in turns in one process on copies of the same matrices; the ratio is taken pair by pair, so that a busy
machine slows both. Prints a table and, as the last line, the same as JSON. Times hold for the machine they name only.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from pipeline.hardware.device import device_info
from pipeline.training.optimizer import MuonAdamW


def block_matrices(*, layers: int, width: int, device: str) -> list[torch.nn.Parameter]:
    """Per layer: queries, keys, values, output (width x width), and the two matrices of an MLP of 4 x width."""
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator) for _ in range(layers) for shape in shapes]
    return [torch.nn.Parameter(matrix.to(device)) for matrix in matrices]


def muon(matrices: list[torch.nn.Parameter], *, product_dtype: str) -> MuonAdamW:
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    settings = {"kind": "muon", "lr": 0.02, "momentum": 0.97, "weight_decay": 0.1, "outputs_first": True}
    return MuonAdamW([{"params": matrices, "name": "matrices", "product_dtype": product_dtype, **settings}])


def seconds(optimizers: list[MuonAdamW], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for optimizer in optimizers:
        optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(*, layers: int, width: int, pairs: int, product_dtype: str, device: str) -> dict[str, float | str]:
    """Median milliseconds of both ways, and the ratio's median, first and last decile."""
    stacked = [muon(block_matrices(layers=layers, width=width, device=device), product_dtype=product_dtype)]
    each = block_matrices(layers=layers, width=width, device=device)
    one_by_one = [muon([matrix], product_dtype=product_dtype) for matrix in each]
    times = [(seconds(one_by_one, device), seconds(stacked, device)) for _ in range(pairs + 2)][2:]  # 2 to warm up
    ratios = [slow / fast for slow, fast in times]
    deciles = statistics.quantiles(ratios, n=10, method="inclusive")
    return {
        "product_dtype": product_dtype,
        "one_by_one_ms": 1e3 * statistics.median(slow for slow, _ in times),
        "stacked_ms": 1e3 * statistics.median(fast for _, fast in times),
        "ratio": statistics.median(ratios),
        "ratio_p10": deciles[0],
        "ratio_p90": deciles[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    info = device_info()
    device = "cuda" if info.kind == "cuda" else "cpu"
    results = [
        compare(layers=options.layers, width=options.width, pairs=options.pairs, product_dtype=dtype, device=device)
        for dtype in ("float32", "bfloat16")
    ]
    print(
        f"{info.name}, {options.threads} threads, {options.layers} layers x {options.width}, torch {torch.__version__}"
    )
    print(f"{'products in':<12} {'one by one':>12} {'stacked':>12} {'ratio':>7}  10 % to 90 %")
    for row in results:
        times = f"{row['one_by_one_ms']:>9.1f} ms {row['stacked_ms']:>9.1f} ms"
        print(
            f"{row['product_dtype']:<12} {times} {row['ratio']:>7.2f}  {row['ratio_p10']:.2f} to {row['ratio_p90']:.2f}"
        )
    print(json.dumps({"device": info.name, **vars(options), "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
