"""Support table of transformers.TrainingArguments: what becomes of every field under `train:`.

passed: given to the Trainer unchanged; default is transformers' own. default: passed, with our default instead of
transformers'. ours: set by another key of the recipe, which the message names. refused: would break a promise of this
program, or do nothing in it; `text` says which. added: no field of TrainingArguments, but it stands among them. tests/recipe/test_fates.py holds the table to the installed version.
"""

from dataclasses import dataclass
from typing import Any, Literal

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
class Fate:
    """One field. text: its meaning (passed, default, added), the owner key (ours) or the reason (refused)."""

    fate: Literal["passed", "default", "ours", "refused", "added"]
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
        return self.fate in ("passed", "default", "added")


def passed(type: Any, default: Any, text: str, **rest: Any) -> Fate:
    return Fate(fate="passed", type=type, default=default, text=text, **rest)


def default(type: Any, value: Any, text: str, **rest: Any) -> Fate:
    return Fate(fate="default", type=type, default=value, text=text, **rest)


def added(type: Any, value: Any, text: str, **rest: Any) -> Fate:
    return Fate(fate="added", type=type, default=value, text=text, **rest)


def ours(owner: str) -> Fate:
    return Fate(fate="ours", text=owner)


def refused(reason: str) -> Fate:
    return Fate(fate="refused", text=reason)


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

FATES: dict[str, Fate] = {
    # Length and batch
    "max_steps": passed(int, None, "Horizon: optimizer steps. Exactly one horizon is given; see run.tokens.", minimum=1, maximum=MOST_STEPS, must_match=True),
    "num_train_epochs": passed(float, None, "Horizon: passes over the sources.", above=0, maximum=1e9, must_match=True),
    "per_device_train_batch_size": passed(int | Literal["auto"], 8, "Rows of one forward pass on one device (the micro-batch). Does not change the training. auto: the most that fit, tried on a GPU before the first step and estimated on a CPU; needs data.batch_tokens. A run keeps it on the same device while it fits.", minimum=1, maximum=MOST_ROWS),
    "gradient_accumulation_steps": passed(int, None, "Micro-steps of an optimizer step. Exactly one of this and data.batch_tokens, from which it is derived for any number of processes.", minimum=1, maximum=MOST_ROWS),
    "auto_find_batch_size": refused("it changes the global batch in the middle of a run; train.per_device_train_batch_size: auto finds what fits before it, and the training stays the same"),
    "average_tokens_across_devices": default(bool, True, "The loss is the mean over all trained tokens of all devices.", only="without it the loss depends on the number of devices"),
    # Rates under optimizer.type: trainer
    "learning_rate": passed(float, 5e-5, "Peak rate.", minimum=0, **RATE),
    "lr_scheduler_type": passed(SCHEDULERS, "linear", "Shape of the rate over the run.", **RATE),
    "lr_scheduler_kwargs": passed(dict[str, Any] | None, None, "Its settings, e.g. {min_lr_rate: 0.1}.", **RATE),
    "warmup_steps": passed(float, 0.0, "Steps of warm-up; below 1 a share of the run.", minimum=0, maximum=MOST_STEPS, **RATE),
    "optim": passed(OPTIMIZERS, "adamw_torch_fused", "The optimizer, as transformers names it.", **RATE),
    "optim_args": passed(str | None, None, "Its further arguments, as `name=value,name=value`.", **RATE),
    "optim_target_modules": refused("GaLore and APOLLO optimizers are not supported: their state does not fit the checkpoint's format"),
    "weight_decay": passed(float, 0.0, "Decoupled decay.", minimum=0, **RATE),
    "adam_beta1": passed(float, 0.9, "Adam's first average.", minimum=0, below=1, **RATE),
    "adam_beta2": passed(float, 0.999, "Adam's second average.", minimum=0, below=1, **RATE),
    "adam_epsilon": passed(float, 1e-8, "Adam's epsilon.", minimum=0, **RATE),
    "max_grad_norm": passed(float, 1.0, "Gradients are scaled down to this norm; 0 leaves them alone.", minimum=0),
    "label_smoothing_factor": refused("the loss would no longer be the cross-entropy that loss, BPB and perplexity stand for"),
    "neftune_noise_alpha": passed(float | None, None, "Noise on the embeddings while training (NEFTune).", above=0, must_match=True),
    # Precision, memory, compilation
    "bf16": passed(bool | Literal["auto"], False, "bfloat16 autocast; weights stay float32. auto: where the hardware makes it faster."),
    "fp16": passed(bool, False, "float16 autocast with a loss scaler, for GPUs without bfloat16."),
    "fp8": added(bool, False, "Float8 products (torchao, scales per tensor) in the matrices of a Tandem's blocks without bias, beside bf16 for the rest. Weights and checkpoints are as without it; evaluations and samples compute in bf16. Needs a GPU of compute capability 8.9 (Ada, Hopper) or later and the package torchao; a choice for models wide enough, best with torch_compile. Scales are of one micro-batch, so a step depends on the micro-batch, within float8's rounding."),
    "bf16_full_eval": refused("it casts the weights themselves and the training goes on with the rounded ones"),
    "fp16_full_eval": refused("it casts the weights themselves and the training goes on with the rounded ones"),
    "tf32": passed(bool | None, None, "TF32 matrix products on NVIDIA GPUs; default as torch has it."),
    "activation_checkpointing": passed(bool | None, None, "Recompute activations in the backward pass: less memory, about a third more time."),
    "activation_checkpointing_kwargs": passed(dict[str, Any] | None, None, "Its settings, e.g. {every_n_layers: 2}.", keys=CHECKPOINTING),
    "gradient_checkpointing": passed(bool | None, None, "The older name of activation_checkpointing."),
    "gradient_checkpointing_kwargs": passed(dict[str, Any] | None, None, "Its settings, e.g. {use_reentrant: false}.", keys=CHECKPOINTING),
    "torch_compile": passed(bool | Literal["auto"], False, "Compile the model into one static graph. auto: where it pays."),
    "torch_compile_backend": passed(COMPILERS | None, None, "Backend of the compiler; default inductor."),
    "torch_compile_mode": passed(COMPILER_MODES | None, None, "Mode of inductor, e.g. max-autotune."),
    "torch_empty_cache_steps": refused("it waits for the device every time; against fragmented memory set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    "use_liger_kernel": refused(NO_LIGER),
    "liger_kernel_config": refused(NO_LIGER),
    "use_cache": refused("training never needs the cache; generation switches it on by itself"),
    "use_cpu": passed(bool, False, "Train on the CPU although there is an accelerator."),
    "full_determinism": passed(bool, False, "Only deterministic kernels: resuming on CUDA is then exact to the bit, and slower."),
    # Logging
    "logging_strategy": default(Literal["steps"], "steps", "When numbers are logged.", only="the cadence is logging_steps"),
    "logging_steps": default(int, 10, "Optimizer steps between rows of metrics and console lines.", minimum=1),
    "logging_first_step": default(bool, True, "Also log the first step."),
    "log_on_each_node": default(bool, False, "The first rank of the run logs.", only="one console.log and one metrics.jsonl belong to a run"),
    "logging_nan_inf_filter": default(bool, False, "transformers' filter logs a NaN as 0.", only="it would log a loss that is not a number as 0, and wait for the device at every micro-step"),
    "include_num_input_tokens_seen": default(Literal["no"], "no", "Tokens are counted from the rows (data/tokens).", only="it gathers over all ranks at every micro-step; data/tokens counts the same"),
    "log_level": passed(LOG_LEVELS, "passive", "Level of transformers' own log."),
    "log_level_replica": passed(LOG_LEVELS, "warning", "The same on the other ranks."),
    "disable_tqdm": default(bool, True, "No progress bar over the console lines."),
    "report_to": ours("monitor.trackers"),
    "run_name": ours("run.name"),
    "project": ours("monitor.project"),
    "trackio_space_id": refused(NO_TRACKIO),
    "trackio_bucket_id": refused(NO_TRACKIO),
    "trackio_static_space_id": refused(NO_TRACKIO),
    # Evaluation
    "eval_strategy": default(Literal["steps", "no"], "steps", "no: only at the end."),
    "eval_steps": default(int, 250, "Optimizer steps between evaluations; the last step is always evaluated.", minimum=1),
    "eval_delay": passed(float, 0.0, "Steps before the first evaluation on the cadence.", minimum=0),
    "per_device_eval_batch_size": passed(int, 8, "Rows of one forward pass of an evaluation. Does not change its value.", minimum=1, maximum=MOST_ROWS),
    "prediction_loss_only": default(bool, True, "No logits are kept.", only=OWN_EVALUATION),
    "eval_on_start": ours("evals.bpb.at_start"),
    "eval_do_concat_batches": refused(OWN_EVALUATION),
    "eval_use_gather_object": refused(OWN_EVALUATION),
    "eval_accumulation_steps": refused(OWN_EVALUATION),
    "include_for_metrics": refused(OWN_EVALUATION),
    "batch_eval_metrics": refused(OWN_EVALUATION),
    # Checkpoints
    "save_strategy": default(Literal["steps", "no"], "steps", "no: no checkpoint while training; a run that stops is lost."),
    "save_steps": passed(int, 500, "Optimizer steps between checkpoints; the last step is always saved.", minimum=1),
    "save_total_limit": default(int | None, 2, "The newest checkpoints that are kept, beside run.keep_best and run.keep_every_steps; null keeps all.", minimum=1),
    "save_only_model": refused("a checkpoint without the optimizer cannot be continued from"),
    "save_on_each_node": refused("all nodes share one run directory"),
    "enable_jit_checkpoint": refused("SIGTERM, SIGHUP and Ctrl-C always save a whole checkpoint here, agreed on by all ranks"),
    "load_best_model_at_end": refused(LAST_MODEL),
    "metric_for_best_model": refused(LAST_MODEL),
    "greater_is_better": refused(LAST_MODEL),
    "resume_from_checkpoint": ours("run.resume"),
    "ignore_data_skip": refused("rows are a function of the step: a resume is a seek and never skips"),
    "restore_callback_states_from_checkpoint": refused("callbacks take up their state from the run directory"),
    "output_dir": ours("run.directory and run.name"),
    # Hub
    "push_to_hub": ours("hub.id"),
    "hub_model_id": ours("hub.id"),
    "hub_private_repo": ours("hub.private"),
    "hub_token": refused("a token never stands in a recipe; set HF_TOKEN or run `hf auth login`"),
    "hub_strategy": ours("hub.strategy"),
    "hub_always_push": ours("hub.strategy"),
    "hub_revision": ours("hub.revision"),
    # Randomness and data
    "seed": passed(int, 42, "Of weights, data order and dropout.", minimum=0, maximum=SEEDS - 1, must_match=True),
    "data_seed": ours("train.seed"),
    "dataloader_drop_last": refused(NO_LOADER),
    "dataloader_num_workers": refused(NO_LOADER),
    "dataloader_pin_memory": refused(NO_LOADER),
    "dataloader_persistent_workers": refused(NO_LOADER),
    "dataloader_prefetch_factor": refused(NO_LOADER),
    "dataloader_multiprocessing_context": refused(NO_LOADER),
    "dataloader_in_order": refused(NO_LOADER),
    "remove_unused_columns": default(bool, False, "Rows carry what the model takes.", only="position_ids and shift_labels would be dropped for some models"),
    "label_names": refused("every batch carries labels and shift_labels"),
    "train_sampling_strategy": ours("train.seed and data.sources (rows follow from the seed and the step)"),
    "length_column_name": refused("rows all have data.row_tokens positions"),
    # Processes
    "accelerator_config": default(dict[str, Any], {"split_batches": False, "dispatch_batches": False, "even_batches": False}, "accelerate's own switches; keys not named keep these values.", keys=ACCELERATE),
    "ddp_find_unused_parameters": default(bool, False, "Every parameter is used; looking for unused ones costs a walk over the graph per step."),
    "ddp_bucket_cap_mb": passed(int | None, None, "Size of DDP's buckets.", minimum=1, maximum=2**20),
    "ddp_broadcast_buffers": passed(bool | None, None, "Broadcast buffers at every forward pass."),
    "ddp_static_graph": passed(bool | None, None, "The graph of the backward pass never changes."),
    "ddp_backend": passed(Literal["nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"] | None, None, "Backend of the collectives; default by device."),
    "ddp_timeout": default(int, 7200, "Seconds a rank waits for the others.", minimum=1, maximum=10**8),
    "parallelism_config": ours(LAUNCHER),
    "fsdp": ours(LAUNCHER),
    "fsdp_config": ours(LAUNCHER),
    "deepspeed": refused("it is not supported; several GPUs train with accelerate_configs/ddp.yaml"),
    "local_rank": refused(LAUNCHED),
    # The rest
    "debug": passed(Literal["", "underflow_overflow"], "", "transformers' debug options: underflow_overflow names the module that makes the first number that is not finite."),
    "skip_memory_metrics": default(bool, True, "Trainer's own memory metrics are not taken.", only="they are taken once, around the whole training, and slow it down"),
    "do_train": refused(COMMAND),
    "do_eval": refused(COMMAND),
    "do_predict": refused(COMMAND),
}  # fmt: skip
