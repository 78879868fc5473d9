"""Each check finds what it is for, in one sentence with its cure, and lets the rest pass."""

import fcntl
import json
import shutil
import types
from functools import partial

import pytest

from pipeline.hardware.accelerators import planned_device
from pipeline.plan import capacity
from pipeline.plan.__main__ import main
from pipeline.process.errors import (
    CannotWriteError,
    DiskFullError,
    InputMissingError,
    RecipeError,
    raise_errors,
)
from pipeline.run import checks
from pipeline.run.checks import kernel_problems
from tests.planned import CPU, RECIPES, messages, problems_here, quickstart_plan


@pytest.fixture
def quickstart(tmp_path):
    return partial(quickstart_plan, tmp_path)


def test_a_recipe_that_fits_this_machine_has_no_problem_and_leaves_nothing(quickstart, tmp_path):
    assert problems_here(quickstart()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_found_before_it_is_needed(quickstart, tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    found = problems_here(quickstart())
    assert len(found) == 1
    assert "(Not a directory). Set run.directory to a folder that can." in messages(found, CannotWriteError)[0]


def test_a_checkpoint_that_a_training_run_may_delete_is_no_start(quickstart, tmp_path):
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
def test_a_compiled_model_refuses_a_flash_kernel_with_isolated_documents(quickstart, monkeypatch, documents, compiled):
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

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("<html>not found</html>\n")
    argv = [str(RECIPES / "quickstart_pretrain.yaml"), "data.sources=[{files: a.jsonl}]", "run.hardware=null"]
    with pytest.raises(Exception, match=r"a\.jsonl"):
        main(argv)
    assert "plan of" in capsys.readouterr().out
