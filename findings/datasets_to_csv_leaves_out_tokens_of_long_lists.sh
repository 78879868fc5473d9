#!/usr/bin/env bash
# Title: Dataset.to_csv writes a list of 1,001 tokens as "[ 0 1 2 ... 998 999 1000]": the rest is gone, nothing is
#   said.
# Packages: datasets==5.2.0
# Guess: a list in a csv cell is awkward to read back, but it is all there: Python's text of the list, or JSON.
# Seen: to_csv goes through pandas with lists as numpy arrays, and a cell is what numpy prints. Up to 1,000 numbers
#   are all there (without commas, over several lines, floats with 8 digits); from 1,001 on a cell holds the first 3,
#   three dots and the last 3. A list of messages is all there, as text of Python objects, which no JSON reader reads.
#   The number of rows is right, and a short test passes. to_json and to_parquet keep all. 2026-11-27, Python 3.11,
#   Linux, CPU.
# Costs: tokenized rows, embeddings and log probabilities that were exported as csv cannot be had back.
# Tandem: does not use it: csv is only read (docs/data.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 2>"$folder/pip" \
  || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python - <<'PROGRAM'
import csv
import json

import datasets
from datasets import Dataset, load_dataset

datasets.logging.set_verbosity(datasets.logging.CRITICAL)
csv.field_size_limit(10**8)


def cells(rows):
    """Return the cells of a column of lists after to_csv, and whether the other writers keep the lists."""
    data = Dataset.from_dict({"tokens": rows})
    data.to_csv("rows.csv")
    data.to_json("rows.jsonl")
    data.to_parquet("rows.parquet")
    assert [json.loads(line)["tokens"] for line in open("rows.jsonl")] == rows, "the control is wrong: json"
    back = load_dataset("parquet", data_files="rows.parquet", split="train")
    assert back["tokens"][:] == rows, "the control is wrong: parquet"
    with open("rows.csv", newline="") as file:
        return [row["tokens"] for row in csv.DictReader(file)]


short, long, longer = cells([list(range(1000)), list(range(1001)), list(range(50_000))])
print("numbers in the cell of a list of 1000:", len(short.strip("[]").split()))
print("cell of a list of 1001:", long)
print("cell of a list of 50000:", longer)
words = cells([[f"word{number}" for number in range(1001)]])[0]
print("words in the cell of a list of 1001 words:", words.count("word"))
assert long.split() == ["[", "0", "1", "2", "...", "998", "999", "1000]"], "no longer holds: 1001 tokens"
assert longer.split()[-4:] == ["...", "49997", "49998", "49999]"], "no longer holds: 50000 tokens"
assert words.count("word") == 6, "no longer holds: words"
# The control beside those above: one token less and all are there.
assert [int(number) for number in short.strip("[]").split()] == list(range(1000)), "the control is wrong"
PROGRAM
