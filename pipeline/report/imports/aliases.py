"""The names that other programs give to our metrics: the one table, which docs/metrics.md shows by column.

Sources: nanochat scripts/base_train.py and chat_sft.py (the console's fields and what goes to W&B); NeMo 2's loggers and
callbacks; transformers.Trainer's log_history.
"""

from dataclasses import dataclass

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Alias:
    """One name elsewhere. factor: theirs x factor has our unit; meaning: what it is where it is not our number."""

    ours: str
    theirs: str
    factor: float = 1.0
    meaning: str | None = None


LAST_MICRO_BATCH = "smoothed over rank 0's last micro-batch of each step, not over the global batch"
WITHOUT_FIRST = "without the first ten steps of a start"
OTHER_PEAK = "over the bf16 peak that the program took for its device; older ones always took an H100's"
FULL_ATTENTION = "attention counted in full, not causally"

NEMO = [
    Alias(ours="train/loss", theirs="reduced_train_loss"),
    Alias(ours="val/loss", theirs="val_loss"),
    Alias(ours="optim/lr", theirs="lr"),
    Alias(ours="optim/grad_norm", theirs="grad_norm"),
    Alias(ours="optim/num_zeros_in_grad", theirs="num_zeros_in_grad"),
    Alias(ours="perf/step_s", theirs="train_step_timing in s"),
    Alias(ours="perf/eval_s", theirs="validation_step_timing in s", meaning="of one validation step"),
    Alias(ours="perf/tflops_per_gpu", theirs="TFLOPS_per_GPU", meaning=FULL_ATTENTION),
    Alias(ours="mem/allocated_gib", theirs="memory_allocated", factor=1 / GIB),
    Alias(ours="mem/run_peak_allocated_gib", theirs="peak_memory_usage", factor=1 / GIB),
    Alias(ours="data/samples", theirs="consumed_samples"),
    # Megatron-LM's own names, which Megatron-Bridge keeps.
    Alias(ours="train/loss", theirs="lm loss"),
    Alias(ours="optim/lr", theirs="learning-rate"),
    Alias(ours="optim/grad_norm", theirs="grad-norm"),
    Alias(ours="optim/num_zeros_in_grad", theirs="num-zeros"),
    Alias(ours="optim/param_norm", theirs="params-norm"),
    Alias(ours="perf/tflops_per_gpu", theirs="tflops_per_sec_per_gpu", meaning=FULL_ATTENTION),
]

# The fields of nanochat's and picoLLM's console lines; older ones say mfu and grad norm.
NANOCHAT = [
    Alias(ours="train/loss_ema", theirs="loss", meaning=LAST_MICRO_BATCH),
    Alias(ours="train/loss", theirs="Training loss", meaning="rank 0's last micro-batch of the step"),
    Alias(ours="optim/grad_norm", theirs="grad norm"),
    Alias(ours="optim/lrm", theirs="lrm"),
    Alias(ours="perf/step_s", theirs="dt", factor=1e-3),
    Alias(ours="perf/tok_per_s", theirs="tok/sec"),
    Alias(ours="perf/bf16_mfu_pct", theirs="bf16_mfu"),
    Alias(ours="perf/bf16_mfu_pct", theirs="mfu", meaning=OTHER_PEAK),
    Alias(ours="data/epoch", theirs="epoch"),
    Alias(ours="data/pq", theirs="pq"),
    Alias(ours="data/rg", theirs="rg"),
    Alias(ours="perf/total_s", theirs="total time", factor=60.0, meaning=WITHOUT_FIRST),
    Alias(ours="perf/eta_s", theirs="eta", factor=60.0),
    Alias(ours="val/bpb", theirs="Validation bpb"),
    Alias(ours="val/loss", theirs="Validation loss"),
    Alias(ours="core/v1", theirs="CORE metric"),
    Alias(ours="chat/core_part", theirs="ChatCORE"),
    Alias(ours="mem/run_peak_allocated_gib", theirs="Peak memory usage", factor=1 / 1024),
]

NANOCHAT_WANDB = [
    Alias(ours="train/loss_ema", theirs="train/loss", meaning=LAST_MICRO_BATCH),
    Alias(ours="optim/lrm", theirs="train/lrm"),
    Alias(ours="perf/step_s", theirs="train/dt"),
    Alias(ours="perf/tok_per_s", theirs="train/tok_per_sec"),
    Alias(ours="perf/bf16_mfu_pct", theirs="train/mfu"),
    Alias(ours="perf/total_s", theirs="total_training_time", meaning=WITHOUT_FIRST),
    Alias(ours="val/bpb", theirs="val/bpb"),
    Alias(ours="core/v1", theirs="core_metric"),
    Alias(ours="chat/core_part", theirs="chatcore_metric"),
]

# Columns of a CSV file that was made from nanochat's console lines.
NANOCHAT_CSV = [
    Alias(ours="train/loss_ema", theirs="loss", meaning=LAST_MICRO_BATCH),
    Alias(ours="optim/grad_norm", theirs="grad_norm"),
    Alias(ours="optim/lrm", theirs="lrm"),
    Alias(ours="perf/step_s", theirs="dt_ms", factor=1e-3),
    Alias(ours="perf/tok_per_s", theirs="tok_per_sec"),
    Alias(ours="perf/bf16_mfu_pct", theirs="mfu", meaning=OTHER_PEAK),
    Alias(ours="perf/total_s", theirs="total_time_min", factor=60.0, meaning=WITHOUT_FIRST),
]

TRAINER = [
    Alias(ours="train/loss", theirs="loss"),
    Alias(
        ours="optim/lr",
        theirs="learning_rate",
        meaning="of the step just made; of versions before April 2025 of the next one",
    ),
    Alias(ours="optim/grad_norm", theirs="grad_norm"),
    Alias(ours="val/loss", theirs="eval_loss", meaning="mean of batch means"),
    Alias(ours="perf/eval_s", theirs="eval_runtime"),
    Alias(ours="data/epoch", theirs="epoch", meaning="a fraction"),
    Alias(ours="data/tokens", theirs="num_input_tokens_seen", meaning="input positions"),
    Alias(ours="perf/tok_per_s", theirs="train_tokens_per_second", meaning="at the end"),
    Alias(ours="perf/total_s", theirs="train_runtime", meaning="with evaluations and saves"),
]


def by_their_name(aliases: list[Alias]) -> dict[str, Alias]:
    """Lower case, because exports differ in it: TFLOPS_per_GPU, TFLOPs_per_GPU."""
    return {alias.theirs.lower(): alias for alias in aliases}
