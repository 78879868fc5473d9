"""Support table of transformers.TrainingArguments: how each field is handled under `train:`.

supported: passed to the Trainer unchanged, with transformers' default. overridden: passed, with our default instead of
transformers'. managed: set by another key of the recipe, which the message names. rejected: would break a promise of this
program, or do nothing in it; `text` says why. added: no field of TrainingArguments, but a key of `train:` all the same.
tests/recipe/test_supported_arguments.py holds the table to the installed version.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.recipe.schema import Recipe

SCHEDULERS = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"]  # fmt: skip
OPTIMIZERS = Literal["adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd", "adagrad", "adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "grokadamw", "stable_adamw"]  # fmt: skip
SCHEDULE_FREE = "its weights are averages that evaluations, samples and saves would have to switch to and back from, and its first update here fails"
REFUSED_OPTIMIZERS = {  # by their names in transformers: why, and what to take instead
    "schedule_free_adamw": (SCHEDULE_FREE, "optim: adamw_torch_fused with lr_scheduler_type: constant_with_warmup"),
    "schedule_free_radam": (SCHEDULE_FREE, "optim: adamw_torch_fused with lr_scheduler_type: constant_with_warmup"),
    "schedule_free_sgd": (SCHEDULE_FREE, "optim: sgd with lr_scheduler_type: constant_with_warmup"),
}
# Of torch.compile: what trains, of the backends that accelerate passes on.
COMPILERS = Literal["inductor", "eager", "aot_eager", "cudagraphs"]
COMPILER_MODES = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
CHECKPOINTING = {"every_n_layers": int, "offload": bool, "use_reentrant": bool, "preserve_rng_state": bool, "determinism_check": Literal["default", "none"], "debug": bool, "early_stop": bool}  # fmt: skip
ACCELERATE = {"split_batches": bool, "dispatch_batches": bool | None, "even_batches": bool, "use_seedable_sampler": bool, "non_blocking": bool, "use_configured_state": bool}  # fmt: skip
MOST_STEPS = 10**9  # a year of 30 steps a second
MOST_ROWS = 2**20  # of a forward pass
SEEDS = 2**32  # numpy's seeds lie below
LOG_LEVELS = Literal["debug", "info", "warning", "error", "critical", "passive"]


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One field. text: its meaning (supported, overridden, added), the owner key (managed) or the reason (rejected)."""

    kind: Literal["supported", "overridden", "managed", "rejected", "added"]
    text: str
    type: Any = None
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    keys: dict[str, Any] | None = None  # of a dictionary, with their types
    must_match: bool = False
    trainer_only: bool = False  # belongs to optimizer.type: trainer; refused beside adamw and muon_adamw
    only: str | None = None  # why no other value than the default is accepted

    @property
    def limits(self) -> dict[str, float | None]:
        return {"minimum": self.minimum, "maximum": self.maximum, "above": self.above, "below": self.below}

    @property
    def accepted(self) -> bool:
        return self.kind in ("supported", "overridden", "added")


def supported(type: Any, default: Any, text: str, **rest: Any) -> Argument:
    return Argument(kind="supported", type=type, default=default, text=text, **rest)


def overridden(type: Any, value: Any, text: str, **rest: Any) -> Argument:
    return Argument(kind="overridden", type=type, default=value, text=text, **rest)


def added(type: Any, value: Any, text: str, **rest: Any) -> Argument:
    return Argument(kind="added", type=type, default=value, text=text, **rest)


def managed(owner: str) -> Argument:
    return Argument(kind="managed", text=owner)


def rejected(reason: str) -> Argument:
    return Argument(kind="rejected", text=reason)


RATE = {"trainer_only": True, "must_match": True}
NO_LOADER = "rows are read from memory maps by their number; there is no DataLoader to set up"
OWN_EVALUATION = "evaluation sums nats and bytes on the device over all ranks (evals.bpb); it keeps no logits and averages no batches"
LAST_MODEL = (
    "the finished model is that of the last step, after the rates have decayed; every checkpoint kept is a model too"
)
LAUNCHER = "the accelerate config file (accelerate launch --config_file)"
LAUNCHED = "the launcher says this, not the recipe"
NO_TRACKIO = "monitor.trackers writes Trackio's files into the run directory only"
NO_LIGER = (
    "it patches known model classes only and replaces the loss; the chunked cross-entropy here saves the same memory"
)
COMMAND = "the command says what is done: pipeline/pretrain.py, pipeline/sft.py or python -m pipeline.evals"

ARGUMENTS: dict[str, Argument] = {
    # Length and batch
    "max_steps": supported(int, None, "Horizon: optimizer steps. Exactly one horizon is given; see run.tokens.", minimum=1, maximum=MOST_STEPS, must_match=True),
    "num_train_epochs": supported(float, None, "Horizon: passes over the sources.", above=0, maximum=1e9, must_match=True),
    "per_device_train_batch_size": supported(int | Literal["auto"], 8, "Rows of one forward pass on one device (the micro-batch). Does not change the training. auto: the most that fit, tried on a GPU before the first step and estimated on a CPU; needs data.batch_tokens. A run keeps it on the same device while it fits.", minimum=1, maximum=MOST_ROWS),
    "gradient_accumulation_steps": supported(int, None, "Micro-steps of an optimizer step. Exactly one of this and data.batch_tokens, from which it is derived for any number of processes.", minimum=1, maximum=MOST_ROWS),
    "auto_find_batch_size": rejected("it changes the global batch in the middle of a run; train.per_device_train_batch_size: auto finds what fits before it, and the training stays the same"),
    "average_tokens_across_devices": overridden(bool, True, "The loss is the mean over all trained tokens of all devices.", only="without it the loss depends on the number of devices"),
    # Rates under optimizer.type: trainer
    "learning_rate": supported(float, 5e-5, "Peak rate.", minimum=0, **RATE),
    "lr_scheduler_type": supported(SCHEDULERS, "linear", "Shape of the rate over the run.", **RATE),
    "lr_scheduler_kwargs": supported(dict[str, Any] | None, None, "Its settings, e.g. {min_lr_rate: 0.1}.", **RATE),
    "warmup_steps": supported(float, 0.0, "Steps of warm-up; below 1 a share of the run.", minimum=0, maximum=MOST_STEPS, **RATE),
    "optim": supported(OPTIMIZERS, "adamw_torch_fused", "The optimizer, as transformers names it.", **RATE),
    "optim_args": supported(str | None, None, "Its further arguments, as `name=value,name=value`.", **RATE),
    "optim_target_modules": rejected("GaLore and APOLLO optimizers are not supported: their state does not fit the checkpoint's format"),
    "weight_decay": supported(float, 0.0, "Decoupled decay.", minimum=0, **RATE),
    "adam_beta1": supported(float, 0.9, "Adam's first average.", minimum=0, below=1, **RATE),
    "adam_beta2": supported(float, 0.999, "Adam's second average.", minimum=0, below=1, **RATE),
    "adam_epsilon": supported(float, 1e-8, "Adam's epsilon.", minimum=0, **RATE),
    "max_grad_norm": supported(float, 1.0, "Gradients are scaled down to this norm; 0 leaves them alone.", minimum=0),
    "label_smoothing_factor": rejected("the loss would no longer be the cross-entropy that loss, BPB and perplexity stand for"),
    "neftune_noise_alpha": supported(float | None, None, "Noise on the embeddings while training (NEFTune).", above=0, must_match=True),
    # Precision, memory, compilation
    "bf16": supported(bool | Literal["auto"], False, "bfloat16 autocast; weights stay float32. auto: where the hardware makes it faster."),
    "fp16": supported(bool, False, "float16 autocast with a loss scaler, for GPUs without bfloat16."),
    "fp8": added(bool, False, "Float8 products (torchao, scales per tensor) in the matrices of a Tandem's blocks without bias, beside bf16 for the rest. Weights and checkpoints are as without it; evaluations and samples compute in bf16. Needs a GPU of compute capability 8.9 (Ada, Hopper) or later and the package torchao; a choice for models wide enough, best with torch_compile. Scales are of one micro-batch, so a step depends on the micro-batch, within float8's rounding."),
    "bf16_full_eval": rejected("it casts the weights themselves and the training goes on with the rounded ones"),
    "fp16_full_eval": rejected("it casts the weights themselves and the training goes on with the rounded ones"),
    "tf32": supported(bool | None, None, "TF32 matrix products on NVIDIA GPUs; default as torch has it."),
    "activation_checkpointing": supported(bool | None, None, "Recompute activations in the backward pass: less memory, about a third more time."),
    "activation_checkpointing_kwargs": supported(dict[str, Any] | None, None, "Its settings, e.g. {every_n_layers: 2}.", keys=CHECKPOINTING),
    "gradient_checkpointing": supported(bool | None, None, "The older name of activation_checkpointing."),
    "gradient_checkpointing_kwargs": supported(dict[str, Any] | None, None, "Its settings, e.g. {use_reentrant: false}.", keys=CHECKPOINTING),
    "torch_compile": supported(bool | Literal["auto"], False, "Compile the model into one static graph. auto: where it pays."),
    "torch_compile_backend": supported(COMPILERS | None, None, "Backend of the compiler; default inductor."),
    "torch_compile_mode": supported(COMPILER_MODES | None, None, "Mode of inductor, e.g. max-autotune."),
    "torch_empty_cache_steps": rejected("it waits for the device every time; against fragmented memory set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    "use_liger_kernel": rejected(NO_LIGER),
    "liger_kernel_config": rejected(NO_LIGER),
    "use_cache": rejected("training never needs the cache; generation switches it on by itself"),
    "use_cpu": supported(bool, False, "Train on the CPU although there is an accelerator."),
    "full_determinism": supported(bool, False, "Only deterministic kernels: resuming on CUDA is then exact to the bit, and slower."),
    # Logging
    "logging_strategy": overridden(Literal["steps"], "steps", "When numbers are logged.", only="the cadence is logging_steps"),
    "logging_steps": overridden(int, 10, "Optimizer steps between rows of metrics and console lines.", minimum=1),
    "logging_first_step": overridden(bool, True, "Also log the first step."),
    "log_on_each_node": overridden(bool, False, "The first rank of the run logs.", only="one console.log and one metrics.jsonl belong to a run"),
    "logging_nan_inf_filter": overridden(bool, False, "transformers' filter logs a NaN as 0.", only="it would log a loss that is not a number as 0, and wait for the device at every micro-step"),
    "include_num_input_tokens_seen": overridden(Literal["no"], "no", "Tokens are counted from the rows (data/tokens).", only="it gathers over all ranks at every micro-step; data/tokens counts the same"),
    "log_level": supported(LOG_LEVELS, "passive", "Level of transformers' own log."),
    "log_level_replica": supported(LOG_LEVELS, "warning", "The same on the other ranks."),
    "disable_tqdm": overridden(bool, True, "No progress bar over the console lines."),
    "report_to": managed("monitor.trackers"),
    "run_name": managed("run.name"),
    "project": managed("monitor.project"),
    "trackio_space_id": rejected(NO_TRACKIO),
    "trackio_bucket_id": rejected(NO_TRACKIO),
    "trackio_static_space_id": rejected(NO_TRACKIO),
    # Evaluation
    "eval_strategy": overridden(Literal["steps", "no"], "steps", "no: only at the end."),
    "eval_steps": overridden(int, 250, "Optimizer steps between evaluations; the last step is always evaluated.", minimum=1),
    "eval_delay": supported(float, 0.0, "Steps before the first evaluation on the cadence.", minimum=0),
    "per_device_eval_batch_size": supported(int, 8, "Rows of one forward pass of an evaluation. Does not change its value.", minimum=1, maximum=MOST_ROWS),
    "prediction_loss_only": overridden(bool, True, "No logits are kept.", only=OWN_EVALUATION),
    "eval_on_start": managed("evals.bpb.at_start"),
    "eval_do_concat_batches": rejected(OWN_EVALUATION),
    "eval_use_gather_object": rejected(OWN_EVALUATION),
    "eval_accumulation_steps": rejected(OWN_EVALUATION),
    "include_for_metrics": rejected(OWN_EVALUATION),
    "batch_eval_metrics": rejected(OWN_EVALUATION),
    # Checkpoints
    "save_strategy": overridden(Literal["steps", "no"], "steps", "no: no checkpoint while training; a run that stops is lost."),
    "save_steps": supported(int, 500, "Optimizer steps between checkpoints; the last step is always saved.", minimum=1),
    "save_total_limit": overridden(int | None, 2, "The newest checkpoints that are kept, beside run.keep_best and run.keep_every_steps; null keeps all.", minimum=1),
    "save_only_model": rejected("a checkpoint without the optimizer cannot be continued from"),
    "save_on_each_node": rejected("all nodes share one run directory"),
    "enable_jit_checkpoint": rejected("SIGTERM, SIGHUP and Ctrl-C always save a whole checkpoint here, agreed on by all ranks"),
    "load_best_model_at_end": rejected(LAST_MODEL),
    "metric_for_best_model": rejected(LAST_MODEL),
    "greater_is_better": rejected(LAST_MODEL),
    "resume_from_checkpoint": managed("run.resume"),
    "ignore_data_skip": rejected("rows are a function of the step: a resume is a seek and never skips"),
    "restore_callback_states_from_checkpoint": rejected("callbacks take up their state from the run directory"),
    "output_dir": managed("run.directory and run.name"),
    # Hub
    "push_to_hub": managed("hub.id"),
    "hub_model_id": managed("hub.id"),
    "hub_private_repo": managed("hub.private"),
    "hub_token": rejected("a token never stands in a recipe; set HF_TOKEN or run `hf auth login`"),
    "hub_strategy": managed("hub.strategy"),
    "hub_always_push": managed("hub.strategy"),
    "hub_revision": managed("hub.revision"),
    # Randomness and data
    "seed": supported(int, 42, "Of weights, data order and dropout.", minimum=0, maximum=SEEDS - 1, must_match=True),
    "data_seed": managed("train.seed"),
    "dataloader_drop_last": rejected(NO_LOADER),
    "dataloader_num_workers": rejected(NO_LOADER),
    "dataloader_pin_memory": rejected(NO_LOADER),
    "dataloader_persistent_workers": rejected(NO_LOADER),
    "dataloader_prefetch_factor": rejected(NO_LOADER),
    "dataloader_multiprocessing_context": rejected(NO_LOADER),
    "dataloader_in_order": rejected(NO_LOADER),
    "remove_unused_columns": overridden(bool, False, "Rows carry what the model takes.", only="position_ids and shift_labels would be dropped for some models"),
    "label_names": rejected("every batch carries labels and shift_labels"),
    "train_sampling_strategy": managed("train.seed and data.sources (rows follow from the seed and the step)"),
    "length_column_name": rejected("rows all have data.row_tokens positions"),
    # Processes
    "accelerator_config": overridden(dict[str, Any], {"split_batches": False, "dispatch_batches": False, "even_batches": False}, "accelerate's own switches; keys not named keep these values.", keys=ACCELERATE),
    "ddp_find_unused_parameters": overridden(bool, False, "Every parameter is used; looking for unused ones costs a walk over the graph per step."),
    "ddp_bucket_cap_mb": supported(int | None, None, "Size of DDP's buckets.", minimum=1, maximum=2**20),
    "ddp_broadcast_buffers": supported(bool | None, None, "Broadcast buffers at every forward pass."),
    "ddp_static_graph": supported(bool | None, None, "The graph of the backward pass never changes."),
    "ddp_backend": supported(Literal["nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"] | None, None, "Backend of the collectives; default by device."),
    "ddp_timeout": overridden(int, 7200, "Seconds a rank waits for the others.", minimum=1, maximum=10**8),
    "parallelism_config": managed(LAUNCHER),
    "fsdp": managed(LAUNCHER),
    "fsdp_config": managed(LAUNCHER),
    "deepspeed": rejected("it is not supported; several GPUs train with accelerate_configs/ddp.yaml"),
    "local_rank": rejected(LAUNCHED),
    # The rest
    "debug": supported(Literal["", "underflow_overflow"], "", "transformers' debug options: underflow_overflow names the module that makes the first number that is not finite."),
    "skip_memory_metrics": overridden(bool, True, "Trainer's own memory metrics are not taken.", only="they are taken once, around the whole training, and slow it down"),
    "do_train": rejected(COMMAND),
    "do_eval": rejected(COMMAND),
    "do_predict": rejected(COMMAND),
}  # fmt: skip

DERIVED = ("max_steps", "num_train_epochs", "gradient_accumulation_steps")  # with other keys of the recipe


def defaults(*, trainer_optimizer: bool) -> dict[str, Any]:
    """Return what `train:` holds where the recipe says nothing. trainer_optimizer: optimizer.type is trainer."""
    return {
        name: argument.default
        for name, argument in ARGUMENTS.items()
        if argument.accepted and name not in DERIVED and (trainer_optimizer or not argument.trainer_only)
    }


def training_arguments(
    recipe: Recipe, *, output_dir: str, max_steps: int, gradient_accumulation_steps: int
) -> dict[str, Any]:
    """Arguments for transformers.TrainingArguments. "auto" of bf16 and torch_compile is left out: the hardware decides."""
    values = {name: value for name, value in recipe.train.items() if name not in DERIVED and value is not None}
    values = {name: value for name, value in values.items() if value != "auto" and ARGUMENTS[name].kind != "added"}
    return {
        **values,
        "output_dir": output_dir,
        "max_steps": max_steps,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "report_to": "none",  # trackers are written by our own callbacks (monitor.trackers)
        "run_name": recipe.run.name,
        "ignore_data_skip": True,  # rows are a function of the step
    }
