"""Stage 2: chat SFT. `accelerate launch pipeline/sft.py RECIPE [section.key=value ...]`"""

import sys
from pathlib import Path

if not __package__:  # started as a file: `pipeline/` stands first on the path and would hide libraries
    sys.path[0] = str(Path(__file__).parents[1])

from pipeline.process.errors import RecipeError
from pipeline.recipe import help_text, read_recipe
from pipeline.run_dir.failures import exit_with_status
from pipeline.run_dir.signals import Signals


def main(argv: list[str]) -> int:
    if not argv:
        print(help_text("sft"), file=sys.stderr)
        return RecipeError.status
    if "-h" in argv or "--help" in argv:
        print(help_text("sft"))
        return 0
    signals = Signals()
    recipe = read_recipe(argv, stage="sft")

    # Only now: a mistake in the recipe is told before torch is imported.
    from pipeline.callbacks.default import add_callbacks
    from pipeline.preflight.checks import check_before_training
    from pipeline.run.batch_size import settle_micro_batch
    from pipeline.run.data import keep_revisions, open_rows, record_inputs
    from pipeline.run.finish import finish_run, record_plan, say_shape
    from pipeline.run.open_run import evaluation_is_due, open_run
    from pipeline.run.publishing import Publishing
    from pipeline.run.start import start_process
    from pipeline.sources.hub_files import limit_silence
    from pipeline.sources.open import open_sources
    from pipeline.tokenizer import load_or_train
    from pipeline.training.build import build_from_recipe, build_trainer
    from pipeline.training.distributed import store_of_ranks

    processes = start_process(recipe)
    limit_silence()
    signals.connect(store_of_ranks())
    check_before_training(recipe, processes=processes)
    run = open_run(recipe)
    if run.finished:
        return 0
    keep_revisions(recipe, run)
    train, held_out = open_sources(recipe, kind="chat")
    tokenizer = load_or_train(recipe, train, validation=held_out)
    rows, validation = open_rows(recipe, tokenizer, (train, held_out), run)
    record_inputs(recipe, run, tokenizer=tokenizer, sources=(train, held_out), rows=rows, validation=validation)
    model = build_from_recipe(recipe, tokenizer)
    trainer = build_trainer(recipe, run.directory, model=model, tokenizer=tokenizer, rows=rows, validation=validation)
    settle_micro_batch(recipe, run, trainer)
    say_shape(run, trainer)
    record_plan(recipe, run, trainer)
    trainer.args.eval_on_start = evaluation_is_due(recipe, run)
    add_callbacks(trainer, recipe, run.directory, attempt=run.attempt, start_step=run.step, signals=signals)
    publishing = Publishing(recipe, run.directory, start_step=run.step)
    trainer.resume(run.checkpoint)
    signals.raise_if_stopped(step=trainer.state.global_step)
    finish_run(recipe, run, trainer, publishing)
    return 0


if __name__ == "__main__":
    exit_with_status(main)
