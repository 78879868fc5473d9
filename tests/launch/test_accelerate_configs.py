"""Every file of accelerate_configs/ is read by accelerate's own loader and starts what its head says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from safetensors.torch import load_file

from pipeline.hardware.device import can_compile
from tests.runner import WarmRunner

CONFIGS = sorted((Path(__file__).parents[2] / "accelerate_configs").glob("*.yaml"))


def head_command(path: Path) -> list[str]:
    """The `accelerate launch` command in the comment at a file's head."""
    head = "".join(
        line.removeprefix("#") for line in path.read_text().splitlines(keepends=True) if line.startswith("#")
    )
    command = re.search(r"accelerate launch ((?:.*\\\n)*.*)", head)[1].replace("\\\n", " ")
    return shlex.split(command.replace("R --main", "1 --main").replace("--machine_rank R", "--machine_rank 1"))


def launch_arguments(path, monkeypatch):
    monkeypatch.chdir(path.parents[1])
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(head_command(path)))
    return arguments


def test_the_files_are_those_of_the_readme():
    assert {p.stem for p in CONFIGS} == {"cpu", "cpu_2", "single_gpu", "ddp", "fsdp2", "hsdp", "tp", "multi_node"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_accelerate_reads_the_file_and_its_command(path, monkeypatch):
    config = load_config_from_file(str(path))
    arguments = launch_arguments(path, monkeypatch)
    assert arguments.training_script == "pipeline/pretrain.py"
    assert arguments.training_script_args == ["RECIPE"]
    # Anything else would be taken by TrainingArguments over the recipe's train.bf16.
    assert config.mixed_precision == "no"
    assert arguments.use_cpu is path.stem.startswith("cpu")


@pytest.mark.parametrize(
    ("name", "multi_gpu", "fsdp", "processes", "machines"),
    [
        ("cpu", False, False, 1, 1),
        ("cpu_2", True, False, 2, 1),
        ("single_gpu", False, False, 1, 1),
        ("ddp", True, False, 8, 1),
        ("fsdp2", False, True, 8, 1),
        ("hsdp", False, True, 16, 2),
        ("tp", True, False, 2, 1),
        ("multi_node", True, False, 16, 2),
    ],
)
def test_the_command_starts_that_many_processes_of_that_kind(name, multi_gpu, fsdp, processes, machines, monkeypatch):
    path = next(p for p in CONFIGS if p.stem == name)
    arguments = launch_arguments(path, monkeypatch)
    assert (arguments.multi_gpu, arguments.use_fsdp) == (multi_gpu, fsdp)
    assert (arguments.num_processes, arguments.num_machines) == (processes, machines)
    if multi_gpu or fsdp:
        environ = prepare_multi_gpu_env(arguments)
        assert arguments.nproc_per_node == str(processes // machines)
        if fsdp:
            assert environ["ACCELERATE_USE_FSDP"] == "true"
            assert environ["FSDP_VERSION"] == "2"  # which hardware/device.py reads
            replicas = environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")
            assert replicas == ("2" if name == "hsdp" else "1")
        assert environ.get("PARALLELISM_CONFIG_TP_SIZE", "1") == ("2" if name == "tp" else "1")
    else:
        _, environ = prepare_simple_launcher_cmd_env(arguments)
        assert environ["ACCELERATE_USE_CPU"] == str(name == "cpu")


STARTED = """
import os, sys
from pipeline.recipe import read_recipe
from pipeline.run.start_process import start_process

start_process(read_recipe(sys.argv[1:]))
print(os.environ["ACCELERATE_USE_FSDP"])
"""


def test_one_process_under_fsdp2_yaml_is_not_wrapped_by_accelerate_either(tmp_path):
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-c", STARTED, "quickstart_pretrain", f"data.cache_dir={tmp_path}"]
    started = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
    assert started.stdout.splitlines()[-1:] == ["false"], started.stderr


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_forgotten_number_of_processes_is_asked_for(name):
    path = next(p for p in CONFIGS if p.stem == name)
    with pytest.raises(ValueError, match="num_processes"):
        _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files, warm):
    return WarmRunner(tmp_path, cache, text_files, chat_files, warm)


def test_the_recipe_decides_precision_and_compilation_not_accelerate(runner):
    recipe = runner.recipe("plain", "gpt2", train={"max_steps": 2, "bf16": False, "torch_compile": False})
    plain = runner.train(recipe)
    settings = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    launched = runner.train(recipe, "run.name=launched", **settings)
    assert "its mixed_precision (bf16) is ignored: the recipe decides (train.bf16: False" in launched.output
    assert "its dynamo_backend (inductor) is ignored" in launched.output
    assert "is ignored" not in plain.output
    ours, theirs = (load_file(run.directory / "model" / "model.safetensors") for run in (plain, launched))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_switched_off_compiler_is_none_for_a_run(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not can_compile()
