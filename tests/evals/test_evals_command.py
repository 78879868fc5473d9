"""The command line of `python -m pipeline.evals`: what is asked for, and what is refused before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.evals.__main__ import read_arguments
from pipeline.process.errors import RecipeError

ROOT = Path(__file__).parents[2]


def tasks(*words):
    return read_arguments(["model", *words]).tasks


def test_parts_of_an_evaluation_are_gathered_from_all_words_that_name_it():
    found = tasks("bpb", "lm_eval:hellaswag,arc_easy", "mine:score", "lm_eval:arc_easy, piqa", "chat:gsm8k")
    assert found == {"bpb": None, "lm_eval": ["hellaswag", "arc_easy", "piqa"], "mine:score": None, "chat": ["gsm8k"]}
    assert tasks("core:copa", "core") == {"core": None}
    assert tasks("core", "core:copa") == {"core": None}


def test_the_default_is_bpb_and_samples_or_only_the_own_task():
    assert tasks() == {"bpb": None, "samples": None}
    assert tasks("--own-task", "mine=mine.jsonl") == {"chat": []}
    assert tasks("chat:gsm8k", "--own-task", "mine=mine.jsonl") == {"chat": ["gsm8k"]}


@pytest.mark.parametrize("word", ["lm_eval", "lm_eval:", "lm_eval:a,,b", "core:", "chat:gsm8k,"])
def test_a_word_without_a_task_name_is_refused(word):
    with pytest.raises(RecipeError, match="names no task, so nothing was scored"):
        tasks(word)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cores"], "no evaluation called cores.*Did you mean core"),
        (["bpb:x"], "no evaluation called bpb:x"),
        (["core:copas"], "CORE has no task called copas.*copa"),
        (["chat", "--own-task", "mine"], "names no file.*NAME=FILE"),
        (["core", "--max-per-task", "0"], "--max-per-task 0 leaves nothing to score"),
        (["--own-task", "a=x.jsonl", "--own-task", "a=y.jsonl"], "two of --own-task have the same name"),
        (["core", "--output", "no/such/folder.json"], "folder.json is in no folder that exists"),
        (["chat", "--max-new-tokens", "-1"], "--max-new-tokens -1 leaves nothing to score"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(words, message):
    with pytest.raises(RecipeError, match=message):
        tasks(*words)


def test_reading_the_words_and_looking_for_the_harness_import_no_torch():
    code = (
        "import sys\nfrom pipeline.evals.__main__ import read_arguments\nfrom pipeline.evals.harness import require_harness\n"
        "read_arguments(['m', 'lm_eval:a', 'chat:gsm8k'])\ntry: require_harness()\nexcept Exception: pass\n"
        "assert not {'torch', 'transformers', 'datasets', 'lm_eval'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
