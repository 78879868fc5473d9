"""What a run says at its end, from its own files."""

import shlex
import time

import pytest

from pipeline.process import commands
from pipeline.process.commands import command, stage_command
from pipeline.recipe import read_recipe
from pipeline.run.finish import next_lines, result_text, time_text
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory


def ends(recipe, name, directory):
    """Return the commands that a run of this recipe ends with, by the word before them."""
    run = RunDirectory(directory / "runs" / "mine")
    run.path.mkdir(parents=True, exist_ok=True)
    read = read_recipe([recipe], stage=name)
    files = [place.rpartition(":")[0] for place in read.places.values()]
    lines = next_lines(run, stage=name, prompts=read.samples.prompts, files=files)
    return dict(line.split(maxsplit=1) for line in (line.replace("stage 2", "stage-2") for line in lines))


def test_the_result_shows_first_and_last_score_and_which_way_is_better():
    found = {"val/bpb/first": 2.5319, "val/bpb": 0.1798, "val/loss/first": 6.5, "val/loss": 0.4}
    assert result_text(found) == "val/bpb 2.532 -> 0.180 (lower is better)"
    chat = {"chat/world/first": 0.0, "chat/world": 0.8167, "chat/world/sum": 1.0, "sft/assistant_bpb/first": 0.5, "sft/assistant_bpb": 0.5}  # fmt: skip
    assert result_text(chat) == "chat/world 0.0 % -> 81.7 %, sft/assistant_bpb 0.500 (lower is better)"
    assert result_text({"train/loss": 3.25}) == "train/loss 3.250"


def test_the_time_of_a_start_has_the_parts_that_it_had(tmp_path):
    run, now = RunDirectory(tmp_path), time.time()
    first = {"event": "attempt", "attempt": 1, "step": 0, "time": now - 500}
    for row in (first, {"attempt": 1, "step": 9, "perf/total_s": 100.0}):
        append_row(run.metrics, row)
    append_row(run.metrics, {"event": "attempt", "attempt": 2, "step": 9, "time": now - 300})
    append_row(run.metrics, {"attempt": 2, "step": 19, "perf/total_s": 340.0})
    append_row(run.metrics, {"attempt": 2, "step": 19, "perf/eval_s": 12.0, "chat/eval_s": 8.0})
    said = time_text(run, attempt=2)
    assert "in start 2: training 4.0 min, evaluation 20 s" in said


@pytest.mark.parametrize("console", [None, "tandem"])
def test_the_next_commands_are_those_of_the_program_that_was_started(monkeypatch, tmp_path, console):
    monkeypatch.setenv(commands.CONSOLE, console) if console else monkeypatch.delenv(commands.CONSOLE, raising=False)
    monkeypatch.chdir(commands.ROOT)
    said = ends("recipes/quickstart_pretrain.yaml", "pretrain", tmp_path)
    talk = shlex.split(said["talk"])
    assert talk[:2] == ["tandem", "chat"] if console else talk[-5:-3] == ["-m", "pipeline.chat"]
    assert talk[-1] == read_recipe(["recipes/quickstart_pretrain.yaml"], stage="pretrain").samples.prompts[0]
    start = f"model.start_from={tmp_path}/runs/mine"
    script = "bash run_sft.sh recipes/quickstart_sft.yaml"
    assert said["stage-2"] == f"{'tandem sft quickstart_sft' if console else script} {start}"
    assert "stage-2" not in ends("recipes/quickstart_sft.yaml", "sft", tmp_path)


def test_stage_2_of_own_text_is_the_recipe_for_own_conversations(monkeypatch, tmp_path):
    monkeypatch.setenv(commands.CONSOLE, "tandem")
    recipe = tmp_path / "book.yaml"
    recipe.write_text("extends: own_text\ndata: {sources: [{files: book.jsonl}]}\n")
    assert shlex.split(ends(str(recipe), "pretrain", tmp_path)["stage-2"])[:3] == ["tandem", "sft", "own_chat"]
    other = tmp_path / "other.yaml"
    other.write_text(
        "run: {stage: pretrain}\nmodel: {depth: 2}\ntrain: {max_steps: 3}\ndata: {batch_tokens: 4096, sources: [{files: book.jsonl}]}\n"
    )
    assert shlex.split(ends(str(other), "pretrain", tmp_path)["stage-2"])[:3] == ["tandem", "sft", "RECIPE"]


def test_what_a_shell_would_change_is_quoted(monkeypatch):
    monkeypatch.setenv(commands.CONSOLE, "tandem")
    for argument in ("a b", "it's", 'say "a"', "$HOME", "runs/mine", ""):
        assert shlex.split(command("chat", argument)) == ["tandem", "chat", argument]
    assert stage_command("own_chat", "sft", ["run.name=x"]) == "tandem sft own_chat run.name=x"
