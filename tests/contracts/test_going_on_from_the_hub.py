"""Contract 2 across machines: what a run pushed is enough to go on bitwise where nothing of the run lies."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import load_file

from faults.services import TEN_STEPS, environment
from pipeline.process.storage import read_json, write_json
from pipeline.run_dir.run_directory import RunDirectory
from tests.hub.hub_stand_in import hub_stand_in
from tests.runner import ROOT, WarmRunner

REPO = "somebody/model"
SEAL = "last-checkpoint/MANIFEST.json"
SHARDED = {"ranks": 2, "sharded": True}


def state_on(hub):
    """The step of the checkpoint that the Hub holds."""
    files = hub.repos[REPO].commits[-1][1] if REPO in hub.repos else {}
    return json.loads(files[SEAL])["step"] if SEAL in files else None


def weights(directory):
    return {name: value.numpy().tobytes() for name, value in load_file(directory / "model/model.safetensors").items()}


@pytest.fixture
def another_machine(tmp_path, text_files, chat_files, warm):
    """Another working folder, cache and home of the Hub's client; only the recipe and the data are there."""
    folder = tmp_path / "another"
    folder.mkdir()
    runner = WarmRunner(folder, folder / "cache", text_files, chat_files, warm)
    runner.here = [f"run.directory={folder}/runs", f"data.cache_dir={runner.cache}"]
    return runner


def cut_after_its_push(runner, recipe, hub, home, *overrides, **how):
    """Killed behind step 12 as soon as the checkpoint of step 10 is on the Hub."""
    return runner.kill(
        recipe,
        *overrides,
        name="cut",
        after_step=12,
        ready=lambda directory: state_on(hub) == 10,
        **how,
        **environment(hub.url, home),
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "how"),
    [
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
        ("modern", {}),
        pytest.param("modern", SHARDED, marks=pytest.mark.slow),
    ],
    ids=["gpt2", "modern", "modern-sharded"],
)
def test_the_same_command_goes_on_bitwise_on_a_machine_without_the_run(runner, another_machine, tmp_path, model, how):
    recipe = runner.recipe("hub", model, hub={"id": REPO, "strategy": "checkpoint"})
    uncut = runner.train(recipe, "run.name=uncut", "hub.id=null", **how)
    with hub_stand_in() as hub:
        cut_after_its_push(runner, recipe, hub, tmp_path / "hf", **how)
        home = tmp_path / "another hf"
        gone_on = another_machine.train(
            recipe, "run.name=cut", *another_machine.here, **how, **environment(hub.url, home)
        )
        assert f"checkpoint-10 was restored from {REPO}@" in gone_on.output
        assert "going on from checkpoint-10 (attempt 2)" in gone_on.output
        files = hub.repos[REPO].commits[-1][1]
        assert state_on(hub) == 20
        assert files["model.safetensors"] == (gone_on.directory / "model" / "model.safetensors").read_bytes()
        # The finished run is there as well: a third machine has nothing to do but to take it.
        third = another_machine.folder / "third"
        again = another_machine.start(
            recipe, "run.name=cut", f"run.directory={third}", f"data.cache_dir={another_machine.cache}",
            **environment(hub.url, home),
        )  # fmt: skip
        output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert "the run has finished" in output
    assert weights(third / "cut") == weights(gone_on.directory) == weights(uncut.directory)
    for name in ("train/loss", "train/loss_ema", "val/loss"):
        assert gone_on.values(name) == uncut.values(name)


@pytest.mark.full
def test_a_pulled_run_goes_on_bitwise_or_names_its_missing_state(runner, another_machine, tmp_path):
    recipe = runner.recipe("hub", "gpt2", hub={"id": REPO, "strategy": "checkpoint"})
    uncut = runner.train(recipe, "run.name=uncut", "hub.id=null")

    def pull(*arguments):
        variables = {**os.environ, **environment(hub.url, tmp_path / "another hf"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pipeline.hub", "pull", REPO, *arguments]
        done = subprocess.run(command, env=variables, cwd=another_machine.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with hub_stand_in() as hub:
        cut_after_its_push(runner, recipe, hub, tmp_path / "hf")
        assert "Continue from checkpoint-10: bash" in pull()
        own = another_machine.folder / "runs" / "cut" / "recipe.yaml"
        files = hub.repos[REPO].commits[-1][1]
        for name in [name for name in files if name.startswith("last-checkpoint/")]:
            del files[name]
        assert "No checkpoint was pushed with it" in pull("--runs", "without")
    # Code of one's own is not published: the callback that held the run for its kill is not there.
    more = [*another_machine.here, "hub.id=null", "run.callbacks=[]"]
    gone_on = another_machine.train(own, "run.name=cut", *more)
    assert "going on from checkpoint-10 (attempt 2)" in gone_on.output
    assert weights(gone_on.directory) == weights(uncut.directory)
    assert gone_on.values("train/loss") == uncut.values("train/loss")


@pytest.mark.full
def test_stage_2_starts_from_a_pushed_base_and_records_its_commit(runner, another_machine, tmp_path):
    short = {**TEN_STEPS, "max_steps": 4, "save_steps": 2}
    base = runner.recipe("base", "modern", train=short, hub={"id": REPO})
    chat = another_machine.sft_recipe("chat", "gpt2", train=short)
    recipe = yaml.safe_load(chat.read_text())
    del recipe["tokenizer"], recipe["optimizer"]
    chat.write_text(yaml.safe_dump({**recipe, "model": {"start_from": REPO}}))
    with hub_stand_in() as hub:
        runner.train(base, **environment(hub.url, tmp_path / "hf"))
        home = environment(hub.url, tmp_path / "another hf")
        first = another_machine.train(chat, stage="sft", **home)
        begun_from = {"from": REPO, "commit": hub.repos[REPO].commits[-1][0]}
        assert RunDirectory(first.directory).read_manifest()["inputs"]["start_from"] == begun_from
        hub.repos[REPO].commits.append(("f" * 40, hub.repos[REPO].commits[-1][1]))  # the branch goes on
        shutil.rmtree(first.directory / "model")
        shutil.rmtree(first.directory / "checkpoints" / "checkpoint-4")
        manifest = RunDirectory(first.directory).read_manifest()
        del manifest["finished"]
        write_json(first.directory / "run_manifest.json", manifest)
        again = another_machine.train(chat, stage="sft", **home)
    assert "going on from checkpoint-2" in again.output
    assert RunDirectory(first.directory).read_manifest()["inputs"]["start_from"] == begun_from
    assert read_json(first.directory / "model" / "config.json")["model_type"] == "tandem"


STRANGER = """
import sys
sys.modules["pipeline"] = None  # importing it is an error
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
repo, text, *revisions = sys.argv[1:]
logits = {}
for revision in revisions:
    tokenizer = AutoTokenizer.from_pretrained(repo, revision=revision)
    model = AutoModelForCausalLM.from_pretrained(repo, revision=revision, trust_remote_code=True).float().eval()
    with torch.no_grad():
        logits[revision] = model(**tokenizer(text, return_tensors="pt")).logits
save_file(logits, "logits.safetensors")
"""
