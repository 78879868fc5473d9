"""Each rule of the diagnosis names its sign just beyond the threshold, and nothing just within it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.report.diagnosis import diagnose, diagnosis_text
from pipeline.report.diagnosis.page import page
from pipeline.report.diagnosis.rules import RULES
from tests.report.made_runs import STARTED, falling, found, made_run, noisy, sound_run

ROOT = Path(__file__).parents[2]
N = 400


def with_recipe(data, **sections):
    return replace(data, recipe=data.recipe | {name: data.recipe.get(name, {}) | keys for name, keys in sections.items()})  # fmt: skip


def with_manifest(data, **keys):
    return replace(data, manifest=data.manifest | keys)


def grown(by):
    """Step times or memory that grow evenly, so that the last third (or window) stands `by` above the first."""
    return noisy(np.linspace(1, 1 + by * 1.5, N), share=0.01)


def jumping(share):
    return noisy([0.5] * N, share=share, seed=1)


def with_spikes(count):
    events = [{"event": "spike", "step": 100 + i, "name": "train/loss", "value": 9.0} for i in range(count)]
    return replace(sound_run(), rows=[*events, *sound_run().rows])


def imported_with_spike(height):
    norms = noisy([1.0] * 100, share=0.05)
    norms[60] = height
    return made_run({"optim/grad_norm": norms})


def restarted(back):
    """A run of 400 steps that was cut at step 200 and went on `back` steps before that."""
    data = sound_run(**{"perf/goodput_pct": None})
    rows = [row for row in data.rows if "event" not in row]
    later = {"event": "attempt", "attempt": 2, "step": 200 - back, "time": 1.0}
    return replace(data, all_rows=[*STARTED, *rows[:200], later, *rows[200 - back :]])


def validated(last, *, train=None):
    """Evaluations that fall to 3.0 at step 300 and end at `last`."""
    values = {100: 4.0, 200: 3.4, 300: 3.0, 400: last}
    return sound_run(**{"val/loss": values, "val/bpb": None} | ({"train/loss": train} if train else {}))


def gap(at_the_end):
    """Training stands at 3.0 from the first quarter on; validation moves from 3.1 to 3.1 + at_the_end."""
    train = [8.0] * 20 + [3.0] * (N - 20)
    return sound_run(**{"train/loss": train, "val/bpb": None, "val/loss": {100: 3.1, 200: 3.1, 300: 3.1, 400: 3.1 + at_the_end}})  # fmt: skip


def repeated(val, *, parameters=None):
    """Five passes, of which the later ones take the training loss from 3.2 to 2.0."""
    data = sound_run(
        **{
            "train/loss": np.linspace(4.5, 2.0, N).tolist(),
            "data/epoch": [*[1 + step // 80 for step in range(N)][:-1], 6],
            "val/loss": {300: 2.6, 400: val},
            "val/bpb": None,
        }
    )
    rows = [row | {"tokens": row["step"] * 2048} if "event" not in row else row for row in data.rows]
    return with_manifest(replace(data, rows=rows), plan={"parameters": parameters} if parameters else {})


FLAT = {"optim/lr": [1.0] * N, "optim/lrm": None}
# By rule: a run just beyond the threshold with the level it must get, and the nearest one that is healthy or lower.
CASES = {
    "run reached its end": [
        (with_recipe(with_manifest(sound_run(), status="training"), train={"max_steps": N + 1}), "trouble"),
        (with_recipe(with_manifest(sound_run(), status="training"), train={"max_steps": N}), "healthy"),
        (replace(sound_run(), failure={"status": 71, "class": "OutOfMemoryError"}), "trouble"),
        (replace(sound_run(), failure={"status": 75, "class": "Preempted"}), "note"),
    ],
    "run can be resumed": [
        (replace(sound_run(), checkpoints=[(N, 1000, False)]), "note"),  # saves were logged
        (replace(sound_run(**{"ckpt/save_s": None}), checkpoints=[]), "trouble"),
        (with_recipe(replace(sound_run(), checkpoints=[]), train={"save_strategy": "no"}), "trouble"),
        (replace(sound_run(), checkpoints=[(N // 2, 1000, True), (N, 1000, False)]), "healthy"),
    ],
    "starts are few": [
        (restarted(back=8), "note"),
        (restarted(back=7), "healthy"),
        (restarted(back=40), "trouble"),
        (sound_run(**{"perf/goodput_pct": [89.0] * N}), "note"),
        (sound_run(**{"perf/goodput_pct": [69.0] * N}), "trouble"),
    ],
    "text is not repeated too often": [
        (sound_run(**{"data/epoch": {N: 5}}), "note"),
        (sound_run(**{"data/epoch": {N: 4}}), "healthy"),
        (sound_run(**{"data/epoch": {N: 17}}), "trouble"),
    ],
    "rows hold text": [
        (with_manifest(sound_run(), shares={"a": {"lost": {"padded": 0.05}}, "b": {"lost": {}}}), "note"),
        (with_manifest(sound_run(), shares={"a": {"lost": {"padded": 0.049, "cropped": 0.199}}}), "healthy"),
        (with_manifest(sound_run(), shares={"a": {"lost": {"padded": 0.0, "cropped": 0.5}}}), "trouble"),
    ],
    "every row is readable": [
        (sound_run(**{"data/bad_rows": {N: 1}}), "note"),
        (sound_run(**{"data/bad_rows": {N: 4}}), "trouble"),  # of 3,200 rows
        (sound_run(), "healthy"),
    ],
    "reading needs no retries": [
        (sound_run(**{"data/retries": {N: 3}}), "note"),
        (sound_run(**{"data/retries": {N: 4}}), "trouble"),
        (sound_run(), "healthy"),
    ],
    "learning rate follows its schedule": [
        (sound_run(**{"optim/lrm": {**dict.fromkeys(range(41, 100), 1.0), 100: 0.99}}), "trouble"),
        (sound_run(**{"optim/lrm": {**dict.fromkeys(range(41, 100), 1.0), 100: 0.995}}), "healthy"),
        (made_run({"optim/lr": [0.1, 1.0, 0.5, 0.2, 0.26, 0.1]}), "note"),
        (made_run({"optim/lr": [0.1, 1.0, 0.5, 0.2, 0.24, 0.1]}), "healthy"),
    ],
    "run goes on beyond its warm-up": [
        (with_recipe(sound_run(), optimizer={"schedule": {"warmup_steps": N}}), "trouble"),
        (with_recipe(sound_run(), optimizer={"schedule": {"warmup_steps": N // 5 + 1}}), "note"),
        (with_recipe(sound_run(), optimizer={"schedule": {"warmup_steps": N // 5}}), "healthy"),
        (made_run({"optim/lr": list(range(1, 13))}), "trouble"),
        (made_run({"optim/lr": [*range(1, 12), 11]}), "healthy"),
    ],
    "loss falls": [
        (sound_run(**{"train/loss": noisy(np.linspace(8.0, 7.62, N), share=0.001)}), "trouble"),
        (sound_run(**{"train/loss": noisy(np.linspace(8.0, 7.5, N), share=0.001)}), "healthy"),
        (with_recipe(sound_run(**{"train/loss": noisy([3.0] * N)}), model={"start_from": "x"}), "note"),
        (with_recipe(sound_run(**{"train/loss": noisy(np.linspace(3.0, 2.95, N))}), model={"start_from": "x"}), "healthy"),
    ],
    "loss stays below its start": [
        (sound_run(**{"train/loss": [5.0, 5.3, 5.3, *np.linspace(5, 3, 97)]}), "trouble"),
        (sound_run(**{"train/loss": [5.0, 5.3, 5.0, *np.linspace(5, 3, 97)]}), "healthy"),  # one value: a spike
        (sound_run(**{"train/loss": [5.0, 5.2, 5.2, *np.linspace(5, 3, 97)]}), "healthy"),
    ],
    "loss does not rise": [
        (sound_run(**{"train/loss": noisy([*falling(N - 60), *np.linspace(3.03, 3.3, 60)])}), "trouble"),
        (sound_run(**{"train/loss": noisy([*falling(N - 60), *np.linspace(3.03, 3.1, 60)])}), "healthy"),
    ],
    "loss keeps falling": [
        (sound_run(**{"train/loss": noisy([*falling(150), *[3.0] * 250], share=0.005), **FLAT}), "trouble"),
        (sound_run(**{"train/loss": noisy([*falling(150), *[3.0] * 250], share=0.005)}), "note"),
        (sound_run(**{"train/loss": noisy([*falling(150, end=3.1), *np.linspace(3.1, 3.0, 250)], share=0.005), **FLAT}), "healthy"),
    ],
    "loss does not spike": [
        (with_spikes(3), "trouble"),
        (with_spikes(2), "note"),
        (with_spikes(0), "healthy"),
    ],
    "gradient norm does not spike": [
        (imported_with_spike(1.6), "note"),
        (imported_with_spike(1.15), "healthy"),
    ],
    "gradient norm stays bounded": [
        (sound_run(**{"optim/grad_norm": [1.0] * 300 + [10.1] * 100}), "trouble"),
        (sound_run(**{"optim/grad_norm": [1.0] * 300 + [9.9] * 100}), "healthy"),
        (sound_run(**{"optim/grad_norm": [1.0] * 300 + [0.009] * 100}), "trouble"),
        (sound_run(**{"optim/grad_norm": [1.0] * 300 + [0.011] * 100}), "healthy"),
    ],
    "clipping acts now and then": [
        (sound_run(**{"optim/clip_frac": [0.0] * N}), "note"),
        (sound_run(**{"optim/clip_frac": [0.0] * (N - 1) + [0.1]}), "healthy"),
        (sound_run(**{"optim/clip_frac": [0.51] * N}), "note"),
        (sound_run(**{"optim/clip_frac": None, "optim/grad_norm": [0.99] * N}), "note"),
        (sound_run(**{"optim/clip_frac": None, "optim/grad_norm": [0.99] * (N - 1) + [1.01]}), "healthy"),
    ],
    "every number is finite": [
        (sound_run(**{"optim/grad_norm": [1.0] * 99 + [float("nan")] + [1.0] * 300}), "trouble"),
        (replace(sound_run(), failure={"status": 76, "message": "loss is nan"}), "trouble"),
        (sound_run(**{"optim/skipped_steps": {N: 4}}), "trouble"),
        (sound_run(**{"optim/skipped_steps": {N: 3}}), "note"),
        (sound_run(), "healthy"),
    ],
    "something is held out": [
        (sound_run(**{"val/loss": {0: 8.0}, "val/bpb": {0: 3.0}}), "trouble"),
        (sound_run(**{"val/loss": {0: 8.0, N: 3.0}, "val/bpb": None}), "healthy"),
    ],
    "validation keeps falling": [
        (validated(3.07), "trouble"),
        (validated(3.02), "note"),
        (validated(3.01), "healthy"),
    ],
    "validation stays beside training": [
        (gap(0.6), "trouble"),
        (gap(0.2), "note"),
        (gap(0.1), "healthy"),
    ],
    "validation text is not trained on": [
        (sound_run(**{"val/bpb": {N: 0.49}}), "trouble"),
        (sound_run(**{"val/bpb": {N: 0.51}}), "healthy"),
        (sound_run(**{"train/loss": [3.0] * N, "val/loss": {300: 2.69, N: 2.69}}), "trouble"),
        (sound_run(**{"train/loss": [3.0] * N, "val/loss": {300: 2.8, N: 2.8}}), "note"),
        (sound_run(**{"train/loss": [3.0] * N, "val/loss": {300: 2.9, N: 2.69}}), "healthy"),  # one evaluation
        (with_manifest(sound_run(), overlap={"found": 3, "documents": 100}), "trouble"),
        (with_manifest(sound_run(), overlap={"found": 0, "documents": 100}), "healthy"),
        (repeated(2.02), "note"),
        (repeated(2.02, parameters=1_000_000), "trouble"),
        (repeated(2.1, parameters=1_000_000), "healthy"),
    ],
    "step time stays the same": [
        (sound_run(**{"perf/step_s": grown(0.3)}), "trouble"),
        (sound_run(**{"perf/step_s": grown(0.15)}), "note"),
        (sound_run(**{"perf/step_s": grown(0.08)}), "healthy"),
        (sound_run(**{"perf/step_s": [0.5] * 150 + [0.8] * 100 + [0.7] * 150}), "healthy"),  # it passes again
        (sound_run(**{"perf/step_s": None, "perf/tok_per_s": [1 / t for t in grown(0.3)]}), "trouble"),
    ],
    "throughput is stable": [
        (sound_run(**{"perf/step_s": jumping(0.45)}), "trouble"),
        (sound_run(**{"perf/step_s": jumping(0.15)}), "note"),
        (sound_run(**{"perf/step_s": jumping(0.07)}), "healthy"),
        (sound_run(**{"perf/step_s": [0.5, 0.5, 5.0, 0.5, 0.5, 0.5, 0.5, 0.5] * 50}), "healthy"),  # rare ones
    ],
    "the accelerator is used": [
        (sound_run(**{"gpu/util_pct": [49.0] * N}), "trouble"),
        (sound_run(**{"gpu/util_pct": [89.0] * N}), "note"),
        (sound_run(**{"gpu/util_pct": [100.0] * N, "perf/mfu_pct": [9.9] * N}), "trouble"),
        (sound_run(**{"gpu/util_pct": None, "perf/mfu_pct": None, "perf/bf16_mfu_pct": [29.0] * N}), "note"),
        (sound_run(**{"gpu/util_pct": [90.0] * N, "perf/mfu_pct": [30.0] * N}), "healthy"),
    ],
    "data does not stall the steps": [
        (sound_run(**{"data/wait_frac": [0.0, 0.0] + [0.9] * 50 + [0.0] * (N - 52)}), "trouble"),
        (sound_run(**{"data/wait_frac": [0.04] * N}), "note"),
        (sound_run(**{"data/wait_frac": [1.0] + [0.02] * (N - 1)}), "healthy"),  # the first rows of a start
    ],
    "no rank keeps the others waiting": [
        (sound_run(**{"perf/slowest_rank": [1.51] * N}), "trouble"),
        (sound_run(**{"perf/slowest_rank": [1.2] * N}), "note"),
        (sound_run(**{"perf/slowest_rank": [1.1] * 300 + [3.0] * 100}), "healthy"),
    ],
    "the GPU is not throttled": [
        (sound_run(**{"gpu/throttled_pct": [11.0] * N}), "trouble"),
        (sound_run(**{"gpu/throttled_pct": [1.1] * N}), "note"),
        (sound_run(**{"gpu/throttled_pct": [0.9] * N}), "healthy"),
    ],
    "saves do not hold the training up": [
        (sound_run(**{"ckpt/save_s": {N: 200.0}, "perf/total_s": {N: 1000.0}}), "trouble"),
        (sound_run(**{"ckpt/save_s": {N: 200.0}, "perf/total_s": {N: 300.0}}), "note"),  # a short run
        (sound_run(**{"ckpt/save_s": {N: 49.0}, "perf/total_s": {N: 1000.0}}), "healthy"),
    ],
    "evaluations leave time for training": [
        (sound_run(**{"perf/eval_s": {N: 1100.0}, "perf/total_s": {N: 1000.0}}), "trouble"),
        (sound_run(**{"perf/eval_s": {N: 1100.0}, "perf/total_s": {N: 5000.0}}), "healthy"),
        (sound_run(**{"perf/eval_s": {N: 100.0}, "core/eval_s": {N: 300.0}, "perf/total_s": {N: 1000.0}}), "note"),
    ],
    "memory does not grow": [
        (sound_run(**{"mem/host_rss_gib": np.linspace(1.0, 1.5, N).tolist()}), "trouble"),
        (sound_run(**{"mem/allocated_gib": np.linspace(1.0, 1.18, N).tolist()}), "note"),
        (sound_run(**{"mem/host_rss_gib": np.linspace(1.0, 1.1, N).tolist()}), "healthy"),
        (sound_run(**{"mem/host_rss_gib": [1.0] * 70 + [3.0] * 330}), "healthy"),  # it fills, and stands
    ],
    "device memory has room": [
        (sound_run(**{"mem/alloc_retries": {N: 1}}), "note"),
        (sound_run(), "healthy"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_sign_is_named_just_beyond_its_threshold_and_not_just_within(name):
    levels = [(finding := found(data, name)).level + ("" if finding.level == level else f" ({finding.evidence})") for data, level in CASES[name]]  # fmt: skip
    assert levels == [level for _, level in CASES[name]]


def test_every_rule_is_tried_on_a_sick_and_on_a_sound_run():
    assert [rule.name for rule in RULES] == sorted(CASES, key=[rule.name for rule in RULES].index)
    for name, cases in CASES.items():
        levels = {level for _, level in cases}
        assert "healthy" in levels, name
        assert levels & {"note", "trouble"}, name


def test_a_sound_run_is_healthy_in_every_sign():
    assert {finding.rule: finding.level for finding in diagnose(sound_run())} == dict.fromkeys(CASES, "healthy")
    assert diagnosis_text(sound_run()).startswith("**Healthy**: 32 of 32 signs could be judged, none of them is one")


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_makes_no_trouble(seed):
    data = sound_run(
        **{
            "train/loss": noisy(falling(N), share=0.05, seed=seed),
            "perf/step_s": noisy([0.5] * N, share=0.08, seed=seed),
            "optim/grad_norm": noisy([0.7] * N, share=0.3, seed=seed),
        }
    )
    assert {finding.rule for finding in diagnose(data) if finding.level != "healthy"} == set()


def test_without_numbers_every_rule_is_unknown_and_nothing_is_said():
    empty = made_run({})
    assert {finding.level for finding in diagnose(empty)} == {"unknown"}
    assert diagnosis_text(empty) == ""


def test_the_text_tells_trouble_with_evidence_threshold_and_advice_and_what_is_unknown():
    data = sound_run(**{"perf/step_s": grown(0.3), "gpu/throttled_pct": None})
    text = diagnosis_text(data)
    drift = found(data, "step time stays the same")
    assert "**1 sign of trouble** (the step time drifts upward)" in text
    trouble = text.split("### Trouble")[1].split("###")[0]
    assert all(part in trouble for part in (drift.title, drift.evidence, drift.threshold, drift.advice))
    assert "Unknown, for want of numbers: the GPU is not throttled (gpu/throttled_pct: 5 logged values)." in text


def test_every_threshold_of_the_code_stands_on_the_page():
    assert (ROOT / "docs" / "diagnosis.md").read_text() == page(), "run python -m pipeline.report.diagnosis"


def test_the_numbers_are_explained_with_the_runs_own_figures():
    data = sound_run(
        **{
            "data/samples": {N: 3200},
            "data/tokens": {N: 800_000},
            "mem/allocated_gib": {N: 40.0},
            "mem/peak_allocated_gib": {N: 60.5},
            "mem/reserved_gib": {N: 64.0},
            "mem/device_used_gib": {N: 70.0},
            "perf/mfu_pct": [55.0] * N,
            "perf/bf16_mfu_pct": [62.0] * N,
            "perf/tflops_per_gpu": [544.0] * N,
            "gpu/util_pct": [100.0] * N,
            "gpu/mem_busy_pct": [42.0] * N,
        }
    )
    text = diagnosis_text(with_manifest(data, shape={"device": "H100", "dtype": "bfloat16"}))
    assert "3,200 samples x 256 positions = 819,200 tokens, which is 400 steps x 2,048 positions a step" in text
    assert "800,000 of them were trained on" in text
    assert "20.50 GiB came and went within a step" in text
    assert "used on the device 70.00 GiB" in text
    assert "over the peak of bfloat16 (544 of 989.1 TFLOP/s, H100)" in text
    assert "**Utilisation is not efficiency**: 100 % beside an MFU of 55.0 %" in text
    assert "median 42 %" in text


def test_numbers_that_were_not_logged_are_not_explained():
    text = diagnosis_text(made_run({"train/loss": [3.0] * 30}))
    assert "How to read" not in text
