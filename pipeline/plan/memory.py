"""Memory and disk that a run takes, and what its ranks send each other, by arithmetic from its sizes. Bytes
everywhere."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeline.hardware.accelerators import DeviceInfo
from pipeline.hardware.device import batch_ranks, model_shards
from pipeline.hardware.processor import available_bytes
from pipeline.recipe import Recipe
from pipeline.recipe.batch import micro_batch, rows_per_step
from pipeline.recipe.model_statistics import CountedSizes
from pipeline.recipe.schema import with_values
from pipeline.recipe.sizes import SMEAR_GATE_CHANNELS, VALUE_GATE_CHANNELS, Sizes

FP32 = 4
# Bytes that the backward pass keeps per block, row position and unit of width: (modern, any other block), by 16-bit
# autocast and torch.compile. Counted on Tandem's blocks without dropout, whose masks come on top
# (tests/plan/test_memory.py counts again).
KEPT = {
    (True, False): (50, 60),
    (True, True): (45, 36),
    (False, False): (85, 112),
    (False, True): (82, 64),
}
KEPT_OUTSIDE = 25  # embeddings, last norm, head's input
# The chunked loss holds at most so many logits at a time: twice in fp32, and their product and gradient in the compute
# format.
LOSS_CHUNK_ELEMENTS, CPU_LOSS_CHUNK_ELEMENTS, LOSS_BYTES = 2**25, 2**23, 3 * FP32
# Resident memory of a training process on a CPU beside its tensors: Python with all that a stage imports, threads, and
# the products' own buffers; and what torch.compile adds. Measured with torch 2.13 and transformers 5.23 (docs/log.md,
# 2026-11-23).
PROCESS_BYTES, COMPILER_BYTES = 520 << 20, 120 << 20
# A CPU's process keeps what it has freed (hardware/processor.py: keep_freed_memory), in pieces that the next tensors
# do not fill.
KEPT_FREED = 1.15
# Of a pair of positions and a head, where attention is made of plain products: its weights in fp32, to which a copy in
# 16 bits comes.
EAGER_BYTES = 4
# Bytes of optimizer state for each parameter, by train.optim's beginning.
TRAINER_STATES = {
    "adamw_torch_4bit": 1, "adamw_torch_8bit": 2, "adamw_bnb_8bit": 2, "adamw_8bit": 2, "adamw_torch": 8,
    "adamw_anyprecision": 8, "sgd": 0, "adagrad": 4, "stable_adamw": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Memory of one process, with all weights replicated (DDP) or its share of them (FSDP2). process and activations
    are estimates; the rest is exact up to padding.

    process, saved: on a CPU, whose memory holds Python, the libraries and the copy of a checkpoint that is being
    written too.
    """

    weights: int
    gradients: int  # with DDP's buckets, which hold them a second time
    optimizer: int | None  # None when the optimizer is not one we know
    activations: int
    process: int = 0
    saved: int = 0

    @property
    def fixed(self) -> int | None:
        """Return what is needed whatever the micro-batch."""
        if self.optimizer is None:
            return None
        return self.weights + self.gradients + self.optimizer + self.process + self.saved

    @property
    def total(self) -> int | None:
        return None if self.fixed is None else self.fixed + self.activations


def memory_of(
    recipe: Recipe,
    sizes: Sizes | CountedSizes,
    *,
    processes: int,
    half: bool,
    compiled: bool,
    on_cpu: bool = False,
    rows: int | None = None,
    shards: int | None = None,
) -> Memory:
    """Return the memory of one process. half: matrices are multiplied in bf16 or fp16 under autocast, over fp32
    masters. rows: None for the recipe's micro-batch. shards: processes that share a model (FSDP2), 1 for none; None
    for what the launcher asks for."""
    weights = weight_bytes(recipe, sizes)
    activations = _activations(
        recipe, sizes, rows=rows or micro_batch(recipe), half=half, compiled=compiled, on_cpu=on_cpu
    )
    saves = on_cpu and recipe.train["save_strategy"] != "no"
    saved = (checkpoint_bytes(recipe, sizes) or 0) if saves else 0
    gradients, optimizer = weights * (2 if processes > 1 else 1), optimizer_bytes(recipe, sizes)
    if shards is None:
        shards = model_shards(processes)
    if shards > 1:
        units = fsdp_units(sizes)
        own = sum(padded(unit, shards) for unit in units) // shards
        if recipe.optimizer.type == "muon_adamw":  # every rank keeps all variances
            matrices = sum(padded(block_matrices(sizes, n), shards) for n in range(sizes.n_layer)) // shards
            states = sizes.variances + (2 + weight_copies(recipe)) * own - matrices
            optimizer = FP32 * states
        elif optimizer is not None:
            optimizer = optimizer * FP32 * own // weights
        weights = gradients = FP32 * own + gathered_bytes(units)
        saved //= processes  # each writes a part
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=round(KEPT_FREED * activations) if on_cpu else activations,
        process=PROCESS_BYTES + compiled * COMPILER_BYTES if on_cpu else 0,
        saved=saved,
    )


Shape = tuple[int, int]  # rows, by which FSDP2 cuts, and columns


def block_matrices(sizes: Sizes | CountedSizes, layer: int) -> list[Shape]:
    """Return the matrices of a block as they are stored, which Muon updates; of a counted model one that stands for
    all of them."""
    width = sizes.n_embd
    if not isinstance(sizes, Sizes):
        return [(width, sizes.parameters()["matrices"] // sizes.n_layer // width)]
    heads, kv, inner = sizes.n_head * sizes.head_dim, sizes.n_kv_head * sizes.head_dim, sizes.n_inner
    if sizes.biases:  # Conv1D's, (in, out)
        return [(width, heads + 2 * kv), (heads, width), (width, inner), (inner, width)]
    gate = [(sizes.n_kv_head, VALUE_GATE_CHANNELS)] * _has_value_embedding(sizes, layer)
    return [(heads, width), (kv, width), (kv, width), (width, heads), *gate, (inner, width), (width, inner)]


def _has_value_embedding(sizes: Sizes, layer: int) -> bool:
    return bool(sizes.value_embedding_layers) and layer % 2 == (sizes.n_layer - 1) % 2


def fsdp_units(sizes: Sizes | CountedSizes) -> list[list[Shape]]:
    """Return the parameters that FSDP2 gathers together: first those that stay whole through a micro-step (the head or
    the table that it is tied to, and what is in no other unit), then each block's, and at last a table of bigrams and
    an untied one of tokens."""
    width, counts = sizes.n_embd, sizes.parameters()
    table = [(sizes.vocab_rows, width)]
    blocks = [block_matrices(sizes, layer) for layer in range(sizes.n_layer)]
    if not isinstance(sizes, Sizes):
        root = [(sizes.vocab_rows, (counts["head"] or counts["embeddings"]) // sizes.vocab_rows)]
        return [root, *blocks, *([table] if counts["head"] else [])]
    kv = sizes.n_kv_head * sizes.head_dim
    norm = [(width, 1)] * sizes.norm_parameters
    for layer, block in enumerate(blocks):
        block += 2 * norm + ([(sizes.vocab_rows, kv)] if _has_value_embedding(sizes, layer) else [])
        if sizes.biases:
            block += [(sizes.n_head * sizes.head_dim + 2 * kv, 1), (width, 1), (sizes.n_inner, 1), (width, 1)]
    root = [*table, (sizes.learned_positions, width), *norm]
    root += [(sizes.n_layer, 1)] * 2 * sizes.residual_lambdas + [(1, 1)] * sizes.backout
    root += [(1, SMEAR_GATE_CHANNELS), (1, 1)] * sizes.smear
    bigrams = [(sizes.bigram_embeddings, width)] * bool(sizes.bigram_embeddings)
    root += [(sizes.n_layer, 1)] * len(bigrams)
    return [root, *blocks, *([bigrams] if bigrams else []), *([] if sizes.tied else [table])]


def padded(unit: list[Shape], shards: int) -> int:
    """Return the elements of a unit over all ranks: each rank has as many rows of every parameter as the one with the
    most."""
    return sum(-(-rows // shards) * shards * columns for rows, columns in unit)


def gathered_bytes(units: list[list[Shape]]) -> int:
    """Return what a rank holds whole of a sharded model's weights, and of their gradients: the first unit through a
    step, a block and the next one."""
    root, *others = (padded(unit, 1) for unit in units)
    return FP32 * (root + max((a + b for a, b in pairwise(others)), default=sum(others)))


def weight_bytes(recipe: Recipe, sizes: Sizes | CountedSizes) -> int:
    """Return one copy of the weights as they are trained, and of anything that is stored like them."""
    return FP32 * sizes.parameters()["total"] - _narrower_bytes(recipe, sizes)


def _narrower_bytes(recipe: Recipe, sizes: Sizes | CountedSizes) -> int:
    """Return what model.embedding_dtype takes off one copy of the weights in fp32."""
    return FP32 // 2 * sizes.table_parameters if recipe.model.embedding_dtype == "bfloat16" else 0


def optimizer_bytes(recipe: Recipe, sizes: Sizes | CountedSizes) -> int | None:
    """Optimizer state of one copy of the weights: what memory holds and what a checkpoint stores."""
    of_updates = _update_rule_bytes(recipe, sizes)
    return None if of_updates is None else of_updates + weight_copies(recipe) * weight_bytes(recipe, sizes)


def weight_copies(recipe: Recipe) -> int:
    """Return how many more copies of the weights the optimizer keeps."""
    return bool(recipe.optimizer.average_steps) + (recipe.optimizer.ema_nesterov is not None)


def _update_rule_bytes(recipe: Recipe, sizes: Sizes | CountedSizes) -> int | None:
    parameters = sizes.parameters()
    kind = recipe.optimizer.type
    if kind == "adamw":
        return 2 * weight_bytes(recipe, sizes)
    if kind == "muon_adamw":
        # Momentum, and one row or column of variances a matrix.
        return FP32 * (sizes.variances - parameters["matrices"]) + 2 * weight_bytes(recipe, sizes)
    if kind == "trainer":
        optim = str(recipe.train.get("optim"))
        known = [name for name in TRAINER_STATES if optim.startswith(name)]
        if not known:
            return None
        size = TRAINER_STATES[max(known, key=len)]
        copies = size // FP32  # numbers of a parameter's own dtype; what is less is an 8- or 4-bit state
        return size * parameters["total"] - copies * _narrower_bytes(recipe, sizes)
    return None


def _activations(
    recipe: Recipe, sizes: Sizes | CountedSizes, *, rows: int, half: bool, compiled: bool, on_cpu: bool
) -> int:
    positions, parameters = rows * sizes.row_tokens, sizes.parameters()
    kept = KEPT[half, compiled][0 if recipe.model.preset.startswith("modern") else 1] * positions * sizes.n_embd
    if (recipe.model.chosen_attention or recipe.model.attn_implementation) == "eager":
        kept += (EAGER_BYTES + 2 * half) * positions * sizes.row_tokens * (sizes.n_head or 0)
    if recipe.train.get("activation_checkpointing") or recipe.train.get("gradient_checkpointing"):
        # Each block's input, and one block at a time in full.
        blocks = FP32 * sizes.n_layer * positions * sizes.n_embd + kept
    else:
        blocks = kept * sizes.n_layer
    copies = 2 * parameters["scaling"] if half else 0  # autocast's 16-bit weights live until the backward pass
    chunk = CPU_LOSS_CHUNK_ELEMENTS if on_cpu else LOSS_CHUNK_ELEMENTS
    loss = LOSS_BYTES * min(chunk, positions * sizes.vocab_rows)
    training = blocks + KEPT_OUTSIDE * positions * sizes.n_embd + copies + loss
    if not on_cpu:
        return training
    # Of few rows a step, the evaluation's many take more: their logits, one block's tensors, and the copies.
    scored = (recipe.evals.bpb.batch_rows or recipe.train["per_device_eval_batch_size"]) * sizes.row_tokens
    loss = LOSS_BYTES * min(chunk, scored * sizes.vocab_rows)
    return max(training, scored * kept // positions + KEPT_OUTSIDE * scored * sizes.n_embd + copies + loss)


def checkpoint_bytes(recipe: Recipe, sizes: Sizes | CountedSizes) -> int | None:
    """Return one whole checkpoint: weights and optimizer state as they are trained; tokenizer and the rest are a few
    megabytes."""
    optimizer = optimizer_bytes(recipe, sizes)
    return None if optimizer is None else weight_bytes(recipe, sizes) + optimizer


def model_bytes(recipe: Recipe, sizes: Sizes | CountedSizes) -> int:
    """Return the finished model/ in hub.dtype."""
    return (FP32 if recipe.hub.dtype == "float32" else 2) * sizes.parameters()["total"]


def queued_bytes(recipe: Recipe, sizes: Sizes | CountedSizes) -> int:
    """Return what waits while its checkpoint is rotated away: a checkpoint each for the Hub and for run.mirror."""
    whole = checkpoint_bytes(recipe, sizes) or weight_bytes(recipe, sizes)
    is_queued = recipe.hub.id is not None and recipe.hub.strategy == "checkpoint"
    return whole * (int(is_queued) + int(bool(recipe.run.mirror)))


def checkpoints_on_disk(recipe: Recipe, steps: int | None) -> int | None:
    """Checkpoints that lie there at the fullest moment: those kept and the one being written. None when their number
    depends on a horizon that is not known."""
    limit, every, save_steps = (
        recipe.train["save_total_limit"],
        recipe.run.keep_every_steps,
        recipe.train["save_steps"],
    )
    if steps is None:
        return None if limit is None or every else limit + 1 + recipe.run.keep_best
    saves = max(1, -(-steps // save_steps))
    if limit is None:
        return saves
    return min(saves, limit + 1 + recipe.run.keep_best + (steps // math.lcm(every, save_steps) if every else 0))


def row_bytes(recipe: Recipe, vocab_size: int | None) -> int:
    """Return a packed row of a shard: its ids, five numbers, and for conversations two bits a position."""
    positions = recipe.data.row_tokens + 1
    ids = positions * (2 if vocab_size is not None and vocab_size <= 1 << 16 else 4)
    return ids + 5 * 4 + (2 * -(-positions // 8) if recipe.stage == "sft" else 0)


# How many rows of one forward pass memory holds, by arithmetic: what `train.per_device_train_batch_size: auto` is
# planned as.

UNKNOWN = 8  # rows, where arithmetic knows too little: transformers' own default
# Row positions on a CPU, which has enough to do with them: more take memory and save nothing that we know of.
CPU_POSITIONS = 16_384
# Of a CPU's available memory, which others use too; of a device's, whose allocator leaves holes.
CPU_SHARE, DEVICE_SHARE = 0.5, 0.9


def options(recipe: Recipe, processes: int) -> list[int]:
    """Return the divisors of the rows of a step that one process gets, largest first: none of them adds padding."""
    rows = math.ceil(rows_per_step(recipe) / batch_ranks(processes))
    return [n for n in range(rows, 0, -1) if rows % n == 0]


def usable_bytes(memory_gib: float) -> float:
    """Return what a training may take of an accelerator with so much memory."""
    return DEVICE_SHARE * memory_gib * 2**30


def planned_micro_batch(
    recipe: Recipe,
    sizes: Sizes | CountedSizes | None,
    device: DeviceInfo,
    *,
    processes: int,
    half: bool,
    compiled: bool,
    shards: int,
) -> int:
    """Return the largest option that fits by arithmetic, 1 at the least. half, compiled, shards: as for memory_of."""
    on_cpu = device.kind == "cpu"
    limit = CPU_SHARE * available_bytes() / processes if on_cpu else usable_bytes(device.memory_gib or 0)
    for rows in options(recipe, processes):
        tried = with_values(recipe, {"micro_batch": rows})
        kinds: dict[str, Any] = {"half": half, "compiled": compiled, "on_cpu": on_cpu, "shards": shards}
        need = memory_of(tried, sizes, processes=processes, **kinds).total if sizes else None
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
