"""A long run takes no more memory, file descriptors, threads and temporary files than a short one."""

import json
import statistics

import pytest

from tests.runner import Runner

pytestmark = pytest.mark.full

# Notes after every step what the main process holds, and what all processes of the run left in the temporary folders.
NOTES = """
import json
import os
import tempfile

import psutil
from transformers import TrainerCallback


def entries(folder):
    found = 0
    for _, folders, files in os.walk(folder):
        # A third checkpoint is there while it is written: the test reads these when the run has ended.
        folders[:] = [name for name in folders if name != "checkpoints"]
        found += len(folders) + len(files)
    return found


class Notes(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        process = psutil.Process()
        noted = {
            "step": state.global_step,
            "rss": process.memory_info().rss,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "children": len(process.children(recursive=True)),
            "temporary": entries(tempfile.gettempdir()),
            "run": entries("runs"),
        }
        with open("notes.jsonl", "a") as file:
            file.write(json.dumps(noted) + "\\n")
"""
COUNTS = ("descriptors", "threads", "children", "temporary", "run")


@pytest.mark.parametrize(
    "steps", [300, pytest.param(5000, marks=pytest.mark.slow), pytest.param(20_000, marks=pytest.mark.slow)]
)
def test_what_a_run_holds_stays_where_it_is(tmp_path, cache, text_files, chat_files, steps):
    runner = Runner(tmp_path, cache, text_files, chat_files)
    (tmp_path / "mine.py").write_text(NOTES)
    (tmp_path / "temporary").mkdir()
    every = 50 if steps <= 5000 else 100
    train = {
        "max_steps": steps,
        "save_steps": every,
        "eval_steps": every,
        "per_device_train_batch_size": 8,
        "logging_steps": 5,
    }
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 1, "options": {"sliding_window": 16}}
    recipe = runner.recipe(
        "leak",
        "modern",
        train=train,
        run={"callbacks": ["mine:Notes"], "keep_best": False},  # which may come late
        model=sizes,
        samples={"every_steps": every, "prompts": ["The"], "max_new_tokens": 8},
    )
    # One shard a source: open shards are descriptors too, up to eight of each source.
    overrides = ["data.row_tokens=32", "data.batch_tokens=256", "data.shard_rows=4096", "evals.bpb.tokens=1024"]
    # Threads that spin would starve other tests.
    environment = {"TMPDIR": str(tmp_path / "temporary"), "OMP_WAIT_POLICY": "passive"}
    process = runner.start(recipe, *overrides, **environment)
    output, _ = process.communicate(timeout=10_000)
    assert process.returncode == 0, output[-3000:]
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    warm = [note for note in notes if steps // 5 <= note["step"] < 2 * steps // 5]
    late = [note for note in notes if note["step"] >= 4 * steps // 5]
    most = {name: (max(n[name] for n in warm), max(n[name] for n in late)) for name in ("rss", *COUNTS)}
    growth = most["rss"][1] / most["rss"][0] - 1
    slope, _ = statistics.linear_regression(
        [note["step"] for note in notes if note["step"] >= steps // 5],
        [note["rss"] for note in notes if note["step"] >= steps // 5],
    )
    counts = ", ".join(f"{name} {most[name][0]} -> {most[name][1]}" for name in COUNTS)
    print(
        f"{steps} steps: {most['rss'][0] / 2**20:.1f} MiB, growth {100 * growth:.2f} %, slope {1000 * slope / 1024:.1f} KiB per 1000 steps, {counts}"
    )
    assert growth < 0.01
    for name in COUNTS:  # late their middle: a file is open and temporary for a moment while a checkpoint is written
        before, after = most[name][0], statistics.median_high(note[name] for note in late)
        assert after <= before, name
    checkpoints = tmp_path / "runs/leak/checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {
        ".writing",
        f"checkpoint-{steps - every}",
        f"checkpoint-{steps}",
    }
    newest, older = (sorted(path.name for path in checkpoints.glob(f"*-{step}/*")) for step in (steps, steps - every))
    assert newest == older
