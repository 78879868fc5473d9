#!/usr/bin/env bash
# Title: class_encode_column gives the score 10 the id 1, between 1 and 2: whole numbers are ordered as texts.
# Packages: datasets==5.2.0
# Guess: whole numbers are ordered as numbers, so that of the scores 1 to 10 the score s gets the id s - 1; casting a
#   column of the numbers to ClassLabel(names=["1", ..., "10"]) gives the same ids, as it does for a column of their
#   texts.
# Seen: class_encode_column makes texts of the numbers and sorts these: 1, 10, 2, 3 ... 9 get the ids 0, 1, 2, 3 ...
#   9. A set of the scores 1 to 9 gets s - 1, so that the id of 2 is 1 in one set and 2 in the other. Cast to
#   ClassLabel with names "1" to "10", the texts become s - 1, but the numbers stay as they are: score 1 is then the
#   class named "2", and the 10 is an id that has no class; no error. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a model that is trained on the ids as an order takes 10 for nearly the worst.
# Tandem: does not use them: it trains no classes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python - <<'PROGRAM'
import datasets
from datasets import ClassLabel, Dataset

datasets.logging.set_verbosity(datasets.logging.CRITICAL)
SCORES = list(range(1, 11))
RIGHT = [score - 1 for score in SCORES]


def encoded(scores):
    data = Dataset.from_dict({"score": scores}).class_encode_column("score")
    return data["score"][:], data.features["score"].names


def cast(scores):
    names = ClassLabel(names=[str(score) for score in SCORES])
    return Dataset.from_dict({"score": scores}).cast_column("score", names)["score"][:]


ten, names = encoded(SCORES)
nine, _ = encoded(SCORES[:9])
as_numbers = cast(SCORES)
as_texts = cast([str(score) for score in SCORES])
print("scores:", SCORES)
print("ids of 1 to 10 by class_encode_column:", ten, "names:", names)
print("ids of 1 to 9 by class_encode_column:", nine)
print("ids of the numbers, cast to ClassLabel:", as_numbers)
print("ids of the texts, cast to ClassLabel:", as_texts)
assert ten == [0, 2, 3, 4, 5, 6, 7, 8, 9, 1], "no longer holds: class_encode_column"
assert names == ["1", "10", "2", "3", "4", "5", "6", "7", "8", "9"], "no longer holds: names"
assert as_numbers == SCORES and max(as_numbers) >= len(names), "no longer holds: numbers cast to ClassLabel"
# The controls: scores of one digit, and the cast of texts.
assert nine == RIGHT[:9] and as_texts == RIGHT, "the control is wrong"
PROGRAM
