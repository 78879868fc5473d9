"""The life of a run, for both stages: from its recipe to the finished model."""

from collections.abc import Sequence
from functools import partial

from transformers import TrainerCallback

from pipeline.callbacks.samples import held_out_prompts
from pipeline.callbacks.stop_signals import StopSignals
from pipeline.model.modeling_tandem import TandemForCausalLM
from pipeline.plan.plan import plan_of_run
from pipeline.process.network import set_http_timeouts
from pipeline.recipe import Recipe
from pipeline.recipe.batch import KEY
from pipeline.recipe.schema import with_values
from pipeline.run.callbacks import add_callbacks, end_callbacks, own_callbacks
from pipeline.run.checks import benchmarks_of, check_before_training
from pipeline.run.finish import finish_run, print_summary
from pipeline.run.inputs import record_inputs
from pipeline.run.open_rows import open_rows
from pipeline.run.open_run import evaluation_is_due, open_run, restore_run
from pipeline.run.settings import print_run_config, record_plan, settings_of
from pipeline.run.start_process import resolve_open_values, start_process
from pipeline.run_dir.failures import KeyboardSignals, Signals
from pipeline.sources.open import open_sources, with_recorded_inputs
from pipeline.tokenizer import load_or_train
from pipeline.training.build import build_from_recipe, build_trainer, resolve_rows
from pipeline.training.distributed import on_rank_0, store_of_ranks


def train(recipe: Recipe, signals: Signals | KeyboardSignals, *, callbacks: Sequence[TrainerCallback] = ()) -> int:
    """Train the run of the recipe to its end, from its newest checkpoint. Return the exit status; every rank calls it.

    A recipe is frozen: each step that decides an open value (start, batch, attention, commits, steps, micro-batch)
    returns the next one. callbacks: act after the recipe's own.
    """
    # 1. The process joins the other ranks, and what the recipe left open is decided.
    processes = start_process(recipe)
    set_http_timeouts()
    signals.connect(store_of_ranks())
    recipe = restore_run(recipe)
    recipe = resolve_open_values(recipe, processes)
    recipe = check_before_training(recipe, processes=processes)
    if recipe.run.minutes is not None:
        from pipeline.plan.budget import steps_within

        here = with_values(recipe, {"run.hardware": None})
        steps, _ = on_rank_0(lambda: steps_within(here))
        recipe = with_values(recipe, {"train.max_steps": steps})

    # 2. The run directory, and the checkpoint to continue from.
    run = open_run(recipe)
    flush = None
    if recipe.run.mirror:
        from pipeline.contrib.mirror import FAILED_FLUSH_S, start_uploader

        flush = start_uploader(recipe.run.mirror, run.directory)
    if run.finished:
        if flush:
            flush()
        return 0

    # 3. Text, tokenizer, model, rows.
    if run.step:  # the commits of Hub datasets and the held-out files that it began with
        begun = run.directory.read_manifest().get("inputs", {})
        recipe = with_values(recipe, {"data": with_recorded_inputs(recipe.data, begun)})
    sources, held_out = open_sources(recipe.source_settings())
    if recipe.samples.held_out:
        more = on_rank_0(lambda: held_out_prompts(held_out, recipe.samples.held_out))
        prompts = list(dict.fromkeys([*recipe.samples.prompts, *more]))
        recipe = with_values(recipe, {"samples.prompts": prompts})
    tokenizer = load_or_train(recipe.tokenizer_settings(), sources, validation=held_out)
    model = build_from_recipe(recipe, tokenizer)
    if not isinstance(model, TandemForCausalLM):  # held by tests/contracts: a row may hold several texts
        recipe = resolve_rows(recipe, model, step=run.step)
    recipe, rows, validation = open_rows(recipe, tokenizer, (sources, held_out), run)
    record_inputs(
        run,
        recipe.data,
        recipe.train,
        start_from=recipe.model.start_from,
        chat=recipe.stage == "sft",
        trust_code=recipe.run.trust_code,
        tokenizer=tokenizer,
        sources=(sources, held_out),
        rows=rows,
        validation=validation,
    )

    # 4. The trainer, and what acts on its events.
    stop = StopSignals(signals)
    trainer = build_trainer(
        recipe,
        run.directory,
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        validation=validation,
        interruptible=stop.on_every_rank,
        eval_on_start=evaluation_is_due(run, recipe.train, at_start=recipe.evals.bpb.at_start),
    )
    if recipe.is_auto:
        from pipeline.run.micro_batch import find_micro_batch

        micro_batch = find_micro_batch(
            run,
            trainer.args,
            trainer.model,
            fits=trainer.fits_in_memory,
            sharded=trainer.is_sharded,
            planned=recipe.micro_batch_rows,
            rows_per_step=recipe.rows_per_step,
            where=recipe.where(KEY),
        )
        recipe = with_values(recipe, {"micro_batch": micro_batch})
        trainer.set_micro_batch(rows=micro_batch, micro_steps=recipe.micro_steps(trainer.batch_ranks))
    assert recipe.data.batch_tokens
    settings = settings_of(
        trainer.args,
        attention=trainer.model.config._attn_implementation,
        sharded=trainer.is_sharded,
        batch_tokens=recipe.data.batch_tokens,
        start_from=recipe.model.start_from,
        fp8=bool(recipe.train.get("fp8")),
    )
    if trainer.is_world_process_zero():
        print_run_config(run, settings)
        built = {"micro_batch": settings.micro_batch, "processes": settings.processes}
        plan = partial(plan_of_run, recipe, run.directory, **built)
        record_plan(run, trainer.model, row_tokens=recipe.data.row_tokens, make=plan)
    add_callbacks(
        trainer,
        run.directory,
        run=recipe.run,
        monitor=recipe.monitor,
        samples=recipe.samples,
        chat=recipe.stage == "sft",
        own=[*own_callbacks(recipe.run.callbacks, recipe.code, where=recipe.where("run.callbacks")), *callbacks],
        wanted=benchmarks_of(recipe),
        attempt=run.attempt,
        start_step=run.step,
        stop=stop,
    )
    publishing = None
    if recipe.hub.id is not None:
        from pipeline.run_dir.hub_queue import Publishing

        publishing = Publishing(recipe.hub, run.directory, start_step=run.step)

    # 5. The steps, and the end.
    try:
        trainer.resume(run.checkpoint)
        signals.raise_if_stopped(step=trainer.state.global_step, first=flush)
        finish_run(run.directory, trainer, publishing, dtype=recipe.hub.dtype)
        if trainer.is_world_process_zero():
            files = [place.rpartition(":")[0] for place in recipe.places.values()]
            print_summary(run, stage=recipe.stage, prompts=recipe.samples.prompts, files=files)
    except BaseException as error:
        if isinstance(signals, KeyboardSignals):
            end_callbacks(trainer.callback_handler.callbacks, trainer.args, trainer.state, trainer.control)
        if flush and isinstance(error, Exception):  # its last checkpoint
            flush(FAILED_FLUSH_S)
        raise
    if flush:
        flush()
    return 0
