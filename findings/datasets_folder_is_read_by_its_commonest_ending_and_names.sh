#!/usr/bin/env bash
# Title: load_dataset of a folder reads LICENSE.txt and NOTES.txt instead of data.jsonl, or only the file named test.
# Packages: datasets==5.2.0
# Guess: the data files are found by what they are; a folder whose files differ is an error; a file with "test" in its
#   name is the split test and the others are train.
# Seen: the most frequent ending decides and all other files are left out: data.jsonl beside LICENSE.txt and NOTES.txt
#   is a data set of two texts, 500 rows are not there. As soon as one name holds a word of a split (test, dev, eval,
#   training ...), files without one are in no split: unit_test.jsonl, docs.jsonl, code.jsonl load as a split test of
#   one file, and of training_1.jsonl, pretrain_2.jsonl, pretrain_3.jsonl the first alone is loaded as train. A folder
#   dev/ beside ops/ does the same. Nothing is said. With data_files=["*.jsonl"] all rows are there. contest.jsonl and
#   latest.jsonl, which also hold the letters, are train. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a licence is trained on instead of the data, or one file of many, by a file name.
# Tandem: its folders hold one form and all their files are read, whatever their names (docs/data.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python - <<'PROGRAM'
import json
from itertools import count
from pathlib import Path

import datasets
from datasets import load_dataset

datasets.logging.set_verbosity(datasets.logging.CRITICAL)
number = count()


def load(*names, **settings):
    """Write each name as a file of 500 rows of jsonl, or as one line of text; return the rows of each split."""
    root = Path(f"folder{next(number)}")
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"text": name})] * 500 if name.endswith("jsonl") else ["All rights reserved."]
        path.write_text("".join(row + "\n" for row in rows))
    return {split: len(rows) for split, rows in load_dataset(str(root), **settings).items()}


seen = {}
expected = {
    ("LICENSE.txt", "NOTES.txt", "data.jsonl"): {"train": 2},
    ("unit_test.jsonl", "docs.jsonl", "code.jsonl"): {"test": 500},
    ("training_1.jsonl", "pretrain_2.jsonl", "pretrain_3.jsonl"): {"train": 500},
    ("dev/1.jsonl", "ops/1.jsonl"): {"validation": 500},
}
for names, rows in expected.items():
    seen[names] = load(*names)
    print(", ".join(names), "->", seen[names])
    assert seen[names] == rows, f"no longer holds: {names}"

# The controls: the same names given as data files, less notes, and names in which the letters are part of a word.
control = {
    ("LICENSE.txt", "data.jsonl", "more.jsonl"): {"train": 1000},
    ("contest.jsonl", "latest.jsonl", "devices.jsonl"): {"train": 1500},
}
for names, rows in control.items():
    found = load(*names)
    print(", ".join(names), "->", found)
    assert found == rows, f"the control is wrong: {names}"
for names in expected:
    found = load(*names, data_files=["**/*.jsonl"])
    assert found == {"train": 500 * sum(name.endswith("jsonl") for name in names)}, f"the control is wrong: {names}"
print("with data_files=['**/*.jsonl'] all rows of each")
PROGRAM
