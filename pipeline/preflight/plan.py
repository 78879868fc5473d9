"""What a run will be, from its recipe alone: parameters, tokens, steps, FLOPs, memory, disk, hours, cost, energy.

Plain arithmetic without network, GPU or weights; without torch too, unless model.type is one of transformers. What is not known
is None, and printed as n/a.
"""

from dataclasses import dataclass
from functools import cached_property, partial

from pipeline.artifacts.errors import RecipeError
from pipeline.hardware.cpu import can_compile
from pipeline.hardware.device import DeviceInfo
from pipeline.hardware.products import bfloat16_is_faster
from pipeline.preflight.durations import Duration, Span, evaluation_tokens, expected_duration
from pipeline.preflight.memory import (
    Memory,
    checkpoint_bytes,
    checkpoints_on_disk,
    memory_of,
    model_bytes,
    queued_bytes,
    row_bytes,
)
from pipeline.preflight.micro_batch import planned_micro_batch
from pipeline.preflight.probe import Probe, kept
from pipeline.recipe import Recipe
from pipeline.recipe.batch import horizon_steps, is_auto, micro_batch, micro_steps, rows_per_step, with_batch_tokens
from pipeline.recipe.counted_sizes import CountedSizes, SizesUnknownError
from pipeline.recipe.sizes import Sizes, sizes_from_config, sizes_of
from pipeline.recipe.start_from import start_folder
from pipeline.report.fit import Expected, expected_bpb


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
        """Rows of one micro-step over all processes."""
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
        """The most memory of a process as probed, on a CPU with the copy of a checkpoint that is being written."""
        if self.probe is None:
            return None
        copied = self.device.kind == "cpu" and self.recipe.train["save_strategy"] != "no"
        return self.probe.peak_bytes + ((self.checkpoint_bytes or 0) if copied else 0)

    @property
    def val_bpb(self) -> Expected | None:
        """The last val/bpb, where fitted runs of this family let expect one."""
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
    """The plan for that many processes, one for each accelerator (or several on a CPU). Fills data.batch_tokens, and the micro-batch where it is auto.

    scored_bytes: of one scoring of the validation, where the data are open already.
    """
    recipe.data.batch_tokens = with_batch_tokens(recipe, processes)
    sizes, sizes_unknown = _sizes(recipe)
    steps = _steps(recipe)
    compute = _compute_format(recipe, device)
    checkpoint = checkpoint_bytes(recipe, sizes) if sizes else None
    count = checkpoints_on_disk(recipe, steps)
    rows = None if steps is None else steps * rows_per_step(recipe)
    half, compiled = compute in ("bfloat16", "float16"), _compiled(recipe, device)
    if is_auto(recipe):
        recipe.micro_batch = planned_micro_batch(
            recipe, sizes, device, processes=processes, half=half, compiled=compiled
        )
    by_rows = partial(memory_of, recipe, sizes, processes=processes, half=half, compiled=compiled) if sizes else None
    return Plan(
        recipe=recipe,
        device=device,
        processes=processes,
        compute_format=compute,
        sizes=sizes,
        steps=steps,
        batch_tokens=recipe.data.batch_tokens,
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
    """Sizes of the model that the recipe starts from when it lies here, else of the recipe's own; or None, and why."""
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
    """The format of the matrix products. What `auto` means on a GPU is known without torch only by the table of peaks.

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
