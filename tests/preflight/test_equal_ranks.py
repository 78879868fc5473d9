"""Ranks that would not train the same are refused before step 1: two real gloo ranks, each with its own command line."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def said_by(recipe: Path, overrides: list[list[str]]) -> list[tuple[int, str]]:
    """(status, output) of the ranks of one run, each started by itself as on a machine of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(len(overrides)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(ROOT),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "pipeline" / "pretrain.py"), str(recipe), *own],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, own in enumerate(overrides)
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


@pytest.fixture
def recipe(text_files, tmp_path) -> Path:
    path = tmp_path / "two.yaml"
    recipe = {
        "run": {"stage": "pretrain", "directory": str(tmp_path / "runs")},
        "tokenizer": {"vocab_size": 600},
        "data": {"sources": [{"files": str(text_files[0])}], "row_tokens": 64, "batch_tokens": 512},
        "model": {"n_layer": 1, "n_embd": 32, "n_head": 2},
        "optimizer": {"type": "adamw"},
        "train": {"max_steps": 2, "save_steps": 10},
    }
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_another_rate_and_cadence_on_one_rank_end_both_with_the_difference(recipe):
    ranks = said_by(recipe, [["train.save_steps=10"], ["train.save_steps=7", "train.seed=3"]])
    assert [status for status, _ in ranks] == [64, 64], ranks
    text = ranks[0][1]  # the others have nothing to add
    assert f"train.save_steps: 10 on {socket.gethostname()}, 7 on {socket.gethostname()} (rank 1)" in text
    assert "train.seed: " in text
    assert "Give every machine the same recipe" in text
