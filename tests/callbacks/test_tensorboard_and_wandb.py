"""Trackers hold the rows that they get; one that fails is reported once and ends no run."""

import shutil
import sys
import threading
import time
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np

from pipeline.callbacks.trackers import TensorBoard, WandbRun, trackers_of
from pipeline.metrics import METRICS
from pipeline.recipe.schema import Monitor
from pipeline.run_dir.run_directory import RunDirectory
from tests.callbacks.tracker_files import tensorboard_descriptions, tensorboard_scalars, tensorboard_texts


def state(step=0):
    return SimpleNamespace(is_world_process_zero=True, global_step=step, max_steps=10)


def log(tracker, steps):
    for step in steps:
        tracker.on_log(None, state(step), None, logs={"train/loss": 1 / (step + 1), "data/tokens": 2**24 + step})


def wandb_run(folder):
    settings = {"project": "p", "config": {}, "note": None, "tags": [], "attempt": 1}
    return WandbRun(RunDirectory(folder), **settings, tokens_at=lambda step: 512 * step)


def test_each_tracker_that_a_recipe_may_name_is_made(tmp_path):
    (names,) = get_args(get_type_hints(Monitor)["trackers"])
    for name in get_args(names):
        settings = {"config": {}, "note": None, "tags": [], "attempt": 1, "start_step": 0}
        monitor = Monitor(trackers=[name])
        made = trackers_of(monitor, RunDirectory(tmp_path), **settings, tokens_at=lambda step: 512 * step)
        assert len(made) == 1, name


def test_tensorboard_holds_each_step_once_after_a_restart_as_float32(tmp_path):
    for start, steps in ((0, range(1, 8)), (5, range(6, 10))):
        tracker = TensorBoard(tmp_path, start_step=start)
        tracker.on_train_begin(None, state(start), None)
        log(tracker, steps)
        tracker.add_samples(steps[-1], ["A"], [f"after {steps[-1]}"])
        tracker.on_train_end(None, state(), None)
    tags = tensorboard_scalars(tmp_path)
    assert tags["train/loss"] == [(step, np.float32(1 / (step + 1))) for step in range(1, 10)]
    assert tags["data/tokens"] == [(step, np.float32(2**24 + step)) for step in range(1, 10)]
    assert tensorboard_texts(tmp_path, "samples/text_summary")[9] == "<pre>A</pre>\n\n<pre>after 9</pre>"


def test_tensorboard_shows_the_meaning_unit_and_better_direction_of_a_metric(tmp_path):
    tracker = TensorBoard(tmp_path, start_step=0)
    tracker.on_train_begin(None, state(), None)
    log(tracker, range(1, 3))
    tracker.on_log(None, state(3), None, logs={"optim/lr/head": 0.1, "own/number": 1.0})
    tracker.on_train_end(None, state(), None)
    described = tensorboard_descriptions(tmp_path)
    assert described["train/loss"].startswith("sum of the loss over all trained targets")
    assert described["train/loss"].endswith("(nats; lower is better)")
    assert described["optim/lr/head"] == METRICS["optim/lr/<group>"].description
    assert described["own/number"] == ""
    assert tensorboard_scalars(tmp_path)["train/loss"] == [(1, 0.5), (2, np.float32(1 / 3))]


def test_tensorboard_shows_samples_as_texts_in_which_markdown_and_html_do_nothing(tmp_path):
    from tensorboard.plugins.text.text_plugin import text_array_to_html

    tracker = TensorBoard(tmp_path, start_step=0)
    tracker.on_train_begin(None, state(), None)
    tracker.add_samples(3, ["# A <b>", "B"], ["| a | *b* |\n\n\n- <script>alert(1)</script></pre>*c*", "ünder & co"])
    tracker.on_train_end(None, state(), None)
    text = tensorboard_texts(tmp_path, "samples/text_summary")[3]
    shown = text_array_to_html(np.array(text, dtype=object), True)
    assert "<pre># A &lt;b&gt;</pre>" in shown
    assert "| a | *b* |\n\n\n- &lt;script&gt;alert(1)&lt;/script&gt;&lt;/pre&gt;*c*</pre>" in shown
    assert "<pre>ünder &amp; co</pre>" in shown


def test_tensorboard_that_cannot_start_is_reported_once(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("in the way")
    tracker = TensorBoard(tmp_path / "tensorboard", start_step=0)
    tracker.on_train_begin(None, state(), None)
    log(tracker, range(1, 4))
    tracker.add_samples(3, ["A"], ["a"])
    tracker.on_train_end(None, state(), None)
    assert capsys.readouterr().out.count("TensorBoard stopped taking numbers (") == 1


def test_tensorboard_whose_folder_vanishes_in_mid_run_is_reported_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # its thread's own traceback
    tracker = TensorBoard(tmp_path / "tensorboard", start_step=0)
    tracker.on_train_begin(None, state(), None)
    log(tracker, [1])
    tracker.writer.flush()
    shutil.rmtree(tmp_path / "tensorboard")
    for step in range(2, 50):
        log(tracker, [step])
        time.sleep(0.005)
    tracker.on_train_end(None, state(), None)
    out = capsys.readouterr().out
    assert out.count("TensorBoard stopped taking numbers (") == 1, out
    assert "metrics.jsonl has every number" in out


def test_a_wandb_that_cannot_be_imported_is_reported_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = wandb_run(tmp_path)
    tracker.on_train_begin(None, state(), None)
    log(tracker, [1])
    tracker.add_samples(1, ["A"], ["a"])
    tracker.on_train_end(None, state(), None)
    assert capsys.readouterr().out.count("W&B cannot be used (") == 1
