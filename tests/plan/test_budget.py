"""plan/budget.py: a schedule that ends in time, and enough steps for few chats."""

import json
from dataclasses import replace

import pytest

from pipeline.plan.budget import LEAST_CHAT_STEPS, SCORINGS, _within, schedule_of, steps_within
from pipeline.plan.plan import FORWARD, START_S
from pipeline.plan.probe import Probe
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.run_dir.earlier_runs import EarlierRuns
from tests.planned import RECIPES, quickstart_plan


def probed_plan(folder, *overrides, step_s=0.5):
    plan = quickstart_plan(folder, *overrides)
    return replace(plan, probe=Probe(step_s=step_s, steps=9, first_step_s=20.0, peak_bytes=2**30))


@pytest.mark.parametrize("minutes", [3, 10, 60])
@pytest.mark.parametrize("step_s", [0.05, 0.5, 5.0])
def test_start_steps_and_scorings_end_inside_of_the_budget(tmp_path, minutes, step_s):
    plan = probed_plan(tmp_path, "train.max_steps=100000", step_s=step_s)
    keys = _within(plan, 60 * minutes)
    steps, scored = keys["train.max_steps"], 2 * keys.get("evals.bpb.tokens", plan.recipe.evals.bpb.tokens)
    start_s = START_S["cpu"] + 20.0
    scoring_s = (SCORINGS + 1) * FORWARD * scored * step_s / plan.batch_tokens
    spent = start_s + steps * step_s + (scoring_s if scored > 2**14 else 0)  # the least that is scored may not fit
    assert spent <= 60 * minutes
    assert spent >= 0.6 * 60 * minutes


def test_a_run_that_fits_keeps_its_passes(tmp_path):
    keys = _within(probed_plan(tmp_path, "train.max_steps=10"), 600)
    assert "train.max_steps" not in keys


def chats(folder, count):
    rows = []
    for n in range(count):
        turns = [{"role": "user", "content": f"What comes after {n}?"}, {"role": "assistant", "content": f"{n + 1}."}]
        rows.append(json.dumps({"messages": turns}))
    (folder / "chats.jsonl").write_text("\n".join(rows))
    sources = json.dumps([{"files": str(folder / "chats.jsonl")}])
    return [str(RECIPES / "own_chat.yaml"), f"data.sources={sources}", "model.start_from=null", "model.depth=2"]


@pytest.mark.full
def test_few_chats_get_small_steps_and_more_passes(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    words = chats(tmp_path, 400)
    shipped = read_recipe(words, stage="sft")
    found = schedule_of(words, stage="sft", minutes=None)
    assert found.keys["data.batch_tokens"] == shipped.data.row_tokens
    assert found.keys["train.per_device_train_batch_size"] == 1
    assert found.passes > shipped.train["num_train_epochs"]
    assert found.steps >= LEAST_CHAT_STEPS or found.passes == 10
    assert found.minutes > 0
    assert not found.measured


@pytest.mark.full
def test_every_process_keeps_a_row_of_a_small_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NPROC", "4")
    words = chats(tmp_path, 100)
    found = schedule_of(words, stage="sft", minutes=None)
    assert found.keys["data.batch_tokens"] == 4 * read_recipe(words, stage="sft").data.row_tokens
    assert found.keys["train.per_device_train_batch_size"] == 1


def test_minutes_that_leave_no_time_are_refused(tmp_path, monkeypatch):
    from pipeline.launch.init import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="--minutes 1 is no time"):
        main(["texts", "--minutes", "1"])


def within(folder, *overrides):
    places = [f"run.directory={folder}/runs", f"data.cache_dir={folder}/cache"]
    return read_recipe([str(RECIPES / "quickstart_pretrain.yaml"), *places, *overrides], earlier=EarlierRuns())


@pytest.mark.full
def test_the_steps_of_a_run_by_minutes_are_planned_to_fill_them(tmp_path):
    recipe = within(tmp_path, "run.minutes=3", "train.eval_steps=20", "train.save_steps=20")
    steps, probe = steps_within(recipe)
    assert "max_steps" not in recipe.train
    plan = quickstart_plan(tmp_path, f"train.max_steps={steps}", "train.eval_steps=20", "train.save_steps=20")
    seconds = replace(plan, probe=probe).duration.total
    assert 100 < seconds < 180  # what measuring took is left out


def test_minutes_replace_an_inherited_horizon_and_are_one(tmp_path):
    assert within(tmp_path, "run.minutes=3").horizons == ["run.minutes"]
    with pytest.raises(RecipeError, match="is a second horizon after"):
        within(tmp_path, "run.minutes=3", "train.max_steps=9")


def test_minutes_of_other_hardware_are_planned_by_arithmetic(tmp_path, capsys):
    steps, probe = steps_within(within(tmp_path, "run.minutes=60", "run.hardware=8xH100"))
    assert probe is None
    assert steps > 1000
    assert "by arithmetic" in capsys.readouterr().out


def test_too_few_minutes_for_what_surrounds_the_steps_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="5 steps with start, scoring and saves take"):
        steps_within(within(tmp_path, "run.minutes=1", "run.hardware=8xH100", "evals.bpb.tokens=100000000000"))
