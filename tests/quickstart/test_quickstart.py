"""The newcomer's path, whole: both scripts from nothing prepared, and what the README says they reach. Slow: run by hand.

bash run_tests.sh -m slow tests/quickstart
"""

import os
import re
import subprocess
import time
from itertools import islice
from pathlib import Path

import pytest

from pipeline.run_dir.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
QUESTIONS, ANSWERED_WITHIN, MUST_STOP = 50, 128, 45


def run_script(name: str, folder: Path) -> tuple[float, RunDirectory]:
    """Seconds and the run directory of one script with its default recipe."""
    started = time.monotonic()
    environment = {**os.environ, "TANDEM_CACHE": str(folder / "cache")}
    command = ["bash", str(ROOT / name), f"run.directory={folder / 'runs'}"]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    path = re.search(r"^run (\S+): starting", done.stdout, re.MULTILINE)[1]
    return time.monotonic() - started, RunDirectory(path)


def answers_that_stop(run: RunDirectory, questions: list[str]) -> tuple[int, int]:
    """How many answers end with the end token in time, and how many hold another control token before it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipeline.generation.stream import stream
    from pipeline.tokenizer.chat import prompt_ids
    from pipeline.tokenizer.specials import control_ids

    tokenizer = AutoTokenizer.from_pretrained(run.model, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(run.model, trust_remote_code=True).eval()
    end, controls = tokenizer.eos_token_id, control_ids(tokenizer)
    stopped = strange = 0
    for question in questions:
        ids = prompt_ids(tokenizer, [{"role": "user", "content": question}])
        answer = list(stream(model, tokenizer, ids, max_new_tokens=ANSWERED_WITHIN, stop_ids=[]))
        told = answer[: answer.index(end)] if end in answer else answer
        stopped += end in answer
        strange += bool(controls & set(told))
    return stopped, strange


@pytest.mark.slow
def test_the_quickstart_reaches_what_the_readme_says(tmp_path):
    from pipeline.recipe import read_recipe
    from pipeline.sources.open import open_sources

    pretraining_s, base = run_script("run_pretrain.sh", tmp_path)
    reached = base.read_manifest()["results"]
    print(f"pretraining {pretraining_s:.0f} s, val/bpb {reached['val/bpb/first']:.4f} -> {reached['val/bpb']:.4f}")
    sft_s, chat = run_script("run_sft.sh", tmp_path)
    tuned = chat.read_manifest()["results"]
    print(
        f"SFT {sft_s:.0f} s, sft/assistant_bpb {tuned['sft/assistant_bpb/first']:.4f} -> {tuned['sft/assistant_bpb']:.4f}"
    )

    recipe = read_recipe(
        [str(ROOT / "recipes" / "quickstart_sft.yaml"), f"data.cache_dir={tmp_path / 'cache'}"], stage="sft"
    )
    held_out = open_sources(recipe, kind="chat")[1][0]
    conversations = (item for block in held_out.read() for item in block.items)
    questions = [c.messages[0]["content"] for c in islice(conversations, QUESTIONS)]
    stopped, strange = answers_that_stop(chat, questions)
    print(
        f"of {len(questions)} held-out questions {stopped} answers stop within {ANSWERED_WITHIN} tokens, {strange} hold another control token"
    )

    assert pretraining_s <= 7 * 60
    assert sft_s <= 4 * 60
    assert reached["val/bpb"] <= 1.48
    assert reached["val/bpb"] <= 0.40 * reached["val/bpb/first"]
    assert tuned["sft/assistant_bpb"] <= 0.75 * tuned["sft/assistant_bpb/first"]
    assert len(questions) == QUESTIONS
    assert stopped >= MUST_STOP
    assert strange == 0
