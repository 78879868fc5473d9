"""`tandem init FOLDER`: look at files of the user's own and write a commented recipe for them."""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from pipeline.data.preview import OWN_RECIPES, preview
from pipeline.process.errors import CannotWriteError
from pipeline.process.storage import write_text
from pipeline.run_dir.failures import exit_with_status

# What is often changed beside the data; every key: docs/recipes.md.
TEXT = """
# tokenizer: {vocab_size: 8192}   # ids, trained on your text: 4096 up to 10 MB, 8192 for 100 MB, 32768 for gigabytes
# model: {depth: 6}               # larger learns more and takes longer: `tandem plan` says how long
# train: {num_train_epochs: 8}    # passes over your text; 4 if not given
samples:
  prompts: ["The"]                # what the model continues after each evaluation
"""
CHAT = """
model:
  start_from: latest:pretrain     # what learns to chat: runs/NAME, latest:RECIPE_NAME, or a model of the Hub

samples:
  prompts: ["Who are you?"]       # asked after each evaluation
"""


def recipe_text(source: dict[str, Any], *, stage: str, path: Path) -> str:
    """Return a recipe over the source, with comments."""
    source_lines = yaml.safe_dump({"data": {"sources": [source]}}, sort_keys=False, width=100, allow_unicode=True)
    return (
        f"# {'Stage 2, chat SFT' if stage == 'sft' else 'Stage 1, pretraining'}, on files of yours. Written by `tandem init`; change what you like.\n"
        f"# Look at the rows: tandem data {path} --show 3\n"
        f"# Time and memory:  tandem plan {path}\n"
        f"# Run:              tandem {stage} {path}\n\n"
        f"extends: {OWN_RECIPES[stage]}   # everything that is not said here: a small model, minutes on a CPU\n\n"
        f"{source_lines}{CHAT if stage == 'sft' else TEXT}"
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tandem init", description=__doc__)
    parser.add_argument("data", metavar="FOLDER", help="a folder or file of yours, a glob, or the id of a dataset")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="keys of a source, as split=test")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: the data's name with .yaml, in this folder"
    )
    arguments = parser.parse_intermixed_args(argv)
    name = re.sub(r"\W+", "_", Path(arguments.data).resolve().with_suffix("").name).strip("_") or "own"
    path = arguments.output or Path(f"{name}.yaml")
    if path.exists():
        raise CannotWriteError(
            f"{path}: is there already, and is not written over. Remove it, or name another --output."
        )
    lines = preview(
        arguments.data, arguments.settings, tokenizer=None, rows=2, colour=sys.stdout.isatty(), recipe=False
    )
    while True:
        try:
            print(next(lines))
        except StopIteration as end:
            source, stage = end.value
            break
    for key in ("files", "id"):  # a path in a recipe is read from the recipe's folder
        if isinstance(value := source.get(key), str) and Path(value).expanduser().exists():
            place = Path(value).expanduser().absolute()
            inside = place.is_relative_to(path.absolute().parent)
            source[key] = str(place.relative_to(path.absolute().parent) if inside else place)
    write_text(path, recipe_text(source, stage=stage, path=path))
    print(f"{path}: a recipe for it, with comments. What to type next:\n  tandem {stage} {shlex.quote(str(path))}")
    return 0


if __name__ == "__main__":
    exit_with_status(main)
