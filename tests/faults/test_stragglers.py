"""A rank that is slower than the others is measured by its own time, and named."""

import pytest

from pipeline.run_dir.rows import read_rows
from tests.runner import WarmRunner

pytestmark = pytest.mark.full

# Rank 1 computes slowly from step 4 on. The other one waits for it in the exchange of gradients, and takes as long in all.
SLOW = """
import os, time
from transformers import TrainerCallback


class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if os.environ["RANK"] == "1" and state.global_step == 4:
            model.register_forward_pre_hook(lambda *_: time.sleep(0.2))
"""


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files, warm) -> WarmRunner:
    return WarmRunner(tmp_path, cache, text_files, chat_files, warm)


def test_the_slow_rank_is_named_after_several_intervals_and_logged(runner):
    (runner.folder / "mine.py").write_text(SLOW)
    train = {"max_steps": 12, "save_steps": 100, "per_device_train_batch_size": 4, "logging_steps": 2}
    recipe = runner.recipe("slow", "gpt2", train=train, run={"callbacks": ["mine:Slow"]})
    output = runner.train(recipe, ranks=2).output
    directory = runner.folder / "runs" / "slow"
    rows = [row for row in read_rows(directory / "metrics.jsonl") if "perf/slowest_rank" in row]
    assert [row["step"] for row in rows] == [1, 2, 4, 6, 8, 10, 12]
    late = [row for row in rows if row["step"] >= 6]
    assert {row["perf/slowest_rank_id"] for row in late} == {1}
    assert all(row["perf/slowest_rank"] > 1.5 for row in late)
    events = [row for row in read_rows(directory / "metrics.jsonl") if row.get("event") == "straggler"]
    (event,) = (row for row in events if row["rank"] == 1)
    assert event["ratio"] > 1.5
    assert output.count("straggler: rank 1 takes ") == 1  # once for as long as it lasts
    assert not (directory / "stacks").exists()
