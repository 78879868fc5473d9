"""`python -m pipeline.data RECIPE [section.key=value ...] [--show N] [--prune] [--watchlist FILE] [--part K/N]
[--publish ADDRESS]`: prepare all rows of a recipe now;
`python -m pipeline.data FILE_OR_FOLDER_OR_ID [key=value ...] [--show N] [--tokenizer X]`: look at data before there is
a recipe."""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from pipeline.process.commands import program, whole_number
from pipeline.process.network import SHARDS_FORMS, takes_shards
from pipeline.process.progress import Bar, in_colour, short_count
from pipeline.recipe.schema import with_values
from pipeline.run_dir.failures import exit_with_status


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=program("data"),
        description="Fetch, verify, tokenize and pack the data of a recipe; or look at data that has none yet.",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE|DATA",
        help="recipe file; or a data file, a folder, a glob, the id of a dataset",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help=(
            "changes to the recipe; beside data: keys of a source, as split=test or 'columns={prompt: Q, response: A}'"
        ),
    )
    parser.add_argument("--show", type=int, metavar="N", help="print N rows with the trained tokens marked (data: 3)")
    parser.add_argument("--tokenizer", metavar="ID_OR_FOLDER", help="data: render and count with this tokenizer")
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
    parser.add_argument(
        "--part",
        metavar="K/N",
        type=part_of,
        help=(
            "encode part K of N (from 1) into the shared data.cache_dir; the last part, or a call without "
            "--part, makes the shards"
        ),
    )
    parser.add_argument(
        "--publish",
        metavar="ADDRESS",
        type=shards_address,
        help=(
            "send the shards there when all are made, for data.shards_from: s3://..., gs://... or "
            "hf://datasets/NAMESPACE/NAME"
        ),
    )
    parser.add_argument("--ahead", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.ahead:
        from pipeline.data.prepare import prepare_in_background

        return prepare_in_background(Path(arguments.ahead))
    if arguments.recipe is None:
        parser.error("neither a recipe nor data is named")
    from pipeline.data.preview import is_recipe, preview

    if not is_recipe(arguments.recipe):
        count = 3 if arguments.show is None else arguments.show
        colour = in_colour()
        log = logging.getLogger("pipeline.sources.open")
        log.addFilter(_is_no_warning)  # the preview says itself what is left out
        try:
            for line in preview(
                arguments.recipe, arguments.overrides, tokenizer=arguments.tokenizer, rows=count, colour=colour
            ):
                print(line)
        finally:
            log.removeFilter(_is_no_warning)
        return 0
    _prepare(arguments)
    return 0


def part_of(text: str) -> tuple[int, int]:
    """Return (k, n) of "k/n"."""
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part. Write K/N with K from 1 to N, as 3/16.")
    return int(k), int(n)


def shards_address(text: str) -> str:
    if not takes_shards(text):
        raise argparse.ArgumentTypeError(f"{text!r} takes no shards. Write {SHARDS_FORMS}.")
    return text


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno != logging.WARNING


def _prepare(arguments: argparse.Namespace) -> None:
    from pipeline.data.losses import padding_notes, table, warning_lines
    from pipeline.data.prepare import prepare_now
    from pipeline.data.preview import shown_rows
    from pipeline.data.row_plan import plan_rows
    from pipeline.data.rows import TrainingRows
    from pipeline.data.validation import ValidationRows
    from pipeline.recipe import read_recipe
    from pipeline.recipe.dial import row_settings
    from pipeline.recipe.start_from import resolve_start
    from pipeline.run_dir.earlier_runs import EarlierRuns
    from pipeline.sources.open import open_sources
    from pipeline.tokenizer import load_or_train

    recipe = read_recipe([arguments.recipe, *arguments.overrides], earlier=EarlierRuns())
    recipe = resolve_start(recipe)
    if not recipe.data.batch_tokens:
        world_size = whole_number(os.environ, "NPROC", 1, least=1)
        recipe = with_values(recipe, {"data.batch_tokens": recipe.global_batch_tokens(world_size)})
        print(
            f"data: the batch follows from train.gradient_accumulation_steps; for {world_size} process(es) it is "
            f"{recipe.data.batch_tokens:,} tokens"
        )
    if recipe.data.num_proc:
        os.environ.setdefault("RAYON_NUM_THREADS", str(recipe.data.num_proc))
    sources = open_sources(recipe.source_settings())
    for source in sources[0]:
        if source.recognised:
            print(f"data: {source.name}: {source.recognised}")
    tokenizer = load_or_train(recipe.tokenizer_settings(), sources[0], validation=sources[1])
    if not recipe.model.becomes_tandem:
        from pipeline.training.build import rows_of_recipe

        recipe = rows_of_recipe(recipe, tokenizer)
    plan = plan_rows(row_settings(recipe), tokenizer, sources=sources, watchlist=arguments.watchlist)
    if arguments.part and not _encode_part(plan, tokenizer, sources, arguments.part):
        return
    row_tokens = recipe.data.row_tokens
    with Bar("data: preparing", unit="tokens") as bar:

        def report(role: str, source: int, stream: Any) -> None:
            seals, total = stream.datasets[source].seals, stream.mixture.total_rows
            if role == "train" and total:  # of a source of unknown length nobody knows it before its end
                bar.reach(bar.n, total=total * row_tokens)
            bar.update(seals[-1]["rows"] * row_tokens if seals else 0)

        preparation = prepare_now(plan, tokenizer, sources=sources, verify=True, report=report)
    print(table(plan))
    rows, validation = TrainingRows.open(preparation=preparation), ValidationRows(preparation)
    rows.raise_if_too_bad()
    for line in warning_lines(plan, validation, sources=sources, tokenizer=tokenizer):
        print(line)
    for line in padding_notes(plan, rows.shares()):
        print(line)
    print(f"data: {rows.total_rows():,} rows, {rows.total_steps():,} steps, in {plan['cache_dir']}")
    for line in shown_rows(rows, tokenizer, count=arguments.show or 0, colour=in_colour()):
        print(line)
    if arguments.publish:
        from pipeline.contrib.published_shards import publish

        sent, size = publish(plan, arguments.publish)
        print(
            f"data: {sent} files, {size / 1e9:.2f} GB, were sent to {arguments.publish}. Take them with "
            f"data.shards_from={arguments.publish}"
        )
    if arguments.prune:
        from pipeline.data.references import prune

        count, freed = prune(plan, runs=Path(recipe.run.directory))
        print(f"data: {count} unused shard folders deleted, {freed / 1e9:.2f} GB freed")


def _encode_part(plan: dict, tokenizer: Any, sources: tuple[list, list], part: tuple[int, int]) -> bool:
    """Encode a part of the training text; return whether it was the last one, after which the shards are made."""
    from pipeline.contrib.parts import prepare_part

    with Bar("data: encoding", unit="tokens") as bar:
        to_come = prepare_part(plan, tokenizer, sources=sources, part=part, report=bar.update)
    if to_come:
        print(
            f"data: part {part[0]} of {part[1]} is encoded, {short_count(bar.n)} tokens. To come: "
            f"{', '.join(map(str, to_come))}. The last one, or the same command without --part, makes the shards."
        )
    return not to_come


if __name__ == "__main__":
    exit_with_status(main)
