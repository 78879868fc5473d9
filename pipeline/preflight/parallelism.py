"""Collectives of an optimizer step under DDP, FSDP2 and HSDP: bytes by kind, within a host and between hosts, and seconds on the links.

By arithmetic, of what training/sharding.py, training/muon.py and accelerate's DDP do; tests/preflight/test_parallelism.py counts it on real ranks.
shards: ranks that share a model; 1 is DDP, all ranks FSDP, the ranks of a host HSDP.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.hardware.device import Links, tensor_parallel_size
from pipeline.preflight.memory import FP32, Shape, block_matrices, fsdp_units, padded
from pipeline.recipe import Recipe
from pipeline.recipe.sizes import CountedSizes, Sizes

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Share of a link's published rate that collectives of many megabytes reach: an assumption.
LINK_SHARE = 0.8
# Seconds of a call, and of each of its steps within a host and between hosts: NCCL's own model (src/graph/tuning.cc, Ring and Simple; of an
# all-reduce its trees' number of steps).
CALL_S, STEP_S, STEP_BETWEEN_S = 8.4e-6, 3.4e-6, 14e-6
DDP_BUCKET = 25 << 20  # bytes of gradients that DDP reduces together, torch's default
MUON_SHARED_FROM = 1 << 18  # elements of a stack, as in training/muon.py


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step of one rank.

    size: bytes of the whole tensors of all calls: gathered, reduced, or (all-to-all) handed over by the rank that has most. ranks: of the
    group, on so many hosts.
    """

    kind: Kind
    calls: int
    size: int
    ranks: int
    hosts: int

    def sent(self) -> tuple[float, float]:
        """Return the bytes that one device sends to its own host and to others, mean of the host's devices.

        All but all-to-all go round in rings that enter each host once, as many rings as a host has devices; a tree carries as much.
        """
        local = self.ranks // self.hosts
        if self.kind == "all-to-all":
            return self.size * (local - 1) / self.ranks, self.size * (self.ranks - local) / self.ranks
        total = self.size * (self.ranks - 1) / self.ranks * (2 if self.kind == "all-reduce" else 1)
        between = total / local if self.hosts > 1 else 0.0
        return total - between, between

    def seconds(self, links: Links) -> float:
        within, between = self.sent()
        crossings, steps = {
            "all-to-all": (0.0, 0.0),
            "all-reduce": (
                2 * math.log2(self.hosts),
                2.0 * (self.ranks // self.hosts - 1),
            ),  # up a tree of hosts and down
        }.get(self.kind, (self.hosts - 1.0, float(self.ranks - self.hosts)))
        call = CALL_S + STEP_BETWEEN_S * crossings + STEP_S * steps
        return max(within / links.within_bytes_s, between / links.between_bytes_s) / LINK_SHARE + self.calls * call


def collectives(
    recipe: Recipe,
    sizes: Sizes | CountedSizes,
    *,
    processes: int,
    hosts: int,
    shards: int,
    micro_steps: int,
    half: bool,
) -> list[Collective]:
    """Return the collectives of a step that grow with the model. half: products are of 16 bits."""
    if processes == 1 or tensor_parallel_size() > 1:  # tensor parallelism's sums of activations are not counted
        return []
    spanned = -(-shards * hosts // processes)  # hosts of the ranks that share a model
    stacks = muon_stacks(recipe, sizes)
    if shards == 1:  # DDP: all gradients once, and of Muon's directions each stack's from its makers
        gradients = FP32 * sizes.parameters()["total"]
        shared = [-(-n // processes) * processes * rows * columns for (rows, columns), n in stacks.items() if n > 1 and n * rows * columns >= MUON_SHARED_FROM]  # fmt: skip
        return [
            Collective("all-reduce", -(-gradients // DDP_BUCKET), gradients, processes, hosts),
            Collective("all-gather", len(shared), (2 if half else FP32) * sum(shared), processes, hosts),
        ]
    root, *others = (padded(unit, shards) for unit in fsdp_units(sizes))
    everything, units = FP32 * micro_steps * (root + sum(others)), micro_steps * (1 + len(others))
    # Blocks are gathered for the forward and again for the backward pass; gradients are reduced in every micro-step.
    again, twice = FP32 * micro_steps * sum(others), micro_steps * len(others)
    found = [
        Collective("all-gather", units + twice, everything + again, shards, spanned),
        Collective("reduce-scatter", units, everything, shards, spanned),
    ]
    if stacks:
        found.append(Collective("all-to-all", 2 * len(stacks), FP32 * max(_exchanged(stacks, shards)), shards, spanned))
    if (replicas := processes // shards) > 1:
        found.append(Collective("all-reduce", units, everything // shards, replicas, min(hosts, replicas)))
    return found


def muon_stacks(recipe: Recipe, sizes: Sizes | CountedSizes) -> dict[Shape, int]:
    """Return how many matrices of each shape Muon updates, in its order; none where they are not known one by one."""
    stacks: dict[Shape, int] = defaultdict(int)
    if recipe.optimizer.type == "muon_adamw" and isinstance(sizes, Sizes):
        for layer in range(sizes.n_layer):
            for shape in block_matrices(sizes, layer):
                stacks[shape] += 1
    return stacks


def _exchanged(stacks: dict[Shape, int], ranks: int) -> list[int]:
    """Return the elements that each rank hands over for Muon: its rows of all matrices to their owners, and of its own ones the directions
    to all, with the variances of each neuron."""
    sent, first = [0] * ranks, 0
    for (rows, columns), count in stacks.items():
        most = -(-rows // ranks)
        for rank in range(ranks):
            own = len(range((rank - first) % ranks, count, ranks))
            height = min(max(rows - rank * most, 0), most)
            sent[rank] += count * height * columns + own * (rows * columns + ranks * max(rows, columns))
        first += count
    return sent


def muon_flops(stacks: dict[Shape, int], ranks: int) -> int:
    """Return the FLOPs of the rank that orthogonalises most: five products of a matrix with its gram matrix, twice, and of that with itself."""
    done, first = [0] * ranks, 0
    for (rows, columns), count in stacks.items():
        short, long = sorted((rows, columns))
        for n in range(first, first + count):
            done[n % ranks] += 5 * (4 * short**2 * long + 2 * short**3)
        first += count
    return max(done)
