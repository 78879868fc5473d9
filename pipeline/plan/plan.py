"""Plan of a run, from its recipe alone: parameters, tokens, steps, FLOPs, memory, disk, hours, cost, energy.

Plain arithmetic without network, GPU or weights; without torch too, unless model.type is one of transformers. What is
not known is None, and printed as n/a.
"""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.hardware.accelerators import DeviceInfo
from pipeline.hardware.device import batch_ranks, device_info, model_shards
from pipeline.hardware.processor import available_bytes, cpu_can_compile, physical_cores, usable_cores
from pipeline.hardware.rates import bfloat16_is_faster, product_rates
from pipeline.plan.memory import (
    FP32,
    Memory,
    checkpoint_bytes,
    checkpoints_on_disk,
    fsdp_units,
    larger_micro_batch,
    memory_of,
    model_bytes,
    planned_micro_batch,
    queued_bytes,
    row_bytes,
    usable_bytes,
)
from pipeline.process import commands
from pipeline.process.errors import RecipeError
from pipeline.process.storage import cache_dir, read_sealed_json, write_sealed_json
from pipeline.recipe import Recipe
from pipeline.recipe.batch import (
    KEY,
    is_auto,
    isolates_documents,
    micro_batch,
    micro_steps,
    rows_per_step,
    step_rows,
    tokens_at,
    with_batch_tokens,
)
from pipeline.recipe.dial import horizon_steps
from pipeline.recipe.identity import resume_keys
from pipeline.recipe.model_sizes import sizes_from_config, sizes_from_model, sizes_of
from pipeline.recipe.model_statistics import CountedSizes
from pipeline.recipe.schema import with_values
from pipeline.recipe.sizes import Sizes, SizesUnknownError
from pipeline.recipe.start_from import start_folder
from pipeline.run_dir.run_directory import RunDirectory

if TYPE_CHECKING:
    from pipeline.training.trainer import TandemTrainer


# Steps measured on this machine before the run: seconds a step, and the most memory that a process took.
#
# Child processes make real steps of the recipe's model, at its micro-batch and with its optimizer, on rows of random
# tokens (run/probing.py): what a row says does not change its time. The result lies in the cache under all that it
# depends on. There the next plan of such a run finds it, that of the training's own start too, which measures nothing
# itself.

PROBE_START_S = 180.0  # for imports, the model, and the first step with its compilation
CPU_SHARE = 0.5  # of a CPU's free memory that a probe may take by arithmetic: more would push others out
# Beginnings of keys of train: that neither time nor memory of a step depends on, and of those told apart (the
# micro-batch).
WITHOUT = (
    "max_steps", "num_train_epochs", "seed", "logging_", "eval_", "save_", "per_device_", "learning_rate", "warmup_",
    "ddp_timeout",
)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """Seconds of the measured steps (median, quickest, slowest), the first two left out, of which the first compiles.

    peak_bytes: of one process, resident memory where it trains on the CPU, else allocated on the device.
    """

    step_s: float
    low_s: float
    high_s: float
    steps: int
    first_step_s: float
    peak_bytes: int
    time: float


class NotMeasured(Exception):
    """Raised when a probe cannot measure the run; its text is the reason, half a sentence."""


def measure(argv: list[str], device: DeviceInfo, *, processes: int, seconds: float, needed_bytes: int | None) -> Probe:
    """Probe the run of this command line with so many processes, for about so many seconds of steps.

    needed_bytes: of one process, by arithmetic. Raises NotMeasured.
    """
    free = CPU_SHARE * available_bytes() / processes
    if device.kind == "cpu" and needed_bytes is not None and needed_bytes > free:
        raise NotMeasured(
            f"a process takes about {needed_bytes / 2**30:.1f} GiB, and its part of half the free memory is "
            f"{free / 2**30:.1f} GiB"
        )
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    )
    command = [sys.executable, *launcher, "-m", "pipeline.run.probing", str(seconds), *argv]
    limit = PROBE_START_S + 3 * seconds
    child = subprocess.Popen(
        command,
        env=commands.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, stderr = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"three steps took more than {limit:.0f} s (--probe SECONDS gives them more)") from None
    finally:
        with suppress(ProcessLookupError):  # whatever it has started
            os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
        child.wait()
    results = [line for line in out.splitlines() if line.startswith('{"step_s"')]
    if not results:
        lines = (stderr.strip() or out.strip() or f"status {child.returncode}").splitlines()
        raise NotMeasured(f"its process ended with: {lines[-1]}")
    return Probe(**json.loads(results[-1]))


def keep(probe: Probe, recipe: Recipe, device: DeviceInfo, *, processes: int) -> None:
    """For the plans to come."""
    write_sealed_json(_probe_place(recipe, device, processes=processes), asdict(probe))


def kept(recipe: Recipe, device: DeviceInfo, *, processes: int) -> Probe | None:
    """Return what was measured last, on such a machine, of such steps. The micro-batch of the recipe must be a number
    by now."""
    try:
        return Probe(**read_sealed_json(_probe_place(recipe, device, processes=processes)))
    except (OSError, ValueError, TypeError, PackageNotFoundError):
        return None


def _probe_place(recipe: Recipe, device: DeviceInfo, *, processes: int) -> Path:
    settings = {
        name: value
        for name, value in resume_keys(recipe).items()
        if name.startswith(("model.", "optimizer.")) and not name.startswith("optimizer.schedule.")
    }
    settings |= {f"train.{n}": value for n, value in recipe.train.items() if not n.startswith(WITHOUT)}
    settings |= {
        KEY: micro_batch(recipe),
        "attention": recipe.model.attn_implementation,
        "vocab_size": recipe.tokenizer.vocab_size,
        "row_tokens": recipe.data.row_tokens,
        "batch_tokens": recipe.data.batch_tokens,
        "isolated": isolates_documents(recipe),
        "machine": [device.name, usable_cores(), processes],
        "versions": [version("torch"), version("transformers")],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return cache_dir(recipe.data.cache_dir) / "probes" / f"{digest}.json"


# Expected duration of a run: by a probe of its steps, else a range by arithmetic.

# Shares of the peak that steps reach, from and to. A GPU's is the data sheet's; narrow blocks keep it idle between
# kernels.
GPU_MFU, FULL_WIDTH, LEAST_MFU = (0.15, 0.55), 768, 0.01
# A processor's peak is the measured rate of square products of one thread, times its threads.
CPU_MFU = (0.06, 0.70)
PROBED = 1.15  # a run's mean step against the median of a probe of the same steps
FORWARD = (0.2, 0.33, 0.5)  # of a training step's time a token: what scoring takes
# Of a process, and of the disk that many of them share
SAVE_BYTES_S, DISK_BYTES_S = (5e9, 1e9, 2e8), (5e10, 1e10, 2e9)
# Imports, model, compilation; report and model at the end.
START_S = {"cpu": (6.0, 25.0, 120.0), "other": (15.0, 60.0, 300.0)}
BYTES_A_TOKEN, BYTES_A_TOKEN_FACTOR = 3.5, 1.5  # by vocabulary and text; in SFT the questions come on top
LEAST_VALIDATION = 200_000  # bytes that are held out at least where the data have them
RECORDED_PARTS = ("total", "start", "steps", "evaluations", "saves")  # of a duration, in run_manifest.json


@dataclass(frozen=True)
class Span:
    """A positive quantity: what is expected, and from where to where it may lie."""

    low: float
    value: float
    high: float

    @classmethod
    def around(cls, value: float, factor: float) -> "Span":
        return cls(value / factor, value, value * factor)

    def __add__(self, other: "Span") -> "Span":
        return Span(self.low + other.low, self.value + other.value, self.high + other.high)

    def __mul__(self, other: "Span | float") -> "Span":
        other = other if isinstance(other, Span) else Span(other, other, other)
        return Span(self.low * other.low, self.value * other.value, self.high * other.high)


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Seconds of one run without preparing its data and without CORE and chat tasks: a step, and start and end, all
    steps, evaluations of bits per byte, and saves."""

    step: Span
    start: Span
    steps: Span
    evaluations: Span
    saves: Span
    source: str  # "as probed", "by arithmetic ..."

    @property
    def total(self) -> Span:
        return self.start + self.steps + self.evaluations + self.saves


def expected_duration(plan: "Plan") -> Duration | None:
    """Return how long the planned run takes; None while its steps or the speed of its device are not known."""
    step, source = compute_of_step(plan)
    if plan.probe is not None:
        step, source = Span.around(plan.probe.step_s, PROBED), "as probed"
    if plan.steps is None or plan.tokens is None or step is None:
        return None
    train, forward = plan.recipe.train, Span(*FORWARD)
    rest = Span(*START_S["cpu" if plan.device.kind == "cpu" else "other"])
    if plan.probe is not None:
        rest += Span.around(plan.probe.first_step_s, PROBED)
    saved = 0 if train["save_strategy"] == "no" else max(1, plan.steps // train["save_steps"])
    a_token = step * (1 / plan.batch_tokens)  # of all processes, which share the scoring too
    return Duration(
        step=step,
        start=rest,
        steps=step * (plan.tokens / plan.batch_tokens),
        evaluations=a_token * forward * plan.evaluation_tokens * evaluations_of(plan.recipe, plan.steps),
        saves=plan.save * saved,
        source=source,
    )


def evaluations_of(recipe: Recipe, steps: int) -> int:
    """Return how often bits per byte are scored: before the first step, every train.eval_steps, and at the end."""
    every = recipe.train["eval_steps"] if recipe.train["eval_strategy"] != "no" else steps
    return int(recipe.evals.bpb.at_start) + math.ceil(steps / every)


def evaluation_tokens(recipe: Recipe, scored_bytes: int | None) -> Span:
    """Return the tokens of one scoring of bits per byte: by the bytes that are scored where they are known, else up to
    the recipe's limits."""
    if scored_bytes is not None:
        return Span.around(scored_bytes / BYTES_A_TOKEN, BYTES_A_TOKEN_FACTOR)
    least = LEAST_VALIDATION / BYTES_A_TOKEN
    rows, documents = recipe.evals.bpb.tokens, recipe.evals.bpb.document_bytes / BYTES_A_TOKEN
    low, high = min(rows, least) + min(documents, least), rows + documents
    return Span(low, math.sqrt(low * high), high)


def scored_at_most(recipe: Recipe, held_out: int) -> int:
    """Return the bytes of one scoring of bits per byte, as rows and in pretraining as documents too, within the
    recipe's limits."""
    limits = recipe.evals.bpb
    documents = 0 if recipe.stage == "sft" else min(held_out, limits.document_bytes)
    return round(min(held_out, limits.tokens * BYTES_A_TOKEN)) + documents


def compute_of_step(plan: "Plan") -> tuple[Span | None, str]:
    """Return the seconds of a step's compute by arithmetic, and how they are known; None where the peak or the FLOPs
    are not known."""
    flops = _step_flops(plan)
    if flops is None:
        return None, ""
    if plan.device.kind == "cpu":
        rates = product_rates()
        peak = rates and max(1, physical_cores() // plan.processes) * (
            rates.bfloat16 if plan.compute_format == "bfloat16" else rates.float32
        )
        shares = CPU_MFU
    else:
        peak = (plan.device.peak_flops or {}).get(plan.compute_format)
        narrow = min(1.0, (plan.sizes.n_embd if plan.sizes else FULL_WIDTH) / FULL_WIDTH)
        shares = (max(LEAST_MFU, GPU_MFU[0] * narrow**2), GPU_MFU[1])
    if not peak:
        return None, ""
    low, high = shares
    step = Span(flops / (high * peak), flops / (math.sqrt(low * high) * peak), flops / (low * peak))
    return step, f"by arithmetic, {low:.0%} to {high:.0%} of the peak"


def _step_flops(plan: "Plan") -> float | None:
    """Exact-causal FLOPs of a step in one process, rows that only fill up micro-steps included."""
    flops = None if plan.sizes is None else plan.sizes.flops_per_token("exact_causal")
    return None if flops is None else flops * plan.batch_tokens / (1 - plan.padding_share) / plan.processes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Numbers of one run on one kind of device. Bytes, seconds and watts are named so."""

    recipe: Recipe
    device: DeviceInfo
    processes: int
    compute_format: str
    sizes: Sizes | CountedSizes | None
    steps: int | None
    batch_tokens: int
    micro_steps: int
    memory: Memory | None
    least_memory: Memory | None  # of a micro-batch of one row
    shards: int = 1  # processes that share a model (FSDP2, HSDP)
    checkpoint_bytes: int | None
    run_disk_bytes: int | None
    shards_bytes: int | None
    evaluation_tokens: Span
    compiled: bool
    probe: Probe | None = None  # measured on this machine
    sizes_unknown: str | None = None  # why there are none
    steps_are_estimated: bool = False  # of a horizon in epochs, by a sample of the data

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else tokens_at(self.recipe, self.steps)

    @property
    def flops(self) -> float | None:
        """Return the FLOPs of the whole training, by nanochat's formula."""
        flops = None if self.sizes is None else self.sizes.flops_per_token("nanochat")
        return None if flops is None or self.tokens is None else flops * self.tokens

    @property
    def tokens_per_param(self) -> float | None:
        scaling = None if self.sizes is None else self.sizes.scaling
        return None if scaling is None or self.tokens is None else self.tokens / scaling

    @property
    def rows_per_pass(self) -> int:
        """Return rows of one micro-step over all processes."""
        return batch_ranks(self.processes) * micro_batch(self.recipe)

    @property
    def padding_share(self) -> float:
        """Share of the computed rows that fill up the last micro-step of each step and teach nothing."""
        return 1 - rows_per_step(self.recipe) / (self.micro_steps * self.rows_per_pass)

    @property
    def row_fits(self) -> bool | None:
        """Return whether a micro-batch of one row fits into the device by the estimate; None where that is not
        known."""
        least = self.least_memory.total if self.least_memory else None
        limit = self.device.memory_gib
        return None if least is None or limit is None else least <= usable_bytes(limit)

    @property
    def layout(self) -> str:
        """Return how the model lies on the devices, in PyTorch's words."""
        return "DDP" if self.shards == 1 else "FSDP" if self.shards == self.processes else "HSDP"

    @cached_property
    def duration(self) -> Duration | None:
        """Return the duration of the whole run but the preparation of its data."""
        return expected_duration(self)

    @property
    def save(self) -> Span:
        """Return the seconds that the writing of a checkpoint takes: by one process, or in parts by those that share a
        model, whole tensors each."""
        whole = part = self.checkpoint_bytes or 0
        if self.shards > 1 and self.sizes is not None:
            tensors = [FP32 * rows * columns for unit in fsdp_units(self.sizes) for rows, columns in unit]
            part = max(whole // self.processes, min(whole, max(tensors)))
        return Span(*(max(part / rate, whole / disk) for rate, disk in zip(SAVE_BYTES_S, DISK_BYTES_S, strict=True)))

    @property
    def training_s(self) -> float | None:
        """Time in the steps alone."""
        return None if self.duration is None else self.duration.steps.value

    @property
    def process_bytes(self) -> int | None:
        """Return the most memory of a process as probed, on a CPU with the copy of a checkpoint that is being
        written."""
        if self.probe is None:
            return None
        return self.probe.peak_bytes + (self.memory.saved if self.memory else 0)

    @property
    def device_hours(self) -> Span | None:
        """Return the hours of all devices, for the whole duration."""
        return None if self.duration is None else self.duration.total * (self.processes / 3600)

    @property
    def cost(self) -> Span | None:
        price = self.recipe.run.gpu_hour_cost
        return None if self.device_hours is None or price is None else self.device_hours * price

    @property
    def energy_kwh(self) -> Span | None:
        """Return the energy of the accelerators alone, at their rated power."""
        watts = self.device.power_w
        return None if self.device_hours is None or watts is None else self.device_hours * (watts / 1000)

    def facts(self) -> dict[str, Any]:
        """Return the plan as run_manifest.json holds it (run_dir/run_directory.py); what is not known is left out."""
        memory, duration = self.memory, self.duration
        cost, energy = self.cost, self.energy_kwh
        parts = ("weights", "gradients", "optimizer", "activations", "process", "saved", "total") if memory else ()
        found = {
            "device": self.device.name,
            "processes": self.processes,
            "parameters": self.sizes.parameters().get("total") if self.sizes else None,
            "scaling_parameters": self.sizes.scaling if self.sizes else None,
            "steps": self.steps,
            "tokens": self.tokens,
            "flops": self.flops,
            "memory_bytes": _known({name: getattr(memory, name) for name in parts}) or None,
            "process_bytes": self.process_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "run_disk_bytes": self.run_disk_bytes,
            "training_s": self.training_s,
            "duration_s": {name: asdict(getattr(duration, name)) for name in RECORDED_PARTS} if duration else None,
            "duration_source": duration.source if duration else None,
            "cost": cost.value if cost else None,
            "energy_kwh": energy.value if energy else None,
            "probe": asdict(self.probe) if self.probe else None,
        }
        return _known(found)


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def plan_of_run(recipe: Recipe, run: RunDirectory, *, micro_batch: int, processes: int) -> Plan:
    """Return the plan of a run as it was built: its micro-batch, its vocabulary, and the validation that it scores."""
    inputs = run.read_manifest().get("inputs", {})
    scored, vocabulary = inputs.get("validation_bytes"), inputs.get("tokenizer", {}).get("size")
    recipe = with_values(recipe, {KEY: micro_batch})
    if vocabulary:  # of little text it is smaller than tokenizer.vocab_size, and chat adds tokens to others' models
        recipe = with_values(recipe, {"tokenizer.vocab_size": vocabulary})
    return make_plan(recipe, device_info(), processes=processes, scored_bytes=sum(scored.values()) if scored else None)


def make_plan(
    recipe: Recipe,
    device: DeviceInfo,
    *,
    processes: int,
    scored_bytes: int | None = None,
    about_steps: int | None = None,
    shards: int | None = None,
) -> Plan:
    """Return the plan for that many processes, one for each accelerator (or several on a CPU). Its recipe has
    data.batch_tokens, and a micro-batch where it is auto.

    scored_bytes: of one scoring of the validation, where the data are open already. about_steps: of a horizon in
    epochs. shards: processes that share a model; None for what the launcher asks for.
    """
    if shards is None:
        shards = model_shards(processes)
    batch_tokens = with_batch_tokens(recipe, batch_ranks(processes))
    recipe = with_values(recipe, {"data.batch_tokens": batch_tokens})
    sizes, sizes_unknown = _sizes(recipe)
    known_steps = _steps(recipe)
    steps = about_steps if known_steps is None else known_steps
    compute = _compute_format(recipe, device)
    checkpoint = checkpoint_bytes(recipe, sizes) if sizes else None
    count = checkpoints_on_disk(recipe, steps)
    rows = None if steps is None else step_rows(recipe).before(steps)
    half, compiled = compute in ("bfloat16", "float16"), _compiled(recipe, device, shards)
    shared: dict[str, Any] = {"processes": processes, "half": half, "compiled": compiled, "shards": shards}
    if is_auto(recipe):
        recipe = with_values(recipe, {"micro_batch": planned_micro_batch(recipe, sizes, device, **shared)})
    by_rows = partial(memory_of, recipe, sizes, on_cpu=device.kind == "cpu", **shared) if sizes else None
    return Plan(
        recipe=recipe,
        device=device,
        processes=processes,
        compute_format=compute,
        sizes=sizes,
        steps=steps,
        steps_are_estimated=known_steps is None,
        batch_tokens=batch_tokens,
        micro_steps=micro_steps(recipe, batch_ranks(processes)),
        memory=by_rows() if by_rows else None,
        least_memory=by_rows(rows=1) if by_rows else None,
        shards=shards,
        checkpoint_bytes=checkpoint,
        run_disk_bytes=count * checkpoint + model_bytes(recipe, sizes) + queued_bytes(recipe, sizes)
        if sizes and checkpoint is not None and count
        else None,
        shards_bytes=None if rows is None else rows * row_bytes(recipe, recipe.tokenizer.vocab_size),
        evaluation_tokens=evaluation_tokens(recipe, scored_bytes),
        compiled=compiled,
        probe=kept(recipe, device, processes=processes),
        sizes_unknown=sizes_unknown,
    )


def memory_hint(recipe: Recipe, trainer: "TandemTrainer") -> str | None:
    """Return what the CUDA device of a run had in use at most, when twice its micro-batch would fit too; else None."""
    import torch

    args = trainer.args
    peak, limit = trainer.log_row.memory.peak(), torch.cuda.mem_get_info(args.device)[1]
    sizes = sizes_from_model(trainer.model, recipe.data.row_tokens)
    half = bool(args.bf16 or args.fp16)
    memory = memory_of(recipe, sizes, processes=args.world_size, half=half, compiled=bool(args.torch_compile))
    rows = larger_micro_batch(recipe, memory.fixed, peak=peak, limit=limit, processes=args.world_size)
    if rows is None:
        return None
    return (
        f"{gibibytes(peak)} of {gibibytes(limit)} were in use at most: {KEY}: {rows} fits, too, and auto finds what "
        "fits."
    )


def _steps(recipe: Recipe) -> int | None:
    assert recipe.data.batch_tokens
    try:
        return horizon_steps(recipe, recipe.data.batch_tokens)
    except ValueError as error:
        raise RecipeError(
            f"{recipe.path}: run: the horizon follows from sizes that are not known: {error}. Give run.tokens or "
            "train.max_steps."
        ) from error


def _sizes(recipe: Recipe) -> tuple[Sizes | CountedSizes | None, str | None]:
    """Return sizes of the model that the recipe starts from when it lies here, else of the recipe's own; or None, and
    why."""
    folder = start_folder(recipe)
    if folder is not None:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        import pipeline.model.build  # noqa: F401 - makes our own model type known

        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            text, vocabulary = config.get_text_config(), recipe.tokenizer.vocab_size or 0
            if vocabulary > getattr(text, "vocab_size", math.inf):
                text.vocab_size = vocabulary  # rows are added for ids that it has none for (training/build.py)
            return sizes_from_config(config, recipe.data.row_tokens), None
        except SizesUnknownError as error:
            return None, str(error)
        except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError):
            # Of wrong values, or of code of its own: known when it is loaded, if it is trusted.
            return None, "its config is not one of transformers' own types"
    try:
        return sizes_of(recipe), None
    except SizesUnknownError as error:
        return None, str(error)
    except ImportError:
        return None, "torch is not installed, and a model of transformers is counted with it"
    except ValueError:
        return None, None


def _compute_format(recipe: Recipe, device: DeviceInfo) -> str:
    """Return the format of the matrix products. What `auto` means on a GPU is known without torch only by the table of
    peaks.

    Under train.fp8 bfloat16 too: what float8 gains depends on the widths, and hours are not promised on it.
    """
    train = recipe.train
    bf16 = train.get("bf16")
    if bf16 == "auto":
        bf16 = not train.get("fp16") and (
            bfloat16_is_faster() if device.kind == "cpu" else "bfloat16" in (device.peak_flops or {})
        )
    if bf16 or train.get("fp16"):
        return "bfloat16" if bf16 else "float16"
    return "tf32" if train.get("tf32") and device.kind == "cuda" else "float32"


def _compiled(recipe: Recipe, device: DeviceInfo, shards: int) -> bool:
    compiled = recipe.train.get("torch_compile")
    if compiled == "auto":  # as decide_compile
        return shards == 1 and (cpu_can_compile() if device.kind == "cpu" else device.kind == "cuda")
    return bool(compiled)


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def gibibytes(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**28 else f"{count / 2**20:,.0f} MiB"
