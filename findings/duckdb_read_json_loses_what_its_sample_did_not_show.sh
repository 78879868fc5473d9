#!/usr/bin/env bash
# Title: duckdb rounds or drops, unsaid, what jsonl shows only after row 20,480 or after its 32nd file.
# Packages: duckdb==2.0.1
# Guess: what the sample did not show is an error, as a word among numbers is (it names sample_size and the line), or
#   the column becomes wider.
# Seen: behind 20,480 rows of another kind read_json gives 2 for 2.5, 1 for 0.9, null for a text where the sample had
#   only nulls, and messages without the tool_calls that the sample's had not; a new column is not there at all. One
#   row earlier, at row 20,480 itself, all of them are right. Of many files only the first 32 are looked at, however
#   short: a row in a 33rd file is treated so after 32 files of 4 rows. sample_size=-1 is right for 20,481 rows. A
#   word among numbers raises, which hides that the rest does not. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a corpus of jsonl that is turned to parquet by duckdb loses scores, tool calls and columns; counts are right.
# Tandem: reads each row of jsonl by Python's json, with no type of a column (pipeline/sources/raw_rows.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet duckdb==2.0.1 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
venv/bin/python - <<'PROGRAM'
import json

import duckdb

SAMPLE = 20480
USED = {"role": "assistant", "content": "", "tool_calls": [{"name": "search"}]}
# The rows of the sample, and a row that comes after them.
CASES = {
    "score 2.5": ({"value": 1}, {"value": 2.5}),
    "score 0.9": ({"value": 0}, {"value": 0.9}),
    "text after nulls": ({"value": None}, {"value": "be brief"}),
    "tool calls": ({"value": [{"role": "user", "content": "Hi"}]}, {"value": [USED]}),
    "new column": ({"value": 1}, {"value": 1, "other": "x"}),
}
LOST = {
    "score 2.5": (2,), "score 0.9": (1,), "text after nulls": (None,),
    "tool calls": ([{"role": "assistant", "content": ""}],), "new column": (1,),
}
RIGHT = {
    "score 2.5": (2.5,), "score 0.9": (0.9,), "text after nulls": ("be brief",),
    "tool calls": ([USED],), "new column": (1, "x"),
}


def write(name, rows):
    with open(name, "w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return name


def last(files, **settings):
    return duckdb.read_json(files, **settings).fetchall()[-1]


for name, (early, late) in CASES.items():
    behind = write("behind.jsonl", [early] * SAMPLE + [late])
    inside = write("inside.jsonl", [early] * (SAMPLE - 1) + [late])
    files = [write(f"part-{number:02d}.jsonl", [early] * 4) for number in range(32)]
    files.append(write("part-32.jsonl", [late]))
    print(f"{name}: written {late}, row 20,481 is {last(behind)}")
    assert last(behind) == LOST[name], f"no longer holds: {name}"
    assert last(files) == LOST[name], f"no longer holds: {name} in a 33rd file"
    # The controls: one row earlier, one file earlier, and every row looked at.
    assert last(inside) == RIGHT[name], f"the control is wrong: {name} in row 20,480"
    assert last(files[1:]) == RIGHT[name], f"the control is wrong: {name} in a 32nd file"
    assert last(behind, sample_size=-1) == RIGHT[name], f"the control is wrong: {name}, sample_size=-1"
print("the same in a 33rd file; all right in row 20,480, in a 32nd file and with sample_size=-1")

word = write("word.jsonl", [{"value": 1}] * SAMPLE + [{"value": "n/a"}])
try:
    last(word)
    raise SystemExit("the control is wrong: a word among numbers was read")
except duckdb.Error as error:
    print("a word among numbers:", type(error).__name__)
PROGRAM
