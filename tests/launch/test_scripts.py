"""run_pretrain.sh, run_sft.sh and run_tests.sh: which Python they take, what they install, and when."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Stands for a Python whose pip only notes what it was asked for; VERSION_OK is its answer about its version.
STUB_PYTHON = """#!/bin/bash
case "$*" in
  -V) echo "Python $STUB_VERSION" ;;
  "-c "*) [ "$STUB_VERSION" != 3.10.4 ] ;;
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-m pip install"*) echo "$*" >>"$STUB_LOG"; exit ${STUB_PIP_STATUS:-0} ;;
  "-m pytest"*) echo "ran: $*" ;;
  *) echo "ran: $(basename "$1") $(basename "$2") $4" ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A clone's files that set up and start, with an entry that tells what it was given."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "accelerate_configs", folder / "accelerate_configs")
    shutil.copytree(ROOT / "pipeline" / "launch", folder / "pipeline" / "launch")
    for name in ("run_pretrain.sh", "run_sft.sh", "run_tests.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copy(ROOT / "pipeline" / "__init__.py", folder / "pipeline")
    (folder / "pipeline" / "sft.py").write_text("import sys\nprint('entry got', *sys.argv[1:])\n")
    (folder / "pipeline" / "pretrain.py").write_text(
        "import os, sys\nopen(os.environ['TANDEM_STATUS'], 'w').write('64\\n')\nos._exit(64)\n"
    )
    return folder


@pytest.fixture
def stub(tmp_path):
    """A PATH on which every Python is the stub, and its environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python"):
        (folder / name).write_text(STUB_PYTHON)
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "STUB_LOG": str(tmp_path / "pip.log"),
        "STUB_VERSION": "3.12.1",
    }


def run(clone, script, *arguments, environ, timeout=120):
    return subprocess.run(
        ["bash", clone / script, *arguments], env=environ, capture_output=True, text=True, timeout=timeout, cwd=clone
    )


def active(**more):
    """The environment these tests run in, as an activated one, whether or not it is a virtual one."""
    environ = {k: v for k, v in os.environ.items() if k not in ("CONDA_PREFIX", "NPROC")}
    return {**environ, "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": "", **more}


def installs(environ):
    log = Path(environ["STUB_LOG"])
    return log.read_text().splitlines() if log.exists() else []


def test_an_active_environment_is_used_as_it_is(clone):
    done = run(clone, "run_sft.sh", "my.yaml", "run.name=x", environ=active())
    assert done.returncode == 0, done.stderr
    assert "starting 1 process on the CPU: sft.py my.yaml run.name=x (accelerate_configs/cpu.yaml)" in done.stdout
    assert "entry got my.yaml run.name=x" in done.stdout
    assert "installing" not in done.stdout
    assert not (clone / ".venv").exists()


def test_without_a_recipe_the_quickstart_is_run(clone):
    done = run(clone, "run_sft.sh", environ=active())
    assert f"entry got {clone}/recipes/quickstart_sft.yaml" in done.stdout


def test_the_status_of_the_run_is_the_status_of_the_script(clone):
    assert run(clone, "run_pretrain.sh", environ=active()).returncode == 64


def test_an_impossible_nproc_ends_with_the_recipe_status(clone):
    done = run(clone, "run_pretrain.sh", environ=active(NPROC="many"))
    assert done.returncode == 64
    assert done.stderr.startswith("NPROC is 'many'")


def test_only_what_the_active_environment_lacks_is_installed_and_pinned(clone):
    with open(clone / "constraints.txt", "a") as file:
        file.write("surely-not-there==3.1\n")
    text = (
        (clone / "pyproject.toml")
        .read_text()
        .replace('"psutil>=7.1",', '"psutil>=7.1", "Surely_Not.There>=3", "pyyaml>=99",')
    )
    (clone / "pyproject.toml").write_text(text)
    command = f'. "{clone}/pipeline/launch/environment.sh"; missing_requirements "{sys.executable}" ""'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    pinned = next(line for line in (clone / "constraints.txt").read_text().split() if line.startswith("pyyaml=="))
    assert done.stdout.split() == ["surely-not-there==3.1", pinned]


def test_an_old_python_gets_one_sentence_before_anything_is_made(clone, stub):
    stub["STUB_VERSION"] = "3.10.4"
    done = run(clone, "run_pretrain.sh", environ=stub)
    assert done.returncode == 66
    assert done.stderr.count("\n") == 1
    assert "Tandem needs Python 3.11 or newer" in done.stderr
    assert "Python 3.10.4" in done.stderr
    assert not (clone / ".venv").exists()
    assert not installs(stub)


def test_an_active_environment_with_an_old_python_gets_one_sentence(clone, stub, tmp_path):
    (tmp_path / "old" / "bin").mkdir(parents=True)
    shutil.copy(tmp_path / "bin" / "python3", tmp_path / "old" / "bin" / "python")
    done = run(clone, "run_sft.sh", environ={**stub, "VIRTUAL_ENV": str(tmp_path / "old"), "STUB_VERSION": "3.10.4"})
    assert done.returncode == 66
    assert done.stderr.count("\n") == 1
    assert "the active environment has Python 3.10.4" in done.stderr


def test_the_first_call_installs_and_the_second_starts_at_once(clone, stub):
    first = run(clone, "run_pretrain.sh", environ=stub)
    assert first.returncode == 0, first.stderr
    assert installs(stub) == [f"-m pip install --quiet --editable {clone} --constraint {clone}/constraints.txt"]
    begun = time.monotonic()
    second = run(clone, "run_pretrain.sh", "my.yaml", environ=stub)
    assert second.stdout == "ran: launch.py pretrain.py my.yaml\n"
    assert time.monotonic() - begun < 1
    assert len(installs(stub)) == 1
    run(clone, "run_sft.sh", environ=stub)
    assert len(installs(stub)) == 1


def test_a_changed_dependency_is_installed_by_the_next_call(clone, stub):
    run(clone, "run_pretrain.sh", environ=stub)
    with open(clone / "constraints.txt", "a") as file:
        file.write("# changed\n")
    run(clone, "run_pretrain.sh", environ=stub)
    assert len(installs(stub)) == 2


def test_the_tests_extra_is_added_once_and_serves_the_stages_too(clone, stub):
    run(clone, "run_pretrain.sh", environ=stub)
    done = run(clone, "run_tests.sh", "-q", environ=stub)
    assert "ran: -m pytest -q" in done.stdout
    assert installs(stub)[1] == f"-m pip install --quiet --editable {clone}[dev] --constraint {clone}/constraints.txt"
    run(clone, "run_pretrain.sh", environ=stub)
    for arguments, tier in (((), "not slow and not full"), (("--all",), "not slow")):
        done = run(clone, "run_tests.sh", *arguments, environ=stub)
        assert f"ran: -m pytest -m {tier} --numprocesses logical --maxprocesses 8 --dist loadfile" in done.stdout
    assert len(installs(stub)) == 2


def test_an_installation_that_failed_is_tried_again(clone, stub):
    failed = run(clone, "run_pretrain.sh", environ={**stub, "STUB_PIP_STATUS": "1"})
    assert failed.returncode == 69
    assert "installing failed" in failed.stderr
    assert run(clone, "run_pretrain.sh", environ=stub).returncode == 0
    assert len(installs(stub)) == 2


def test_conda_base_is_left_alone_and_another_conda_environment_is_used(clone, stub, tmp_path):
    (tmp_path / "conda" / "bin").mkdir(parents=True)
    shutil.copy(tmp_path / "bin" / "python3", tmp_path / "conda" / "bin" / "python")
    conda = {**stub, "CONDA_PREFIX": str(tmp_path / "conda")}
    run(clone, "run_sft.sh", environ={**conda, "CONDA_DEFAULT_ENV": "base"})
    assert (clone / ".venv").exists()
    shutil.rmtree(clone / ".venv")
    run(clone, "run_sft.sh", environ={**conda, "CONDA_DEFAULT_ENV": "mine"})
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("script", ["run_pretrain.sh", "run_sft.sh", "run_tests.sh"])
def test_help_installs_nothing(clone, stub, script):
    done = run(clone, script, "--help", environ=stub)
    assert done.returncode == 0
    assert f"bash {script}" in done.stdout
    assert not (clone / ".venv").exists()
