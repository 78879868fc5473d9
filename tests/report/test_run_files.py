"""A report of a damaged or foreign run directory: what no run writes is left out, and what is whole is shown."""

import json

import pytest

from pipeline.report.run_data import read_evals, read_failure, read_recipe, read_run, read_samples
from pipeline.report.single import report
from pipeline.run_dir.run_directory import RunDirectory

ODD = [7, -1.5, "text", None, [], {}, [[]], True, {"a": {"b": []}}]
MARKUP = "<script>alert(1)</script>\x1b]52;c;aGk=\x07"


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "x")
    run.path.mkdir()
    run.report.mkdir()
    run.metrics.write_text('{"step": 2, "attempt": 1, "time": 1.0, "tokens": 8, "train/loss": 3.0, "val/bpb": 1.5}\n')
    run.manifest.write_text('{"name": "x", "stage": "pretrain", "attempts": 1, "status": "finished"}')
    return run


def test_whole_samples_and_scores_stay_among_odd_ones(run):
    sample = {"step": 2, "attempt": 1, "prompt": "a", "text": "b"}
    odd = [
        {**sample, name: value}
        for name in sample
        for value in ODD
        if not isinstance(value, (str, int)) or value is True
    ]
    run.samples.write_text("".join(json.dumps(row) + "\n" for row in [*odd, sample]))
    assert read_samples(run, []) == [sample]
    result = {"name": "val/bpb", "value": 1.0, "protocol": "p"}
    entries = [
        *ODD,
        *({"step": 2, "time": 1.0, "results": value, "samples": value} for value in ODD),
        {"step": 2, "results": [*ODD, result]},
    ]
    run.evals.write_text(json.dumps({"entries": entries}))
    assert [row for entry in read_evals(run, []) for row in entry["results"]] == [result]


def test_a_recipe_gives_its_sections_without_numbers_that_are_none(run):
    run.recipe.write_text(
        "run: {gpu_hour_cost: [1], note: 5}\nmodel: 7\ntrain: {max_steps: 9, max_grad_norm: x}\noptimizer: {schedule: 3}\n"
    )
    assert read_recipe(run) == {"run": {}, "train": {"max_steps": 9}, "optimizer": {}}
    run.recipe.write_text("a: &a [1]\nb: [" + ", ".join(["*a"] * 10) + "]\n" + "c: {d: !!python/name:os.system x}\n")
    assert read_recipe(run) == {}


def test_a_failure_of_wrong_types_is_text(run):
    run.failure.write_text('{"status": [], "class": 7, "message": {"a": 1}, "facts": [1]}')
    assert read_failure(run) == {"status": None, "class": "7", "message": "{'a': 1}", "facts": None}


def test_a_report_of_files_of_odd_types_is_made_and_runs_no_markup(run):
    run.manifest.write_text(
        json.dumps(
            {
                "name": MARKUP,
                "attempts": "two",
                "inputs": {"sources": [{"name": MARKUP, "files": ["a", 7]}, 3]},
                "tags": [1],
            }
        )
    )
    rows = [{"step": value, "time": value, "event": value, "val/bpb": value} for value in ODD]
    with open(run.metrics, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    run.samples.write_text(
        "".join(json.dumps({"step": value, "prompt": value, "text": MARKUP}) + "\n" for value in ODD)
    )
    run.evals.write_text(json.dumps({"entries": [{"results": value, "step": value, "time": value} for value in ODD]}))
    run.failure.write_text(json.dumps({"status": {}, "class": MARKUP, "message": [], "facts": 3}))
    text = report(read_run(str(run.path)))
    assert "attempts is 'two', not of type integer: left out of this report" in text
    assert "inputs.sources[1] is 3" in text
