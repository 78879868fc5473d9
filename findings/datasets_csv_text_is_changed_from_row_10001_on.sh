#!/usr/bin/env bash
# Title: From row 10,001 on the csv answers "007" and "1e5" become the texts "7" and "100000", before as written.
# Packages: datasets==5.2.0
# Guess: a csv column that holds words is text in all rows; at worst the whole column is guessed wrong.
# Seen: load_dataset("csv") guesses the types of every 10,000 rows anew and then casts them to those of the first
#   10,000. A file of 10,000 rows of words and then 4 rows "007", "1e5", "3.10", "0042" gives "7", "100000", "3.1",
#   "42" for these, and a last block of "True", "FALSE" gives "true" and "false". The same four rows inside the first
#   10,000, or with one word among them, are exact, so the values depend on where the file is cut. Map-style and
#   streaming alike, no warning. With features given (the column is Value("string")) all are exact. 2026-11-27, Python
#   3.11, Linux, CPU.
# Costs: exact-match answers, ids and phone numbers differ by their row number; a join or a decontamination misses
#   them.
# Tandem: reads csv with Python's csv module, every field as text (pipeline/sources/raw_rows.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python - <<'PROGRAM'
import csv
import logging
import warnings

import datasets
from datasets import Features, Value, load_dataset

datasets.logging.set_verbosity(datasets.logging.CRITICAL)
warnings.simplefilter("ignore")
WORDS = ["a word"] * 10_000
ANSWERS = ["007", "1e5", "3.10", "0042"]


def load(name, answers, **settings):
    """Write the answers as a csv of one column beside their number, return them as both ways read them."""
    with open(name, "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["number", "answer"])
        writer.writerows(enumerate(answers))
    whole = load_dataset("csv", data_files=name, split="train", **settings)["answer"][:]
    stream = [row["answer"] for row in load_dataset("csv", data_files=name, split="train", streaming=True, **settings)]
    assert whole == stream, "no longer holds: map-style and streaming differ"
    assert len(whole) == len(answers)
    return whole


late = load("late.csv", WORDS + ANSWERS)[-4:]
truths = load("truths.csv", WORDS + ["True", "FALSE"])[-2:]
early = load("early.csv", ANSWERS + WORDS[4:])[:4]
mixed = load("mixed.csv", WORDS + ANSWERS + ["a word"])[-5:-1]
text = Features({"number": Value("int64"), "answer": Value("string")})
declared = load("declared.csv", WORDS + ANSWERS, features=text)[-4:]
print("written:", ANSWERS)
print("rows 10,001 to 10,004:", late)
print('"True", "FALSE" as rows 10,001 and 10,002:', truths)
print("rows 1 to 4:", early)
print("rows 10,001 to 10,004, a word after them:", mixed)
print("rows 10,001 to 10,004, features given:", declared)
assert late != ANSWERS, "no longer holds: the rows are read as they are written"
assert late == ["7", "100000", "3.1", "42"], "no longer holds: the values"
assert truths == ["true", "false"], "no longer holds: truths"
# The controls: the same rows elsewhere in the file, beside a word, and with the type given.
assert early == ANSWERS and mixed == ANSWERS and declared == ANSWERS, "the control is wrong"
PROGRAM
