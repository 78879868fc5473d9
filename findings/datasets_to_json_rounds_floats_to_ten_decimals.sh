#!/usr/bin/env bash
# Title: Dataset.to_json rounds floats to 10 decimals, so that 1e-11 is 0.0, and writes infinity as null.
# Packages: datasets==5.2.0
# Guess: json holds a double's shortest text, so a float comes back as it was, as from json.dumps and from parquet.
# Seen: to_json goes through pandas, whose default is 10 decimals behind the point, not 10 digits: of 1,000 random log
#   probabilities near -2 not one comes back, the largest error is 5e-11. Of 1,000 token probabilities near 1e-9
#   hardly a tenth of a digit is left: the largest relative error is above 5 percent, and all below 5e-11 are 0.0.
#   inf, -inf and nan all become null. double_precision=15, the most it takes, still loses digits. to_parquet and
#   to_csv are exact, as are whole numbers beside a null (2**53 + 1). 2026-11-27, Python 3.11, Linux, CPU.
# Costs: log(p) of a written probability is minus infinity; scores that were written and read do not compare equal.
# Tandem: does not use it: numbers of a run are written by Python's json (pipeline/process/storage.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 2>"$folder/pip" \
  || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python - <<'PROGRAM'
import json
import math
import random

import datasets
from datasets import Dataset, load_dataset

datasets.logging.set_verbosity(datasets.logging.CRITICAL)
draw = random.Random(5)
logs = [-2 - draw.random() for _ in range(1000)]
small = [draw.random() * 1e-9 for _ in range(999)] + [1e-11]
ends = [math.inf, -math.inf, math.nan] + [1.0] * 997
big = [2**53 + 1, None] * 500
data = Dataset.from_dict({"logs": logs, "small": small, "ends": ends, "big": big})


def written(name, **settings):
    data.to_json(name, **settings)
    rows = [json.loads(line) for line in open(name)]
    return {key: [row[key] for row in rows] for key in rows[0]}


found = written("rows.jsonl")
changed = sum(a != b for a, b in zip(logs, found["logs"]))
error = max(abs(a - b) for a, b in zip(logs, found["logs"]))
relative = max(abs(a - b) / a for a, b in zip(small, found["small"]) if a > 1e-10)
print("log probabilities that changed:", changed, "of 1000, by at most 5e-11:", error <= 5.1e-11)
print("probability 1e-11 is written as:", found["small"][-1])
print("probabilities near 1e-9 that changed:", sum(a != b for a, b in zip(small, found["small"])), "of 1000")
print("inf, -inf, nan are written as:", found["ends"][:3])
assert changed > 990 and 1e-11 < error < 5.1e-11, "no longer holds: log probabilities"
assert found["small"][-1] == 0.0 and relative > 0.05, "no longer holds: small probabilities"
assert found["ends"][:3] == [None, None, None], "no longer holds: infinity"
assert found["big"] == big
finer = written("finer.jsonl", double_precision=15)
print("log probabilities that changed with double_precision=15:", sum(a != b for a, b in zip(logs, finer["logs"])))
assert finer["logs"] != logs and finer["ends"][0] is None, "no longer holds: double_precision=15"

# The controls: the same rows through Python's json, parquet and csv.
assert [json.loads(json.dumps(x)) for x in logs + small] == logs + small, "the control is wrong"
data.to_parquet("rows.parquet")
data.to_csv("rows.csv")
for kind, name in (("parquet", "rows.parquet"), ("csv", "rows.csv")):
    back = load_dataset(kind, data_files=name, split="train")
    print(f"log probabilities that changed by way of {kind}:", sum(a != b for a, b in zip(logs, back["logs"][:])))
    assert kind == "csv" or (back["logs"][:] == logs and back["small"][:] == small), "the control is wrong"
    assert max(abs(a - b) for a, b in zip(logs, back["logs"][:])) < 1e-15, "the control is wrong"
    assert back["ends"][0] == math.inf, "the control is wrong"
PROGRAM
