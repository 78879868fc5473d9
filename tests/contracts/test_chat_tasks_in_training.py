"""Chat tasks while a run trains: at their cadence and at the end, by all ranks, with what a recipe gets wrong said before
step 1."""

import json

import pytest

from pipeline.run_dir.rows import read_rows
from tests.evals.chat_task_files import write_all, write_jsonl
from tests.runner import MODELS

# Writes down whether autocast was on: in forward passes of training (True, ...) and of generating (False, ...).
PRECISION = """
import json
from pathlib import Path

import torch
from transformers import TrainerCallback


class Precision(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen = []
        block = next(m for name, m in model.named_modules() if name.endswith("c_attn"))
        block.register_forward_pre_hook(
            lambda module, inputs: self.seen.append([model.training, torch.is_autocast_enabled("cpu")])
        )

    def on_train_end(self, args, state, control, **kwargs):
        Path(__file__).with_name("precision.json").write_text(json.dumps(self.seen))
"""


@pytest.fixture
def runner(runner):
    return runner


def recipe_of(runner, name, **chat):
    data = runner.folder / "tasks"
    data.mkdir(exist_ok=True)
    write_all(data, 6)
    own = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it"}]
    write_jsonl(data / "own.jsonl", [{"messages": own}] * 3)
    settings = {
        "every_steps": 4,
        "tasks": ["arc_easy", "gsm8k"],
        "own": [{"name": "mine", "files": "tasks/own.jsonl", "checker": "contains"}],
        "data": "tasks",
        "max_per_task": 5,
        "max_new_tokens": 6,
    }
    return runner.sft_recipe(
        name,
        "gpt2",
        model={**MODELS["gpt2"]["model"], "n_positions": 512},
        train={"max_steps": 10, "per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": 5, "seed": 7},
        evals={"bpb": {"tokens": 1024, "at_start": False}, "chat": settings | chat},
    )


def entries_of(run):
    return json.loads((run.directory / "report" / "evals.json").read_text())["entries"]


@pytest.mark.full
def test_chat_tasks_are_scored_at_their_cadence_and_change_nothing(runner):
    run = runner.train(recipe_of(runner, "scored"), stage="sft")
    for name in ("chat/arc_easy", "chat/gsm8k", "chat/mine", "chat/eval_s"):
        assert sorted(run.values(name)) == [4, 8, 10]
    last = entries_of(run)[-1]
    assert [row["name"] for row in last["results"]] == ["chat/arc_easy", "chat/gsm8k", "chat/mine"]
    assert [(row["items"], row["of"], row["too_long"]) for row in last["results"]] == [(5, 6, 0), (5, 6, 0), (3, 3, 0)]
    parts = last["results"][1]["protocol_parts"]
    assert (parts["items"], parts["max_new_tokens"]) == (5, 6)
    assert "step 00010 | chat/arc_easy" in (run.directory / "console.log").read_text()
    plain = runner.train(recipe_of(runner, "plain", every_steps=None), stage="sft")
    assert plain.values("train/loss") == run.values("train/loss")


@pytest.mark.full
def test_each_subject_has_its_own_score_and_the_start_is_scored(runner):
    recipe = recipe_of(runner, "subjects", every_steps=10, at_start=True, tasks=[])
    said = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it"}]
    write_jsonl(runner.folder / "tasks" / "own.jsonl", [{"messages": said, "subject": s} for s in ("a", "b", "b")])
    run = runner.train(recipe, stage="sft")
    for name in ("chat/mine", "chat/mine/a", "chat/mine/b"):
        assert sorted(run.values(name)) == [0, 10]
    first, last = entries_of(run)
    assert [(row["name"], row["items"]) for row in first["results"]] == [
        ("chat/mine", 3),
        ("chat/mine/a", 1),
        ("chat/mine/b", 2),
    ]
    assert {row["protocol"] for row in last["results"]} == {row["protocol"] for row in first["results"]}
    assert "chat/mine: 0.0% answered right: a 0%, b 0%" in run.output
    assert "mine/b" in (run.directory / "report" / "report.md").read_text()


@pytest.mark.full
def test_cpu_answers_are_generated_in_float32_while_training_stays_in_bfloat16(runner):
    (runner.folder / "precision.py").write_text(PRECISION)
    recipe = recipe_of(runner, "precision", every_steps=10, at_start=True, tasks=[])
    run = runner.train(recipe, "train.bf16=true", "run.callbacks=[precision:Precision]", stage="sft")
    seen = {tuple(pair) for pair in json.loads((runner.folder / "precision.json").read_text())}
    assert {(True, True), (False, False)} <= seen
    assert (True, False) not in seen
    assert {row["dtype"] for entry in entries_of(run) for row in entry["results"]} == {"float32"}


def test_two_ranks_have_the_chat_scores_of_one(runner):
    one = runner.train(recipe_of(runner, "one", every_steps=10), stage="sft")
    two = runner.train(recipe_of(runner, "two", every_steps=10), ranks=2, stage="sft")
    results = {}
    for name, run in (("one", one), ("two", two)):
        results[name] = entries_of(run)[0]["results"]
        for row in results[name]:
            del row["seconds"]
            assert row.get("contamination", {"text_of": [name]}).pop("text_of") == [name]
    assert results["one"][0]["items"] == 5
    assert results["one"] == results["two"]


@pytest.mark.full
def test_a_failing_checker_is_reported_on_both_ranks_and_training_continues(runner):
    (runner.folder / "own_checks.py").write_text("def broken(messages, text):\n    raise KeyError('nothing')\n")
    own = [{"name": "mine", "files": "tasks/own.jsonl", "checker": "own_checks:broken"}]
    run = runner.train(recipe_of(runner, "broken", every_steps=10, own=own), ranks=2, stage="sft")
    assert "chat was not scored (DataError: " in run.output
    assert "the checker of mine raised KeyError: 'nothing'" in run.output
    (failed,) = [r for r in read_rows(run.directory / "metrics.jsonl") if r.get("event") == "evaluation_failed"]
    assert (failed["name"], failed["step"]) == ("chat", 10)
    assert (run.directory / "model" / "config.json").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("chat", "message", "status"),
    [
        ({"tasks": ["arc"]}, "there is no chat task called arc", 64),
        ({"tasks": ["humaneval"]}, "Allow it with --execute or evals.chat.execute: true", 64),
        ({"own": [{"name": "mine", "files": "tasks/none.jsonl"}]}, "none.jsonl", 66),
        ({"own": [{"files": "tasks/own.jsonl"}]}, "a task of evals.chat.own needs a name", 64),
        ({"data": "elsewhere"}, "elsewhere", 66),
    ],
)
def test_what_cannot_be_scored_is_said_before_the_first_step(runner, chat, message, status):
    refused = runner.train(recipe_of(runner, "refused", **chat), status=status, stage="sft")
    assert message in refused.output
    assert "step 0000" not in refused.output
