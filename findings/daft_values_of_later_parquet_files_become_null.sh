#!/usr/bin/env bash
# Title: daft reads texts, ids and tokens of later parquet files as null where the first file's column is narrower.
# Packages: daft==0.7.26 duckdb==2.0.1 pyarrow==25.0.1
# Guess: read_parquet of several files finds a common type, or says that the files differ, as pyarrow does.
# Seen: daft takes the types of the first file and makes null of what does not fit, without a word: a column that is
#   null in the first file loses the texts of all others; token lists [70000, 5] after a file of uint16 are [null, 5];
#   an id of 2**40 after int32 is null; the text "n/a" after whole numbers is null. 0.75 after whole numbers is 0, and
#   a score of 4 after true and false is True. pyarrow refuses the first five. duckdb refuses four of them, but rounds
#   0.75 to 1, and makes True of 4; with union_by_name=True all values are there. Read alone, each file is right in
#   daft as well. The number of rows is right in all. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a shard whose first file has no system prompt loses all system prompts; rare tokens vanish from a corpus.
# Tandem: reads the files of a source one by one, each with its own types (pipeline/sources/raw_rows.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet daft==0.7.26 duckdb==2.0.1 pyarrow==25.0.1 2>"$folder/pip" \
  || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
DAFT_PROGRESS_BAR=0 DO_NOT_TRACK=true DAFT_ANALYTICS_ENABLED=0 venv/bin/python - <<'PROGRAM'
import daft
import duckdb
import pyarrow
import pyarrow.dataset
import pyarrow.parquet

# Name: the first file's column, the second file's, what daft, pyarrow and duckdb read of the second.
u16, i32 = pyarrow.list_(pyarrow.uint16()), pyarrow.list_(pyarrow.int32())
CASES = {
    "text after null": (pyarrow.nulls(1), ["be brief"], None, "refused", "refused"),
    "tokens after uint16": (
        pyarrow.array([[1]], u16), pyarrow.array([[70000, 5]], i32), [None, 5], "refused", "refused"
    ),
    "2**40 after int32": (pyarrow.array([1], pyarrow.int32()), [2**40], None, "refused", "refused"),
    "text after numbers": ([1], ["n/a"], None, "refused", "refused"),
    "0.75 after whole numbers": ([1], [0.75], 0, "refused", 1),
    "4 after true and false": ([True], [4], True, True, True),
}


def attempt(read):
    """Return what the function reads of the second file, or that it is refused."""
    try:
        return read()[1]
    except (pyarrow.ArrowException, duckdb.Error):
        return "refused"


for name, (first, second, *expected) in CASES.items():
    for number, values in enumerate((first, second)):
        pyarrow.parquet.write_table(pyarrow.table({"value": values}), f"part-{number}.parquet")
    files = ["part-0.parquet", "part-1.parquet"]
    seen = [
        attempt(lambda: daft.read_parquet(files).to_pydict()["value"]),
        attempt(lambda: pyarrow.dataset.dataset(files).to_table()["value"].to_pylist()),
        attempt(lambda: [row[0] for row in duckdb.read_parquet(files).fetchall()]),
    ]
    written = pyarrow.table({"value": second})["value"].to_pylist()[0]
    print(f"{name}: written {written}, daft {seen[0]}, pyarrow {seen[1]}, duckdb {seen[2]}")
    assert seen == list(expected), f"no longer holds: {name}"
    # The controls: daft with the second file alone, and duckdb told to find a common type.
    assert daft.read_parquet(files[1]).to_pydict()["value"] == [written], "the control is wrong: daft"
    united = duckdb.read_parquet(files, union_by_name=True).fetchall()[1][0]
    assert united == written, "the control is wrong: duckdb"
PROGRAM
