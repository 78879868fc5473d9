"""`tandem init FOLDER`: look at files of the user's own and write a commented recipe for them."""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from pipeline.data.estimate import about_steps, about_tokens
from pipeline.data.preview import OWN_RECIPES, preview
from pipeline.process.commands import command, program
from pipeline.process.errors import CannotWriteError, TandemError
from pipeline.process.storage import write_text
from pipeline.recipe import read_recipe
from pipeline.recipe.start_from import resolve_start
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.failures import exit_with_status

# What is often changed apart from the data; every key: docs/recipes.md.
TEXT = """
# tokenizer: {vocab_size: 8192}   # ids, trained on your text: 4096 up to 10 MB, 8192 for 100 MB, 32768 for gigabytes
# model: {depth: 6}               # larger learns more and takes longer: the plan says how long

TRAIN
samples:
  prompts: ["The"]                # what the model continues after each evaluation
"""
CHAT = """
model:
  start_from: latest:pretrain     # what learns to chat: runs/NAME, latest:RECIPE_NAME, or a model of the Hub

TRAIN
samples:
  prompts: ["Who are you?"]       # asked after each evaluation
"""
SCORINGS = 5  # of a run that is shorter than so many times the shipped recipe's train.eval_steps
FEW_STEPS = 10
LEAST_STEPS = 5  # between two of them: a scoring and a checkpoint cost more than some steps of a small model


def recipe_text(source: dict[str, Any], *, stage: str, path: Path, train: str) -> str:
    """Return a recipe over the source, with comments. train: its lines of that section."""
    source_lines = yaml.safe_dump({"data": {"sources": [source]}}, sort_keys=False, width=100, allow_unicode=True)
    title, rest = "Stage 1, pretraining", TEXT
    if stage == "sft":
        title, rest = "Stage 2, chat SFT", CHAT
    return (
        f"# {title}, on files of yours. Written by `{program('init')}`; change what you like.\n"
        f"# Look at the rows: {command('data', path)} --show 3\n"
        f"# Time and memory:  {command('plan', path)}\n"
        f"# Run:              {command(stage, path)}\n\n"
        f"extends: {OWN_RECIPES[stage]}   # everything that is not set here: a small model, minutes on a CPU\n\n"
        f"{source_lines}{rest.replace('TRAIN', train)}"
    )


def train_lines(source: dict[str, Any], *, stage: str) -> str:
    """Return the section `train`: the passes of the shipped recipe, and for a short run when it is scored and
    saved."""
    words = [OWN_RECIPES[stage], f"data.sources={json.dumps([source])}"]
    recipe = read_recipe(words, stage=stage, earlier=EarlierRuns())  # type: ignore[arg-type]
    import pipeline.model.build  # noqa: F401 - makes the type of our models known, whose tokenizer may be loaded

    steps = None
    if "id" not in source:  # nothing is fetched for a comment
        with suppress(TandemError):  # nothing to start from yet, say: the run's own start tells what is missing
            steps = about_steps(about_tokens(resolve_start(recipe))[0], recipe)
    passes = "passes over your data"
    if steps is not None:
        passes += f", about {steps:,} steps"
        if steps < FEW_STEPS:
            passes += "; so few teach little: take more passes"
    keys = {"num_train_epochs": (f"{recipe.train['num_train_epochs']:g}", passes)}
    if steps is not None and steps < SCORINGS * recipe.train["eval_steps"]:
        every = str(max(LEAST_STEPS, steps // SCORINGS))
        keys["eval_steps"] = (every, "steps between two scorings of what is held out")
        keys["save_steps"] = (every, "steps between two checkpoints, from which a stopped run continues")
    text = "train:\n"
    for key, (value, meaning) in keys.items():
        setting = f"  {key}: {value}"
        text += f"{setting:<34}# {meaning}\n"
    return text


PIECE = 4_000  # characters of a document at least, a page or two
PIECES = 50  # that a short text has at least, as far as its paragraphs allow it
LONGEST = 4  # times PIECE: a text without blank lines is cut at a line's end, or where this is reached


def only_text(data: str) -> Path | None:
    """Return the text file that is all of the data; None where there are several files, or one of another kind."""
    place = Path(data).expanduser()
    files = [place]
    if place.is_dir():
        files = [path for path in place.rglob("*") if path.is_file() and not path.name.startswith(".")]
    if len(files) == 1 and files[0].suffix == ".txt" and files[0].is_file():
        return files[0]
    return None


def documents_of(lines: Iterable[str], *, characters: int) -> Iterator[str]:
    """Yield the text in documents of that many characters or a paragraph more, cut at blank lines; nothing of it is
    lost but blank lines at its end."""
    piece = ""
    for line in lines:
        for start in range(0, len(line), LONGEST * characters):
            piece += line[start : start + LONGEST * characters]
            is_paragraph = not line.strip()
            if len(piece) >= LONGEST * characters or (is_paragraph and len(piece) >= characters):
                yield piece
                piece = ""
    if piece.strip():
        yield piece


def cut_into_documents(text: Path, into: Path) -> int | None:
    """Write a text as a jsonl file of documents; return how many, None where it is no UTF-8 or holds too little to
    cut."""
    characters = max(200, min(PIECE, text.stat().st_size // PIECES))
    try:
        with open(text, encoding="utf-8-sig") as file:
            documents = sum(1 for _ in documents_of(file, characters=characters))
        if documents < 2:
            return None
        with open(text, encoding="utf-8-sig") as file, open(into, "w", encoding="utf-8", newline="\n") as out:
            for document in documents_of(file, characters=characters):
                out.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
    except UnicodeDecodeError:
        return None
    return documents


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=program("init"), description=__doc__)
    parser.add_argument("data", metavar="FOLDER", help="a folder or file of yours, a glob, or the id of a dataset")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="keys of a source, as split=test")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: the data's name with .yaml, in this folder"
    )
    arguments = parser.parse_intermixed_args(argv)
    name = re.sub(r"\W+", "_", Path(arguments.data).resolve().with_suffix("").name).strip("_") or "own"
    path = arguments.output or Path(f"{name}.yaml")
    data, into = arguments.data, path.with_suffix(".jsonl")
    text = only_text(data)
    written = [path, into] if text else [path]
    for file in written:
        if file.exists():
            raise CannotWriteError(
                f"{file}: is there already, and is not written over. Remove it, or name another --output."
            )
    if text and (documents := cut_into_documents(text, into)):
        data = str(into)
        print(
            f"{text} is one text, and a part has to be held out to measure by. {into} has it as {documents:,} "
            f"documents, cut at blank lines; the recipe reads that file. To cut it otherwise, write one document "
            'a line: {"text": "..."}.\n'
        )
    lines = preview(data, arguments.settings, tokenizer=None, rows=2, colour=sys.stdout.isatty(), recipe=False)
    while True:
        try:
            print(next(lines))
        except StopIteration as end:  # what the generator returns
            source, stage = end.value
            break
    train = train_lines(source, stage=stage)
    for key in ("files", "id"):  # a path in a recipe is read from the recipe's folder
        if isinstance(value := source.get(key), str) and Path(value).expanduser().exists():
            place, folder = Path(value).expanduser().absolute(), path.absolute().parent
            if place.is_relative_to(folder):
                place = place.relative_to(folder)
            source[key] = str(place)
    write_text(path, recipe_text(source, stage=stage, path=path, train=train))
    print(f"{path}: a recipe for it, with comments. What to type next:\n  {command(stage, path)}")
    return 0


if __name__ == "__main__":
    exit_with_status(main)
