"""Each rule of the diagnosis names its sign just beyond the threshold, and nothing just within it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.process.storage import lock
from pipeline.report.diagnosis_rules import RULES, diagnose
from pipeline.run_dir.run_directory import RunDirectory
from tests.report.made_runs import SCHEDULE, falling, found, made_run, noisy, sound_run

ROOT = Path(__file__).parents[2]
N = 400


def with_recipe(data, **sections):
    return replace(data, recipe=data.recipe | {name: data.recipe.get(name, {}) | keys for name, keys in sections.items()})  # fmt: skip


def with_manifest(data, **keys):
    return replace(data, manifest=data.manifest | keys)


def grown(by):
    """Step times or memory that grow evenly, so that the last third (or window) stands `by` above the first."""
    return noisy(np.linspace(1, 1 + by * 1.5, N), share=0.01)


def others_beside(times):
    """Step times on a machine that others use more and more: every fifth step is as fast as before."""
    slow = np.linspace(1, 1 + 1.5 * (times - 1), N)
    return noisy([0.5 if n % 5 == 0 else 0.5 * slow[n] for n in range(N)], share=0.01)


def with_spikes(count, *, of=N):
    events = [{"event": "spike", "step": 100 + i, "name": "train/loss", "value": 9.0} for i in range(count)]
    data = sound_run(of)
    return replace(data, rows=[*events, *data.rows])


def with_early_spikes(count, *, times=2.0):
    loss = noisy(falling(N))
    for i in range(count):
        loss[4 + 5 * i] *= times
    return made_run({"train/loss": loss})  # a log of another program: nothing was recorded


def validated(last, *, train=None):
    """Evaluations that fall to 3.0 at step 300 and end at `last`."""
    values = {100: 4.0, 200: 3.4, 300: 3.0, 400: last}
    return sound_run(**{"val/loss": values, "val/bpb": None} | ({"train/loss": train} if train else {}))


def learnt(end=3.0):
    """A training loss that falls fast and then stays."""
    return [2 * end] * 60 + [end] * (N - 60)


def easy_text(first_pass):
    """Two passes; validation comes to 0.4 bits per byte, as training does in the second one."""
    half = N // 2
    epochs = {"data/epoch": [1] * half + [2] * half}
    return sound_run(**{"train/bpb": [first_pass] * half + [0.4] * half, "val/bpb": {N: 0.4}} | epochs)


def small_validation(loss, *, of):
    below = sound_run(**{"train/loss": learnt(), "val/loss": {300: loss, N: loss}})
    return with_manifest(below, inputs={"validation_bytes": {"val/bpb_documents": of}})


def overlapping(found):
    overlap = {"documents": 2000, "found": found, "place": "b.jsonl:2", "whole": True}
    return with_manifest(sound_run(), inputs={"overlap": overlap})


def dropping(**lost):
    share = {"lost": {"padded": 0.0, "cut": 0.0, "too long": 0.0, "no target": 0.0} | lost}
    return with_manifest(sound_run(), shares={"kept": dropping_nothing(), "short": share})


def dropping_nothing():
    return {"lost": {"padded": 0.0, "cut": 0.0, "too long": 0.0, "no target": 0.0}}


def short(data, count):
    """The run as it stood after that many logged steps."""
    rows = [row for row in data.rows if "event" in row or row["step"] <= count]
    return replace(data, rows=rows, all_rows=rows)


# By rule: runs just beyond each threshold and just within it, with the level that they must get.
CASES = {
    "run reached its end": [
        (with_recipe(with_manifest(sound_run(), status="training"), train={"max_steps": N + 1}), "trouble"),
        (with_recipe(with_manifest(sound_run(), status="training"), train={"max_steps": N}), "healthy"),
        (replace(sound_run(), failure={"status": 71, "class": "OutOfMemoryError"}), "trouble"),
        (replace(sound_run(), failure={"status": 75, "class": "Preempted"}), "note"),
        (replace(sound_run(), checkpoints=[(N, 9, False)], failure={"status": 75, "class": "Preempted"}), "trouble"),
    ],
    "text is not repeated too often": [
        (sound_run(**{"data/epoch": {N: 4}}), "healthy"),
        (sound_run(**{"data/epoch": {N: 5}}), "note"),
        (sound_run(**{"data/epoch": {N: 16}}), "note"),
        (sound_run(**{"data/epoch": {N: 17}}), "trouble"),
        (with_manifest(sound_run(**{"data/epoch": {N: 3.9}}), imported={"program": "Trainer"}), "healthy"),
        (with_manifest(sound_run(**{"data/epoch": {N: 4.0}}), imported={"program": "Trainer"}), "note"),
    ],
    "conversations fit their rows": [
        (dropping(**{"too long": 0.0099}), "healthy"),
        (dropping(**{"too long": 0.01}), "note"),
        (dropping(**{"too long": 0.099}), "note"),
        (dropping(**{"too long": 0.1}), "trouble"),
        (dropping(cut=0.0099), "healthy"),
        (dropping(cut=0.5), "note"),
        (dropping(**{"no target": 0.02}), "note"),
        (with_manifest(sound_run(), shares={"a": {"lost": {"padded": 0.0, "cropped": 0.0}}}), "unknown"),  # text
    ],
    "run goes on beyond its warm-up": [
        (with_recipe(sound_run(), optimizer={"schedule": {"warmup_steps": N // 5}}), "healthy"),
        (with_recipe(sound_run(), optimizer={"schedule": {"warmup_steps": N // 5 + 1}}), "note"),
        (with_recipe(sound_run(), optimizer={"schedule": {"warmup_steps": N - 1}}), "note"),
        (with_recipe(sound_run(), optimizer={"schedule": {"warmup_steps": N}}), "trouble"),
        (made_run({"optim/lr": list(range(1, 13))}), "trouble"),
        (made_run({"optim/lr": [*range(1, 12), 11]}), "healthy"),
        (made_run({"optim/lr": list(range(1, 10))}), "unknown"),
    ],
    "loss falls": [
        (sound_run(**{"train/loss": noisy(np.linspace(8.0, 7.62, N), share=0.001)}), "trouble"),
        (sound_run(**{"train/loss": noisy(np.linspace(8.0, 7.5, N), share=0.001)}), "healthy"),
        (with_recipe(sound_run(**{"train/loss": noisy([3.0] * N)}), model={"start_from": "x"}), "note"),
        (with_recipe(sound_run(**{"train/loss": noisy(np.linspace(3.0, 2.95, N))}), model={"start_from": "x"}), "healthy"),
        (made_run({"train/loss": [5.0] * 12}, steps=range(1, 61, 5)), "trouble"),
        (made_run({"train/loss": [5.0] * 11}, steps=range(1, 111, 10)), "unknown"),
        (made_run({"train/loss": [5.0] * 40}), "unknown"),
        (made_run({"train/loss_ema": [5.0] * 50}), "trouble"),
    ],
    "loss does not rise": [
        (sound_run(**{"train/loss": [5.0, 5.3, 5.3, *np.linspace(5, 3, 97)]}), "trouble"),
        (sound_run(**{"train/loss": [5.0, 5.3, 5.0, *np.linspace(5, 3, 97)]}), "healthy"),  # one value: a spike
        (sound_run(**{"train/loss": [5.0, 5.2, 5.2, *np.linspace(5, 3, 97)]}), "healthy"),
        (sound_run(**{"train/loss": noisy([*falling(N - 60), *np.linspace(3.03, 3.3, 60)])}), "trouble"),
        (sound_run(**{"train/loss": noisy([*falling(N - 60), *np.linspace(3.03, 3.16, 60)], share=0.01)}), "trouble"),
        (sound_run(**{"train/loss": noisy([*falling(N - 80), *[3.085] * 80], share=0.002)}), "note"),
        (sound_run(**{"train/loss": noisy([*falling(N - 60), *np.linspace(3.03, 3.05, 60)])}), "healthy"),
        (made_run({"train/loss": [5.0] * 14}), "unknown"),
    ],
    "loss does not spike": [
        (with_spikes(0), "healthy"),
        (with_spikes(2), "note"),
        (with_spikes(3), "trouble"),
        (with_spikes(3, of=4000), "note"),
        (with_early_spikes(2), "note"),
        (with_early_spikes(3), "trouble"),
        (with_early_spikes(3, times=1.4), "healthy"),
        (short(with_spikes(0), 20), "unknown"),
    ],
    "clipping acts now and then": [
        (sound_run(**{"optim/clip_frac": [0.0] * N}), "note"),
        (sound_run(**{"optim/clip_frac": [0.0] * (N - 1) + [0.1]}), "healthy"),
        (sound_run(**{"optim/clip_frac": [0.49] * N}), "healthy"),
        (sound_run(**{"optim/clip_frac": [0.51] * N}), "note"),
        (sound_run(**{"optim/clip_frac": None, "optim/grad_norm": [0.99] * N}), "note"),
        (sound_run(**{"optim/clip_frac": None, "optim/grad_norm": [0.99] * (N - 1) + [1.01]}), "healthy"),
        (short(sound_run(), 9), "unknown"),
        (with_recipe(sound_run(), train={"max_grad_norm": 0}), "healthy"),
    ],
    "every number is finite": [
        (sound_run(), "healthy"),
        (sound_run(**{"optim/grad_norm": [1.0] * 99 + [float("nan")] + [1.0] * 300}), "trouble"),
        (replace(sound_run(), failure={"status": 76, "message": "loss is nan"}), "trouble"),
        (replace(sound_run(), rows=[*sound_run().rows, {"event": "nonfinite", "step": 9, "metrics": ["train/loss"]}]), "trouble"),
        (sound_run(**{"optim/skipped_steps": {N: 4}}), "trouble"),
        (sound_run(**{"optim/skipped_steps": {N: 3}}), "note"),
    ],
    "something is held out": [
        (sound_run(**{"val/loss": {0: 8.0}, "val/bpb": {0: 3.0}}), "trouble"),
        (sound_run(**{"val/loss": {0: 8.0, N: 3.0}, "val/bpb": None}), "healthy"),
    ],
    "validation keeps falling": [
        (validated(3.01), "healthy"),
        (validated(3.02), "note"),
        (validated(3.055), "note"),
        (validated(3.07), "trouble"),
        (sound_run(**{"val/loss": {300: 3.0, 400: 4.0}, "val/bpb": None}), "unknown"),
    ],
    "validation text is not trained on": [
        (sound_run(**{"val/bpb": {N: 0.49}}), "trouble"),
        (sound_run(**{"val/bpb": {200: 0.49, N: 0.6}}), "trouble"),  # reached, whatever came after
        (sound_run(**{"val/bpb": {N: 0.51}}), "healthy"),
        (easy_text(first_pass=0.45), "healthy"),  # so easy is text that was read once only
        (easy_text(first_pass=0.55), "trouble"),
        (small_validation(2.69, of=10_000), "healthy"),  # a tenth is chance there
        (small_validation(2.0, of=10_000), "trouble"),
        (sound_run(**{"train/loss": learnt(), "val/loss": {300: 2.69, N: 2.69}}), "trouble"),
        (sound_run(**{"train/loss": learnt(), "val/loss": {300: 2.71, N: 2.71}}), "healthy"),
        (sound_run(**{"train/loss": learnt(), "val/loss": {300: 2.9, N: 2.69}}), "healthy"),  # one evaluation
        (sound_run(**{"train/loss": [6.0] * N, "val/loss": {300: 2.69, N: 2.69}}), "healthy"),  # flat: another trouble
        (sound_run(**{"train/loss": [*falling(300), *[9.0] * 100], "val/loss": {300: 3.1, N: 3.1}}), "healthy"),  # diverged
        (overlapping(0), "healthy"),
        (overlapping(1), "note"),
        (overlapping(19), "note"),
        (overlapping(20), "trouble"),
        (made_run({}, manifest={"inputs": {"overlap": {"documents": 40, "found": 7, "place": "b.jsonl:2"}}}), "trouble"),
    ],
    "step time stays the same": [
        (sound_run(**{"perf/step_s": grown(0.09)}), "healthy"),
        (sound_run(**{"perf/step_s": grown(0.12)}), "note"),
        (sound_run(**{"perf/step_s": grown(0.24)}), "note"),
        (sound_run(**{"perf/step_s": grown(0.3)}), "trouble"),
        (sound_run(**{"perf/step_s": [0.5] * 150 + [0.8] * 100 + [0.7] * 150}), "healthy"),  # it passes again
        (sound_run(**{"perf/step_s": [0.5] * 140 + [0.67] * 120 + [0.65] * 60 + [0.68] * 80}), "note"),  # it stays
        (sound_run(**{"perf/step_s": others_beside(1.4)}), "healthy"),  # some steps are as fast as ever
        (made_run({"perf/step_s": [0.5] * 12 + [5.0] + [0.5] * 7}), "healthy"),  # one slow interval
        (made_run({"perf/step_s": np.linspace(1, 2, 15).tolist()}), "unknown"),
    ],
    "the accelerator is used": [
        (sound_run(**{"gpu/util_pct": [90.0] * N, "perf/mfu_pct": [30.0] * N}), "healthy"),
        (sound_run(**{"gpu/util_pct": [89.0] * N}), "note"),
        (sound_run(**{"gpu/util_pct": [51.0] * N}), "note"),
        (sound_run(**{"gpu/util_pct": [49.0] * N}), "trouble"),
        (sound_run(**{"gpu/util_pct": None, "perf/mfu_pct": None, "perf/bf16_mfu_pct": [29.0] * N}), "note"),
        (sound_run(**{"gpu/util_pct": [100.0] * N, "perf/mfu_pct": [11.0] * N}), "note"),
        (sound_run(**{"gpu/util_pct": [100.0] * N, "perf/mfu_pct": [9.9] * N}), "trouble"),
    ],
    "data does not stall the steps": [
        (sound_run(**{"data/wait_frac": [1.0] + [0.02] * (N - 1)}), "healthy"),  # the first rows of a start
        (sound_run(**{"data/wait_frac": [0.04] * N}), "note"),
        (sound_run(**{"data/wait_frac": [0.09] * N}), "note"),
        (sound_run(**{"data/wait_frac": [0.0, 0.0] + [0.9] * 50 + [0.0] * (N - 52)}), "trouble"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_sign_is_named_just_beyond_its_threshold_and_not_just_within(name):
    results = [(found(data, name), level) for data, level in CASES[name]]
    assert [result.level for result, _ in results] == [level for _, level in results], results


def test_every_rule_is_tried_on_a_sick_and_on_a_sound_run():
    assert {rule.name for rule in RULES} == set(CASES)
    for name, cases in CASES.items():
        levels = {level for _, level in cases}
        assert "healthy" in levels, name
        assert levels & {"note", "trouble"}, name


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_makes_no_sign(seed):
    noise = {
        "train/loss": noisy(falling(N), share=0.05, seed=seed),
        "perf/step_s": noisy([0.5] * N, share=0.08, seed=seed),
        "optim/grad_norm": noisy([0.7] * N, share=0.3, seed=seed),
    }
    for data in (sound_run(), sound_run(**noise)):
        assert {name: result for name, result in diagnose(data).items() if result.level != "healthy"} == {}


def test_clipped_steps_are_counted_by_the_steps_of_each_logged_row():
    steps = [1, *range(20, 621, 20), 631]
    shares = dict.fromkeys(steps, 0.0) | {1: 1.0, 20: 19 / 19, 40: 7 / 20}
    data = made_run({"optim/clip_frac": shares}, recipe={"train": {"max_grad_norm": 1.0}})
    assert found(data, "clipping acts now and then").evidence == "4.3% of 631 steps"


def training(data, run, *, step, planned):
    """The run up to that step, not at its end."""
    rows = [row for row in data.rows if row.get("step", 0) <= step]
    data = with_manifest(replace(data, rows=rows, all_rows=rows), inputs={"max_steps": planned}, status="running")
    return replace(data, checkpoints=[], run=run)


def test_nothing_is_judged_before_it_is_due_while_a_run_trains(tmp_path):
    slow_start = falling(N) + np.where(np.arange(N) < 100, 8.0 - falling(N), 0)  # flat while the rate is near 0
    data = sound_run(**{"train/loss": noisy(slow_start), "val/loss": None, "val/bpb": None, "ckpt/save_s": None})
    data = with_recipe(data, train={"eval_steps": 250, "save_steps": 200}, optimizer={"type": "adamw", "schedule": {**SCHEDULE, "warmup_steps": 100}})  # fmt: skip
    run = RunDirectory(tmp_path)
    held = lock(run.lock)
    early = training(data, run, step=90, planned=N)
    assert early.is_training
    titles = {found(early, rule).title for rule in ("something is held out", "run goes on beyond its warm-up")}  # fmt: skip
    assert titles == {"the first validation is to come", "the warm-up has not ended yet"}
    assert found(early, "loss falls").level == "unknown"
    late = training(data, run, step=260, planned=N)
    assert found(late, "something is held out").title == "no validation at all"
    held.release()
    stopped = training(data, run, step=90, planned=N)
    assert found(stopped, "run goes on beyond its warm-up").title == "the run ends inside its warm-up"


def test_validation_is_compared_in_bits_per_byte_where_training_has_them():
    loss = falling(N)
    nats = {step: loss[step - 1] * 0.92 for step in range(50, N + 1, 50)}  # the rows of validation have shorter tokens
    bytes_alike = {step: loss[step - 1] / 3.3 * 1.002 for step in range(50, N + 1, 50)}
    data = sound_run(**{"val/loss": nats, "val/bpb": bytes_alike, "train/bpb": (np.array(noisy(loss)) / 3.3).tolist()})
    leak = found(data, "validation text is not trained on")
    assert leak.level == "healthy"
    assert "val/bpb against train/bpb" in leak.evidence
