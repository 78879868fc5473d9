"""Memory that really runs out: the status, the micro-batch that fits, and that it does."""

import json
import re

import pytest

from tests.runner import Runner

pytestmark = pytest.mark.full

# Limits the address space of the process when training begins: what is mapped by then and $HEADROOM MB.
LIMIT = """
import os, resource
import psutil
from transformers import TrainerCallback


class Limits(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        limit = psutil.Process().memory_info().vms + int(os.environ["HEADROOM"]) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files) -> Runner:
    return Runner(tmp_path, cache, text_files, chat_files)


def test_the_micro_batch_that_is_named_is_the_largest_divisor_that_fits(runner):
    (runner.folder / "mine.py").write_text(LIMIT)
    train = {"max_steps": 3, "save_steps": 100, "per_device_train_batch_size": 96, "logging_steps": 1}
    # Of the headroom a row takes some 7 MB, so that a divisor more takes more than what is left to threads.
    model = {"n_layer": 8, "n_embd": 128, "n_head": 4}
    recipe = runner.recipe("memory", "gpt2", train=train, model=model, run={"callbacks": ["mine:Limits"]})
    # glibc then maps every large block by itself and gives it back at once: what is mapped is what is used.
    how = {"HEADROOM": "217", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    how["OMP_WAIT_POLICY"] = "passive"  # threads that spin would starve other tests
    batch = "data.batch_tokens=6144"  # 96 rows of 64
    stopped = runner.train(recipe, batch, status=71, **how)
    failure = json.loads((stopped.directory / "failure.json").read_text())
    assert (failure["status"], failure["class"]) == (71, "OutOfMemoryError")
    message = failure["message"]
    assert "memory.yaml:" in message
    assert "Traceback" not in stopped.output
    fitting = int(re.search(r"Set train.per_device_train_batch_size to (\d+);", message)[1])
    assert 1 < fitting < 96
    assert 96 % fitting == 0
    larger = min(n for n in range(fitting + 1, 97) if 96 % n == 0)
    assert larger < 96
    runner.train(recipe, batch, f"train.per_device_train_batch_size={larger}", status=71, **how)
    done = runner.train(recipe, batch, f"train.per_device_train_batch_size={fitting}", **how)
    assert sorted(done.values("train/loss")) == [1, 2, 3]
