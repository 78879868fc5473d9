"""`tandem init FOLDER`: look at files of the user's own and write a commented recipe for them."""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from pipeline.data.preview import OWN_RECIPES, preview
from pipeline.plan.budget import Schedule, schedule_of
from pipeline.plan.table import time_text
from pipeline.process.commands import command, program
from pipeline.process.errors import CannotWriteError, RecipeError, TandemError
from pipeline.process.progress import in_colour
from pipeline.process.storage import write_text
from pipeline.recipe import read_recipe
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.failures import exit_with_status

# What is often changed apart from the data; every key: docs/recipes.md.
TEXT = """
# tokenizer: {vocab_size: 8192}   # ids, trained on your text: 4096 up to 10 MB, 8192 for 100 MB, 32768 for gigabytes
# model: {depth: 6}               # larger learns more and takes longer: the plan says how long

TRAIN
# samples: {prompts: ["The"]}     # what the model continues after each evaluation, besides held-out beginnings
"""
CHAT = """
model:
  start_from: latest:pretrain     # what learns to chat: runs/NAME, latest:RECIPE_NAME, or a model of the Hub

TRAIN
# samples: {prompts: ["Who are you?"]}   # asked after each evaluation, besides what held-out chats ask
"""
FEW_STEPS = 10
LEAST_MINUTES = 2  # imports, compilation and report take one
MOST_MINUTES = 60 * 24 * 365
LONG_MINUTES = 15  # from which on a shorter run is offered


def recipe_text(source: dict[str, Any], *, stage: str, path: Path, schedule: Schedule) -> str:
    """Return a recipe over the source, with comments."""
    data: dict[str, Any] = {"sources": [source]}
    if "data.batch_tokens" in schedule.keys:
        data["batch_tokens"] = schedule.keys["data.batch_tokens"]
    source_lines = yaml.safe_dump({"data": data}, sort_keys=False, width=100, allow_unicode=True)
    title, rest = "Stage 1, pretraining", TEXT
    if stage == "sft":
        title, rest = "Stage 2, chat SFT", CHAT
    return (
        f"# {title}, on files of yours. Written by `{program('init')}`; change what you like.\n"
        f"# Look at the rows: {command('data', path)} --show 3\n"
        f"# Time and memory:  {command('plan', path)}\n"
        f"# Run:              {command(stage, path)}\n\n"
        f"extends: {OWN_RECIPES[stage]}   # everything that is not set here: a small model, minutes on a CPU\n\n"
        f"{source_lines}{rest.replace('TRAIN', train_lines(schedule))}"
    )


COMMENTS = {
    "num_train_epochs": "passes over your data",
    "max_steps": "as many as fit into the time; in its place num_train_epochs: 4 reads all of your data",
    "per_device_train_batch_size": "small steps, as the chats are few",
    "eval_steps": "steps between two scorings of what is held out",
    "save_steps": "steps between two checkpoints, from which a stopped run continues",
}


def train_lines(schedule: Schedule) -> str:
    """Return the sections `train` and `evals` of the schedule, with comments."""
    keys = {}
    if "train.max_steps" not in schedule.keys:
        keys["num_train_epochs"] = f"{schedule.passes:g}"
    for key, value in schedule.keys.items():
        section, _, name = key.partition(".")
        if section == "train":
            keys[name] = "null" if value is None else str(value)
    text = "train:\n"
    for key, value in keys.items():
        setting, comment = f"  {key}: {value}", COMMENTS.get(key)
        if key == "num_train_epochs" and schedule.steps is not None:
            comment = f"{comment}, about {schedule.steps:,} steps"
            if schedule.steps < FEW_STEPS:
                comment += "; so few teach little: take more passes"
        if comment and value != "null":
            setting = f"{setting:<34}# {comment}"
        text += f"{setting}\n"
    if "evals.bpb.tokens" in schedule.keys:
        bpb = ", ".join(f"{name}: {schedule.keys[f'evals.bpb.{name}']}" for name in ("tokens", "document_bytes"))
        text += f"evals:\n  bpb: {{{bpb}}}   # scored each time: as much as the time allows\n"
    return text


def time_lines(schedule: Schedule, *, again: str) -> list[str]:
    """Return how long the run takes. again: the command that makes a recipe of ten minutes."""
    if schedule.minutes is None:
        return ["time: not known before its data are read; `tandem plan` says more then"]
    how = "by arithmetic, a half to twice that; a measurement is truer"
    if schedule.measured:
        how = "by steps measured here"
    lines = [f"time: about {time_text(60 * schedule.minutes)} on this machine ({how})"]
    if not schedule.measured and schedule.minutes > LONG_MINUTES:
        lines.append(f"      for a run of ten minutes: {again}")
    return lines


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
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help="keys of a source, as split=test")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: the data's name with .yaml, in this folder"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="measure this machine and size the run so that all of it ends in so many minutes",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.minutes is not None and not LEAST_MINUTES <= arguments.minutes < MOST_MINUTES:
        raise RecipeError(
            f"command line: --minutes {arguments.minutes:g} is no time to train in. Give {LEAST_MINUTES} or more."
        )
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
    lines = preview(data, arguments.settings, tokenizer=None, rows=2, colour=in_colour(), with_recipe=False)
    while True:
        try:
            print(next(lines))
        except StopIteration as end:  # what the generator returns
            source, stage = end.value
            break
    words = [OWN_RECIPES[stage], f"data.sources={json.dumps([source], ensure_ascii=False)}"]
    try:
        found = schedule_of(words, stage=stage, minutes=arguments.minutes)
    except TandemError:  # nothing to start from yet, say: the run's own start tells what is missing
        if arguments.minutes is not None:
            raise
        passes = read_recipe(words, stage=stage, earlier=EarlierRuns()).train["num_train_epochs"]
        found = Schedule({}, steps=None, passes=passes, minutes=None, measured=False)
    for key in ("files", "id"):  # a path in a recipe is read from the recipe's folder
        if isinstance(value := source.get(key), str) and Path(value).expanduser().exists():
            place, folder = Path(value).expanduser().absolute(), path.absolute().parent
            if place.is_relative_to(folder):
                place = place.relative_to(folder)
            source[key] = str(place)
    write_text(path, recipe_text(source, stage=stage, path=path, schedule=found))
    ten = path.with_name(f"{path.stem}_10min.yaml")
    print(
        *time_lines(
            found, again=command("init", arguments.data, *arguments.settings, "--minutes", "10", "--output", ten)
        ),
        sep="\n",
    )
    print(f"{path}: a recipe for it, with comments. What to type next:\n  {command(stage, path)}")
    return 0


if __name__ == "__main__":
    exit_with_status(main)
