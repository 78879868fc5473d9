import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.data.__main__ import main
from pipeline.data.row_plan import folders_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe_file(bench, tmp_path) -> Path:
    bench.tokenizer.save_pretrained(tmp_path / "tokenizer")
    recipe = {
        "run": {"directory": str(tmp_path / "runs")},
        "tokenizer": {"path": str(tmp_path / "tokenizer"), "vocab_size": 600},
        "data": {
            "sources": [{"files": str(path), "name": path.stem} for path in bench.chat_files[:2]],
            "validation": [{"files": str(bench.chat_files[2])}],
            "row_tokens": 128,
            "batch_tokens": 1024,
            "shard_rows": 32,
            "cache_dir": str(tmp_path / "cache"),
        },
        "model": {"n_layer": 2, "n_embd": 32, "n_head": 2},
        "train": {"num_train_epochs": 1},
    }
    recipe["run"]["stage"] = "sft"
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture
def command(capsys):
    """The command in this process: (status, what it printed, what it printed on stderr)."""

    def run(*arguments):
        status = main([str(a) for a in arguments])
        return status, *capsys.readouterr()

    return run


def test_the_command_prepares_prints_shares_and_shows_trained_tokens_in_brackets(recipe_file, command):
    status, out, _ = command(recipe_file, "--show", 2)
    assert status == 0
    assert "talks" in out
    assert "share" in out
    assert "row 1: " in out
    assert "[[It is " in out
    assert "<|end|>]]" in out
    assert "[[What is" not in out


def test_prune_deletes_only_what_neither_the_recipe_nor_a_run_uses(recipe_file, command, tmp_path):
    shards = tmp_path / "cache" / "shards"
    assert command(recipe_file)[0] == 0
    first = set(shards.iterdir())
    assert command(recipe_file, "data.row_tokens=64")[0] == 0
    second = set(shards.iterdir()) - first
    (tmp_path / "runs" / "kept").mkdir(parents=True)
    named = sorted(second)[0]
    (tmp_path / "runs" / "kept" / "run_manifest.json").write_text(f'{{"data": "{named.name}"}}')
    status, out, _ = command(recipe_file, "--prune")
    assert status == 0
    assert f"{len(second) - 1} unused shard folders deleted" in out
    assert set(shards.iterdir()) == first | {named}


def test_a_missing_file_is_told_in_one_sentence_with_status_66(recipe_file):
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.data", str(recipe_file), "data.validation=[{files: nowhere/*.jsonl}]"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 66
    assert "nowhere/*.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_prune_keeps_what_other_runs_use_and_what_was_prepared_lately(recipe_file, command, tmp_path):
    shards = tmp_path / "cache" / "shards"
    assert command(recipe_file)[0] == 0
    mine = set(shards.iterdir())
    prepared = {}
    for number, name in enumerate(("there", "gone", "disk away", "old", "very old")):
        assert command(recipe_file, f"data.shard_rows={64 + number}")[0] == 0
        prepared[name] = set(shards.iterdir()) - mine - set().union(*prepared.values())
    places = {"there": "elsewhere/run", "gone": "elsewhere/other", "disk away": "unmounted/runs/run"}
    for name, place in places.items():
        for folder in prepared[name]:
            (folder / "users").write_text(json.dumps(str(tmp_path / place)) + "\n")
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    (tmp_path / "elsewhere" / "run" / "run_manifest.json").write_text("{}")
    for folder in prepared["old"] | prepared["very old"]:
        (folder / "users").unlink()
    for folder in prepared["very old"]:
        os.utime(folder, (0, 0))
    assert command(recipe_file, "--prune")[0] == 0
    assert set(shards.iterdir()) == mine | prepared["there"] | prepared["disk away"] | prepared["old"]


def test_a_training_notes_its_run_directory_beside_the_shards_once(bench, tmp_path):
    recipe = bench.recipe()
    for _ in range(2):
        preparation = bench.started(recipe, run=tmp_path / "a run")
        preparation.close()
    for folder in folders_of(preparation.plan):
        assert (folder / "users").read_text() == json.dumps(str(tmp_path / "a run")) + "\n"
