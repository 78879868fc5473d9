"""Runs of other programs, known by the figures that were published of them: what is wrong with them is named from these alone."""

import numpy as np
import pytest

from pipeline.report.diagnosis import diagnosis_text
from pipeline.report.diagnosis_rules import diagnose
from tests.report.made_runs import made_run, noisy

# A nanochat base run of depth 16 on two H100s: planned steps, and the step at whose evaluation a download failed.
PLANNED, CRASHED, PRINTED_EVERY = 12_800, 2_000, 10
LOSS_AT = {1: 11.0904, 1_000: 3.4627, 5_000: 3.0704}
DT_S, TOK_PER_S, MFU = 1.217, 430_600, 43.8

# Two NeMo runs of Llama-3 8B on 8 H100s, bf16 and fp8: one value a step.
NEMO = {
    "bf16": {"steps": 574, "step_s": 12.1, "tflops": 625, "allocated": 43e9, "peak": 64.5e9, "spike": (475, 0.0100), "samples": 73_472},
    "fp8": {"steps": 740, "step_s": 9.3, "tflops": 810, "allocated": 39e9, "peak": 64.0e9, "spike": (520, 0.0155), "samples": 94_720},
}  # fmt: skip
GLOBAL_BATCH, ROW_TOKENS, WARMUP, PEAK_RATE, GIB = 128, 8192, 2000, 3e-4, 2**30
SETTINGS = {
    "data": {"row_tokens": ROW_TOKENS, "batch_tokens": GLOBAL_BATCH * ROW_TOKENS},
    "train": {"max_steps": 10_000, "warmup_steps": WARMUP, "max_grad_norm": 1.0, "save_strategy": "no"},
}


def nanochat_run():
    steps = np.array([1, *range(PRINTED_EVERY, CRASHED + 1, PRINTED_EVERY)])
    loss = np.exp(np.interp(np.log(steps), np.log(list(LOSS_AT)), np.log(list(LOSS_AT.values()))))
    return made_run(
        {
            "train/loss_ema": noisy(loss, share=0.01),
            "optim/lrm": [1.0] * len(steps),
            "optim/grad_norm": noisy([0.5] * len(steps), share=0.2),
            "perf/step_s": noisy([DT_S] * len(steps), share=0.002),
            "perf/tok_per_s": noisy([TOK_PER_S] * len(steps), share=0.002),
            "perf/bf16_mfu_pct": noisy([MFU] * len(steps), share=0.002),
            "perf/total_s": (steps * DT_S).tolist(),
        },
        steps=steps,
        manifest={"imported": {"program": "nanochat"}, "inputs": {"max_steps": PLANNED}},
    )


def nemo_run(name, *, recipe):
    facts = NEMO[name]
    count = facts["steps"]
    norms = noisy([*np.linspace(0.0075, 0.0015, 50), *[0.0015] * (count - 50)], share=0.08)
    norms[facts["spike"][0] - 1] = facts["spike"][1]
    return made_run(
        {
            "optim/lr": [PEAK_RATE * step / WARMUP for step in range(1, count + 1)],
            "optim/grad_norm": norms,
            "perf/step_s": noisy([facts["step_s"]] * count, share=0.01),
            "perf/tflops_per_gpu": [facts["tflops"]] * count,
            "data/samples": [GLOBAL_BATCH * step for step in range(1, count + 1)],
            "mem/allocated_gib": [facts["allocated"] / GIB] * count,
            "mem/run_peak_allocated_gib": [facts["peak"] / GIB] * count,
            "gpu/util_pct": [100.0] * count,
            "gpu/power_pct": [100.0] * count,
            "gpu/mem_busy_pct": [41.0] * count,
        },
        recipe=recipe,
        manifest={"imported": {"program": "NeMo"}},
    )


def titles(data, *levels):
    return {rule: result.title for rule, result in diagnose(data).items() if result.level in levels}


def test_a_nanochat_run_that_crashed_at_its_evaluation_is_unfinished_and_lost():
    data = nanochat_run()
    trouble = titles(data, "trouble")
    assert trouble["run reached its end"] == "the run is unfinished"
    text = diagnosis_text(data)
    assert "step 2,000 of 12,800 (15.6%); no checkpoint to resume from" in text
    # The training itself was sound.
    healthy = titles(data, "healthy")
    assert {"loss falls", "loss does not rise", "step time stays the same", "the accelerator is used"} <= healthy.keys()  # fmt: skip
    # Its log lines hold no validation of these steps; that is all that is held against it.
    assert trouble.keys() == {"run reached its end", "something is held out"}


@pytest.mark.parametrize("name", NEMO)
def test_a_nemo_run_ending_in_warm_up_without_validation_is_in_trouble(name):
    data = nemo_run(name, recipe=SETTINGS)
    assert titles(data, "trouble") == {
        "run reached its end": "the run is unfinished",
        "run goes on beyond its warm-up": "the run ends inside its warm-up",
        "something is held out": "no validation at all",
    }
    notes = titles(data, "note")
    assert notes == {"clipping acts now and then": "clipping was never active"}
    count = NEMO[name]["steps"]
    text = diagnosis_text(data)
    assert f"{count} steps made, 2,000 of warm-up: {count / 2000:.0%} of it" in text


@pytest.mark.parametrize("name", NEMO)
def test_a_nemo_export_without_settings_still_shows_a_rising_rate(name):
    data = nemo_run(name, recipe={})
    trouble = titles(data, "trouble")
    assert trouble["run goes on beyond its warm-up"] == "the run ends while its learning rate still rises"
    assert trouble["something is held out"] == "no validation at all"
    assert {"clipping acts now and then", "run reached its end"} <= titles(data, "unknown").keys()
