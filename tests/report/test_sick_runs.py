"""Runs made sick on purpose, trained by the real entry: the diagnosis names each sickness, and the healthy run healthy.

The thresholds were fixed before the first of these runs. Slow: bash run_tests.sh -m slow -s tests/report/test_sick_runs.py
"""

import json

import pytest

from pipeline.report.diagnosis import verdict
from pipeline.report.diagnosis_rules import diagnose
from pipeline.report.run_data import read_run
from tests.conftest import docstrings
from tests.runner import WarmRunner

pytestmark = pytest.mark.slow

# Beside the recipes, as a user's own code lies there.
OWN_CODE = """
import time

import numpy as np
import torch
from transformers import TrainerCallback


def slow_reader(row):
    time.sleep(0.1)  # a document of a slow service
    return row["text"]


class Poison(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 120:
            with torch.no_grad():
                next(model.parameters())[0, 0] = float("nan")


class Hoard(TrainerCallback):
    def __init__(self):
        self.kept = []

    def on_step_end(self, args, state, control, **kwargs):
        self.kept.append(np.ones(2**18, dtype=np.float32))
        self.norms = [float(np.linalg.norm(one)) for one in self.kept]
"""
STEPS = 240
TRAIN = {"max_steps": STEPS, "per_device_train_batch_size": 8, "logging_steps": 2, "save_steps": 120, "eval_steps": 40}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "options": NO_DROPOUT}
EVALS = {"bpb": {"tokens": 4096, "document_bytes": 0}}


@pytest.fixture
def runner(tmp_path, text_files, chat_files, cache, warm) -> WarmRunner:
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    return WarmRunner(tmp_path, cache, text_files, chat_files, warm)


def documents(runner, name, texts):
    path = runner.folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def diagnosed(runner, name, *, status=0, train=None, **sections):
    """Findings by rule of a training of that recipe."""
    sections = {"model": SMALL, "optimizer": {"type": "adamw"}, "evals": EVALS, **sections}
    recipe = runner.recipe(name, "gpt2", train={**TRAIN, **(train or {})}, **sections)
    run = runner.train(recipe, status=status).directory
    findings = diagnose(read_run(str(run)))
    print(f"\n{name}: {verdict(findings)}")
    for rule, finding in findings.items():
        if finding.level in ("trouble", "note"):
            print(f"  {finding.level:8} {rule}: {finding.title} | {finding.evidence}")
    return findings


def troubles(findings):
    return {rule for rule, finding in findings.items() if finding.level == "trouble"}


def test_a_healthy_run_is_called_healthy(runner):
    findings = diagnosed(runner, "healthy")
    assert troubles(findings) == set()
    assert verdict(findings).startswith("**Healthy**")


def test_a_rate_that_is_too_high_is_seen_in_the_loss(runner):
    findings = diagnosed(runner, "high-rate", optimizer={"type": "adamw", "rate_scale": 30.0})
    in_the_loss = {"loss falls", "loss does not rise", "loss does not spike"}
    assert troubles(findings) & in_the_loss
    assert troubles(findings) <= in_the_loss


def test_a_reader_that_is_slow_is_seen_as_a_data_stall(runner):
    texts = docstrings(modules=60)[::4]
    # Many files, because a file's rows are read in blocks: of one file all waiting would come before the first step.
    for part in range(0, len(texts), 4):
        documents(runner, f"slow-{part:04}", texts[part : part + 4])
    findings = diagnosed(
        runner,
        "stalled",
        tokenizer={"vocab_size": 512, "train_chars": 50_000},
        data={
            "sources": [{"files": str(runner.folder / "slow-*.jsonl"), "format": "own_code:slow_reader"}],
            "shard_rows": 16,
            "packing_documents": 16,
        },
        train={"max_steps": STEPS // 4, "eval_steps": 20, "save_steps": 30},
    )
    assert "data does not stall the steps" in troubles(findings)


def test_a_parameter_that_becomes_nan_is_named_with_its_step(runner):
    findings = diagnosed(runner, "nan", status=76, run={"callbacks": ["own_code:Poison"]})
    assert troubles(findings) == {"every number is finite", "run reached its end"}
    assert "step 12" in findings["every number is finite"].evidence


def test_a_callback_that_keeps_memory_and_slows_steps_is_called_drift(runner):
    findings = diagnosed(runner, "leak", run={"callbacks": ["own_code:Hoard"]})
    assert "step time stays the same" in troubles(findings)


def test_validation_text_that_is_trained_on_is_seen_as_a_leak(runner):
    texts = docstrings(modules=60)[:25]
    findings = diagnosed(
        runner,
        "leaked",
        data={
            "sources": [{"files": documents(runner, "few", texts)}],
            "validation": [{"files": documents(runner, "held", texts[:10])}],
        },
        model={**SMALL, "n_embd": 128},
        train={"max_steps": 2 * STEPS},
    )
    assert "validation text is not trained on" in troubles(findings)


def test_text_that_is_learnt_by_heart_is_seen_in_validation(runner):
    texts = docstrings(modules=60)
    findings = diagnosed(
        runner,
        "memorised",
        data={
            "sources": [{"files": documents(runner, "few", texts[:25])}],
            "validation": [{"files": documents(runner, "held", texts[100:140])}],
        },
        model={**SMALL, "n_embd": 128},
        train={"max_steps": 2 * STEPS},
    )
    assert "validation keeps falling" in troubles(findings)
    assert findings["validation text is not trained on"].level == "healthy"
