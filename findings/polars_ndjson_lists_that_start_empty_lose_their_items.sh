#!/usr/bin/env bash
# Title: polars reads a list as [null] where a jsonl file's first 100 rows, or its first file, have it empty.
# Packages: polars==2.1.0 pyarrow==26.0.1
# Guess: a type that the first rows do not tell is found later, or it is an error, as it is for a column that is null
#   in the first 100 rows and then holds text.
# Seen: read_ndjson and scan_ndjson look at 100 rows. Where "tools" is [] in all of them, the column is List(Null),
#   and later texts and numbers are read as nulls of the right number: ["search", "math"] is [null, null], and token
#   ids likewise. Two files, the first with empty lists only, do the same from row 2 on, even with
#   infer_schema_length=None, which is right for one file. A list of mappings in row 101, or null instead of [] before
#   it, raises. Files read one by one and then joined are right, and so is pyarrow with its defaults. 2026-11-27,
#   Python 3.11, Linux, CPU.
# Costs: chats whose tool calls start late in a file lose all of them, while the counts of rows and of calls are
#   right.
# Tandem: reads each row of jsonl by Python's json, with no type of a column (pipeline/sources/raw_rows.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet polars==2.1.0 pyarrow==26.0.1 2>"$folder/pip" \
  || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
venv/bin/python - <<'PROGRAM'
import json

import polars
import pyarrow.json


def write(name, rows):
    with open(name, "w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return name


USED = ["search", "math"]
IDS = [17, 4, 99]
plain = [{"text": f"row {number}", "tools": []} for number in range(100)]
late = write("late.jsonl", plain + [{"text": "row 100", "tools": USED}])
early = write("early.jsonl", plain[:99] + [{"text": "row 99", "tools": USED}] + [{"text": "row 100", "tools": USED}])
ids = write("ids.jsonl", plain + [{"text": "row 100", "tools": IDS}])
files = [write("part-0.jsonl", plain[:1]), write("part-1.jsonl", [{"text": "row 1", "tools": USED}])]


def last(frame):
    return frame["tools"].to_list()[-1]


seen = {
    "read_ndjson, row 101": last(polars.read_ndjson(late)),
    "scan_ndjson, row 101": last(polars.scan_ndjson(late).collect()),
    "read_ndjson, second file": last(polars.read_ndjson(files)),
    "second file, infer_schema_length=None": last(polars.read_ndjson(files, infer_schema_length=None)),
}
late_ids = last(polars.read_ndjson(ids))
control = {
    "row 101 after one in row 100": last(polars.read_ndjson(early)),
    "row 101, infer_schema_length=None": last(polars.read_ndjson(late, infer_schema_length=None)),
    "second file, read by itself": last(polars.concat([polars.read_ndjson(x) for x in files], how="vertical_relaxed")),
    "row 101, pyarrow": pyarrow.json.read_json(late)["tools"].to_pylist()[-1],
}
print("written:", USED)
for name, value in (seen | control).items():
    print(f"{name}: {value}")
print("written:", IDS, "row 101:", late_ids)
assert all(value == [None, None] for value in seen.values()), "no longer holds: late lists are read"
assert late_ids == [None, None, None], "no longer holds: late numbers are read"
assert all(value == USED for value in control.values()), "the control is wrong"

refused = {
    "null before": [{"tools": None}] * 100 + [{"tools": USED}],
    "mappings in row 101": plain + [{"text": "row 100", "tools": [{"name": "search"}]}],
}
for name, rows in refused.items():
    try:
        polars.read_ndjson(write("refused.jsonl", rows))
        raise SystemExit(f"the control is wrong: {name} was read")
    except polars.exceptions.PolarsError as error:
        print(f"{name}: {type(error).__name__}")
PROGRAM
