"""The Trainer of a recipe: model, rows, evaluation and meter put together."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from pipeline.data.row_plan import document_end_of
from pipeline.evals.bpb import compiled_nll
from pipeline.hardware.device import (
    batch_rank,
    batch_ranks,
    compute_format,
    decide_bf16,
    decide_compile,
    device_info,
    shards_model,
)
from pipeline.metrics import VAL_BPB_DOCUMENTS
from pipeline.model.build import PLAIN_HEADS, build_model
from pipeline.model.errors import ModelOptionsError
from pipeline.model.groups import store_embeddings
from pipeline.model.modeling_tandem import TandemForCausalLM
from pipeline.model.saved import save_model
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.process.storage import read_json, remove_folder
from pipeline.process.user_code import CodeFolder, guarded, import_attribute
from pipeline.recipe import Recipe
from pipeline.recipe.model_sizes import model_fields, sizes_from_model, sizes_of
from pipeline.recipe.schema import Model, Run, training_arguments, with_values
from pipeline.recipe.start_from import check_sizes, start_folder
from pipeline.run_dir.checkpoints import by_step, problems, read_seal, whole_folder
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.tokenizer.chat import end_of_turn
from pipeline.tokenizer.encode import byte_lengths, document_start, is_byte_level
from pipeline.training.distributed import on_rank_0
from pipeline.training.guard import refuse_nonfinite
from pipeline.training.meters import StepMeter
from pipeline.training.model_checks import KeepEnds, check_foreign, refuse_quantized
from pipeline.training.optimizer import OPTIMIZERS, cache_lomo_check, parameter_groups, product_dtype
from pipeline.training.trainer import Evaluation, TandemTrainer, TrainerSettings


class OneDeviceArguments(TrainingArguments):
    """One process stays on one device: with several in sight Trainer would wrap the model in DataParallel."""

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)


def build_arguments(recipe: Recipe, run: RunDirectory, **decided: Any) -> TrainingArguments:
    """Return the recipe as TrainingArguments, for this number of processes. decided: values that the hardware decided,
    such as bf16 and torch_compile."""
    # The rows of a step are dealt to the ranks, and each rank takes its share in micro-batches:
    # batch_tokens / row_tokens = rows of a step; rows / (ranks x micro-batch) = micro-steps, rounded up.
    ranks = batch_ranks(int(os.environ.get("WORLD_SIZE", 1)))
    arguments = training_arguments(
        recipe.train,
        run_name=recipe.run.name,
        output_dir=str(run.checkpoints),
        max_steps=recipe.train["max_steps"],
        gradient_accumulation_steps=recipe.micro_steps(ranks),
    )
    arguments["per_device_train_batch_size"] = recipe.micro_batch_rows
    if not decided.get("torch_compile", arguments.get("torch_compile")):
        decided |= {"torch_compile_mode": None, "torch_compile_backend": None}  # given, they would switch it on
    if shards_model():  # reduced in every micro-step: to wait for the last one would take the memory of all gradients
        decided["accelerator_config"] = {
            **arguments["accelerator_config"],
            "gradient_accumulation_kwargs": {"sync_each_batch": True},
        }
    return OneDeviceArguments(**{**arguments, **decided})


def write_finished_model(
    run: RunDirectory,
    model: Any,
    tokenizer: Any,
    *,
    dtype: str,
    step: int,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write model/ whole or not at all, in the type that hub.dtype names; one that an earlier start left stays when it
    is that one, unharmed. weights: those of a sharded model, whole."""
    facts = {"step": step, "run": run.name, "dtype": dtype}
    if run.model.exists():
        if not problems(run.model) and facts.items() <= read_seal(run.model).items():
            return
        remove_folder(run.model)
    with whole_folder(run.model, **facts) as folder:
        save_model(model, folder, dtype=getattr(torch, dtype), state_dict=weights)
        tokenizer.save_pretrained(folder)


def build_from_recipe(recipe: Recipe, tokenizer: Any) -> torch.nn.Module:
    """Return the model with fp32 weights (the embeddings in model.embedding_dtype): those of model.start_from, else
    initialised from train.seed.

    Raises RecipeError for options that its config refuses and for a model whose loss is no sum over tokens,
    InputMissingError when there is nothing to start from.
    """
    start, where = recipe.model.start_from, recipe.where
    attention = recipe.model.chosen_attention or recipe.model.attn_implementation
    seed = int(recipe.train.get("seed", 42))

    # 1. The weights: those of an earlier model, which must be as the recipe says, or new ones.
    try:
        if start:
            begun = _begun_type(RunDirectory.of(recipe.run).checkpoints) if recipe.run.name is not None else None
            how: dict[str, Any] = {"attn_implementation": attention, "text_type": begun}
            if recipe.model.adapter is not None:
                how = {"attn_implementation": attention, "native": True, "revision": _begun_commit(recipe.run)}
            model: Any = _load_start(start, recipe.code, where, **how)
            check_sizes(recipe.model, model.config, where=where("model.start_from"))
            rows = model.config.get_text_config().vocab_size
            _add_embeddings(model, num_ids=len(tokenizer), seed=seed)
            if recipe.model.adapter is not None:
                from pipeline.training.adapter import adapt

                ids = {"rows": rows, "tokenizer": tokenizer}
                adapt(model, recipe.model.adapter, start=start, **ids, where=where, seed=seed)
        else:
            fields = model_fields(
                recipe.model,
                vocab_size=len(tokenizer),
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            model = _initialise(recipe.model, fields, recipe.code, where, attention=attention, seed=seed)
    except ModelOptionsError as error:
        raise RecipeError(f"{recipe.path}: {error}") from error

    # 2. The plan and the meters counted with the sizes of this model, and no other.
    if not start:  # else check_sizes has compared them
        with suppress(ValueError):  # nothing was planned
            planned = sizes_of(recipe, len(tokenizer)).parameters()["total"]
            _check_planned(model, planned, recipe.model.type, where)

    # 3. A class that is not ours computes the loss that training needs.
    if not isinstance(model, TandemForCausalLM):
        train_rows = recipe.micro_batch_rows if recipe.isolates_documents else 1
        eval_rows = recipe.evals.bpb.batch_rows or recipe.train["per_device_eval_batch_size"]  # always isolated
        check_foreign(model, tokenizer, where=where, isolated_rows=max(train_rows, eval_rows))

    # 4. `generate` ends where the training text does.
    if recipe.stage == "sft":
        _stop_at(end_of_turn(tokenizer), "the end of a turn", model, tokenizer)
    elif start:
        end = document_end_of(tokenizer, run=recipe.run, start_folder=start_folder(recipe))
        if end is None:  # then a text ends where the next one begins
            end = document_start(tokenizer)
        _stop_at(end, "which follows each document", model, tokenizer)

    # 5. The types of numbers that the recipe chose.
    if recipe.model.embedding_dtype != "float32":
        tied = model.config.tie_word_embeddings
        if tied or not isinstance(model, TandemForCausalLM):
            head = "a tied" if tied else "an untied"
            raise RecipeError(
                f"{where('model.embedding_dtype')}: is {recipe.model.embedding_dtype}, and model.start_from gives a "
                f"{type(model).__name__} with {head} head: only the embeddings of a Tandem with an untied head can "
                "be stored so. Remove the key: float32 is used."
            )
        store_embeddings(model, getattr(torch, recipe.model.embedding_dtype))
    if recipe.train.get("fp8"):
        from pipeline.training.fp8 import refuse_without_fp8

        refuse_without_fp8(model, where("train.fp8"))
    return model


def _begun_commit(run: Run) -> str | None:
    """Return the commit of a Hub model that the run began from: its checkpoints hold no weights of the base."""
    if run.name is None:
        return None
    inputs = RunDirectory.of(run).read_manifest().get("inputs", {})
    return (inputs.get("start_from") or {}).get("commit")


def _load_start(start: str, code: CodeFolder, where: Callable[[str], str], **how: Any) -> Any:
    """Return the model of model.start_from, whose weights are numbers that a step can change. how: of load_model;
    text_type is that of the checkpoints of a run that has begun."""
    from pipeline.evals.subject import open_model

    place = where("model.start_from")
    try:
        model = open_model(start, code=code, where=place, dtype=torch.float32, **how)
    except OSError as error:
        raise InputMissingError(f"{place}: {start}: no model can be loaded ({error}).") from error
    if hasattr(model, "peft"):
        raise InputMissingError(f"{place}: {start} is an adapter, no whole model. Merge it: hub export --merge.")
    model.config.get_text_config().use_cache = False  # Trainer does so of a model of text alone
    on_rank_0(lambda: [print(line) for line in model.notes])  # one call: ranks may have other notes
    refuse_quantized(model, f"{place}: {start}")
    refuse_nonfinite(model.state_dict(), where=f"{place}: {start}", instead="Start from other weights.")
    return model


def _initialise(
    model: Model,
    fields: dict[str, Any],
    code: CodeFolder,
    where: Callable[[str], str],
    *,
    attention: str | None,
    seed: int,
) -> torch.nn.Module:
    """Return a new model of model.type. fields: of its config."""
    if ":" not in model.type:
        identity_blocks = model.preset == "portable"
        return build_model(
            model.type, fields, attn_implementation=attention, seed=seed, identity_blocks=identity_blocks
        )
    place = where("model.type")
    custom = import_attribute(model.type, code, where=place)
    with guarded(f"{place}: {model.type}"):
        return build_model(custom, fields, attn_implementation=attention, seed=seed)


def _check_planned(model: torch.nn.Module, planned: int, kind: str, where: Callable[[str], str]) -> None:
    """Raise RecipeError when horizon, memory and MFU were computed for a model of another size than the one that was
    built."""
    built = sum(parameter.numel() for parameter in model.parameters())
    if planned != built:
        raise RecipeError(
            f"{where('model.type')}: {kind} is planned with {planned:,} parameters and was built with {built:,}, so "
            "horizon, memory and MFU would be those of another model. Give the sizes that its config calls otherwise "
            "in model.options."
        )


def _begun_type(checkpoints: Path) -> str | None:
    """Return the model_type of a run's newest checkpoint; a text part alone stays that."""
    configs = [folder / "config.json" for folder in by_step(checkpoints)]
    configs = [config for config in configs if config.exists()]
    return read_json(configs[-1]).get("model_type") if configs else None


def _stop_at(end: int | None, what: str, model: Any, tokenizer: Any) -> None:
    """Add the token that ends an answer or a text to the generation config, or `generate` would continue."""
    config = model.generation_config
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if end is None or end in known:
        return
    config.eos_token_id = [end, *(i for i in known if i is not None)]
    token = tokenizer.convert_ids_to_tokens(end)
    line = f"model: generation also ends at {token!r}, {what} (eos_token_id of generation_config.json)"
    on_rank_0(lambda: print(line))


def _add_embeddings(model: Any, *, num_ids: int, seed: int) -> None:
    """Give every id an embedding: an earlier model lacks those of the control tokens that chat added."""
    rows = model.config.get_text_config().vocab_size
    if num_ids > rows:
        line = f"model: {num_ids - rows} embeddings added for new tokens ({rows} -> {num_ids})"
        on_rank_0(lambda: print(line))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # new rows are drawn around the mean of the old ones: the same at every start
            model.resize_token_embeddings(num_ids)


def build_optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of `optimizer.type`: adamw, muon_adamw, or module:attr called with (model, recipe).

    Raises RecipeError for a model that it cannot update.
    """
    kind = recipe.optimizer.type
    if ":" in kind:
        where = recipe.where("optimizer.type")
        factory = import_attribute(kind, recipe.code, where=where)
        with guarded(f"{where}: {kind}"):
            optimizer = factory(model, recipe)
        for i, group in enumerate(optimizer.param_groups):
            group.setdefault("initial_lr", group["lr"])
            group.setdefault("name", f"group_{i}")
        return optimizer
    dtype = product_dtype(bf16=decide_bf16(recipe.train.get("bf16"), fp16=bool(recipe.train.get("fp16"))))
    backend = None
    # On a CPU the products are nearly all of Muon's time: a compiled step is no faster, and takes 16 s to compile.
    if decide_compile(recipe.train.get("torch_compile")) and device_info().kind != "cpu":
        backend = recipe.train.get("torch_compile_backend") or "inductor"
    return OPTIMIZERS[kind](parameter_groups(model, recipe.optimizer, product_dtype=dtype), backend=backend)


def build_trainer(
    recipe: Recipe,
    run: RunDirectory,
    *,
    model: Any,
    tokenizer: Any,
    rows: Any,
    validation: Any,
    interruptible: Callable[..., Iterable] = iter,
    eval_on_start: bool = False,
) -> TandemTrainer:
    """Return the Trainer of both stages. rows, validation: as the data room opens them; recipe.train holds max_steps
    by now.

    interruptible: wraps the batches of evaluations, so that a signal can end them.
    """
    # 1. Number formats and compilation, as recipe and hardware decide.
    bf16 = decide_bf16(recipe.train.get("bf16"), fp16=bool(recipe.train.get("fp16")))
    fp8 = bool(recipe.train.get("fp8"))
    compiled = decide_compile(recipe.train.get("torch_compile"))
    is_sharded = shards_model()
    args = build_arguments(
        recipe,
        run,
        bf16=bf16,
        torch_compile=compiled and not is_sharded,  # the Trainer would compile the whole model, hooks included
        use_cpu=device_info().kind == "cpu",
        eval_on_start=eval_on_start,
    )
    autocast_dtype = None
    if bf16:
        autocast_dtype = torch.bfloat16
    elif args.fp16:
        autocast_dtype = torch.float16

    # 2. Time, tokens and FLOPs, against the peak of this device in the format that it computes in.
    peaks = device_info().peak_flops or {}
    compute = compute_format(bf16=bf16, fp16=bool(args.fp16), tf32=bool(args.tf32), fp8=fp8)
    meter = StepMeter(
        tokens_at=recipe.tokens_at,
        max_steps=args.max_steps,
        world_size=args.world_size,
        sizes=sizes_from_model(model, recipe.data.row_tokens),
        peak=peaks.get(compute),
        bf16_peak=peaks.get("bfloat16"),
    )

    # 3. The evaluation: bits per byte of held-out text, and the user's tasks.
    lengths_V = byte_lengths(tokenizer) if is_byte_level(tokenizer) else None
    eval_rows = recipe.evals.bpb.batch_rows or args.per_device_eval_batch_size
    nll = None
    if args.torch_compile:
        nll = compiled_nll(model, backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    tasks = {}
    if recipe.evals.tasks:
        from pipeline.evals.tasks import load_tasks

        tasks = load_tasks(recipe.evals.tasks, folder=recipe.code, where=f"{recipe.path}: evals.tasks")
    evaluation = Evaluation(
        validation=validation,
        tasks=tasks,
        tokenizer=tokenizer,
        options={
            "byte_lengths_V": lengths_V,
            "stage": recipe.stage,
            "rows": eval_rows,
            "rank": batch_rank(args.process_index),
            "world_size": batch_ranks(args.world_size),
            "device": args.device,
            "autocast_dtype": autocast_dtype,
            "nll": nll,
        },
    )

    # 4. Each rank keeps its part of the model, where the launcher asks for that.
    cache_lomo_check()
    if is_sharded:
        compile_options = None
        if compiled:
            options = {name: recipe.train.get(f"torch_compile_{name}") for name in ("backend", "mode")}
            compile_options = {name: value for name, value in options.items() if value}
        from pipeline.training.sharding import shard_model

        shard_model(model, compile_options=compile_options)
        args.torch_compile = compiled

    # 5. The Trainer.
    settings = TrainerSettings(
        path=recipe.path,
        where=recipe.where,
        stage=recipe.stage,
        monitor=recipe.monitor,
        hub=recipe.hub,
        keep_every_steps=recipe.run.keep_every_steps,
        keep_best=recipe.run.keep_best,
        make_optimizer=None if recipe.optimizer.type == "trainer" else partial(build_optimizer, recipe=recipe),
        schedule=recipe.optimizer.schedule,
        fp8=fp8,
        eval_rows=eval_rows,
        sets_accumulation="gradient_accumulation_steps" in recipe.train,
    )
    trainer = TandemTrainer(
        model=model,
        args=args,
        settings=settings,
        run=run,
        tokenizer=tokenizer,
        rows=rows,
        evaluation=evaluation,
        interruptible=interruptible,
        meter=meter,
        byte_lengths_V=lengths_V,
    )
    if recipe.stage == "pretrain" and recipe.model.start_from:
        trainer.add_callback(KeepEnds(model))
    return trainer


def resolve_rows(recipe: Recipe, model: Any, *, step: int = 0) -> Recipe:
    """Return the recipe, with rows of one text each where texts of a row would see each other. Every rank calls it.

    step: of a run that continues, which keeps the rows that it began with. Raises RecipeError for a model that sees the
    token that it predicts.
    """
    if recipe.model.start_from is None and recipe.model.type in PLAIN_HEADS:
        return recipe  # held by tests/contracts; these would be copied, as their blocks write nothing yet
    from pipeline.training.isolation import try_isolation

    model.config.get_text_config().use_cache = False  # Trainer leaves it on in the text part of a larger config
    found = on_rank_0(lambda: try_isolation(model, row_tokens=recipe.data.row_tokens))
    begun = step > 0 and "inputs" in RunDirectory.of(recipe.run).read_manifest()
    kind = f"a {type(model).__name__}"
    if found == "looks_ahead" and not begun:
        key = "model.start_from" if recipe.model.start_from else "model.type"
        raise RecipeError(
            f"{recipe.where(key)}: {kind} sees the tokens behind the one that it is to predict, so it would learn to "
            "copy them. Take a causal language model; BERT and its kin are one with is_decoder: true."
        )
    if found != "leaks":
        return recipe
    if begun and not recipe.data.one_text_rows:
        line = (
            f"note: texts that share a row see each other in {kind}; this run continues as it began, a new one has "
            "rows of one text each"
        )
    else:
        recipe = with_values(recipe, {"data.one_text_rows": True})
        held = "row holds one document"
        if recipe.stage == "sft":
            held = "row holds one conversation"
        elif not recipe.data.isolate_documents:  # then only those of the evaluation are kept apart
            held = f"row of {VAL_BPB_DOCUMENTS} holds one document"
        line = f"rows: texts that share one see each other in {kind} (tried on two), so each {held}, padded"
    on_rank_0(lambda: print(line, flush=True))
    return recipe


def rows_of_recipe(recipe: Recipe, tokenizer: Any) -> Recipe:
    """Return resolve_rows of the recipe for a preparation without a training: its model is built for that, or its run
    has begun."""
    model, run = recipe.model, RunDirectory.of(recipe.run)
    kind = (model.start_config or {}).get("model_type") if model.start_from else model.type
    if kind in PLAIN_HEADS:
        return recipe
    if run.has_trained():
        recorded = run.read_manifest().get("inputs", {}).get("one_text_rows", False)
        return with_values(recipe, {"data.one_text_rows": recorded})
    try:
        return resolve_rows(recipe, build_from_recipe(recipe, tokenizer))
    except InputMissingError:
        print(
            "note: the model is not here, so rows are made as for one that keeps the texts of a row apart", flush=True
        )
        return recipe
