"""How many rows of one forward pass memory holds, by arithmetic: what `train.per_device_train_batch_size: auto` is planned as."""

import math

from pipeline.hardware.cpu import available_bytes
from pipeline.hardware.device import DeviceInfo
from pipeline.preflight.memory import memory_of
from pipeline.recipe import Recipe
from pipeline.recipe.batch import micro_batch, rows_per_step
from pipeline.recipe.counted_sizes import CountedSizes
from pipeline.recipe.sizes import Sizes

UNKNOWN = 8  # rows, where arithmetic knows too little: transformers' own default
# Row positions on a CPU, which has enough to do with them: more take memory and save nothing that we know of.
CPU_POSITIONS = 16_384
# Of a CPU's available memory, which others use too; of a device's, whose allocator leaves holes.
CPU_SHARE, DEVICE_SHARE = 0.5, 0.9


def options(recipe: Recipe, processes: int) -> list[int]:
    """The divisors of the rows of a step that one process gets, largest first: none of them adds padding."""
    rows = math.ceil(rows_per_step(recipe) / processes)
    return [n for n in range(rows, 0, -1) if rows % n == 0]


def planned_micro_batch(
    recipe: Recipe,
    sizes: Sizes | CountedSizes | None,
    device: DeviceInfo,
    *,
    processes: int,
    half: bool,
    compiled: bool,
) -> int:
    """The largest option that fits by arithmetic, 1 at the least. half, compiled: as for memory_of."""
    on_cpu = device.kind == "cpu"
    limit = CPU_SHARE * available_bytes() / processes if on_cpu else DEVICE_SHARE * (device.memory_gib or 0) * 2**30
    for rows in options(recipe, processes):
        recipe.micro_batch = rows  # which memory_of reads
        need = memory_of(recipe, sizes, processes=processes, half=half, compiled=compiled).total if sizes else None
        fits = need <= limit if need is not None and limit else rows <= UNKNOWN
        if fits and not (on_cpu and rows * recipe.data.row_tokens > CPU_POSITIONS):
            return rows
    return 1


def larger_micro_batch(recipe: Recipe, fixed: int | None, *, peak: float, limit: float, processes: int) -> int | None:
    """Twice the micro-batch, where it divides the rows of a step and would fit too; else None.

    fixed: bytes that do not grow with it, by arithmetic; what was measured beyond them doubles. peak: measured bytes;
    limit: the device's.
    """
    doubled = 2 * micro_batch(recipe)
    if fixed is None or doubled not in options(recipe, processes):
        return None
    return doubled if peak + max(peak - fixed, 0) <= DEVICE_SHARE * limit else None
