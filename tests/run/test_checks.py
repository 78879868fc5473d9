"""Each check finds what it is for, in one sentence with its cure, and lets the rest pass."""

import fcntl
import json
import re
import shutil
import types
from pathlib import Path

import pytest
import torch

from pipeline.hardware.accelerators import DeviceInfo, planned_device
from pipeline.plan import capacity
from pipeline.plan.__main__ import main
from pipeline.plan.capacity import find_notes, find_problems
from pipeline.plan.plan import gigabytes, make_plan
from pipeline.process.errors import (
    CannotWriteError,
    DiskFullError,
    InputMissingError,
    OutOfMemoryError,
    RecipeError,
    raise_errors,
)
from pipeline.recipe import read_recipe
from pipeline.run import checks
from pipeline.run.checks import kernel_problems, machine_problems

RECIPES = Path(__file__).parents[2] / "recipes"
CPU = DeviceInfo("cpu", "a CPU", 1, 16.0, None, None, None, None)


@pytest.fixture
def quickstart(tmp_path):
    def plan(*overrides, device=CPU, processes=1):
        given = [
            str(RECIPES / "quickstart_pretrain.yaml"),
            f"run.directory={tmp_path}/runs",
            f"data.cache_dir={tmp_path}/cache",
            *overrides,
        ]
        return make_plan(read_recipe(given), device, processes=processes)

    return plan


def problems_here(plan):
    return [*find_problems(plan, on_this_machine=True), *machine_problems(plan)]


def messages(problems, kind):
    assert all(type(problem) is kind for problem in problems), problems
    return [str(problem) for problem in problems]


def test_a_recipe_that_fits_this_machine_has_no_problem_and_leaves_nothing_behind(quickstart, tmp_path):
    assert problems_here(quickstart()) == []
    assert list(tmp_path.iterdir()) == []


def test_rows_by_accumulation_that_cannot_be_halved_are_found_once_the_processes_are_known(quickstart):
    batch = ["data.batch_tokens=null", "train.gradient_accumulation_steps=1", "train.per_device_train_batch_size=1"]
    warmup = ["optimizer.schedule.batch_warmup_steps=10", "optimizer.schedule.batch_halvings=2"]
    (message,) = messages(find_problems(quickstart(*batch, *warmup, processes=3), on_this_machine=False), RecipeError)
    assert "batch_halvings: is 2, and 3 rows of a step cannot be halved that often" in message
    assert find_problems(quickstart(*batch, *warmup, processes=4), on_this_machine=False) == []


def test_smaller_first_steps_that_save_no_time_or_are_compiled_again_are_noted(quickstart):
    def notes(*more, rows=4):
        batch = ["data.batch_tokens=4096", f"train.per_device_train_batch_size={rows}"]
        found = find_notes(quickstart(*batch, "optimizer.schedule.batch_halvings=2", *more, processes=4))
        return [note for note in found if "batch_halvings" in note]

    warmup, compiled = "optimizer.schedule.batch_warmup_steps=10", "train.torch_compile=true"
    assert notes(compiled) == []
    (few,) = notes(warmup, "train.torch_compile=false", rows=2)
    assert "a first step of 4 rows computes 8, since a process's micro-batch of 2 rows cannot be halved 2 times" in few
    assert notes(warmup, "train.torch_compile=false") == []
    (again,) = notes(warmup, compiled)
    assert "at each of the 2 doublings" in again


@pytest.mark.parametrize(
    ("optimizer", "given", "unused"),
    [
        ("sgd", "momentum=0.9, weight_decay=0.1", "weight_decay=0.1 for sgd. Remove it. Decay is train.weight_decay."),
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


def test_a_folder_that_cannot_be_written_is_found_before_it_is_needed(quickstart, tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    found = problems_here(quickstart())
    assert len(found) == 1
    assert "(Not a directory). Set run.directory to a folder that can." in messages(found, CannotWriteError)[0]


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
    folder = checks.run_folder(plan.recipe) / "checkpoints" / "checkpoint-600"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"0" * 1_000_000)
    monkeypatch.setattr(capacity, "_free", lambda folder: plan.run_disk_bytes - 1_000_000)
    assert problems_here(plan) == []


def test_what_the_run_keeps_beside_its_checkpoints_makes_no_room_for_them(quickstart, monkeypatch):
    plan = quickstart()
    for name in ("quarantine", "wandb", "hub_queue"):
        folder = checks.run_folder(plan.recipe) / name / "checkpoint-600"
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


def test_a_model_larger_than_the_device_is_refused_and_a_large_micro_batch_only_noted():
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


def test_the_last_line_of_a_plan_that_may_not_fit_says_so_and_what_to_write(capsys):
    def last_line(*arguments):
        assert main([str(RECIPES / "fineweb_d24.yaml"), *arguments]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert re.search(r"may not fit: .*16 rows are estimated to need .* of the device's 24\.0 GiB", last_line("run.hardware=1xRTX4090"))  # fmt: skip
    assert last_line("run.hardware=8xB200") == "nothing was found that would stop this run"


def test_more_processes_than_rows_are_refused_and_padding_is_noted(quickstart):
    found = find_problems(quickstart(processes=9), on_this_machine=False)
    assert "has 4 rows, and 9 processes" in messages(found, RecipeError)[0]
    notes = find_notes(quickstart("train.per_device_train_batch_size=5", "data.batch_tokens=2048"))
    assert any("2 rows of padding beside its 8, which costs 20 % of the time" in note for note in notes)
    assert find_notes(quickstart()) == []


def test_a_checkpoint_of_a_run_that_trains_is_no_start_since_that_run_deletes_it(quickstart, tmp_path):
    start, mine = tmp_path / "training" / "checkpoints" / "checkpoint-5", tmp_path / "runs" / "mine"
    start.mkdir(parents=True)
    plan = quickstart(f"model.start_from={start}", "run.name=mine")
    with open(tmp_path / "training" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (message,) = messages(problems_here(plan), InputMissingError)
        assert "may delete checkpoint-5 once it has newer ones" in message
        (mine / "checkpoints" / "checkpoint-1").mkdir(parents=True)  # one that has begun from it goes on
        (mine / "run_manifest.json").write_text(json.dumps({"must_match": {"model.start_from": str(start)}}))
        assert problems_here(plan) == []
    shutil.rmtree(mine)
    assert problems_here(plan) == []


def test_more_processes_than_gpus_are_refused(quickstart, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    plan = quickstart(device=planned_device("1xH100"), processes=2)
    assert "2 processes for 1 H100" in messages(checks.raised(capacity._devices, plan), RecipeError)[0]


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
        " dp_replicate_size 2 x dp_shard_size 4 is not the number of processes, 4, so no groups of processes can share the copies of the model. Change --num_processes or one of the two.",
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


def test_an_outdated_or_missing_package_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(checks, "_requirements", lambda: ["torch>=99", "no-such-package>=2,<3", "psutil>=1"])
    found = messages([*checks._versions()], InputMissingError)
    assert len(found) == 2
    assert f"torch: {torch.__version__.split('+')[0]}" in found[0]
    assert "no-such-package: not installed" in found[1]
    assert found[1].endswith("pip install 'no-such-package>=2,<3'") or found[1].endswith(
        "pip install 'no-such-package<3,>=2'"
    )


@pytest.mark.parametrize(
    ("override", "kind", "words"),
    [
        ("train.fp16=true", RecipeError, "fp16 needs a GPU"),
        ("train.tf32=true", RecipeError, "has no TF32"),
        ("model.attn_implementation=flex_attention", RecipeError, "no backward pass on cpu"),
        ("model.attn_implementation=flash_attention_2", RecipeError, "needs a CUDA device"),
        ("model.attn_implementation=kernels-community/flash-attn", RecipeError, "needs a CUDA device"),
        ("model.attn_implementation=quick", RecipeError, "is no attention that transformers knows"),
    ],
)
def test_a_format_or_kernel_that_the_cpu_lacks_is_refused(quickstart, override, kind, words):
    overrides = [override, "train.bf16=false"] if "fp16" in override else [override]
    found = messages(kernel_problems(quickstart(*overrides).recipe, CPU), kind)
    assert len(found) == 1
    assert words in found[0]
    assert override.split("=")[0] in found[0]


def test_a_flash_kernel_without_its_package_names_the_package(quickstart, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recipe = quickstart("model.attn_implementation=flash_attention_2").recipe
    assert (
        "needs the package flash-attn"
        in messages(kernel_problems(recipe, planned_device("H100")), InputMissingError)[0]
    )


@pytest.mark.parametrize("documents", ["data.isolate_documents=true", "data.isolate_documents=false"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_flash_kernel_with_isolated_documents_is_refused_where_the_model_is_compiled(
    quickstart, monkeypatch, documents, compiled
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    overrides = ["model.attn_implementation=flash_attention_2", f"train.torch_compile={str(compiled).lower()}"]
    found = kernel_problems(quickstart(*overrides, documents).recipe, planned_device("H100"))
    if compiled and documents.endswith("true"):
        assert "flex_attention" in messages(found, RecipeError)[0]
    else:
        assert found == []


def test_compiling_without_a_compiler_is_refused_unless_it_is_auto(quickstart, monkeypatch):
    monkeypatch.setattr("pipeline.run.checks.can_compile", lambda: False)
    found = kernel_problems(quickstart("train.torch_compile=true").recipe, CPU)
    assert "finds no compiler" in messages(found, InputMissingError)[0]
    assert kernel_problems(quickstart("train.torch_compile=auto").recipe, CPU) == []


def test_bf16_on_a_device_that_imitates_it_is_noted(quickstart):
    notes = find_notes(quickstart("train.bf16=true", device=planned_device("T4")))
    assert any("T4 only imitates bfloat16" in note for note in notes)


def test_all_problems_are_reported_at_once_with_the_lowest_status():
    with pytest.raises(RecipeError, match=r"^one\.\ntwo\.$"):
        raise_errors([DiskFullError("two."), RecipeError("one."), RecipeError("one.")])
    raise_errors([])


def test_the_entries_check_refuses_on_this_machine(quickstart, text_files, monkeypatch, capsys):
    sources = f"data.sources=[{{files: {text_files[0]}}}, {{files: {text_files[1]}}}]"
    recipe = quickstart("train.per_device_train_batch_size=5", sources).recipe
    checks.check_before_training(recipe, processes=1)
    assert "rows of padding" in capsys.readouterr().out
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    with pytest.raises(DiskFullError):
        checks.check_before_training(recipe, processes=1)


def test_sources_on_this_machine_are_opened_by_the_command(tmp_path, monkeypatch, capsys):
    from pipeline.plan.__main__ import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("<html>not found</html>\n")
    argv = [str(RECIPES / "quickstart_pretrain.yaml"), "data.sources=[{files: a.jsonl}]", "run.hardware=null"]
    with pytest.raises(Exception, match=r"a\.jsonl"):
        main(argv)
    assert "plan of" in capsys.readouterr().out
