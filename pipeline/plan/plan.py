"""Plan of a run, from its recipe alone: parameters, tokens, steps, FLOPs, memory, disk, hours, cost, energy.

Plain arithmetic without network, GPU or weights; without torch too, unless model.type is one of transformers. What is
not known is None, and printed as n/a.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.hardware.accelerators import DeviceInfo
from pipeline.hardware.device import batch_ranks, device_info, model_shards
from pipeline.hardware.processor import available_bytes, cpu_can_compile, physical_cores
from pipeline.hardware.rates import bfloat16_is_faster, product_rates
from pipeline.plan.memory import (
    CPU_SHARE,
    FP32,
    Memory,
    Workload,
    checkpoints_on_disk,
    micro_batches,
    planned_micro_batch,
    row_bytes,
    usable_bytes,
)
from pipeline.process.errors import RecipeError
from pipeline.recipe import Recipe
from pipeline.recipe.batch import KEY
from pipeline.recipe.dial import horizon_steps
from pipeline.recipe.model_sizes import sizes_from_config, sizes_of
from pipeline.recipe.schema import Bpb, Hub, with_values
from pipeline.recipe.sizes import Sizes, SizesUnknownError
from pipeline.recipe.start_from import start_folder
from pipeline.run_dir.run_directory import RunDirectory

if TYPE_CHECKING:
    from pipeline.plan.probe import Probe
    from pipeline.plan.step_memory import StepMemory

# Share of the peak that a step is assumed to reach where none was measured: of a GPU's data sheet, from 0.15 to 0.55 of
# which wide models reach (narrow blocks keep it idle between kernels); of a processor's measured products, 0.06 to 0.7.
GPU_MFU, FULL_WIDTH = 0.29, 768
CPU_MFU = 0.20
FORWARD = 1 / 3  # of a training step's time a token: what scoring takes
SAVE_BYTES_S = 1e9
START_S = {"cpu": 25.0, "cuda": 60.0, "mps": 60.0}  # imports, model, compilation; report and model at the end
BYTES_A_TOKEN = 3.5  # by vocabulary and text
LEAST_VALIDATION = 200_000  # bytes that are held out at least where the data have them


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Seconds of one run without preparing its data and without CORE and chat tasks."""

    start: float  # and end
    steps: float
    evaluations: float  # of bits per byte
    saves: float
    mfu: float | None  # share of the peak that was assumed; None where steps were measured

    @property
    def total(self) -> float:
        return self.start + self.steps + self.evaluations + self.saves

    @property
    def source(self) -> str:
        return "as probed" if self.mfu is None else f"at an assumed MFU of {self.mfu:.0%}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Numbers of one run on one kind of device. Bytes, seconds and watts are named so."""

    recipe: Recipe
    device: DeviceInfo
    processes: int
    compute_format: str
    sizes: Sizes | None
    sizes_unknown: str | None  # why there are none
    steps: int | None
    steps_are_estimated: bool  # of a horizon in epochs, by a sample of the data
    batch_tokens: int
    micro_steps: int
    memory: Memory | None
    least_memory: Memory | None  # of a micro-batch of one row
    shards: int  # processes that share a model (FSDP2)
    checkpoint_bytes: int | None
    queued_bytes: int  # what waits for the Hub or the mirror while its checkpoint is rotated away
    run_disk_bytes: int | None
    shards_bytes: int | None
    evaluation_tokens: float
    probe: "Probe | None" = None  # measured steps of this machine

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.recipe.tokens_at(self.steps)

    @property
    def flops(self) -> float | None:
        """Return the FLOPs of the whole training, by nanochat's formula."""
        if self.sizes is None:
            return None
        return _product(self.sizes.flops_per_token("nanochat"), self.tokens)

    @property
    def tokens_per_param(self) -> float | None:
        if self.tokens is None or self.sizes is None or self.sizes.scaling is None:
            return None
        return self.tokens / self.sizes.scaling

    @property
    def rows_per_pass(self) -> int:
        """Return rows of one micro-step over all processes."""
        return batch_ranks(self.processes) * self.recipe.micro_batch_rows

    @property
    def padding_share(self) -> float:
        """Return the share of the computed rows that fill up the last micro-step of each step and teach nothing."""
        return 1 - self.recipe.rows_per_step / (self.micro_steps * self.rows_per_pass)

    @property
    def row_fits(self) -> bool | None:
        """Return whether a micro-batch of one row fits into the device by the estimate; None where that is not
        known."""
        limit = self.device.memory_gib
        if limit is None or self.least_memory is None or self.least_memory.total is None:
            return None
        return self.least_memory.total <= usable_bytes(limit)

    @cached_property
    def duration(self) -> Duration | None:
        """Return the expected duration; None while the steps or the speed of the device are not known."""
        # 1. A step, as probed or by an assumed share of the peak.
        start_s, mfu = START_S[self.device.kind], None
        step_s: float | None
        if self.probe is not None:
            step_s = self.probe.step_s
            start_s += self.probe.first_step_s
        else:
            mfu, step_s = _assumed_step(self)
        if self.steps is None or self.tokens is None or step_s is None:
            return None
        # 2. A token of all processes, which share the scoring too.
        token_s = step_s / self.batch_tokens
        # 3. How often is scored and saved.
        train = self.recipe.train
        num_saves = 0
        if train["save_strategy"] != "no":
            num_saves = max(1, self.steps // train["save_steps"])
        evaluations = num_evaluations(train, self.steps, at_start=self.recipe.evals.bpb.at_start)
        return Duration(
            start=start_s,
            steps=token_s * self.tokens,
            evaluations=FORWARD * token_s * self.evaluation_tokens * evaluations,
            saves=num_saves * (self.checkpoint_bytes or 0) / SAVE_BYTES_S,
            mfu=mfu,
        )

    @property
    def device_hours(self) -> float | None:
        if self.duration is None:
            return None
        return self.duration.total * self.processes / 3600

    @property
    def cost(self) -> float | None:
        return _product(self.device_hours, self.recipe.run.gpu_hour_cost)

    @property
    def energy_kwh(self) -> float | None:
        """Return the energy of the accelerators alone, at their rated power."""
        watt_hours = _product(self.device_hours, self.device.power_w)
        return None if watt_hours is None else watt_hours / 1000

    def facts(self) -> dict[str, Any]:
        """Return the plan as run_manifest.json holds it (run_dir/run_directory.py); what is not known is left out."""
        duration, memory = self.duration, self.memory
        found: dict[str, Any] = {"device": self.device.name, "processes": self.processes}
        if self.sizes:
            found["parameters"] = self.sizes.parameters()["total"]
            found["scaling_parameters"] = self.sizes.scaling
        found |= {"steps": self.steps, "tokens": self.tokens, "flops": self.flops}
        if memory:
            found["memory_bytes"] = _known({**asdict(memory), "total": memory.total})
        found |= {
            "checkpoint_bytes": self.checkpoint_bytes,
            "run_disk_bytes": self.run_disk_bytes,
            "cost": self.cost,
            "energy_kwh": self.energy_kwh,
        }
        if duration:
            parts = ("total", "start", "steps", "evaluations", "saves")
            found |= {
                "training_s": duration.steps,
                "duration_s": {part: {"value": getattr(duration, part)} for part in parts},
                "duration_source": duration.source,
                "assumed_mfu": duration.mfu,
            }
        return _known(found)


def _product(value: float | None, factor: float | None) -> float | None:
    """Return the product; None where one of the two is not known."""
    if value is None or factor is None:
        return None
    return value * factor


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _assumed_step(plan: Plan) -> tuple[float | None, float | None]:
    """Return the assumed MFU and the seconds of a step by it; (None, None) where peak or FLOPs are not known."""
    unknown = None, None
    if plan.sizes is None:
        return unknown
    # 1. The FLOPs of one process in a step, rows that only fill up micro-steps included.
    computed_tokens = plan.batch_tokens / (1 - plan.padding_share) / plan.processes
    flops = _product(plan.sizes.flops_per_token("exact_causal"), computed_tokens)
    if flops is None:
        return unknown
    # 2. The peak of one process, and the share of it that is reached.
    if plan.device.kind == "cpu":
        rates = product_rates()
        if rates is None:
            return unknown
        of_thread = rates.bfloat16 if plan.compute_format == "bfloat16" else rates.float32
        peak: float | None = max(1, physical_cores() // plan.processes) * of_thread
        mfu = CPU_MFU
    else:
        peak = (plan.device.peak_flops or {}).get(plan.compute_format)
        mfu = GPU_MFU * min(1.0, plan.sizes.n_embd / FULL_WIDTH)
    if not peak:
        return unknown
    return mfu, flops / (mfu * peak)


def num_evaluations(train: dict[str, Any], steps: int, *, at_start: bool) -> int:
    """Return how often bits per byte are scored: before the first step, every train.eval_steps, and at the end."""
    every = steps
    if train["eval_strategy"] != "no":
        every = train["eval_steps"]
    return int(at_start) + math.ceil(steps / every)


def evaluation_tokens(limits: Bpb, scored_bytes: int | None) -> float:
    """Return the tokens of one scoring of bits per byte: by the bytes that are scored, else between the least that is
    held out and the recipe's limits (evals.bpb)."""
    if scored_bytes is not None:
        return scored_bytes / BYTES_A_TOKEN
    rows, documents = limits.tokens, limits.document_bytes / BYTES_A_TOKEN
    least = LEAST_VALIDATION / BYTES_A_TOKEN
    return math.sqrt((min(rows, least) + min(documents, least)) * (rows + documents))


def scored_at_most(limits: Bpb, held_out: int, *, chat: bool) -> int:
    """Return the bytes of one scoring of bits per byte, as rows and in pretraining as documents too, within the
    recipe's limits (evals.bpb)."""
    scored = round(min(held_out, limits.tokens * BYTES_A_TOKEN))
    if not chat:
        scored += min(held_out, limits.document_bytes)
    return scored


def plan_of_run(recipe: Recipe, run: RunDirectory, *, micro_batch: int, processes: int) -> Plan:
    """Return the plan of a run as it was built: its micro-batch, its vocabulary, and the validation that it scores."""
    inputs = run.read_manifest().get("inputs", {})
    known = {KEY: micro_batch}
    # Of little text it is smaller than tokenizer.vocab_size, and chat adds tokens to others' models.
    vocabulary = inputs.get("tokenizer", {}).get("size")
    if vocabulary:
        known["tokenizer.vocab_size"] = vocabulary
    scored_bytes = sum(inputs.get("validation_bytes", {}).values()) or None
    return make_plan(with_values(recipe, known), device_info(), processes=processes, scored_bytes=scored_bytes)


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
    epochs. shards: processes that share a model; None for what the launcher sets.
    """
    # 1. The global batch and the horizon.
    ranks = batch_ranks(processes)
    batch_tokens = recipe.global_batch_tokens(ranks)
    recipe = with_values(recipe, {"data.batch_tokens": batch_tokens})
    data, train = recipe.data, recipe.train
    try:
        steps = horizon_steps(recipe)
    except ValueError as error:
        raise RecipeError(
            f"{recipe.path}: run: the horizon follows from sizes that are not known: {error}. Give run.tokens or "
            "train.max_steps."
        ) from error
    steps_are_estimated = steps is None
    if steps is None:
        steps = about_steps
    # 2. The model, and what a process makes of it.
    sizes, sizes_unknown = planned_sizes(recipe)
    if shards is None:
        shards = model_shards(processes)
    compute = _compute_format(train, device)
    on_cpu = device.kind == "cpu"
    workload = None
    if sizes is not None:
        half = compute in ("bfloat16", "float16")
        workload = workload_of(
            recipe,
            sizes,
            step=_tried_step(recipe, half=half, on_cpu=on_cpu),
            half=half,
            compiled=_compiled(train, device, shards),
            on_cpu=on_cpu,
            processes=processes,
            shards=shards,
        )
        if recipe.model.adapter is not None and workload.step is not None and sizes.linear is not None:
            # Frozen weights have no gradients of their own (recipe/model_sizes.py).
            sizes = replace(sizes, linear=2 / 3 * sizes.linear + 6 * workload.step.trained)
    # 3. The micro-batch: for `auto` the largest that fits.
    if recipe.is_auto:
        limit = CPU_SHARE * available_bytes() / processes
        if not on_cpu:
            limit = usable_bytes(device.memory_gib or 0)
        choices = micro_batches(recipe.rows_per_step, ranks)
        rows = planned_micro_batch(workload, choices, row_tokens=data.row_tokens, limit=limit)
        recipe = with_values(recipe, {"micro_batch": rows})
    # 4. Its memory, and the disk.
    memory = least_memory = checkpoint = run_disk = None
    queued = 0
    if workload is not None:
        memory, least_memory = workload.memory(recipe.micro_batch_rows), workload.memory(1)
        checkpoint = workload.checkpoint_bytes
        queued = _queued_bytes(workload, recipe.hub, mirror=recipe.run.mirror)
        count = checkpoints_on_disk(
            steps,
            save_steps=train["save_steps"],
            limit=train["save_total_limit"],
            keep_every_steps=recipe.run.keep_every_steps,
            keep_best=recipe.run.keep_best,
        )
        if checkpoint is not None and count:
            a_weight = FP32 if recipe.hub.dtype == "float32" else 2
            model = a_weight * workload.sizes.parameters()["total"]
            run_disk = count * checkpoint + model + queued
    shards_bytes = None
    if steps is not None:
        a_row = row_bytes(data.row_tokens, recipe.tokenizer.vocab_size, chat=recipe.stage == "sft")
        shards_bytes = a_row * recipe.step_rows.before(steps)
    return Plan(
        recipe=recipe,
        device=device,
        processes=processes,
        compute_format=compute,
        sizes=sizes,
        sizes_unknown=sizes_unknown,
        steps=steps,
        steps_are_estimated=steps_are_estimated,
        batch_tokens=batch_tokens,
        micro_steps=recipe.micro_steps(ranks),
        memory=memory,
        least_memory=least_memory,
        shards=shards,
        checkpoint_bytes=checkpoint,
        queued_bytes=queued,
        run_disk_bytes=run_disk,
        shards_bytes=shards_bytes,
        evaluation_tokens=evaluation_tokens(recipe.evals.bpb, scored_bytes),
    )


def workload_of(
    recipe: Recipe,
    sizes: Sizes,
    *,
    half: bool,
    compiled: bool,
    step: "StepMemory | None" = None,
    on_cpu: bool = False,
    processes: int = 1,
    shards: int = 1,
) -> Workload:
    """Return what decides the memory of the recipe's training."""
    train, optimizer = recipe.train, recipe.optimizer.type
    if optimizer == "trainer":
        optimizer = str(train.get("optim"))
    return Workload(
        sizes=sizes,
        optimizer=optimizer,
        half_tables=recipe.model.embedding_dtype == "bfloat16",
        modern=recipe.model.preset.startswith("modern"),
        eager=(recipe.model.chosen_attention or recipe.model.attn_implementation) == "eager",
        recomputes=checkpointing_settings(train) is not None,
        scored_rows=recipe.evals.bpb.batch_rows or train["per_device_eval_batch_size"],
        saves=train["save_strategy"] != "no",
        half=half,
        compiled=compiled,
        on_cpu=on_cpu,
        processes=processes,
        shards=shards,
        step=step,
    )


def _tried_step(recipe: Recipe, *, half: bool, on_cpu: bool) -> "StepMemory | None":
    """Return a step's memory by a trial: of adapters, and of models of others that are on this machine. None for
    Tandem's own models, of which bytes were counted (KEPT), and for what cannot be tried."""
    config, adapter = start_config(recipe), recipe.model.adapter
    if config is None or (adapter is None and recipe.model.becomes_tandem):
        return None
    from pipeline.plan.step_memory import memory_of_config

    return memory_of_config(
        config,
        attention=recipe.model.chosen_attention or recipe.model.attn_implementation or "sdpa",
        adapter=adapter,
        row_tokens=recipe.data.row_tokens,
        half=half,
        on_cpu=on_cpu,
        isolated=recipe.isolates_documents,
        checkpointing=checkpointing_settings(recipe.train),
    )


def checkpointing_settings(train: dict[str, Any]) -> dict[str, Any] | None:
    """Return the settings of recomputed activations, None without it; by either name of the key."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if train.get(name):
            return train.get(f"{name}_kwargs") or {}
    return None


def _queued_bytes(workload: Workload, hub: Hub, *, mirror: str | None) -> int:
    """Return what waits while its checkpoint is rotated away: for the Hub one model, with its state where that is
    published, for run.mirror one checkpoint."""
    whole = workload.checkpoint_bytes or workload.weight_bytes
    queued = 0
    if mirror:
        queued += whole
    if hub.id is not None and hub.strategy == "checkpoint":
        queued += whole
    return queued


def start_config(recipe: Recipe) -> Any:
    """Return transformers' config of the model that the recipe starts from; None where it is not on this machine.
    Raises SizesUnknownError."""
    folder = start_folder(recipe)
    if folder is None:
        return None
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    import pipeline.model.build  # noqa: F401 - makes our own model type known

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text, vocabulary = config.get_text_config(), recipe.tokenizer.vocab_size or 0
        if vocabulary > getattr(text, "vocab_size", math.inf):
            text.vocab_size = vocabulary  # rows are added for ids that it has none for (training/build.py)
        return config
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        # Wrong values, or a model's own code: known when it is loaded, if it is trusted.
        raise SizesUnknownError("its config is not one of transformers' own types") from error


def planned_sizes(recipe: Recipe) -> tuple[Sizes | None, str | None]:
    """Return sizes of the model that the recipe starts from when it is on this machine, else of the recipe's own; or
    None, and why."""
    try:
        config = start_config(recipe)
        if config is not None:
            return sizes_from_config(config, recipe.data.row_tokens), None
        return sizes_of(recipe), None
    except SizesUnknownError as error:
        return None, str(error)
    except ImportError:
        return None, "torch is not installed, and a model of transformers is counted with it"
    except ValueError:
        return None, None


def _compute_format(train: dict[str, Any], device: DeviceInfo) -> str:
    """Return the format of the matrix products. What `auto` means on a GPU is known without torch only by the table of
    peaks.

    Under train.fp8 bfloat16 too: what float8 gains depends on the widths, and hours are not promised on it.
    """
    bf16 = train.get("bf16")
    if bf16 == "auto":
        bf16 = "bfloat16" in (device.peak_flops or {})
        if device.kind == "cpu":
            bf16 = bfloat16_is_faster()
        if train.get("fp16"):
            bf16 = False
    if bf16:
        return "bfloat16"
    if train.get("fp16"):
        return "float16"
    return "tf32" if train.get("tf32") and device.kind == "cuda" else "float32"


def _compiled(train: dict[str, Any], device: DeviceInfo, shards: int) -> bool:
    compiled = train.get("torch_compile")
    if compiled != "auto":
        return bool(compiled)
    # As decide_compile of a device that need not be here.
    if device.kind == "cpu":
        return shards == 1 and cpu_can_compile()
    return shards == 1 and device.kind == "cuda"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def gibibytes(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**28 else f"{count / 2**20:,.0f} MiB"
