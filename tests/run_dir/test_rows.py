"""Rows survive crashes: a torn line is ignored and never swallows the next one."""

from pipeline.run_dir.rows import append_row, last_attempts, read_rows


def test_a_torn_last_line_is_ignored_and_leaves_the_next_row_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_row(path, {"step": 1})
    with open(path, "a") as file:
        file.write('{"step": 2, "train/lo')
    assert read_rows(path) == [{"step": 1}]
    append_row(path, {"step": 3})
    assert read_rows(path) == [{"step": 1}, {"step": 3}]


def test_rows_that_a_later_attempt_made_again_are_void(tmp_path):
    rows = [
        {"event": "attempt", "attempt": 1, "step": 0},
        {"step": 1, "attempt": 1},
        {"step": 2, "attempt": 1},
        {"event": "attempt", "attempt": 2, "step": 1},
        {"step": 2, "attempt": 2},
    ]
    kept = [(r["step"], r["attempt"]) for r in last_attempts(rows) if "event" not in r]
    assert kept == [(1, 1), (2, 2)]


def test_an_attempt_from_step_0_measures_step_0_again(tmp_path):
    rows = [
        {"event": "attempt", "attempt": 1, "step": 0},
        {"step": 0, "attempt": 1, "val/bpb": 3.0},
        {"event": "attempt", "attempt": 2, "step": 0},
        {"step": 0, "attempt": 2, "val/bpb": 4.0},
    ]
    assert [row["val/bpb"] for row in last_attempts(rows) if "val/bpb" in row] == [4.0]
    assert [row["attempt"] for row in last_attempts(rows) if "event" in row] == [1, 2]


def test_an_absent_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []
