"""What keeps a planned run from its devices and its disk, in one sentence with its cure."""

import re
from functools import partial

import pytest

from pipeline.hardware.accelerators import planned_device
from pipeline.plan import capacity
from pipeline.plan.__main__ import main
from pipeline.plan.capacity import find_notes, find_problems
from pipeline.plan.plan import gigabytes, make_plan
from pipeline.process.errors import (
    DiskFullError,
    OutOfMemoryError,
    RecipeError,
    raised,
)
from pipeline.recipe import read_recipe
from pipeline.run_dir.run_directory import RunDirectory
from tests.planned import CPU, RECIPES, messages, problems_here, quickstart_plan


@pytest.fixture
def quickstart(tmp_path):
    return partial(quickstart_plan, tmp_path)


def test_rows_that_cannot_be_halved_are_found_once_processes_are_known(quickstart):
    batch = ["data.batch_tokens=null", "train.gradient_accumulation_steps=1", "train.per_device_train_batch_size=1"]
    warmup = ["optimizer.schedule.batch_warmup_steps=10", "optimizer.schedule.batch_halvings=2"]
    (message,) = messages(find_problems(quickstart(*batch, *warmup, processes=3), on_this_machine=False), RecipeError)
    assert "batch_halvings: is 2, and 3 rows of a step cannot be halved that often" in message
    assert find_problems(quickstart(*batch, *warmup, processes=4), on_this_machine=False) == []


@pytest.mark.parametrize(
    ("optimizer", "given", "unused"),
    [
        ("sgd", "momentum=0.9, weight_decay=0.1", "weight_decay=0.1 for sgd. Remove it."),
        ("adamw_torch_fused", "amsgrad=True", "amsgrad=True for adamw_torch_fused."),
        ("adafactor", "relative_step=True", "relative_step=True for adafactor."),
        ("stable_adamw", "kahan_sum=False,max_lr=0.1", "kahan_sum=False for stable_adamw."),
        ("rmsprop", "alpha=0.9,centered=True", None),
    ],
)
def test_arguments_of_an_optimizer_that_transformers_ignores_are_noted(optimizer, given, unused):
    recipe = [str(RECIPES / "gpt2_124m.yaml"), f"train.optim={optimizer}", f"train.optim_args='{given}'"]
    plan = make_plan(read_recipe(recipe), CPU, processes=1)
    notes = [note for note in find_notes(plan) if "optim_args" in note]
    if unused is None:
        assert notes == []
    else:
        (note,) = notes
        assert f"transformers does not use {unused}" in note


def test_a_disk_too_small_for_the_checkpoints_is_refused(quickstart, monkeypatch):
    plan = quickstart()
    monkeypatch.setattr(capacity, "_free", lambda folder: plan.run_disk_bytes - 1)
    assert "train.save_total_limit" in messages(problems_here(plan), DiskFullError)[0]
    monkeypatch.setattr(capacity, "_free", lambda folder: plan.run_disk_bytes)
    assert problems_here(plan) == []


def test_two_checkpoints_and_a_fifth_must_fit_however_few_are_planned(quickstart, monkeypatch):
    for plan in (
        quickstart("train.save_total_limit=null", "train.max_steps=null", "train.num_train_epochs=1"),
        quickstart("train.save_steps=2400"),
        quickstart("train.save_steps=2400", "hub.id=a/b", "hub.strategy=checkpoint"),
    ):
        least = int(2.2 * plan.checkpoint_bytes)
        if plan.recipe.hub.id:
            least += plan.checkpoint_bytes
        assert (plan.run_disk_bytes or 0) < least
        monkeypatch.setattr(capacity, "_free", lambda folder, least=least: least - 1)
        (message,) = messages(problems_here(plan), DiskFullError)
        assert f"checkpoints of {gigabytes(plan.checkpoint_bytes)} and the model" in message
        monkeypatch.setattr(capacity, "_free", lambda folder, least=least: least)
        assert problems_here(plan) == []


def test_checkpoints_that_lie_there_already_are_not_asked_room_for_again(quickstart, monkeypatch):
    plan = quickstart()
    folder = RunDirectory.of(plan.recipe.run).path / "checkpoints" / "checkpoint-600"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"0" * 1_000_000)
    monkeypatch.setattr(capacity, "_free", lambda folder: plan.run_disk_bytes - 1_000_000)
    assert problems_here(plan) == []


def test_what_the_run_keeps_beside_its_checkpoints_makes_no_room_for_them(quickstart, monkeypatch):
    plan = quickstart()
    for name in ("quarantine", "wandb", "hub_queue"):
        folder = RunDirectory.of(plan.recipe.run).path / name / "checkpoint-600"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"0" * 1_000_000)
    monkeypatch.setattr(capacity, "_free", lambda folder: plan.run_disk_bytes - 1)
    assert len(messages(problems_here(plan), DiskFullError)) == 1


def test_a_model_that_waits_for_the_hub_needs_room_too(quickstart):
    plain, at_end = quickstart(), quickstart("hub.id=a/b")
    queued = quickstart("hub.id=a/b", "hub.strategy=checkpoint")
    assert at_end.run_disk_bytes == plain.run_disk_bytes
    assert queued.run_disk_bytes - plain.run_disk_bytes == plain.checkpoint_bytes


def test_a_checkpoint_that_is_being_sent_to_the_mirror_needs_room_too(quickstart):
    mirrored = "run.mirror=s3://bucket/runs"
    plain, sent = quickstart(), quickstart(mirrored)
    assert sent.run_disk_bytes - plain.run_disk_bytes == plain.checkpoint_bytes
    published = ("hub.id=a/b", "hub.strategy=checkpoint")
    assert (
        quickstart(*published, mirrored).run_disk_bytes - quickstart(*published).run_disk_bytes
        == plain.checkpoint_bytes
    )


def test_a_model_larger_than_the_device_is_refused_unlike_a_large_batch():
    fineweb = str(RECIPES / "fineweb_d24.yaml")
    small = make_plan(read_recipe([fineweb]), planned_device("8xL40S"), processes=8)
    assert find_problems(small, on_this_machine=False) == []
    assert any("16 rows are estimated to need" in note for note in find_notes(small))
    tiny = make_plan(read_recipe([fineweb]), planned_device("8xT4"), processes=8)
    assert "no micro-batch fits" in messages(find_problems(tiny, on_this_machine=False), OutOfMemoryError)[0]


def test_a_device_that_does_not_hold_one_row_is_refused():
    fineweb = str(RECIPES / "fineweb_d24.yaml")
    plan = make_plan(read_recipe([fineweb]), planned_device("8xRTX3090"), processes=8)
    assert plan.memory.fixed < 24 * 2**30 < 0.9 * plan.least_memory.total < plan.memory.total
    assert "one row is estimated to need" in messages(find_problems(plan, on_this_machine=False), OutOfMemoryError)[0]


def test_a_plan_that_may_not_fit_says_so_in_its_last_line(capsys):
    def last_line(*arguments):
        assert main([str(RECIPES / "fineweb_d24.yaml"), *arguments]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert re.search(r"may not fit: .*16 rows are estimated to need .* of the device's 24\.0 GiB", last_line("run.hardware=1xRTX4090"))  # fmt: skip
    assert last_line("run.hardware=8xB200") == "nothing was found that would stop this run"


def test_more_processes_than_rows_are_refused_and_padding_is_noted(quickstart):
    found = find_problems(quickstart(processes=9), on_this_machine=False)
    assert "has 4 rows, and 9 processes" in messages(found, RecipeError)[0]
    notes = find_notes(quickstart("train.per_device_train_batch_size=5", "data.batch_tokens=2048"))
    assert any("2 rows of padding with its 8, 20 % of the time" in note for note in notes)
    assert find_notes(quickstart()) == []


def test_more_processes_than_gpus_are_refused(quickstart, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    plan = quickstart(device=planned_device("1xH100"), processes=2)
    assert "2 processes for 1 H100" in messages(raised(capacity._devices, plan), RecipeError)[0]


def test_sharding_is_refused_with_what_it_was_not_tried_with_alone(quickstart, monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert capacity._sharding(quickstart(processes=2)) == []
    wrong = ("train.fp8=true", "train.fp16=true", "model.embedding_dtype=bfloat16")
    for override in wrong:
        (found,) = messages(capacity._sharding(quickstart(override, processes=2)), RecipeError)
        assert found.startswith(f"command line: {override.split('=')[0]}: is not supported with a sharded model"), (
            found
        )
        assert capacity._sharding(quickstart(override, processes=1)) == []
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name, size in {"DP_REPLICATE": 2, "DP_SHARD": 4, "TP": 2, "CP": 1}.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", str(size))
    found = messages(capacity._sharding(quickstart(processes=4)), RecipeError)
    assert [found[0].split(":")[1], found[1].split(":")[1]] == [
        " tp_size above 1 with FSDP is not supported. Start from accelerate_configs/fsdp2.yaml.",
        " dp_replicate_size 2 x dp_shard_size 4 is not the number of processes, 4. Change --num_processes or one of the two.",
    ]
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "1")
    assert capacity._sharding(quickstart(processes=8)) == []
    for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP"):
        monkeypatch.delenv(f"PARALLELISM_CONFIG_{name}_SIZE")
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    found = messages(capacity._sharding(quickstart(processes=2)), RecipeError)
    assert ["fsdp_version: 1" in found[0], "fsdp_offload_params" in found[1]] == [True, True]


def test_tensor_parallelism_is_refused_with_what_it_was_not_tried_with_alone(quickstart, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert capacity._sharding(quickstart("model.preset=portable", processes=2)) == []
    wrong = (
        "train.fp8=true",
        "train.fp16=true",
        "model.embedding_dtype=bfloat16",
        "train.torch_compile=true",
    )
    for override in wrong:
        (found,) = messages(capacity._sharding(quickstart(override, processes=2)), RecipeError)
        assert "is not supported with a sharded model (tensor parallel). Remove the key" in found, found
    (found,) = messages(capacity._sharding(quickstart(processes=4)), RecipeError)
    assert "tp_size 2 is not the number of processes, 4" in found
    (found,) = messages(capacity._sharding(quickstart("model.n_kv_head=1", processes=2)), RecipeError)
    assert "the model has 1 heads of keys and values, which 2 processes cannot share evenly" in found


def test_deepspeed_is_refused_for_any_number_of_processes(quickstart, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for processes in (1, 2):
        (found,) = messages(problems_here(quickstart(processes=processes)), RecipeError)
        assert "DeepSpeed is not supported" in found


def test_bf16_on_a_device_that_imitates_it_is_noted(quickstart):
    notes = find_notes(quickstart("train.bf16=true", device=planned_device("T4")))
    assert any("T4 only imitates bfloat16" in note for note in notes)
