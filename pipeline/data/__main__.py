"""`python -m pipeline.data RECIPE [section.key=value ...] [--show N] [--prune] [--watchlist FILE]`: prepare all rows of a recipe now."""

import argparse
import os
import sys
import time
from pathlib import Path

from pipeline.artifacts.failures import exit_with_status

LINE_EVERY_S = 1.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.data", description="Fetch, verify, tokenize and pack the data of a recipe."
    )
    parser.add_argument("recipe", nargs="?", help="recipe file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N rows with the trained tokens marked")
    parser.add_argument(
        "--prune",
        action="store_true",
        help="delete prepared shards that neither this recipe nor a run beside its runs uses",
    )
    parser.add_argument(
        "--watchlist",
        metavar="FILE",
        help="search the training text for evaluation items, that of prepared shards too; a training names the file",
    )
    parser.add_argument("--ahead", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.ahead:
        from pipeline.data.run_ahead import run_ahead

        return run_ahead(Path(arguments.ahead))
    if arguments.recipe is None:
        parser.error("no recipe is named")
    _prepare(arguments)
    return 0


def _prepare(arguments: argparse.Namespace) -> None:
    from pipeline.recipe import read_recipe

    recipe = read_recipe([arguments.recipe, *arguments.overrides], stage=None)
    from pipeline.recipe.start_from import resolve_start

    resolve_start(recipe)
    if not recipe.data.batch_tokens:
        from pipeline.recipe.batch import with_batch_tokens

        world_size = int(os.environ.get("NPROC", 1))
        recipe.data.batch_tokens = with_batch_tokens(recipe, world_size)
        print(
            f"data: the batch follows from train.gradient_accumulation_steps; for {world_size} process(es) it is {recipe.data.batch_tokens:,} tokens"
        )
    if recipe.data.num_proc:
        os.environ.setdefault("RAYON_NUM_THREADS", str(recipe.data.num_proc))

    from pipeline.data.prepare import prepare_now
    from pipeline.data.prune import prune
    from pipeline.data.rows import TrainingRows
    from pipeline.data.show import shown_rows, table, warning_lines
    from pipeline.data.validation import ValidationRows
    from pipeline.sources.open import open_sources
    from pipeline.tokenizer import load_or_train

    sources = open_sources(recipe, kind="chat" if recipe.stage == "sft" else "text")
    tokenizer = load_or_train(recipe, sources[0], validation=sources[1])
    preparation = prepare_now(
        recipe, tokenizer, sources=sources, verify=True, report=_Line(recipe), watchlist=arguments.watchlist
    )
    print(table(preparation.plan))
    rows, validation = TrainingRows.open(preparation=preparation), ValidationRows.open(preparation)
    rows.raise_if_too_bad()
    for line in warning_lines(recipe, rows, validation, sources=sources[0], tokenizer=tokenizer):
        print(line)
    print(f"data: {rows.total_rows():,} rows, {rows.total_steps():,} steps, in {preparation.plan['cache_dir']}")
    for line in shown_rows(rows, tokenizer, count=arguments.show, colour=sys.stdout.isatty()):
        print(line)
    if arguments.prune:
        count, freed = prune(preparation.plan, runs=Path(recipe.run.directory))
        print(f"data: {count} unused shard folders deleted, {freed / 1e9:.2f} GB freed")


class _Line:
    """Progress: one line that is rewritten on a terminal, else a line now and then."""

    def __init__(self, recipe):
        self.row_tokens, self.started, self.said, self.rows = recipe.data.row_tokens, time.monotonic(), 0.0, 0

    def __call__(self, role: str, source: int, stream) -> None:
        seals = stream.sequences[source].seals
        self.rows += seals[-1]["rows"] if seals else 0
        now = time.monotonic()
        if now - self.said < (LINE_EVERY_S if sys.stderr.isatty() else 10 * LINE_EVERY_S):
            return
        self.said = now
        name = stream.sequences[source].folder.name[:8]
        from pipeline.data.prepare import short_count

        tokens = self.rows * self.row_tokens
        text = f"data: {short_count(tokens)} tokens prepared, {short_count(tokens / (now - self.started))}/s; {role} {name} shard {len(seals)}"
        print(text, file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)


if __name__ == "__main__":
    exit_with_status(main)
