"""Memory and disk that a run takes, by arithmetic from its sizes. Bytes everywhere."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.recipe.sizes import Sizes

if TYPE_CHECKING:
    from pipeline.plan.step_memory import StepMemory

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
# format. A compiled step on a GPU has three times the logits and holds a third of the bytes of each
# (model/modeling_tandem.py, which imports torch; tests/plan/test_memory.py compares).
LOSS_CHUNK_ELEMENTS, CPU_LOSS_CHUNK_ELEMENTS, LOSS_BYTES = 2**25, 2**23, 3 * FP32
# Resident memory of a training process on a CPU beyond its tensors: Python with all that a stage imports, threads, and
# the products' own buffers; and what torch.compile adds. Measured with torch 2.13 and transformers 5.23 (docs/log.md,
# 2026-11-23).
PROCESS_BYTES, COMPILER_BYTES = 520 << 20, 120 << 20
# A CPU's process keeps what it has freed (hardware/processor.py: keep_freed_memory), in pieces that the next tensors
# do not fill.
KEPT_FREED = 1.15
SCORED_LOGITS = 2**28  # elements that the evaluation of a model of transformers holds at once (evals/bpb.py, compared)
EAGER_BYTES = 4  # of a pair of positions and a head: eager attention's weights in fp32; a copy in 16 bits comes on top
# Bytes of optimizer state for each parameter, by train.optim's beginning.
TRAINER_STATES = {
    "adamw_torch_4bit": 1, "adamw_torch_8bit": 2, "adamw_bnb_8bit": 2, "adamw_8bit": 2, "adamw_torch": 8,
    "adamw_anyprecision": 8, "sgd": 0, "adagrad": 4, "stable_adamw": 8,
}  # fmt: skip

# How many rows of one forward pass memory holds: what `train.per_device_train_batch_size: auto` is planned as.
UNKNOWN = 8  # rows, where arithmetic knows too little: transformers' own default
# Row positions on a CPU, which has enough to do with them: more take memory and save nothing that we know of.
CPU_POSITIONS = 16_384
# Of a CPU's available memory, which others use too; of a device's, whose allocator leaves holes.
CPU_SHARE, DEVICE_SHARE = 0.5, 0.9


@dataclass(frozen=True)
class Memory:
    """Memory of one process. activations, process and all of a sharded model are estimates; the rest is exact.

    process, saved: on a CPU, whose memory also holds Python, the libraries and the copy of a checkpoint that is being
    written.
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
        if self.fixed is None:
            return None
        return self.fixed + self.activations


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training process by all that decides its memory, in bytes."""

    sizes: Sizes
    optimizer: str  # adamw, muon_adamw, or train.optim of optimizer.type trainer
    half_tables: bool  # the tables of embeddings are stored in bfloat16
    modern: bool  # the blocks are those of the presets modern and modern_bigram
    eager: bool  # attention is made of plain products
    recomputes: bool  # activation or gradient checkpointing
    scored_rows: int  # rows of one batch of an evaluation
    saves: bool
    half: bool  # matrices are multiplied in bf16 or fp16 under autocast, over fp32 masters
    compiled: bool
    on_cpu: bool
    processes: int
    shards: int  # processes that share a model (FSDP2); 1 for none
    step: "StepMemory | None" = None  # as a trial has counted it, of another model than Tandem's

    @property
    def trained(self) -> int:
        """Return the parameters that have gradients and states: all, or an adapter's."""
        return self.step.trained if self.step else self.sizes.parameters()["total"]

    @property
    def narrower_bytes(self) -> int:
        """Return what bfloat16 tables take off one copy of the weights in fp32."""
        return FP32 // 2 * self.sizes.table_parameters if self.half_tables else 0

    @property
    def weight_bytes(self) -> int:
        """Return one whole copy of the weights that are trained."""
        return FP32 * self.trained - self.narrower_bytes

    @property
    def frozen_bytes(self) -> int:
        """Return the weights that are not trained."""
        return FP32 * (self.step.total - self.step.trained) if self.step else 0

    @property
    def optimizer_bytes(self) -> int | None:
        """Return the optimizer state of one whole copy of the weights; None for an optimizer that we do not know."""
        if self.optimizer == "adamw":
            return 2 * self.weight_bytes
        if self.optimizer == "muon_adamw":  # momentum, and one row or column of variances a matrix
            matrices = self.sizes.parameters()["matrices"]
            return FP32 * (self.sizes.variances - matrices) + 2 * self.weight_bytes
        known = [name for name in TRAINER_STATES if self.optimizer.startswith(name)]
        if not known:
            return None
        size = TRAINER_STATES[max(known, key=len)]
        # Whole numbers are of a parameter's own dtype; what is less is an 8- or 4-bit state.
        return size * self.trained - size // FP32 * self.narrower_bytes

    @property
    def checkpoint_bytes(self) -> int | None:
        """Return one whole checkpoint: weights and optimizer state; tokenizer and the rest are a few megabytes."""
        if self.optimizer_bytes is None:
            return None
        return self.weight_bytes + self.optimizer_bytes

    @property
    def gathered_bytes(self) -> int:
        """Return what a rank holds whole of a sharded model: head or tied table through a step, and two blocks."""
        counts, layers = self.sizes.parameters(), self.sizes.n_layer
        blocks = 2 * (counts["matrices"] + counts["value_embeddings"]) // layers
        return FP32 * ((counts["head"] or counts["embeddings"]) + blocks)

    def memory(self, rows: int) -> Memory:
        """Return the memory of one process with a micro-batch of so many rows."""
        weights = gradients = self.weight_bytes
        optimizer, activations = self.optimizer_bytes, self.activations(rows)
        process = saved = 0
        if self.processes > 1:
            gradients *= 2
        if self.on_cpu:
            activations = round(KEPT_FREED * activations)
            process = PROCESS_BYTES + self.compiled * COMPILER_BYTES
            if self.saves and self.checkpoint_bytes is not None:
                saved = self.checkpoint_bytes
        if self.shards > 1:
            weights = gradients = weights // self.shards + self.gathered_bytes
            if optimizer is not None:
                optimizer //= self.shards
            saved //= self.processes  # each writes a part
        return Memory(weights + self.frozen_bytes, gradients, optimizer, activations, process, saved)

    def activations(self, rows: int) -> int:
        """Return what a step of so many rows holds beyond weights and states, by a trial or the counts of KEPT."""
        sizes = self.sizes
        if self.step is not None:
            return self._tried_activations(rows, self.step)
        positions = rows * sizes.row_tokens
        # 1. What the backward pass needs of a block.
        modern_bytes, other_bytes = KEPT[self.half, self.compiled]
        kept = (modern_bytes if self.modern else other_bytes) * positions * sizes.n_embd
        if self.eager:
            kept += (EAGER_BYTES + 2 * self.half) * positions * sizes.row_tokens * sizes.n_head
        # 2. Of all blocks; recomputed, each block's input and one block at a time in full.
        blocks = kept * sizes.n_layer
        if self.recomputes:
            blocks = FP32 * sizes.n_layer * positions * sizes.n_embd + kept
        # 3. Autocast's 16-bit weights, which live until the backward pass.
        copies = 0
        if self.half:
            copies = 2 * sizes.parameters()["scaling"]
        training = blocks + copies + self._head_bytes(rows)
        if not self.on_cpu:
            return training
        # Where a step has few rows, the evaluation's many take more: their logits, and one block's tensors.
        scored_blocks = self.scored_rows * sizes.row_tokens * kept // positions
        return max(training, scored_blocks + copies + self._head_bytes(self.scored_rows))

    def _tried_activations(self, rows: int, step: "StepMemory") -> int:
        """Return the larger of what the blocks hold at most, and what is held while logits are; or what scoring takes,
        whose logits may be more than those of few rows."""
        peaks = step.peaks(rows)
        scored = 0
        if not step.chunked:
            a_row = self.sizes.row_tokens * self.sizes.vocab_rows
            scored_rows = min(self.scored_rows, max(1, SCORED_LOGITS // a_row))
            scored = (FP32 + 2 * self.half) * scored_rows * a_row
        return round(max(peaks.blocks, peaks.at_head + self.loss_bytes(rows), scored))

    def loss_bytes(self, rows: int) -> int:
        """Return what logits and the loss made of them hold at most."""
        if self.step is not None and not self.step.chunked:
            return round(self.step.peaks(rows).logits)
        chunk = CPU_LOSS_CHUNK_ELEMENTS if self.on_cpu else LOSS_CHUNK_ELEMENTS
        return LOSS_BYTES * min(chunk, rows * self.sizes.row_tokens * self.sizes.vocab_rows)

    def _head_bytes(self, rows: int) -> int:
        """Return what embeddings, last norm and the chunked loss hold."""
        return KEPT_OUTSIDE * rows * self.sizes.row_tokens * self.sizes.n_embd + self.loss_bytes(rows)


def checkpoints_on_disk(
    steps: int | None, *, save_steps: int, limit: int | None, keep_every_steps: int | None, keep_best: bool
) -> int | None:
    """Return the checkpoints at the fullest moment: those kept and the one being written. None when their number
    depends on a horizon that is not known."""
    kept = None
    if limit is not None:
        kept = limit + 1 + keep_best
    if steps is None:
        return None if keep_every_steps else kept
    saves = max(1, -(-steps // save_steps))
    if kept is None:
        return saves
    if keep_every_steps:
        kept += steps // math.lcm(keep_every_steps, save_steps)
    return min(saves, kept)


def row_bytes(row_tokens: int, vocab_size: int | None, *, chat: bool) -> int:
    """Return a packed row of a shard: its ids, five numbers, and for conversations two bits a position."""
    positions = row_tokens + 1
    id_bytes = 4
    if vocab_size is not None and vocab_size <= 1 << 16:
        id_bytes = 2
    row = id_bytes * positions + 5 * 4
    if chat:
        row += 2 * math.ceil(positions / 8)
    return row


def micro_batches(rows_per_step: int, ranks: int) -> list[int]:
    """Return the divisors of the rows of a step that one rank gets, largest first: none of them adds padding."""
    rows = math.ceil(rows_per_step / ranks)
    return [n for n in range(rows, 0, -1) if rows % n == 0]


def usable_bytes(memory_gib: float) -> float:
    """Return what a training may take of an accelerator with so much memory."""
    return DEVICE_SHARE * memory_gib * 2**30


def planned_micro_batch(workload: Workload | None, choices: list[int], *, row_tokens: int, limit: float) -> int:
    """Return the largest choice that fits into the limit (bytes) by arithmetic, 1 at the least."""
    for rows in choices:
        need = None
        if workload is not None:
            if workload.on_cpu and rows * row_tokens > CPU_POSITIONS:
                continue
            need = workload.memory(rows).total
        fits = rows <= UNKNOWN
        if need is not None and limit:
            fits = need <= limit
        if fits:
            return rows
    return 1
