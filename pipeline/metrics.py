"""The registry of metrics: name, unit, meaning, direction, panel and the names that other programs give to the same number.

Console, best checkpoint, TensorBoard, report, importers and model card read it; docs/metrics_page.py writes the tables of
docs/metrics.md from it. After it come the protocol of a score and the recent values of one number.
"""

import hashlib
import json
import re
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, Literal

# Columns of docs/metrics.md; the last one is of nanochat's and picoLLM's console lines.
NEMO, TRAINER, NANOCHAT = "NeMo", "Trainer", "nanochat"
NANOCHAT_WANDB, NANOCHAT_CSV = "nanochat (W&B)", "nanochat (CSV of its console)"
GIB = 2.0**30
FACTORS = {"ms": 1e-3, "min": 60.0, "bytes": 1 / GIB, "MiB": 1 / 1024}  # of other programs' units, to ours


@dataclass(frozen=True)
class Alias:
    """A name in another program. unit: where it has another one than ours; meaning: what it is where it is another number."""

    program: str
    name: str
    unit: str | None = None
    meaning: str | None = None
    label: str = ""  # before the name in docs/metrics.md
    imported: bool = True  # False: for the reader; no export has it as a number of a step

    @property
    def factor(self) -> float:
        """Return what their number is multiplied by to have our unit."""
        return FACTORS[self.unit] if self.unit else 1.0


@dataclass(frozen=True)
class Metric:
    """A number of a run, or with <...> in its name a family of them. better: None where neither direction is."""

    name: str
    unit: str  # "-" where it has none
    meaning: str
    better: Literal["lower", "higher"] | None = None
    panel: str | None = None  # of the report that draws it
    console: bool = True  # of evaluations: False where a line would hold nothing else
    aliases: Sequence[Alias] = ()

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    @property
    def description(self) -> str:
        """Return unit, direction and meaning in a sentence."""
        return f"{self.meaning} ({self.unit}{f'; {self.better} is better' if self.better else ''})"


nemo, trainer, nanochat = partial(Alias, NEMO), partial(Alias, TRAINER), partial(Alias, NANOCHAT)
wandb, nanochat_csv = partial(Alias, NANOCHAT_WANDB, label="W&B"), partial(Alias, NANOCHAT_CSV)

LAST_MICRO_BATCH = "smoothed over rank 0's last micro-batch of each step, not over the global batch"
WITHOUT_FIRST = "without the first ten steps of a start"
OTHER_PEAK = "over the bf16 peak that the program took for its device; older ones always took an H100's"
FULL_ATTENTION = "attention counted in full, not causally"

VAL_LOSS, VAL_BPB, VAL_BPB_DOCUMENTS, SFT_BPB = "val/loss", "val/bpb", "val/bpb_documents", "sft/assistant_bpb"

# By the section of docs/metrics.md, in the order of its tables, of the report's panels and of their curves.
# fmt: off
SECTIONS: dict[str, Sequence[Metric]] = {
    "Row": (
        Metric("step", "steps", "optimizer steps made"),
        Metric("attempt", "-", "1, then 2 after a restart ..."),
        Metric("time", "s", "since 1970, UTC"),
        Metric("tokens", "tokens", "row positions trained on: step x `data.batch_tokens`, less where `optimizer.schedule.batch_warmup_steps` begins with smaller batches"),
    ),
    "Training": (
        Metric("train/loss", "nats", "sum of the loss over all trained targets of the step / their number, over all ranks and micro-steps; mean over the steps since the last log whose loss is finite; no row where there is none",
               better="lower", panel="Loss", aliases=[nemo("reduced_train_loss"), nemo("lm loss", label="Megatron"), nanochat("Training loss", label="older SFT", meaning="rank 0's last micro-batch of the step"), trainer("loss")]),
        Metric("train/perplexity", "-", "exp(train/loss): of the interval's mean loss, not the mean of perplexities", better="lower"),
        Metric("train/bpb", "bits/byte", "pretraining: nats of the trained targets that are text / (ln 2 x their raw bytes), sums over all ranks and micro-steps of the steps since the last log whose loss is finite. Special targets (BOS) are in neither sum, as in val/bpb: equal on equal rows and weights",
               better="lower", panel="Bits per byte"),
        Metric("train/assistant_bpb", "bits/byte", "SFT: the same; its trained targets are what the assistant writes, as in sft/assistant_bpb",
               better="lower", panel="Bits per byte"),
        Metric("train/loss_ema", "nats", "e = 0.9 e + 0.1 x the loss of each step (global mean over its targets), divided by 1 - 0.9^n after n steps, whatever `train.logging_steps` is; the console's `loss`. Earlier versions took the mean of a logged interval for one step",
               better="lower", panel="Loss", aliases=[nanochat("loss", meaning=LAST_MICRO_BATCH), wandb("train/loss", meaning=LAST_MICRO_BATCH), nanochat_csv("loss", meaning=LAST_MICRO_BATCH)]),
        Metric("optim/lr", "-", "rate of the first parameter group in the step just made",
               panel="Learning rate", aliases=[nemo("lr"), nemo("learning-rate", label="Megatron"), trainer("learning_rate", meaning="of the step just made; of versions before April 2025 of the next one")]),
        Metric("optim/lr/<group>", "-", "the same for each group: embeddings, value_embeddings, head, matrices, scalars, x0_lambdas",
               panel="Learning rate"),
        Metric("optim/lrm", "-", "multiplier of all peak rates in the step just made; the console's `lrm`",
               aliases=[nanochat("lrm"), wandb("train/lrm"), nanochat_csv("lrm")]),
        Metric("optim/grad_norm", "-", "L2 norm of a step's whole gradient before clipping: the largest of the steps since the last log, of those where it is finite. Rows without optim/grad_norm_median are of earlier versions, which gave the norm of the last step",
               panel="Gradient norm before clipping", aliases=[nemo("grad_norm"), nemo("grad-norm", label="Megatron"), nanochat("grad norm", label="older"), nanochat_csv("grad_norm"), trainer("grad_norm", meaning="of the last step")]),
        Metric("optim/grad_norm_median", "-", "the median of the same norms: what is usual", panel="Gradient norm before clipping"),
        Metric("optim/clip_frac", "share", "of the steps since the last log those whose norm was above `train.max_grad_norm`; steps whose norm was not finite count as not clipped; left out where nothing is clipped (0)"),
        Metric("optim/num_zeros_in_grad", "entries", "of the step's whole gradient, before clipping, those that are exactly 0, over all trained parameters; rows of the embedding whose token did not occur are the usual ones",
               aliases=[nemo("num_zeros_in_grad"), nemo("num-zeros", label="Megatron")]),
        Metric("optim/param_norm", "-", "L2 norm of all trained parameters after the step",
               aliases=[nemo("params-norm", label="Megatron")]),
        Metric("optim/update_ratio", "-", "L2 norm of the change that the step made to the parameters, weight decay included, / optim/param_norm; with `optimizer.type` adamw and muon_adamw, which measure it a few matrices at a time: other optimizers would need a copy of all parameters. Left out for a step whose update was"),
        Metric("optim/skipped_steps", "steps", "so far those whose update the fp16 loss scaler, `monitor.on_nonfinite: skip` or `monitor.on_spike: skip` left out; their rows are used up",
               better="lower", aliases=[nemo("number of skipped iterations", imported=False)]),
        Metric("optim/nonfinite_steps", "steps", "so far those whose gradient held a NaN or an infinity, which an infinite loss makes too; with fp16 the loss scaler's search for its scale is among them",
               better="lower", aliases=[nemo("number of nan iterations", imported=False)]),
    ),
    "Speed": (
        Metric("perf/step_s", "s", "wall time of a step, mean over the steps since the last log",
               better="lower", panel="Step time", aliases=[nemo("train_step_timing in s"), nanochat("dt", unit="ms"), wandb("train/dt"), nanochat_csv("dt_ms", unit="ms")]),
        Metric("perf/tok_per_s", "tokens/s", "row positions of a step / perf/step_s, over all devices; padding included",
               better="higher", panel="Throughput", aliases=[nanochat("tok/sec"), wandb("train/tok_per_sec"), nanochat_csv("tok_per_sec"), trainer("train_tokens_per_second", meaning="at the end")]),
        Metric("perf/tok_per_s_per_gpu", "tokens/s", "perf/tok_per_s / number of processes", better="higher"),
        Metric("perf/tflops_per_gpu", "TFLOP/s", "exact matmul FLOPs per token, causal attention counted once (where conversations or documents are isolated, in the rows of rank 0's own steps: pairs within one only), x perf/tok_per_s_per_gpu / 1e12",
               better="higher", aliases=[nemo("TFLOPS_per_GPU", meaning=FULL_ATTENTION), nemo("tflops_per_sec_per_gpu", label="Megatron", meaning=FULL_ATTENTION)]),
        Metric("perf/mfu_pct", "%", "those FLOP/s / the device's dense peak for the compute dtype (float8 under train.fp8, where the head and attention stay in bf16)",
               better="higher", panel="Share of the peak FLOP/s"),
        Metric("perf/bf16_mfu_pct", "%", "nanochat's FLOPs per token (12 x heads x head width x window per layer, 6 x matmul parameters) x perf/tok_per_s_per_gpu / the dense bf16 peak; the console's `bf16_mfu`",
               better="higher", panel="Share of the peak FLOP/s", aliases=[nanochat("bf16_mfu"), wandb("train/mfu"), nanochat("mfu", label="SFT and older", meaning=OTHER_PEAK), nanochat_csv("mfu", meaning=OTHER_PEAK)]),
        Metric("perf/eta_s", "s", "row positions left x mean time of one in this start, without its first interval, which compiles; left out in that one",
               better="lower", aliases=[nemo("time remaining", imported=False), nanochat("eta", unit="min")]),
        Metric("perf/total_s", "s", "time in steps over all attempts that count",
               better="lower", aliases=[nanochat("total time", unit="min", meaning=WITHOUT_FIRST), wandb("total_training_time", meaning=WITHOUT_FIRST), nanochat_csv("total_time_min", unit="min", meaning=WITHOUT_FIRST), trainer("train_runtime", meaning="with evaluations and saves")]),
        Metric("perf/goodput_pct", "%", "time in steps that count (perf/total_s, of a fork without its parent's) / wall time since the process of the run's first start began. Start-up (imports and checks, too), preparing data, evaluations, saves, steps made twice and the time between two attempts are its losses, compilation is not",
               better="higher"),
        Metric("perf/lost_steps", "steps", "made and then made again over all attempts, because the next one went on from an earlier checkpoint; as far as they were logged: of a killed attempt nobody knows the steps after its last row",
               better="lower"),
        Metric("perf/first_step_s", "s", "from the start of this process to the end of its first step, compilation included; in the first row of a start",
               better="lower"),
        Metric("perf/eval_s", "s", "wall time of the evaluation at this step",
               better="lower", aliases=[nemo("validation_step_timing in s", meaning="of one validation step"), trainer("eval_runtime")]),
        Metric("perf/slowest_rank", "-", "several processes only: a rank's own time for a step (from asking for its rows to the end of its backward pass, before it waits for the others), mean since the last log; the slowest rank's / the mean of the other ranks'. Above 1.5 for three logs in a row the console names the rank, once, and a row with `\"event\": \"straggler\"` records it",
               better="lower"),
        Metric("perf/slowest_rank_id", "-", "that rank"),
        Metric("ckpt/save_s", "s", "how long the checkpoint of this step held the training up: its copy, and the wait for the one before where that was still being written",
               better="lower", aliases=[nemo("save-checkpoint", meaning="the whole save", imported=False)]),
        Metric("ckpt/write_s", "s", "wall time in which the newest checkpoint was written, hashed and renamed beside the training; in the row of the step that saw its end",
               better="lower"),
        Metric("ckpt/last_good_step", "step", "of the newest checkpoint that is whole on the disk, or that this start went on from; left out before the first one"),
        Metric("ckpt/age_steps", "steps", "since ckpt/last_good_step, or since step 0: what a crash now would cost", better="lower"),
        Metric("ckpt/bytes", "bytes", "size of that checkpoint, without its MANIFEST.json"),
        Metric("ckpt/hub_lag_steps", "steps", "with `hub.id`, and `hub.strategy` not end: the step - the newest step that the Hub has (0 while it has none)",
               better="lower"),
    ),
    "Data": (
        Metric("data/tokens", "targets", "targets trained on so far",
               aliases=[trainer("num_input_tokens_seen", meaning="input positions")]),
        Metric("data/samples", "rows", "rows trained on so far", aliases=[nemo("consumed_samples")]),
        Metric("data/documents", "documents", "conversations, or pieces of text that begin with BOS, in the rows trained on so far; each pass over a source counts. A document longer than a row counts with every piece that `cut_and_fit` makes of it, else once. Left out where shards were prepared by a version that did not count them"),
        Metric("data/source/<source>/tokens", "targets", "of a mixture: data/tokens of this source alone"),
        Metric("data/source/<source>/samples", "rows", "data/samples of this source"),
        Metric("data/source/<source>/documents", "documents", "data/documents of this source"),
        Metric("data/bad_rows", "rows", "unreadable rows of the sources (`data.max_bad_rows`) that were left out, in what was read for the rows trained on so far; each once, however many epochs (with `passes`, once in each pass)",
               better="lower"),
        Metric("data/retries", "-", "times since this start, over all ranks and the process that prepares, that something was read again after an error that may pass: a source's file or a prepared shard (EIO, ESTALE, ETIMEDOUT, at most 3 times), a file or list of the Hub (at most 4 times). Not counted: huggingface_hub's own retries, and rows in a memory map, where such an error ends the process (SIGBUS)",
               better="lower"),
        Metric("data/pad_frac", "share", "of the row positions trained on so far those behind the text of their row; rows of weight 0, which fill a last micro-step, are not among them",
               better="lower"),
        Metric("data/epoch", "-", "pass over its source, from 1, of the step's last row; the console's `epoch`",
               aliases=[nanochat("epoch"), trainer("epoch", meaning="a fraction")]),
        Metric("data/pq", "-", "file of the step's last row, in the order of reading; the console's `pq`", aliases=[nanochat("pq")]),
        Metric("data/rg", "-", "row group of the step's last row; the console's `rg`", aliases=[nanochat("rg")]),
        Metric("data/wait_s", "s", "time a step waited for rows, mean since the last log, of the rank that waited longest",
               better="lower", panel="Step time"),
        Metric("data/wait_frac", "share", "data/wait_s / perf/step_s, at most 1", better="lower"),
    ),
    "Device memory": (
        Metric("mem/allocated_gib", "GiB", "in tensors: between two steps parameters, optimizer state and little else",
               better="lower", panel="Memory", aliases=[nemo("memory_allocated", unit="bytes")]),
        Metric("mem/reserved_gib", "GiB", "held by PyTorch's allocator, in tensors or not", better="lower", panel="Memory"),
        Metric("mem/peak_allocated_gib", "GiB", "in tensors at most since the last log: with activations and gradients",
               better="lower", panel="Memory"),
        Metric("mem/run_peak_allocated_gib", "GiB", "the same since the run began, over all attempts",
               better="lower", panel="Memory", aliases=[nemo("peak_memory_usage", unit="bytes"), nanochat("Peak memory usage", label="at the end", unit="MiB"), trainer("train_mem_gpu_peaked_delta", meaning="of the run", imported=False)]),
        Metric("mem/device_used_gib", "GiB", "used on the device as its driver sees it: reserved, contexts, NCCL's buffers and other processes",
               better="lower", panel="Memory", aliases=[nemo("GPU memory allocated", label="W&B", imported=False)]),
        Metric("mem/alloc_retries", "-", "times since this start, over all ranks, that an allocation failed and was tried again after the cache was given back: the device is nearly full and slows down",
               better="lower"),
        Metric("mem/ooms", "-", "times since this start, over all ranks, that it failed then too", better="lower"),
    ),
    "Validation": (
        Metric(VAL_LOSS, "nats", "mean over all validation targets, special ones included; in SFT over what the assistant writes, its end token included",
               better="lower", panel="Loss", aliases=[nemo("val_loss"), nanochat("Validation loss", label="older SFT"), trainer("eval_loss", meaning="mean of batch means")]),
        Metric(VAL_BPB, "bits/byte", "on best-fit-crop rows of `evals.bpb.tokens` positions, packed by nanochat's rule from a buffer of exactly 1,000 documents; left out where the tokenizer keeps less than 99.9 % of the text. Not nanochat's figure to the third digit, see below",
               better="lower", panel="Bits per byte", aliases=[nanochat("Validation bpb"), wandb("val/bpb")]),
        Metric(VAL_BPB_DOCUMENTS, "bits/byte", "on whole documents, every byte once, each piece beginning with BOS: comparable across tokenizers and packings at equal row length, which is the window",
               better="lower", panel="Bits per byte"),
        Metric(SFT_BPB, "bits/byte", "on what the assistant writes in held-out conversations; their other text is context",
               better="lower", panel="Bits per byte", aliases=[nanochat("Validation bpb", label="its SFT's", imported=False)]),
        *(Metric(f"{name}/<source>", "bits/byte", "of a mixture: the same on the held-out rows of each source alone, in the same pass",
                 better="lower") for name in (VAL_BPB, VAL_BPB_DOCUMENTS, SFT_BPB)),
    ),
    "Texts": (
        Metric("text/bpb_documents", "bits/byte", "as val/bpb_documents, on the files of `--text`; for tokenizers that are not byte-level the bytes are those of the spans that the targets cover",
               better="lower"),
        Metric("text/assistant_bpb", "bits/byte", "as sft/assistant_bpb, on the conversations of `--chat`, one a row", better="lower"),
    ),
    "Benchmarks": (
        Metric("core/v1", "-", "CORE: mean of the centred accuracies of all 22 tasks from their published files, under the baselines of every published score; with `max_per_task` of the first items of each, which the protocol says",
               better="higher", panel="Benchmarks", aliases=[nanochat("CORE metric"), wandb("core_metric")]),
        Metric("core/v2", "-", "the same answers under DCLM's corrected baselines", better="higher", panel="Benchmarks"),
        Metric("core_partial/v1", "-", "as core/v1, where a task is missing or its file is not the published one: not CORE",
               better="higher", panel="Benchmarks"),
        Metric("core_partial/v2", "-", "as core/v2, likewise", better="higher", panel="Benchmarks"),
        Metric("core/<task>", "share", "accuracy on that task, not centred", better="higher", panel="Benchmarks", console=False),
        Metric("core/eval_s", "s", "wall time of the scoring while training", better="lower"),
        Metric("chat/<task>", "share", "accuracy on arc_easy, arc_challenge, mmlu, gsm8k, humaneval, spelling_bee or a task of one's own, not centred; a question longer than the model's positions counts as wrong",
               better="higher", panel="Benchmarks", aliases=[nanochat("chatcore/<task>", imported=False)]),
        Metric("chat/core", "-", "ChatCORE: mean of the centred accuracies of arc_easy, arc_challenge, mmlu, gsm8k and humaneval, all of their official test items asked",
               better="higher", panel="Benchmarks", aliases=[nanochat("chatcore_metric", imported=False)]),
        Metric("chat/core_part", "-", "the same where not all of their items were asked",
               better="higher", panel="Benchmarks", aliases=[nanochat("ChatCORE"), wandb("chatcore_metric", label="W&B, while training,")]),
        Metric("chat/eval_s", "s", "wall time of the scoring while training", better="lower"),
    ),
    "Machine": (
        Metric("gpu/index", "-", "CSV only: number of the GPU on its host"),
        Metric("gpu/name", "-", "CSV only: its name, as the driver says it"),
        Metric("gpu/util_pct", "%", "share of the last moments in which any kernel ran; says nothing of how busy the GPU was",
               better="higher", panel="Utilisation", aliases=[nemo("GPU utilization", label="W&B", imported=False)]),
        Metric("gpu/mem_busy_pct", "%", "share of the last moments in which memory was read or written; not a measure of stalling",
               panel="Utilisation", aliases=[nemo("GPU time spent accessing memory", label="W&B", imported=False)]),
        Metric("gpu/mem_used_gib", "GiB", "CSV only: memory in use as the driver sees it: torch's reserved memory, contexts, other processes",
               aliases=[nemo("GPU memory allocated", label="W&B", imported=False)]),
        Metric("gpu/mem_total_gib", "GiB", "CSV only: memory of the GPU"),
        Metric("gpu/temp_c", "deg C", "temperature; in a row of metrics.jsonl the highest of all GPUs and samples",
               better="lower", panel="Temperature", aliases=[nemo("GPU temp", label="W&B", imported=False)]),
        Metric("gpu/power_w", "W", "power drawn, by one GPU",
               panel="Power", aliases=[nemo("GPU power usage", label="W&B", imported=False)]),
        Metric("gpu/power_pct", "%", "of the power limit in force",
               panel="Utilisation", aliases=[nemo("GPU power usage (%)", label="W&B", imported=False)]),
        Metric("gpu/sm_clock_mhz", "MHz", "clock of the multiprocessors"),
        Metric("gpu/mem_clock_mhz", "MHz", "CSV only: clock of the memory"),
        Metric("gpu/throttle", "-", "CSV only: why the clocks are where they are, NVML's reasons joined by +: gpu_idle, application_clocks, sw_power_cap, hw_slowdown, sync_boost, sw_thermal, hw_thermal, hw_power_brake, display_clocks, board_limit, reliability; `none` where nothing holds them"),
        Metric("gpu/throttled_pct", "%", "share of the samples with a reason of power or heat: all of these but gpu_idle, application_clocks, sync_boost and display_clocks. A GPU at its power limit counts",
               better="lower", panel="Utilisation"),
        Metric("gpu/energy_j", "J", "CSV only: the GPU's own counter of energy, which runs since the driver was loaded; boards before Volta have none"),
        Metric("perf/energy_kwh", "kWh", "energy of the run's GPUs since its first step, over all attempts, lost steps and evaluations included: differences of the GPUs' counters, of a GPU without one trapezoids over its power, whose gaps of more than five sampling periods (at least 1 s) are left out. Not in runs on several hosts, whose report has it, nor where a GPU tells neither",
               better="lower"),
        Metric("perf/energy_j_per_token", "J/token", "gpu/power_w x GPUs x mean time of a step since the last row that has it / row positions of a step: what training a token draws, without evaluations and saves. From the second such row on; not in runs on several hosts",
               better="lower"),
        Metric("host/cpu_pct", "%", "load of all cores, mean since the last sample", panel="Utilisation"),
        Metric("mem/host_rss_gib", "GiB", "resident memory of this process", better="lower", panel="Memory"),
        Metric("mem/host_used_pct", "%", "of the machine's memory", panel="Utilisation"),
        Metric("disk/free_gib", "GiB", "free on the disk of the run directory"),
        Metric("disk/read_mb_s", "MB/s", "read from all disks, mean since the last sample; what comes from the page cache is not seen"),
        Metric("disk/write_mb_s", "MB/s", "written to all disks"),
        Metric("net/received_mb_s", "MB/s", "received on all interfaces"),
        Metric("net/sent_mb_s", "MB/s", "sent on all interfaces"),
    ),
}
# fmt: on

METRICS = {metric.name: metric for metrics in SECTIONS.values() for metric in metrics}
BPB_OF_STAGE = {"pretrain": VAL_BPB, "sft": SFT_BPB}  # on the rows that are held out
VALIDATION = (VAL_LOSS, VAL_BPB, VAL_BPB_DOCUMENTS, SFT_BPB)
BEST_BY = (VAL_BPB, SFT_BPB, VAL_LOSS)  # what makes a checkpoint the best one: the first that the stage has


@cache
def metric_of(name: str) -> Metric | None:
    """Return the metric of that name, or the family that it belongs to; None for a name that is not ours."""
    if name in METRICS:
        return METRICS[name]
    for family, metric in METRICS.items():
        if "<" in family and re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(family)), name):
            return metric
    return None


@cache
def groups(*sections: str) -> tuple[str, ...]:
    """Return what comes before the slash in the names of those sections, or of all."""
    metrics = chain.from_iterable(SECTIONS[section] for section in sections or SECTIONS)
    return tuple(dict.fromkeys(metric.group for metric in metrics if "/" in metric.name))


def is_validation(name: str) -> bool:
    """Return whether it is a number of held-out text."""
    return name.partition("/")[0] in groups("Validation")


def is_evaluation(name: str) -> bool:
    """Return whether it is a number of held-out text or of a benchmark."""
    return name.partition("/")[0] in groups("Validation", "Benchmarks")


def is_of_machine(name: str) -> bool:
    """Return whether it is a number of the run's speed, or of the machine."""
    return name.partition("/")[0] in groups("Speed", "Device memory", "Machine")


def aliases_of(*programs: str) -> dict[str, tuple[str, Alias]]:
    """{a program's name in lower case: (our name, alias)} of what is imported; exports differ in case: TFLOPS_per_GPU, TFLOPs_per_GPU."""
    found = {}
    for metric in METRICS.values():
        for alias in metric.aliases:
            if alias.imported and alias.program in programs:
                found[alias.name.lower()] = metric.name, alias
    return found


# The protocol of a score: the parts that say on what and how it was measured, and the id that is their hash.
#
# Two scores compare only when their ids are equal. The parts stand beside the id wherever a score is kept (evals.json,
# run_manifest.json), so that a reader can say which of them differs.
#
# | part | what it says |
# | --- | --- |
# | score | what is measured: rows, documents, assistant, core, chat, lm_eval |
# | texts | hash of what is scored |
# | bytes, items | how much of it |
# | window | most tokens that the model sees at once; "whole prompts" where none was longer than its positions |
# | stride | from the start of one window to the next: "window" where they do not overlap |
# | bos | before what the model gets a BOS token |
# | dtype | in which the model computes |
# | tokenizer, template | where the scored targets depend on them |
# | coverage | share of the text's bytes that the tokenizer's ids restore; of tasks, of their items' text |
# | rule | version of our code's rule for this score, raised when the same parts would give another figure |

LENGTH = 12  # hex digits of an id


@dataclass(frozen=True)
class Protocol:
    """parts: JSON values by name, in the order in which people read them; `score` is the first word of the id."""

    parts: Mapping[str, Any]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Protocol | None":
        """Return the protocol that a row of evals.json holds; None for a row of an earlier version, which has the id alone."""
        parts = row.get("protocol_parts")
        return cls(parts) if isinstance(parts, Mapping) and parts else None

    @property
    def id(self) -> str:
        return f"{self.parts['score']}-{digest(self.parts, LENGTH)}"

    def having(self, **parts: Any) -> "Protocol":
        """Return the protocol with these parts added or replaced."""
        return Protocol({**self.parts, **parts})

    def row(self) -> dict[str, Any]:
        """Return what a row of evals.json keeps of it."""
        return {"protocol": self.id, "protocol_parts": dict(self.parts)}

    def difference(self, other: "Protocol") -> str:
        """Return each part that differs, as `window 64 against 1024`; "" when the two are equal."""
        return "; ".join(_differences(self.parts, other.parts))

    def __str__(self) -> str:
        return ", ".join(f"{_words(name)} {_value(value)}" for name, value in self.parts.items() if name != "score")


Numbers = dict[str, float]  # by metric name
Results = list[dict[str, Any]]  # rows for evals.json: name, value, its protocol and what else is known of it


def digest(value: Any, length: int = 16) -> str:
    """Return the first hex digits of the hash of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:length]


def why_not_compared(one: Protocol | None, other: Protocol | None) -> str:
    """Return which parts of two protocols of unequal ids differ, as far as both are recorded."""
    if one is None or other is None:
        return "an earlier version measured one of them and did not record the parts of its protocol"
    return one.difference(other)


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name), other.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += [f"{_words(name)} {line}" for line in _differences(a, b)]
        elif a != b:
            lines.append(f"{_words(name)} {_value(a)} against {_value(b)}")
    return lines


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + "; ".join(f"{_words(name)} {_value(inner)}" for name, inner in value.items()) + ")"
    return "none" if value is None else str(value)


WINDOW = 128  # values that are remembered
ENOUGH = 20  # before that nothing is called unusual: losses fall fast in the beginning
DEVIATIONS = 6.0
HIGH_NORM = 2.0  # times the usual gradient norm: lower ones, which clipping bounds, harm nothing
# Times the values around it, so many on either side: of the first values only a single one tells.
EARLY, AROUND = 1.5, 3


class RecentValues(deque[float]):
    """The last WINDOW values, spikes included: a level that stays becomes the usual one."""

    def __init__(self, values: Iterable[float] = ()):
        super().__init__(values, maxlen=WINDOW)

    def highest_usual(self) -> float | None:
        """Return the median and DEVIATIONS robust standard deviations (1.4826 x median absolute deviation), at least a tenth
        above the median; None while there are too few values."""
        if len(self) < ENOUGH:
            return None
        middle = statistics.median(self)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in self)
        return middle + max(DEVIATIONS * spread, 0.1 * abs(middle))

    def early_spikes(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield, of the first ENOUGH values, those far above the values on both sides: how many values ago, and the facts."""
        values = list(self)
        for i in range(1, min(ENOUGH, len(values) - 1)):
            before, after = values[max(i - AROUND, 0) : i], values[i + 1 : i + 1 + AROUND]
            usual = max(statistics.median(before), statistics.median(after))
            if values[i] > EARLY * usual:
                yield len(values) - 1 - i, {"value": values[i], "highest_usual": EARLY * usual, "usual": usual}
