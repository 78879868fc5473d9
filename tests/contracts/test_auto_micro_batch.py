"""Runs with train.per_device_train_batch_size: auto: what fits is tried before the first step and kept; the training is the same."""

import json

import pytest

from pipeline.process.storage import remove_folder

# A model type of the user's that limits the address space when it is built, just before auto is resolved: what is mapped by
# then and $HEADROOM MB. Memory then refuses on a CPU as it does on a GPU.
LIMITED = """
import os, resource
import psutil
from pipeline.model.configuration_tandem import TandemConfig
from pipeline.model.modeling_tandem import TandemForCausalLM


def limited(**fields):
    model = TandemForCausalLM(TandemConfig(**fields))
    if model.device.type == "meta":  # built to count its parameters
        return model
    # What is tried leaves 512 MiB of the address space to the threads of the training.
    limit = psutil.Process().memory_info().vms + (512 + int(os.environ["HEADROOM"])) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return model
"""


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tried_micro_batch_fits_is_kept_and_changes_no_losses(runner, ranks):
    (runner.folder / "mine.py").write_text(LIMITED)
    model = {"type": "mine:limited", "options": {}}  # with dropout
    train = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": "auto", "logging_steps": 1}
    recipe = runner.recipe("tried", "gpt2", train=train, model={"n_layer": 4, "n_embd": 32, "n_head": 2, **model})
    # glibc then maps every large block by itself and gives it back at once: what is mapped is what is used.
    how = {"HEADROOM": "100", "ranks": ranks, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    batch = f"data.batch_tokens={6144 * ranks}"  # 96 rows of 64 for each process
    first = runner.train(recipe, batch, **how)
    assert "that fits, as was just tried" in first.output
    shape = json.loads((first.directory / "run_manifest.json").read_text())["shape"]
    assert 1 < shape["micro_batch"] < 96
    assert shape["micro_batch"] * shape["micro_steps"] == 96
    # The same as a number gives the same losses to the bit: nothing was drawn, and no gradient is left.
    named = runner.train(
        recipe, batch, "run.name=named", f"train.per_device_train_batch_size={shape['micro_batch']}", **how
    )
    assert named.values("train/loss") == first.values("train/loss")
    # As if the first start had found another one.
    path = first.directory / "run_manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["finished"]
    found = manifest["shape"]["micro_batch"]
    manifest["shape"]["micro_batch"] = 3 if found != 3 else 2
    path.write_text(json.dumps(manifest))
    remove_folder(first.directory / "checkpoints" / "checkpoint-2")
    again = runner.train(recipe, batch, **how)
    assert f"auto is {manifest['shape']['micro_batch']}: as this run began" in again.output


def test_on_a_cpu_a_run_says_what_auto_is_and_trains(runner):
    train = {"max_steps": 2, "per_device_train_batch_size": "auto", "logging_steps": 1}
    done = runner.train(runner.recipe("planned", "modern", train=train))
    assert (
        "train.per_device_train_batch_size: auto is 8: the largest divisor of 8 that fits by arithmetic" in done.output
    )
    assert sorted(done.values("train/loss")) == [1, 2]
