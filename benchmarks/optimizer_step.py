"""Muon's step stacked by shape, against our own one matrix at a time, and against torch.optim.Muon.

    python benchmarks/optimizer_step.py [--layers 4] [--width 256] [--pairs 20]

On copies of the same matrices with random gradients. torch.optim.Muon multiplies in bfloat16, takes the matrices one by one
and does less: no row norms before, no exact norm after, no scale per neuron, no cautious decay.
"""

import torch
from common import DEVICE, arguments, in_turns, show

from pipeline.training.optimizer import MuonAdamW

RATES = {"lr": 0.02, "momentum": 0.97, "weight_decay": 0.1}


def block_matrices(*, layers: int, width: int) -> list[torch.nn.Parameter]:
    """Per layer: queries, keys, values, output (width x width), and the two matrices of an MLP of 4 x width."""
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator).to(DEVICE) for _ in range(layers) for shape in shapes]
    parameters = [torch.nn.Parameter(matrix) for matrix in matrices]
    for matrix in parameters:
        matrix.grad = torch.randn_like(matrix)
    return parameters


def muon(matrices: list[torch.nn.Parameter], *, product_dtype: str) -> MuonAdamW:
    group = {"params": matrices, "name": "matrices", "kind": "muon", "outputs_first": True}
    return MuonAdamW([{**group, "product_dtype": product_dtype, **RATES}])


def main() -> None:
    options = arguments(__doc__, layers=4, width=256, pairs=20)
    sizes = {"layers": options.layers, "width": options.width}
    rows = []
    for dtype in ("float32", "bfloat16"):
        stacked = muon(block_matrices(**sizes), product_dtype=dtype)
        each = [muon([matrix], product_dtype=dtype) for matrix in block_matrices(**sizes)]

        def one_by_one(each=each) -> None:
            for optimizer in each:
                optimizer.step()

        found = in_turns(stacked.step, one_by_one, pairs=options.pairs)
        rows.append({"products": dtype, "other": "one by one", **found})
    other = torch.optim.Muon(block_matrices(**sizes), **RATES)
    rows.append(
        {"products": dtype, "other": "torch.optim.Muon", **in_turns(stacked.step, other.step, pairs=options.pairs)}
    )
    show(options, rows)


if __name__ == "__main__":
    main()
