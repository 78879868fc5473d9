#!/usr/bin/env bash
# Title: In a later jsonl file a score of 4 becomes True and a chat message "2024-05-17" gains a midnight.
# Packages: datasets==5.2.0
# Guess: a column that is of another type in a later file is an error, as 2.5 after a file of whole numbers is; text
#   that stays text is not touched.
# Seen: load_dataset("json") casts each later file to the types of the first, and only some casts are refused. After a
#   file of true and false the scores 4 and 0.5 are both True. After numbers such as 20240101 the text "2024-05-17" is
#   1715904000, its seconds since 1970. After a file of words the texts "2024-05-17" and "2024-05-17T09:30:00Z" are
#   "2024-05-17 00:00:00" and "2024-05-17 09:30:00": the file by itself was taken for times and printed anew, also
#   inside chat messages. Map-style and streaming alike, no warning. A column declared as Value("string") does not
#   help, in a single file neither. The same texts in one file with a word beside them stay as they are. 2026-11-27,
#   Python 3.11, Linux, CPU.
# Costs: graded scores become yes and no; answers are trained in a form that the data does not have, by how files were
#   cut.
# Tandem: reads each row of jsonl by Python's json, with no type of a column (pipeline/sources/raw_rows.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python - <<'PROGRAM'
import json
from itertools import count

import datasets
from datasets import Features, Value, load_dataset

datasets.logging.set_verbosity(datasets.logging.CRITICAL)
names = count()


def load(*files, **settings):
    """Write each list of rows as a file, load the files together both ways, return the rows of the last file."""
    paths = []
    for rows in files:
        paths.append(f"part-{next(names):03d}.jsonl")
        with open(paths[-1], "w") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    whole = load_dataset("json", data_files=paths, split="train", **settings).to_list()
    stream = list(load_dataset("json", data_files=paths, split="train", streaming=True, **settings))
    assert whole == stream, "no longer holds: map-style and streaming differ"
    return whole[-len(files[-1]):]


def column(first, later, **settings):
    return [row["value"] for row in load([{"value": x} for x in first], [{"value": x} for x in later], **settings)]


scores = column([True, False], [4, 0])
halves = column([True, False], [0.5])
number = column([20240101], ["2024-05-17"])
texts = column(["in May"], ["2024-05-17", "2024-05-17T09:30:00Z"])
first = [{"messages": [{"role": "user", "content": "When?"}]}]
chats = load(first, [{"messages": [{"role": "assistant", "content": "2024-05-17"}]}])
print("scores 4, 0 after a file of true and false:", scores)
print("score 0.5 after a file of true and false:", halves)
print('text "2024-05-17" after a file of numbers:', number)
print('texts "2024-05-17", "2024-05-17T09:30:00Z" after a file of words:', texts)
print('chat "2024-05-17" after a file of chats:', chats[0]["messages"][0])
assert scores == [True, False] and halves == [True], "no longer holds: numbers after true and false"
assert number == [1715904000], "no longer holds: a date after numbers"
assert texts == ["2024-05-17 00:00:00", "2024-05-17 09:30:00"], "no longer holds: dates after words"
assert chats[0]["messages"][0]["content"].endswith(" 00:00:00"), "no longer holds: dates in a chat"

# The controls: the same values in one file, and a cast that is refused.
together = [row["value"] for row in load([{"value": x} for x in ("in May", "2024-05-17", "2024-05-17T09:30:00Z")])]
assert together == ["in May", "2024-05-17", "2024-05-17T09:30:00Z"], "the control is wrong"
text = Features({"value": Value("string")})
declared = [row["value"] for row in load([{"value": "2024-05-17"}], features=text)]
print('one file of "2024-05-17", declared as string:', declared)
assert declared == ["2024-05-17 00:00:00"], "no longer holds: a declared string"
try:
    column([1], [2.5])
    raise SystemExit("the control is wrong: 2.5 was read after a file of whole numbers")
except datasets.exceptions.DatasetGenerationError:
    print("2.5 after a file of whole numbers: refused")
PROGRAM
