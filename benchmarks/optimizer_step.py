"""Muon's step stacked by shape, against our own one matrix at a time, and against torch.optim.Muon.

    python benchmarks/optimizer_step.py [--layers 4] [--width 256] [--pairs 20] [--compiled 1]
    python benchmarks/optimizer_step.py --calls 1 [--layers 12]

On copies of the same matrices with random gradients. torch.optim.Muon multiplies in bfloat16, takes the matrices one by one
and does less: no row norms before, no exact norm after, no scale per neuron, no cautious decay. --compiled 1 adds the compiled
step against the uncompiled one.

--calls 1 counts instead the calls of torch that a step of the whole optimizer of fineweb_d12 makes at so many layers, with a small
width: views left out, and a compiled graph as one; then the graphs, and the products inside them.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from common import DEVICE, arguments, in_turns, show

from pipeline.model.build import build_model
from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import model_fields
from pipeline.training.optimizer import MuonAdamW, parameter_groups

RATES = {"lr": 0.02, "momentum": 0.97, "weight_decay": 0.1}
GRAPH = "Torch-Compiled Region"  # as the profiler names the call of a compiled graph
PRODUCTS = ("aten::bmm", "aten::baddbmm")
VIEWS = [  # and what makes a tensor without filling it
    "alias",
    "as_strided",
    "detach",
    "detach_",
    "diagonal",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "flatten",
    "lift_fresh",
    "movedim",
    "mT",
    "permute",
    "select",
    "slice",
    "split",
    "squeeze",
    "t",
    "to",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
    "view_as",
    "_unsafe_view",
]


def block_matrices(*, layers: int, width: int) -> list[torch.nn.Parameter]:
    """Per layer: queries, keys, values, output (width x width), and the two matrices of an MLP of 4 x width."""
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator).to(DEVICE) for _ in range(layers) for shape in shapes]
    parameters = [torch.nn.Parameter(matrix) for matrix in matrices]
    for matrix in parameters:
        matrix.grad = torch.randn_like(matrix)
    return parameters


def muon(matrices: list[torch.nn.Parameter], *, product_dtype: str, backend: str | None = None) -> MuonAdamW:
    group = {"params": matrices, "name": "matrices", "kind": "muon", "outputs_first": True}
    return MuonAdamW([{**group, "product_dtype": product_dtype, **RATES}], backend=backend)


def whole_optimizer(*, layers: int, backend: str | None, product_dtype: str = "bfloat16") -> MuonAdamW:
    """Return the optimizer of fineweb_d12 with so many layers of a small width, over random gradients."""
    recipe = read_recipe(["fineweb_d12", f"model.depth={layers}"], stage="pretrain")
    fields = model_fields(recipe.model, vocab_size=64, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = build_model("tandem", {**fields, "n_embd": 8 * fields["n_head"], "n_positions": 64}, seed=0).to(DEVICE)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    groups = parameter_groups(model, recipe.optimizer, product_dtype=product_dtype)
    return MuonAdamW(groups, backend=backend)


def count_calls(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the calls of torch that one step makes, views left out and a compiled graph as one; the graphs among them; and
    the products inside the graphs. The first step, which makes states and graphs, is not counted."""
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.step()
    counts = {"calls": 0, "graphs": 0, "products_in_graphs": 0}
    for event in profiled.events():
        above = event.cpu_parent
        inside = ""
        while above is not None and not inside:
            if above.name.startswith(("aten::", GRAPH)):
                inside = above.name
            above = above.cpu_parent
        if event.name.startswith(GRAPH):
            counts["graphs"] += 1
            counts["calls"] += 1
        elif not inside and event.name.startswith("aten::") and event.name.removeprefix("aten::") not in VIEWS:
            counts["calls"] += 1
        elif inside.startswith(GRAPH) and event.name in PRODUCTS:
            counts["products_in_graphs"] += 1
    return counts


def show_calls(options: argparse.Namespace) -> None:
    rows = []
    for backend in (None, "inductor"):
        optimizer = whole_optimizer(layers=options.layers, backend=backend)
        rows.append({"compiled": backend or "no", **count_calls(optimizer)})
    show(options, rows)


def main() -> None:
    options = arguments(__doc__, layers=4, width=256, pairs=20, calls=0, compiled=0)
    if options.calls:
        show_calls(options)
        return
    sizes = {"layers": options.layers, "width": options.width}
    rows = []
    for dtype in ("float32", "bfloat16"):
        stacked = muon(block_matrices(**sizes), product_dtype=dtype)
        each = [muon([matrix], product_dtype=dtype) for matrix in block_matrices(**sizes)]

        def one_by_one(each=each) -> None:
            for optimizer in each:
                optimizer.step()

        found = in_turns(stacked.step, one_by_one, pairs=options.pairs)
        rows.append({"products": dtype, "ours": "stacked", "other": "one by one", **found})
        if options.compiled:
            fused = muon(block_matrices(**sizes), product_dtype=dtype, backend="inductor")
            found = in_turns(fused.step, stacked.step, pairs=options.pairs)
            rows.append({"products": dtype, "ours": "compiled", "other": "stacked", **found})
    other = torch.optim.Muon(block_matrices(**sizes), **RATES)
    found = in_turns(stacked.step, other.step, pairs=options.pairs)
    rows.append({"products": dtype, "ours": "stacked", "other": "torch.optim.Muon", **found})
    show(options, rows)


if __name__ == "__main__":
    main()
