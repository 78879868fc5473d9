"""Rows read by columns are the rows that were written, however they were torn, restarted or mixed."""

import json
import random

import numpy as np
import pytest

from pipeline.run_dir.columns import Columns, read_columns
from pipeline.run_dir.rows import last_attempts, read_rows


def random_rows(seed, count=400):
    """Attempts that go back, events, numbers that come and go, integers among floats."""
    drawn = random.Random(seed)
    rows, step, attempt = [], 0, 0
    for _ in range(count):
        if attempt == 0 or drawn.random() < 0.01:
            attempt, step = attempt + 1, drawn.choice([0, step // 2, step])
            rows.append({"event": "attempt", "attempt": attempt, "step": step, "changed": ["a: 1 -> 2"]})
        step += 1
        row = {"step": step, "attempt": attempt, "train/loss": drawn.choice([drawn.random(), drawn.randrange(9)])}
        if drawn.random() < 0.1:
            row |= {"val/bpb": drawn.random(), "tokens": step * 2**40}
        if drawn.random() < 0.02:
            row = {"event": "spike", "step": step, "attempt": attempt, "facts": {"at": [1, None]}, "time": 1.5}
        rows.append(row)
    return rows


def write(path, rows, torn=()):
    lines = [json.dumps(row) for row in rows]
    for place in torn:
        lines.insert(place, '{"step": 3, "train/lo')
    path.write_text("\n".join(lines) + '\n{"step": 9')
    return path


@pytest.mark.parametrize("seed", range(4))
def test_rows_by_columns_equal_the_rows_and_those_that_count_too(tmp_path, seed):
    path = write(tmp_path / "metrics.jsonl", random_rows(seed), torn=(5, 90))
    expected = read_rows(path)
    found = read_columns(path)
    assert len(found) == len(expected) == len(random_rows(seed))
    assert list(found) == expected
    assert list(found.that_count()) == last_attempts(expected)
    assert len(found.that_count()) < len(found)
    assert found[3] == expected[3]
    assert found[-5:] == expected[-5:]
    assert list(Columns.of(expected).that_count()) == last_attempts(expected)


def test_a_number_that_is_not_finite_is_kept_as_it_is(tmp_path):
    path = write(tmp_path / "metrics.jsonl", [{"step": 1, "train/loss": float("nan")}, {"step": 2, "train/loss": 1.0}])
    rows, values = read_columns(path).column("train/loss")
    assert rows.tolist() == [0, 1]
    assert np.isnan(values[0])


def test_a_text_that_looks_like_a_time_stays_a_text(tmp_path):
    rows = [{"event": "attempt", "step": 0, "attempt": 1, "note": "2026-01-02 03:04:05"}]
    assert list(read_columns(write(tmp_path / "metrics.jsonl", rows))) == rows


def test_no_file_and_an_empty_one_have_no_rows(tmp_path):
    assert len(read_columns(tmp_path / "none")) == 0
    (tmp_path / "empty").write_text("")
    assert list(read_columns(tmp_path / "empty").that_count()) == []
    assert read_columns(tmp_path / "empty").column("step")[0].size == 0


def test_malformed_steps_times_and_events_count_as_not_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    odd = [
        {"step": 2**80, "a": 1},
        {"step": "x", "time": [], "a": 2},
        {"event": "attempt", "step": None},
        {"event": 7, "step": 1},
        {"step": 1, "a": 10**400},
    ]
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    path.write_text("".join(json.dumps(row) + "\n" for row in odd) + deep + '{"step": 2, "a": NaN}\n')
    read = read_columns(path)
    assert read.events() == []
    assert list(read)[:5] == [{"a": 1}, {"a": 2}, {}, {"step": 1}, {"step": 1}]
    assert read.that_count().column("step")[1].tolist() == [1, 1, 2]
