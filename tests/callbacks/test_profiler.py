"""The trace of monitor.profile_steps holds the steps that were asked for, and opens as JSON."""

import json
from types import SimpleNamespace

import pytest
import torch

from pipeline.callbacks.profiler import ProfileSteps
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.meters import StepMeter


def meter():
    return StepMeter(tokens_at=lambda step: 8 * step, max_steps=9, world_size=1)


def train(callback, *, steps, start=0, rank=0):
    """What the Trainer does around a callback, and of a model what is multiplied."""
    args, state = SimpleNamespace(process_index=rank), SimpleNamespace(global_step=start)
    for _ in range(start, steps):
        callback.meter.begin()
        callback.on_step_begin(args, state, None)
        torch.ones(4, 4) @ torch.ones(4, 4)
        callback.on_pre_optimizer_step(args, state, None)
        torch.ones(4).add_(1)
        state.global_step += 1
        callback.on_step_end(args, state, None)
    callback.on_train_end(args, state, None)


def events(path):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def within(events, outer, name):
    """How often an operator ran in a named range."""
    span = next(event for event in events if event["name"] == outer)
    begin, end = span["ts"], span["ts"] + span["dur"]
    return sum(event["name"] == name and begin <= event["ts"] <= end for event in events)


def test_the_trace_holds_the_operators_of_the_steps_and_of_no_other(tmp_path):
    run = RunDirectory(tmp_path)
    train(ProfileSteps(run, 2, 3, meter=meter()), steps=6)
    found = events(run.profile / "steps-2-3.json")
    assert [event["name"] for event in found if event["name"].startswith("step ")] == ["step 2", "step 3"]
    assert sum(event["name"] == "aten::mm" for event in found) == 2
    assert (within(found, "step 2", "aten::mm"), within(found, "step 2", "aten::add_")) == (1, 1)
    assert (within(found, "forward and backward", "aten::mm"), within(found, "optimizer", "aten::mm")) == (1, 0)
    assert within(found, "optimizer", "aten::add_") == 1
    assert not list(run.profile.glob("*.part"))


@pytest.mark.parametrize(("start", "steps", "traced"), [(3, 6, ["step 3"]), (0, 3, ["step 2"]), (4, 6, None)])
def test_a_run_that_covers_only_some_profiled_steps_traces_those(tmp_path, start, steps, traced):
    run = RunDirectory(tmp_path)
    train(ProfileSteps(run, 2, 3, meter=meter()), start=start, steps=steps)
    trace = run.profile / "steps-2-3.json"
    found = [e["name"] for e in events(trace) if e["name"].startswith("step ")] if trace.exists() else None
    assert found == traced


def test_other_ranks_trace_nothing(tmp_path):
    run = RunDirectory(tmp_path)
    train(ProfileSteps(run, 0, 1, meter=meter()), steps=3, rank=1)
    assert not run.profile.exists()


def test_starting_the_profiler_and_writing_the_trace_are_no_time_of_steps(tmp_path, monkeypatch):
    watched = meter()
    callback = ProfileSteps(RunDirectory(tmp_path), 0, 0, meter=watched)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("pipeline.training.meters.time.perf_counter", lambda: clock.now)

    class Slow(torch.profiler.profile):
        def start(self):
            clock.now += 5
            super().start()

        def stop(self):
            clock.now += 7
            super().stop()

    monkeypatch.setattr("pipeline.callbacks.profiler.profile", Slow)
    train(callback, steps=1)
    clock.now += 2
    assert watched._elapsed() == 2
