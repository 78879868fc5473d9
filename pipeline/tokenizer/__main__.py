"""`python -m pipeline.tokenizer RECIPE [section.key=value ...]`: train the tokenizer of a recipe and judge it."""

import argparse

from pipeline.process.commands import program
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.failures import exit_with_status


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=program("tokenizer"), description="Train the tokenizer of a recipe and judge it."
    )
    parser.add_argument("recipe", metavar="RECIPE", help="recipe file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="changes to the recipe")
    parser.add_argument(
        "--beside",
        metavar="FOLDER_OR_ID",
        help="tokenizer to compare with; default GPT-2 when the local Hub cache has it",
    )
    arguments = parser.parse_intermixed_args(argv)
    _show(arguments)
    return 0


def _show(arguments: argparse.Namespace) -> None:
    from pipeline.recipe import read_recipe

    recipe = read_recipe([arguments.recipe, *arguments.overrides], earlier=EarlierRuns())

    from pipeline.process.storage import read_json
    from pipeline.sources.open import open_sources
    from pipeline.tokenizer import identity, load_or_train
    from pipeline.tokenizer.train import cached_folder, judge, table

    train, validation = open_sources(recipe.source_settings())
    settings = recipe.tokenizer_settings()
    folder = cached_folder(settings, train)
    kept = not recipe.tokenizer.path and folder.is_dir()
    tokenizer = load_or_train(settings, train, validation=validation, beside=arguments.beside)
    if kept or recipe.tokenizer.path:
        judgement = judge(tokenizer, train=train, validation=validation, beside=arguments.beside)
    else:
        judgement = read_json(folder / "report.json")["judgement"]
    print(table(judgement))
    print(f"tokenizer: {recipe.tokenizer.path or folder}, {len(tokenizer):,} ids, {identity(tokenizer)[:16]}")


if __name__ == "__main__":
    exit_with_status(main)
