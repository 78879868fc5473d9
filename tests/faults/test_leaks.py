"""A long run takes no more memory and no more file descriptors than a short one."""

import json

import pytest

from tests.runner import Runner

# Notes the main process's resident memory and descriptors after every step.
NOTES = """
import json
import psutil
from transformers import TrainerCallback


class Notes(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        process = psutil.Process()
        with open("notes.jsonl", "a") as file:
            file.write(json.dumps([state.global_step, process.memory_info().rss, process.num_fds()]) + "\\n")
"""


@pytest.mark.parametrize("steps", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_memory_and_descriptors_stay_where_they_are(tmp_path, cache, text_files, chat_files, steps):
    runner = Runner(tmp_path, cache, text_files, chat_files)
    (tmp_path / "mine.py").write_text(NOTES)
    train = {
        "max_steps": steps,
        "save_steps": 50,
        "eval_steps": 50,
        "per_device_train_batch_size": 8,
        "logging_steps": 5,
    }
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "options": {"sliding_window": 16}}
    recipe = runner.recipe(
        "leak",
        "modern",
        train=train,
        run={"callbacks": ["mine:Notes"]},
        model=sizes,
        samples={"every_steps": 50, "prompts": ["The"], "max_new_tokens": 8},
    )
    # One shard a source: open shards are descriptors too, up to eight of each source.
    overrides = ["data.row_tokens=32", "data.batch_tokens=256", "data.shard_rows=4096", "evals.bpb.tokens=1024"]
    process = runner.start(recipe, *overrides, OMP_WAIT_POLICY="passive")  # threads that spin would starve other tests
    output, _ = process.communicate(timeout=3000)
    assert process.returncode == 0, output[-3000:]
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    warm = [(rss, fds) for step, rss, fds in notes if steps // 5 <= step < 2 * steps // 5]
    late = [(rss, fds) for step, rss, fds in notes if step >= 4 * steps // 5]
    growth = max(rss for rss, _ in late) / max(rss for rss, _ in warm) - 1
    print(
        f"{steps} steps: {warm[-1][0] / 2**20:.1f} MiB, growth {100 * growth:.2f} %, descriptors {warm[-1][1]} -> {late[-1][1]}"
    )
    assert growth < 0.01
    assert max(fds for _, fds in late) <= max(fds for _, fds in warm)
