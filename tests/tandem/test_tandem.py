"""tandem: what the commands do, as functions."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from datasets import Dataset

import tandem
from pipeline.process.errors import Interrupted
from pipeline.run_dir.failures import KeyboardSignals

ROWS = [{"text": f"The cat number {n} sat on a mat and looked at the dog. " * 8} for n in range(120)]

CUT = f"""
import gc, json, shutil, signal, sys, threading, time
import tandem
from pipeline.run_dir.rows import read_rows
from transformers import TrainerCallback

class Cut(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            signal.raise_signal(signal.SIGINT)

rows = json.loads({json.dumps(json.dumps(ROWS))})
small = ["model.depth=2", "train.torch_compile=false", "train.logging_steps=1"]
named = [*small, "train.max_steps=5", "run.name=cut"]
seen = []
try:
    tandem.train("own_text", *named, dataset=rows, callbacks=[Cut()])
except tandem.TandemError as error:
    seen = [error.status, str(error), signal.getsignal(signal.SIGINT) is signal.default_int_handler]
class Wrong(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise ValueError("mine")

try:
    tandem.train("own_text", *named, dataset=rows, callbacks=[Wrong()])
except ValueError:
    pass
left = [thread.name for thread in threading.enumerate() if "watch" in thread.name]
began = time.time()
run = tandem.train("own_text", *named, dataset=rows)
shutil.rmtree("runs/gone", ignore_errors=True)
for _ in range(2):  # a run that was removed is begun anew
    gone = tandem.train("own_text", *small, "run.name=gone", "train.max_steps=1", dataset=rows)
    shutil.rmtree(gone.path)
row = next(row for row in reversed(read_rows(run.path / "metrics.jsonl")) if "began" in row)
json.dump({{"left": left, "collects": gc.isenabled(), "late": row["began"] - began, "seen": seen, "steps": run.metrics["train/loss"].dropna().index.tolist()}}, open("result.json", "w"))
"""


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.full
def test_ctrl_c_saves_and_the_same_call_continues(tmp_path, own_cache):
    done = subprocess.run([sys.executable, "-c", CUT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    status, sentence, is_restored = result["seen"]
    assert (status, is_restored) == (130, True)
    assert "checkpoint-3 is whole" in sentence
    assert 0 <= result["late"] < 1  # its time is counted from the call, not from the start of the process
    assert (result["left"], result["collects"]) == ([], True)  # the watch for hangs would end this process later
    assert result["steps"] == [1, 2, 3, 4, 5]


def test_the_same_rows_are_the_same_file_in_any_form(own_cache):
    kept = {tandem._kept(rows) for rows in (ROWS, Dataset.from_list(ROWS))}
    assert len(kept) == 1
    assert pandas.read_parquet(kept.pop()).to_dict("records") == ROWS
    assert pandas.read_parquet(tandem._kept(pandas.DataFrame(ROWS))).to_dict("records") == ROWS
    assert tandem._kept(ROWS[:-1]) not in kept


def test_files_and_a_dataset_at_once_are_refused():
    with pytest.raises(tandem.TandemError, match="both given"):
        tandem.train("own_text", files="a.txt", dataset=ROWS)


def test_a_wrong_key_is_refused_as_on_the_command_line(tmp_path):
    with pytest.raises(tandem.TandemError, match="Did you mean"):
        tandem.train("own_text", "train.max_step=3", files=tmp_path)


def test_a_run_that_is_not_there_is_named():
    with pytest.raises(tandem.TandemError, match="nosuch: there is no such run"):
        tandem.load_run("nosuch")


def test_a_users_pipeline_module_is_named_as_what_hides_ours(tmp_path):
    (tmp_path / "pipeline.py").write_text("")
    root = str(Path(tandem.__file__).parents[1])
    code = f"import sys; sys.path[1:1] = [{root!r}]; import tandem"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "pipeline.py: hides Tandem's package" in done.stderr


def test_ctrl_c_outside_of_training_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with KeyboardSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signals.training = True
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signals.stopping = True
        with pytest.raises(Interrupted, match="step 7"):
            signals.raise_if_stopped(step=7)
    assert signal.getsignal(signal.SIGINT) is before


def test_options_of_an_evaluation_that_are_none_or_false_are_left_out(monkeypatch, tmp_path):
    given = []

    def main(arguments):
        given.extend(arguments)
        (tmp_path / "evals.json").write_text('{"results": [{"name": "a", "value": 1.0}]}')

    monkeypatch.setattr("pipeline.evals.__main__.main", main)
    options = {"dtype": None, "as_chat": False, "trust_code": True, "text": ["a", "b"], "max_bytes": 5}
    scores = tandem.evaluate("some/model", "bpb", **options, output=str(tmp_path / "evals.json"))
    assert scores == {"a": 1.0}
    assert given[:8] == ["some/model", "bpb", "--trust-code", "--text", "a", "b", "--max-bytes", "5"]
    monkeypatch.undo()
    with pytest.raises(tandem.TandemError, match="cannot be read as a command"):
        tandem.evaluate("some/model", "bpb", no_such_option=3)
