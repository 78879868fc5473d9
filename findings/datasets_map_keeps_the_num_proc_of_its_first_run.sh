#!/usr/bin/env bash
# Title: After one map with num_proc=4 every later map of it is cut into 4, also with num_proc=1 and the cache
#   refused.
# Packages: datasets==5.2.0
# Guess: num_proc=1 runs the function over the whole set; load_from_cache_file=False makes sure of it. That a result
#   made by 4 processes answers for 1 would be no harm, since the number of processes does not change the rows.
# Seen: the fingerprint leaves num_proc out, and where the cache files of another number lie, map takes that number
#   instead of the one asked for, even with load_from_cache_file=False. A function that packs 700 tokens into rows of
#   64 and drops the rest of its batch (as examples of pretraining do) makes 10 rows in one process, 8 in four (it
#   sees 4 batches of 25). After the 4: num_proc=1, None and 2 and a refused cache all give 8 rows, computed anew in 4
#   batches. After a first map with 1 process, 4 processes give 10. A new file of the same content, or a changed
#   function, is free again. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: rows and steps of a run depend on what ran first on that disk; a run for exact rows with num_proc=1 is not
#   one.
# Tandem: does not use map: it packs the rows itself, alike for any number of processes (docs/promises.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 2>"$folder/pip" \
  || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python - <<'PROGRAM'
import json

import datasets
from datasets import load_dataset

datasets.logging.set_verbosity(datasets.logging.CRITICAL)


def pack(batch):
    """Return the batch's tokens in rows of 64, without the rest, and beside each how many documents the batch had."""
    tokens = sum(batch["tokens"], [])
    rows = [tokens[start : start + 64] for start in range(0, len(tokens) - 63, 64)]
    return {"tokens": rows, "documents": [len(batch["tokens"])] * len(rows)}


def new_set(name):
    with open(name, "w") as out:
        out.writelines(json.dumps({"tokens": [document] * 7}) + "\n" for document in range(100))
    return load_dataset("json", data_files=name, split="train")


def packed(data, **settings):
    rows = data.map(pack, batched=True, **settings)
    return len(rows), max(rows["documents"])


first_four = new_set("first-four.jsonl")
seen = {"num_proc=4 first": packed(first_four, num_proc=4)}
seen["then num_proc=1"] = packed(first_four, num_proc=1)
seen["then no num_proc"] = packed(first_four)
seen["then num_proc=2"] = packed(first_four, num_proc=2)
seen["then num_proc=1, load_from_cache_file=False"] = packed(first_four, num_proc=1, load_from_cache_file=False)

first_one = new_set("first-one.jsonl")
control = {"num_proc=1 first": packed(first_one, num_proc=1)}
control["then num_proc=4"] = packed(first_one, num_proc=4)
for name, (rows, documents) in (seen | control).items():
    print(f"{name}: {rows} rows from batches of {documents}")

assert set(seen.values()) == {(8, 25)}, "no longer holds: after 4 processes"
assert control["then num_proc=4"] == (10, 100), "no longer holds: after 1 process"
# The controls: the same file and function with 1 process first, and after the 4 when their cache files are gone.
assert control["num_proc=1 first"] == (10, 100), "the control is wrong"
first_four.cleanup_cache_files()
removed = packed(first_four, num_proc=1)
print("after cleanup_cache_files, num_proc=1:", removed[0], "rows")
assert removed == (10, 100), "the control is wrong"
PROGRAM
