"""What a run will be, from its recipe alone: parameters, tokens, steps, FLOPs, memory, disk, hours, cost, energy.

Plain arithmetic without network, GPU or weights; without torch too, unless model.type is one of transformers. What is not known
is None, and printed as n/a.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.hardware.cpu import can_compile, usable_cores
from pipeline.hardware.device import DeviceInfo
from pipeline.hardware.products import bfloat16_is_faster, product_rates
from pipeline.preflight.memory import (
    FP32,
    Memory,
    checkpoint_bytes,
    checkpoints_on_disk,
    memory_of,
    model_bytes,
    planned_micro_batch,
    queued_bytes,
    row_bytes,
)
from pipeline.preflight.probe import Probe, kept
from pipeline.process.errors import RecipeError
from pipeline.process.storage import cache_dir, read_sealed_json, write_sealed_json
from pipeline.recipe import Recipe
from pipeline.recipe.resolve import horizon_steps, is_auto, micro_batch, micro_steps, rows_per_step, with_batch_tokens
from pipeline.recipe.schema import with_values
from pipeline.recipe.sizes import CountedSizes, Sizes, SizesUnknownError, sizes_from_config, sizes_of
from pipeline.recipe.start_from import start_folder
from pipeline.report.fit import FARTHEST, Expected, expected_bpb

# Expected duration of a run: by a probe of its steps, by finished runs of this device, else a range by arithmetic.

if TYPE_CHECKING:
    from pipeline.report.run_data import RunData

# Shares of the peak that steps reach, from and to. A GPU's is the data sheet's; narrow blocks keep it idle between kernels.
GPU_MFU, FULL_WIDTH, LEAST_MFU = (0.15, 0.55), 768, 0.01
# A processor's peak is the measured rate of square products of one thread, times its threads.
CPU_MFU = (0.06, 0.70)
PROBED = 1.15  # a run's mean step against the median of a probe of the same steps
# A step of another model by a finished run's rate, and for each doubling of its FLOPs.
OTHER_MODEL, A_DOUBLING = 1.25, 1.15
FARTHEST_DOUBLINGS = 6  # doublings: beyond, arithmetic is as good
FORWARD = (0.2, 0.33, 0.5)  # of a training step's time a token: what scoring takes
SAVE_BYTES_S = (5e9, 1e9, 2e8)
# Imports, model, compilation; report and model at the end.
START_S = {"cpu": (6.0, 25.0, 120.0), "other": (15.0, 60.0, 300.0)}
BYTES_A_TOKEN, BYTES_A_TOKEN_FACTOR = 3.5, 1.5  # by vocabulary and text; in SFT the questions come on top
LEAST_VALIDATION = 200_000  # bytes that are held out at least where the data have them
KEPT_RUNS = 200
LEAST_PROCESS = 200 << 20  # bytes: torch alone takes as many


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
    """Seconds of one run without preparing its data: a step, and start and end, all steps, evaluations and saves."""

    step: Span
    start: Span
    steps: Span
    evaluations: Span
    saves: Span
    source: str  # "as probed", "by finished runs ...", "by arithmetic ..."

    @property
    def total(self) -> Span:
        return self.start + self.steps + self.evaluations + self.saves


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What a run took on this machine: seconds, and flops, the exact-causal FLOPs of a step in one process."""

    run: str
    time: float  # when it ended, since 1970
    machine: list[Any]
    flops: float
    step_s: float
    rest_s: float  # start and end
    save_s: float | None  # one checkpoint
    scored_token_share: float | None  # seconds of a scored token over those of a trained one
    process_bytes: int | None = None  # of a process on a CPU at its peak, beside what arithmetic counts of tensors


def expected_duration(plan: "Plan") -> Duration | None:
    """Return how long the planned run takes; None while its steps or the speed of its device are not known."""
    near = _nearest(plan)
    step, source = _step(plan, near)
    if plan.steps is None or step is None:
        return None
    train, forward = plan.recipe.train, Span(*FORWARD)
    if near is not None and near.scored_token_share:
        forward = Span.around(near.scored_token_share, OTHER_MODEL)
    if near is not None and near.save_s is not None:
        save = Span.around(near.save_s, 2)
    else:
        save = Span(*(1 / rate for rate in SAVE_BYTES_S)) * (plan.checkpoint_bytes or 0)
    rest = Span(*START_S["cpu" if plan.device.kind == "cpu" else "other"])
    if near is not None:
        rest = Span.around(near.rest_s, 1.5)
    elif plan.probe is not None:
        rest += Span.around(plan.probe.first_step_s, PROBED)
    saved = 0 if train["save_strategy"] == "no" else max(1, plan.steps // train["save_steps"])
    a_token = step * (1 / plan.batch_tokens)  # of all processes, which share the scoring too
    return Duration(
        step=step,
        start=rest,
        steps=step * plan.steps,
        evaluations=a_token * forward * plan.evaluation_tokens * evaluations_of(plan.recipe, plan.steps),
        saves=save * saved,
        source=source,
    )


def evaluations_of(recipe: Recipe, steps: int) -> int:
    """Return how often bits per byte are scored: before the first step, every train.eval_steps, and at the end."""
    every = recipe.train["eval_steps"] if recipe.train["eval_strategy"] != "no" else steps
    return int(recipe.evals.bpb.at_start) + math.ceil(steps / every)


def evaluation_tokens(recipe: Recipe, scored_bytes: int | None) -> Span:
    """Return the tokens of one scoring of bits per byte: by the bytes that are scored where they are known, else up to the
    recipe's limits."""
    if scored_bytes is not None:
        return Span.around(scored_bytes / BYTES_A_TOKEN, BYTES_A_TOKEN_FACTOR)
    least = LEAST_VALIDATION / BYTES_A_TOKEN
    rows, documents = recipe.evals.bpb.tokens, recipe.evals.bpb.document_bytes / BYTES_A_TOKEN
    low, high = min(rows, least) + min(documents, least), rows + documents
    return Span(low, math.sqrt(low * high), high)


def _step(plan: "Plan", near: FinishedRun | None) -> tuple[Span | None, str]:
    if plan.probe is not None:
        return Span.around(plan.probe.step_s, PROBED), "as probed"
    flops = _step_flops(plan)
    if flops is None:
        return None, ""
    if near is not None:
        factor = OTHER_MODEL * A_DOUBLING ** abs(math.log2(flops / near.flops))
        ended = time.strftime("%Y-%m-%d", time.gmtime(near.time))
        return Span.around(near.step_s * flops / near.flops, factor), f"by run {near.run} of {ended} on this device"
    if plan.device.kind == "cpu":
        rates = product_rates()
        peak = rates and max(1, usable_cores() // plan.processes) * (
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


def _machine(plan: "Plan") -> list[Any]:
    """Return what a finished run must share with a planned one, so that its speed says something."""
    optimizer = plan.recipe.optimizer.type
    if optimizer == "trainer":
        optimizer = f"trainer {plan.recipe.train.get('optim')}"
    return [plan.device.name, usable_cores(), plan.processes, plan.compute_format, plan.compiled, optimizer]


def _place(recipe: Recipe) -> Path:
    return cache_dir(recipe.data.cache_dir) / "finished_runs.json"


def finished_runs(recipe: Recipe) -> list[FinishedRun]:
    """Return what the finished runs that used this cache took, oldest first."""
    try:
        return [FinishedRun(**run) for run in read_sealed_json(_place(recipe))["runs"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def remember(plan: "Plan", data: "RunData") -> None:
    """Keep what a finished run took, for the plans to come; a cache that cannot be written is left as it is."""
    from pipeline.report.outcome import mean_step_s

    flops, step_s = _step_flops(plan), mean_step_s(data)
    if flops is None or step_s is None or not data.running:
        return
    _, began, last = data.running[-1]
    scored, saved = ([value for _, value in data.series(name)] for name in ("perf/eval_s", "ckpt/save_s"))
    again = scored[1:]  # the first one compiles, which belongs to the start
    again_s = sum(again) / len(again) if again else 0.0
    trained_s = plan.evaluation_tokens.value * step_s / plan.batch_tokens  # on as many tokens as one scoring has
    found = FinishedRun(
        run=data.name,
        time=time.time(),
        machine=_machine(plan),
        flops=flops,
        step_s=step_s,
        rest_s=max(1.0, last - began - step_s * data.step() - again_s * len(scored) - sum(saved)),
        save_s=sum(saved) / len(saved) if saved else None,
        scored_token_share=again_s / trained_s if again else None,
        process_bytes=_beside_tensors(plan, data),
    )
    runs = [*finished_runs(plan.recipe), found][-KEPT_RUNS:]
    with suppress(OSError):
        write_sealed_json(_place(plan.recipe), {"runs": [asdict(one) for one in runs]})


def _beside_tensors(plan: "Plan", data: "RunData") -> int | None:
    peak = (data.manifest.get("peak_memory_bytes") or {}).get("host")
    if data.last("chat/eval_s") is not None:  # answers of growing lengths leave holes that say nothing of other runs
        return None
    if peak is None or plan.device.kind != "cpu" or plan.memory is None or plan.memory.total is None:
        return None
    return max(LEAST_PROCESS, peak - (plan.memory.total - plan.memory.process))


def process_of_finished_run(plan: "Plan") -> int | None:
    """Return what the nearest finished run's process took on a CPU beside its tensors; None where there was none."""
    near = _nearest(plan)
    return near.process_bytes if near is not None and plan.device.kind == "cpu" else None


def _nearest(plan: "Plan") -> FinishedRun | None:
    """Return the finished run of such a machine whose step is nearest in FLOPs, the newest of equals; None where all are far."""
    flops, machine = _step_flops(plan), _machine(plan)
    if flops is None:
        return None
    runs = [run for run in reversed(finished_runs(plan.recipe)) if run.machine == machine]
    near = min(runs, key=lambda run: abs(math.log2(run.flops / flops)), default=None)
    return near if near is not None and abs(math.log2(near.flops / flops)) <= FARTHEST_DOUBLINGS else None


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
    checkpoint_bytes: int | None
    run_disk_bytes: int | None
    shards_bytes: int | None
    evaluation_tokens: Span
    compiled: bool
    probe: Probe | None = None  # measured on this machine
    sizes_unknown: str | None = None  # why there are none

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.batch_tokens

    @property
    def flops(self) -> float | None:
        """Of the whole training, by nanochat's formula."""
        flops = None if self.sizes is None else self.sizes.flops_per_token("nanochat")
        return None if flops is None or self.tokens is None else flops * self.tokens

    @property
    def tokens_per_param(self) -> float | None:
        scaling = None if self.sizes is None else self.sizes.scaling
        return None if scaling is None or self.tokens is None else self.tokens / scaling

    @property
    def rows_per_pass(self) -> int:
        """Return rows of one micro-step over all processes."""
        return self.processes * micro_batch(self.recipe)

    @property
    def padding_share(self) -> float:
        """Share of the computed rows that fill up the last micro-step of each step and teach nothing."""
        return 1 - rows_per_step(self.recipe) / (self.micro_steps * self.rows_per_pass)

    @cached_property
    def duration(self) -> Duration | None:
        """Of the whole run but the preparation of its data."""
        return expected_duration(self)

    @property
    def training_s(self) -> float | None:
        """Time in the steps alone."""
        return None if self.duration is None else self.duration.steps.value

    @property
    def process_bytes(self) -> int | None:
        """Return the most memory of a process as probed, on a CPU with the copy of a checkpoint that is being written."""
        if self.probe is None:
            return None
        return self.probe.peak_bytes + (self.memory.saved if self.memory else 0)

    @property
    def val_bpb(self) -> Expected | None:
        """Return the last val/bpb, where fitted runs of this family let expect one."""
        return expected_bpb(self.recipe, self.sizes, tokens=self.tokens)

    @property
    def device_hours(self) -> Span | None:
        """Of all devices, for the whole duration."""
        return None if self.duration is None else self.duration.total * (self.processes / 3600)

    @property
    def cost(self) -> Span | None:
        price = self.recipe.run.gpu_hour_cost
        return None if self.device_hours is None or price is None else self.device_hours * price

    @property
    def energy_kwh(self) -> Span | None:
        """Of the accelerators alone, at their rated power."""
        watts = self.device.power_w
        return None if self.device_hours is None or watts is None else self.device_hours * (watts / 1000)


def make_plan(recipe: Recipe, device: DeviceInfo, *, processes: int, scored_bytes: int | None = None) -> Plan:
    """Return the plan for that many processes, one for each accelerator (or several on a CPU). Its recipe has data.batch_tokens, and a micro-batch where it is auto.

    scored_bytes: of one scoring of the validation, where the data are open already.
    """
    batch_tokens = with_batch_tokens(recipe, processes)
    recipe = with_values(recipe, {"data.batch_tokens": batch_tokens})
    sizes, sizes_unknown = _sizes(recipe)
    steps = _steps(recipe)
    compute = _compute_format(recipe, device)
    checkpoint = checkpoint_bytes(recipe, sizes) if sizes else None
    count = checkpoints_on_disk(recipe, steps)
    rows = None if steps is None else steps * rows_per_step(recipe)
    half, compiled = compute in ("bfloat16", "float16"), _compiled(recipe, device)
    if is_auto(recipe):
        rows_planned = planned_micro_batch(recipe, sizes, device, processes=processes, half=half, compiled=compiled)
        recipe = with_values(recipe, {"micro_batch": rows_planned})
    by_rows = (
        partial(
            memory_of, recipe, sizes, processes=processes, half=half, compiled=compiled, on_cpu=device.kind == "cpu"
        )
        if sizes
        else None
    )
    plan = Plan(
        recipe=recipe,
        device=device,
        processes=processes,
        compute_format=compute,
        sizes=sizes,
        steps=steps,
        batch_tokens=batch_tokens,
        micro_steps=micro_steps(recipe, processes),
        memory=by_rows() if by_rows else None,
        least_memory=by_rows(rows=1) if by_rows else None,
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
    found = process_of_finished_run(plan)
    if found is None or plan.memory is None or plan.least_memory is None:
        return plan
    memory, least = (replace(one, process=found) for one in (plan.memory, plan.least_memory))
    return replace(plan, memory=memory, least_memory=least)


def _steps(recipe: Recipe) -> int | None:
    assert recipe.data.batch_tokens
    try:
        return horizon_steps(recipe, recipe.data.batch_tokens)
    except ValueError as error:
        raise RecipeError(
            f"{recipe.path}: run: the horizon follows from sizes that are not known: {error}. Give run.tokens or train.max_steps."
        ) from error


def known_sizes(recipe: Recipe) -> Sizes | CountedSizes | None:
    return _sizes(recipe)[0]


def _sizes(recipe: Recipe) -> tuple[Sizes | CountedSizes | None, str | None]:
    """Return sizes of the model that the recipe starts from when it lies here, else of the recipe's own; or None, and why."""
    folder = start_folder(recipe)
    if folder is not None:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        import pipeline.model.build  # noqa: F401 - makes our own model type known

        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
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
    """Return the format of the matrix products. What `auto` means on a GPU is known without torch only by the table of peaks.

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


def _compiled(recipe: Recipe, device: DeviceInfo) -> bool:
    compiled = recipe.train.get("torch_compile")
    if compiled == "auto":
        return can_compile() if device.kind == "cpu" else device.kind == "cuda"
    return bool(compiled)


# Plans as a table: a line for each number, a column for each plan.

UNKNOWN = "n/a"
BESIDE = "the preparation of data, the monitor, the writer of checkpoints"


def plan_table(plans: list[Plan], headings: list[str] | None = None) -> str:
    """Return the plans side by side; headings stand above the columns."""
    rows = [("", headings)] if headings else []
    rows += [(label, [_cell(value, plan) for plan in plans]) for label, value in LINES]
    label_width = max(len(label) for label, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(plans))]
    lines = []
    for label, cells in rows:
        if label and all(cell == "" for cell in cells):
            continue
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)] if len(plans) > 1 else cells
        lines.append(f"  {label.ljust(label_width)}  {'  '.join(padded)}".rstrip())
    return "\n".join(lines)


def why_unknown(plan: Plan) -> list[str]:
    """Return the causes of the n/a in a plan's table."""
    reasons = []
    if plan.sizes is None:
        why = plan.sizes_unknown or "the model that the recipe starts from is not on this machine"
        reasons.append(f"sizes, since {why}")
    elif plan.flops is None and plan.sizes.flops_per_token() is None:
        reasons.append(f"FLOPs, and MFU with them, since {plan.sizes.unknown}")
    if plan.steps is None:
        reasons.append(
            "steps and all that follows from them, since the horizon is in epochs: known once the data are packed"
        )
    if plan.duration is None and plan.steps is not None:
        reasons.append(
            f"time, since the peak of {plan.device.name} in {plan.compute_format} is not known, and no steps were measured; run.hardware=8xH100 plans for another device"
        )
    if plan.checkpoint_bytes is None and plan.sizes is not None:
        reasons.append(
            f"checkpoint, since the state of this optimizer ({plan.recipe.optimizer.type}) is not known before it runs"
        )
    if plan.recipe.run.gpu_hour_cost is None:
        reasons.append("cost, since run.gpu_hour_cost is not given")
    return reasons


def _cell(value: Callable[[Plan], str | None], plan: Plan) -> str:
    text = value(plan)
    return UNKNOWN if text is None else text


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f}M"


def scientific(value: float, digits: int) -> str:
    """4.775e9, as people write it."""
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def gibibytes(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**28 else f"{count / 2**20:,.0f} MiB"


def duration(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 600 else f"{seconds / 60:,.1f} min"


def _parameters(role: str) -> Callable[[Plan], str | None]:
    return lambda plan: None if plan.sizes is None else millions(plan.sizes.parameters()[role])


def _scaling(plan: Plan) -> str | None:
    return None if plan.sizes is None or plan.sizes.scaling is None else millions(plan.sizes.scaling)


def _model(plan: Plan) -> str | None:
    sizes = plan.sizes
    if sizes is None:
        return None
    heads = f", {sizes.n_head} heads" if sizes.n_head else ""
    return f"{sizes.model_type} {sizes.n_layer} x {sizes.n_embd}{heads}"


def _device(plan: Plan) -> str:
    kind = plan.device.name if plan.device.kind != "cpu" else f"CPU ({plan.device.name})"
    return (
        f"{plan.processes} x {kind}"
        if plan.device.kind != "cpu"
        else f"{kind}, {plan.processes} process{'es' * (plan.processes > 1)}"
    )


def _flops(convention: str) -> Callable[[Plan], str | None]:
    def text(plan: Plan) -> str | None:
        flops = None if plan.sizes is None else plan.sizes.flops_per_token(convention)  # type: ignore[arg-type]
        return None if flops is None else scientific(flops, 3)

    return text


def _horizon(plan: Plan) -> str | None:
    return None if plan.steps is None else f"{plan.steps:,} of {plan.batch_tokens:,} tokens"


def _tokens(plan: Plan) -> str | None:
    if plan.tokens is None:
        return None
    count = f"{plan.tokens / 1e9:,.2f}B" if plan.tokens >= 1e8 else f"{plan.tokens / 1e6:,.1f}M"
    return count if plan.tokens_per_param is None else f"{count} ({plan.tokens_per_param:.2f} a scaling parameter)"


def _batch(plan: Plan) -> str:
    auto = " (auto, by arithmetic)" if is_auto(plan.recipe) else ""
    return f"{plan.processes} x {micro_batch(plan.recipe)} x {plan.micro_steps}{auto}"


def _memory(part: str) -> Callable[[Plan], str | None]:
    def text(plan: Plan) -> str | None:
        value = getattr(plan.memory, part) if plan.memory else None
        return None if value is None else ("about " if part in ("activations", "total") else "") + gibibytes(value)

    return text


def _of_the_cpu(part: str) -> Callable[[Plan], str | None]:
    return lambda plan: gibibytes(getattr(plan.memory, part)) if plan.memory and getattr(plan.memory, part) else ""


def _device_memory(plan: Plan) -> str | None:
    return None if plan.device.memory_gib is None else f"{plan.device.memory_gib:,.1f} GiB"


def _checkpoint(plan: Plan) -> str | None:
    if plan.checkpoint_bytes is None or plan.sizes is None:
        return None
    return f"{gigabytes(plan.checkpoint_bytes)} ({gigabytes(FP32 * plan.sizes.parameters()['total'])} of it weights)"


def _bytes(name: str) -> Callable[[Plan], str | None]:
    return lambda plan: None if getattr(plan, name) is None else gigabytes(getattr(plan, name))


def duration_range(span: Span) -> str:
    """Return seconds from where to where, in one unit, and what is expected."""
    hours = span.value >= 600
    low, value, high = ((s / 3600 if hours else s / 60) for s in (span.low, span.value, span.high))
    digits = 2 if hours else 1
    return f"{low:,.{digits}f} to {high:,.{digits}f} {'h' if hours else 'min'}, expected {value:,.{digits}f}"


def _duration(part: str) -> Callable[[Plan], str | None]:
    return lambda plan: None if plan.duration is None else duration_range(getattr(plan.duration, part))


def _range(name: str, shape: str) -> Callable[[Plan], str | None]:
    def text(plan: Plan) -> str | None:
        span: Span | None = getattr(plan, name)
        if span is None:
            return None
        low, high, value = (shape.format(number) for number in (span.low, span.high, span.value))
        return f"{low} to {high}, expected {value}"

    return text


def _probed_memory(plan: Plan) -> str:
    return "" if plan.process_bytes is None else gibibytes(plan.process_bytes)


def probe_line(plan: Plan) -> str:
    """Return what a probe measured, in a sentence."""
    probe = plan.probe
    assert probe is not None
    where = "resident in" if plan.device.kind == "cpu" else "allocated on the device by"
    return (
        f"probe: {probe.steps} steps of {probe.step_s:.3f} s ({probe.low_s:.3f} to {probe.high_s:.3f}) after a first one of "
        f"{probe.first_step_s:.1f} s; at most {gibibytes(probe.peak_bytes)} {where} a process"
    )


def _expected(plan: Plan) -> str:
    expected = plan.val_bpb
    if expected is None:
        return ""
    beyond = f", at {expected.beyond:.1f} times the FLOPs of the largest" if expected.beyond > 1 else ""
    beyond += ", farther than the interval was checked" if expected.beyond > FARTHEST else ""
    return f"{expected.value:.3f} (95 %: {expected.low:.3f} to {expected.high:.3f}; {expected.runs} runs in {expected.fit}{beyond})"


# A number that can be unknown is None, and printed as n/a.
LINES: list[tuple[str, Callable[[Plan], str | None]]] = [
    ("hardware", _device),
    ("compute format", lambda plan: plan.compute_format),
    ("model", _model),
    ("parameters", _parameters("total")),
    ("  embeddings", _parameters("embeddings")),
    ("  value embeddings", _parameters("value_embeddings")),
    ("  head", _parameters("head")),
    ("  matrices of the blocks", _parameters("matrices")),
    ("  scalars, norms, biases", _parameters("scalars")),
    ("scaling parameters (matrices + head)", _scaling),
    ("FLOPs a token, nanochat's formula", _flops("nanochat")),
    ("FLOPs a token, exact-causal", _flops("exact_causal")),
    ("steps", _horizon),
    ("tokens (row positions)", _tokens),
    ("FLOPs, nanochat's formula", lambda plan: None if plan.flops is None else scientific(plan.flops, 2)),
    ("processes x rows x micro-steps", _batch),
    ("rows that only fill up micro-steps", lambda plan: f"{100 * plan.padding_share:.1f} %"),
    ("memory a process (estimate)", _memory("total")),
    ("  Python and libraries", _of_the_cpu("process")),
    ("  weights, fp32", _memory("weights")),
    ("  gradients", _memory("gradients")),
    ("  optimizer", _memory("optimizer")),
    ("  activations", _memory("activations")),
    ("  copy of a checkpoint being written", _of_the_cpu("saved")),
    ("  beside it, with memory of their own", lambda plan: BESIDE if plan.memory and plan.memory.process else ""),
    ("memory a process, as probed", _probed_memory),
    ("memory of the device", _device_memory),
    ("checkpoint", _checkpoint),
    ("disk for checkpoints and model", _bytes("run_disk_bytes")),
    ("disk for packed rows, at most", _bytes("shards_bytes")),
    ("time, without preparing data", _duration("total")),
    ("  in steps", _duration("steps")),
    ("  start and end", _duration("start")),
    ("  evaluations of bits per byte", _duration("evaluations")),
    ("  saves", _duration("saves")),
    ("  known from", lambda plan: None if plan.duration is None else plan.duration.source),
    ("device hours", _range("device_hours", "{:,.1f}")),
    ("energy at rated power, kWh", _range("energy_kwh", "{:,.1f}")),
    ("final val/bpb, by fitted runs", _expected),
    ("cost (run.gpu_hour_cost)", _range("cost", "{:,.2f}")),
]
