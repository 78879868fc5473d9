"""The report reads the run directory only, shows what is there and nothing else, and compares only what compares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.process.errors import InputMissingError
from pipeline.process.storage import write_json, write_text
from pipeline.report.__main__ import main
from pipeline.report.comparison import comparison
from pipeline.report.run_data import read_run
from pipeline.report.single import report
from pipeline.run_dir.checkpoints import whole_folder
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory


def write_run(
    folder, *, protocol="validation-1", last_bpb=1.5, steps=40, failure=None, finished=True, learning_rate=0.02
):
    """A run of two attempts: the first went to step 30 and was lost after 20, the second went on from there."""
    run = RunDirectory(folder)
    recipe = {"model": {"depth": 4}, "train": {"max_steps": steps, "learning_rate": learning_rate}}
    write_text(run.recipe, yaml.safe_dump(recipe))
    run.update_manifest(
        name=folder.name,
        stage="pretrain",
        note="a | note",
        tags=["one", "two"],
        attempts=2,
        versions={"torch": "2.13"},
        git={"commit": "abc123", "changed_files": 0},
        inputs={
            "protocols": {"val/bpb": protocol},
            "tokenizer": {"identity": "feed" * 8, "size": 512},
            "sources": [{"name": "books", "id": None, "fingerprint": "beef" * 8, "files": [{"label": "a.jsonl"}]}],
        },
        shares={"books": {"share": 0.25}},
        **(
            {"status": "finished", "ended": 1.79e9, "finished": 1.79e9, "results": {"val/bpb": last_bpb}}
            if finished
            else {}
        ),
    )
    for attempt, start, end in ((1, 0, 30), (2, 20, steps)):
        append_row(run.metrics, {"event": "attempt", "attempt": attempt, "step": start, "time": 1.79e9})
        for step in range(start, end + 1, 5):
            stamp = {"step": step, "attempt": attempt, "time": 1.79e9 + step, "tokens": step * 4096}
            if step > start:
                loss = 9.0 - step / 10 + (100 if (attempt, step > 20) == (1, True) else 0)
                append_row(
                    run.metrics,
                    stamp
                    | {
                        "train/loss": loss,
                        "optim/lr": 0.01 * learning_rate * step,
                        "optim/grad_norm": 1 / step,
                        "perf/tok_per_s": 1000.0 + step,
                    },
                )
            if step % 20 == 0 and step >= start:
                append_row(run.metrics, stamp | {"val/bpb": last_bpb + (steps - step) / 20})
                append_row(
                    run.samples,
                    stamp | {"prompt": "The sky | is", "text": f"text of {step}\nattempt {attempt}", "chat": False},
                )
    with whole_folder(run.checkpoints / "checkpoint-20") as checkpoint:
        (checkpoint / "model.safetensors").write_bytes(b"x" * 2**20)
    if failure:
        write_json(run.failure, failure)
    return folder


def test_report_tells_metadata_losses_rates_bpb_samples_checkpoints_and_attempts(tmp_path):
    text = report(read_run(str(write_run(tmp_path / "a"))))
    for part in (
        "# a\n\nStatus: finished.", "a \\| note", "one two", "abc123", "| steps | 40 of 40 |", "| tokens (row positions) | 163,840 |",
        "8.5000, 5.0000", "| val/bpb | 0 | 3.500000 | validation-1 |", "| val/bpb | 40 | 1.500000 | validation-1 |",
        "| The sky \\| is | text of 0<br>attempt 1 | text of 40<br>attempt 2 |", "| checkpoint-20 | 1.0 MiB | yes |",
        "| 1 | 2026-09-21T14:13:20+00:00 | 0 | 30 |", "| 2 | 2026-09-21T14:13:20+00:00 | 20 | 40 |", "| torch | 2.13 |", "depth: 4",
        "| books | training | beefbeefbeefbeef |", "| books | training | 1 | 25.00 % |", "| ids | 512 |", "feedfeedfeedfeed",
    ):  # fmt: skip
        assert part in text, part
    assert "10" + "6.5" not in text  # the losses of the attempt that was lost do not count


def test_the_report_of_a_crashed_run_names_the_failure_without_other_files(tmp_path):
    folder = write_run(
        tmp_path / "a", finished=False, failure={"status": 76, "class": "DivergedError", "message": "step 31: nan"}
    )
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 45, "train/lo')  # torn by the crash
    assert "stopped with status 76 (DivergedError): step 31: nan" in report(read_run(str(folder)))
    for name in ("recipe.yaml", "run_manifest.json", "samples.jsonl", "failure.json"):
        (folder / name).unlink()
        report(read_run(str(folder)))
    assert "not finished: last recorded step 40" in report(read_run(str(folder)))


def test_a_manifest_torn_by_a_crash_does_not_hide_the_rest(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "run_manifest.json").write_text('{"name": ')
    assert "5.0000" in report(read_run(str(folder)))


def test_results_of_evals_json_stand_in_the_bpb_table(tmp_path):
    folder = write_run(tmp_path / "a")
    result = {"name": "val/bpb_documents", "value": 1.25, "protocol": "documents-9", "bytes": 12345}
    other = {"name": "spelling/accuracy", "value": 0.75, "protocol": None}
    write_json(
        folder / "report" / "evals.json", {"entries": [{"subject": "model/", "step": 40, "results": [result, other]}]}
    )
    assert "| spelling/accuracy | 40 | 0.75 | model/ |" in report(read_run(str(folder)))
    assert "| val/bpb_documents | 40 | 1.250000 | documents-9 | 12,345 | model/ |" in report(read_run(str(folder)))


def test_comparison_refuses_bpb_of_different_protocols_and_says_why(tmp_path):
    runs = [
        read_run(str(write_run(tmp_path / name, protocol=p, last_bpb=b)))
        for name, p, b in (("a", "v1", 1.5), ("b", "v2", 1.25))
    ]
    text = comparison(runs)
    assert "1.5000" not in text
    assert "1.2500" not in text
    assert "val/bpb of a is not compared: no other of these runs was scored under its protocol v1." in text


def test_comparison_refuses_bpb_without_a_protocol(tmp_path):
    runs = [read_run(str(write_run(tmp_path / name, protocol=None))) for name in ("a", "b")]
    assert "1.5000" not in comparison(runs)
    assert "val/bpb of b is not compared: the run does not say under which protocol it was scored." in comparison(runs)


def test_comparison_shows_equal_protocols_and_the_keys_that_differ(tmp_path):
    runs = [
        read_run(str(write_run(tmp_path / "a", last_bpb=1.5))),
        read_run(str(write_run(tmp_path / "b", last_bpb=1.25, learning_rate=0.03))),
    ]
    text = comparison(runs)
    assert "| val/bpb (last; protocol validation-1) | 1.500000 | 1.250000 |" in text
    assert "| train.learning_rate | 0.02 | 0.03 |" in text
    assert "model.depth" not in text


def test_the_command_writes_report_page_and_picture_into_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report" / "report.html")
    assert (folder / "report" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "(curves.png)" in (folder / "report" / "report.md").read_text()


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(InputMissingError, match="no run is there"):
        read_run(str(tmp_path / "nothing"))


def test_the_report_command_imports_no_torch_and_ends_within_seconds(tmp_path):
    folder = write_run(tmp_path / "a")
    check = (
        "import sys; from pipeline.report.__main__ import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    before = os.times()
    subprocess.run([sys.executable, "-c", check, folder], check=True, cwd=Path(__file__).parents[2])
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 20
