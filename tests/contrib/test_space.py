"""The folder of a Space, started as the Hub starts it: alone, with nothing of this checkout and only the packages it names."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

from pipeline.contrib.space import PACKAGES, write_space
from pipeline.hub.__main__ import main
from pipeline.process.errors import CannotWriteError, InputMissingError
from pipeline.run_dir.run_directory import RunDirectory
from tests.hub.hub_stand_in import Repo, hub_stand_in

pytestmark = pytest.mark.full

OLD, NEW = "a" * 40, "b" * 40
# Packages that the program needs for training, and a Space does not install.
TRAINING_ONLY = ("datasets", "evaluate", "wandb", "tensorboard", "pyarrow", "pandas")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub that holds somebody/parrot, whose newest commit is not the one that was pushed by the run."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from pipeline.tokenizer.train import train_bpe

    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_bpe(
        ["a few words to learn ids from, again and again " * 20], vocab_size=300, split_pattern="gpt2"
    )
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=64, **ids)
        GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "run_manifest.json").write_text('{"stage": "pretrain"}')
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with hub_stand_in() as state:
        state.repos["somebody/parrot"] = Repo(False, {"main": [(OLD, files), (NEW, {"config.json": b"{}"})]})
        yield state


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "parrot-1a2b3c")
    directory.path.mkdir(parents=True)
    directory.update_manifest(hub={"id": "somebody/parrot", "commit": OLD})
    return directory


@pytest.fixture
def space(run, tmp_path):
    assert main(["space", str(run.path), "--output", str(tmp_path / "space")]) == 0
    return tmp_path / "space"


@pytest.fixture
def alone(hub, tmp_path):
    """The environment of a process that finds the Hub and nothing of ours."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "GRADIO_", "PYTHONPATH"))}
    return kept | {
        "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1",
    }  # fmt: skip


def test_it_pins_models_and_packages_and_describes_itself_to_the_hub(space):
    front = yaml.safe_load((space / "README.md").read_text().split("---")[1])
    assert (front["sdk"], front["app_file"], front["models"]) == ("gradio", "app.py", ["somebody/parrot"])
    assert f"somebody/parrot@{OLD}" in (space / "app.py").read_text()
    required = (space / "requirements.txt").read_text().split()
    assert [line.split("==")[0] for line in required] == ["gradio", *PACKAGES]
    assert f"gradio=={front['sdk_version']}" in required
    assert all(re.fullmatch(r"[\w-]+==[\d.]+\w*", line) for line in required)
    assert not list(space.rglob("*.pyc"))


def test_its_program_answers_with_only_the_pushed_commit_and_named_packages(space, alone):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({TRAINING_ONLY}))\n"  # importing one is an error
        "from app import MODELS; import pipeline; from pipeline.chat.__main__ import main\n"
        "assert main([*MODELS, '-p', 'a few', '--max-new-tokens', '4']) == 0; print(pipeline.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=space, env=alone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(space / "pipeline" / "__init__.py")
    assert "somebody/parrot is a base model" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="gradio is not installed")
def test_its_page_starts_where_the_environment_says_and_ends_on_sigterm(space, alone, tmp_path):
    import httpx

    log = tmp_path / "log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, "app.py"],
            stdout=out,
            stderr=out,
            cwd=space,
            env=alone | {"GRADIO_SERVER_NAME": "0.0.0.0"},
        )
    try:
        until = time.monotonic() + 240
        while not (found := re.search(r"http://\S+:(\d+)/ shows somebody/parrot\.", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        answer = httpx.get(f"http://127.0.0.1:{found[1]}/", trust_env=False)
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_an_unpushed_run_and_an_existing_folder_are_refused(run, space, tmp_path):
    with pytest.raises(CannotWriteError, match="is there already"):
        write_space([run], output=space)
    waiting = RunDirectory(tmp_path / "runs" / "waiting")
    waiting.path.mkdir()
    waiting.update_manifest(name="waiting")
    with pytest.raises(InputMissingError, match="Push first"):
        write_space([run, waiting], output=tmp_path / "other")
    assert not (tmp_path / "other").exists()
