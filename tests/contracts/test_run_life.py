"""What the same command does next: continues, says that it is done, refuses what would mix two runs, leaves on a signal."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pipeline.run_dir.checkpoints import by_step, problems
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory
from tests.runner import wait_for_step


@pytest.fixture
def runner(runner):
    return runner


@pytest.mark.full
def test_a_finished_run_says_so_and_leaves_with_0(runner):
    recipe = runner.recipe("done", "gpt2", train={"max_steps": 2, "per_device_train_batch_size": 8})
    runner.train(recipe)
    again = runner.train(recipe)
    assert "the run has finished" in again.output
    assert "step 0000" not in again.output
    report = (again.directory / "report" / "report.md").read_text()
    assert "Status: finished." in report
    assert "padded" in report
    shares = json.loads((again.directory / "run_manifest.json").read_text())["shares"]
    assert all(set(share["lost"]) == {"padded", "cropped", "split", "empty", "bad"} for share in shares.values())
    refused = runner.train(recipe, "run.resume=1", status=64)
    assert "run.fork_from=done@1" in refused.output


@pytest.mark.full
def test_another_recipe_in_the_same_directory_is_refused_with_the_difference(runner):
    recipe = runner.recipe("same", "gpt2", train={"max_steps": 2, "per_device_train_batch_size": 8})
    runner.train(recipe)
    refused = runner.train(recipe, "train.seed=8", "model.n_layer=3", status=64)
    assert "train.seed: 7 -> 8" in refused.output
    assert "another run.name.\n" in refused.output  # and no fork, which another n_layer cannot take up
    assert "model.n_layer: 4 -> 3" in refused.output
    assert "Traceback" not in refused.output
    refused = runner.train(recipe, "train.seed=8", status=64)
    assert "another run.name, and with it run.fork_from=same to start from that one's state" in refused.output


@pytest.mark.full
def test_a_run_without_its_manifest_is_refused_and_left_as_it_is(runner):
    recipe = runner.recipe("unknown", "gpt2", train={"max_steps": 2, "per_device_train_batch_size": 8})
    run = runner.train(recipe)
    (run.directory / "run_manifest.json").unlink()
    before = sorted(run.directory.rglob("*"))

    refused = runner.train(recipe, "train.seed=8", "train.max_steps=4", status=65)

    assert "run_manifest.json: is missing, and the folder holds a run that has trained" in refused.output
    assert sorted(run.directory.rglob("*")) == before


@pytest.mark.full
def test_keys_that_may_change_are_applied_and_recorded(runner):
    recipe = runner.recipe("changed", "gpt2")
    runner.kill(recipe, name="changed", after_step=6)
    saved = runner.folder / "runs" / "changed" / "recipe.yaml"
    changes = ["hub.dtype=bfloat16", "train.max_grad_norm=0.01", "train.logging_steps=4", "run.note=two"]
    run = runner.train(saved, "run.name=changed", "run.callbacks=[]", *changes)
    (event,) = (
        row for row in read_rows(run.directory / "metrics.jsonl") if row.get("attempt") == 2 and "event" in row
    )
    assert event["changed"] == [
        'hub.dtype: "float32" -> "bfloat16"',
        'run.callbacks: ["paced:Paced"] -> []',
        'run.note: null -> "two"',
        "train.logging_steps: 1 -> 4",
        "train.max_grad_norm: 1.0 -> 0.01",
    ]
    rows = [row for row in read_rows(run.directory / "metrics.jsonl") if "train/loss" in row and row["attempt"] == 2]
    assert [row["step"] for row in rows] == [8, 12, 16, 20]
    saved = yaml.safe_load((run.directory / "recipe.yaml").read_text())
    assert (saved["hub"]["dtype"], saved["train"]["max_grad_norm"]) == ("bfloat16", 0.01)
    manifest = json.loads((run.directory / "run_manifest.json").read_text())
    assert (manifest["note"], manifest["recipe_name"]) == ("two", "changed")
    weights = load_file(run.directory / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.full
def test_a_recipe_that_failed_before_step_1_may_be_mended(runner):
    recipe = runner.recipe("mended", "gpt2", train={"max_steps": 2, "per_device_train_batch_size": 8})
    other = shutil.copy(recipe, runner.folder / "other.yaml")
    runner.train(other, "data.sources=[{files: nowhere/*.jsonl}]", status=66)
    assert not (runner.folder / "runs").exists()  # what can be known before is reported before anything is written
    # One that fails after the evaluation at step 0, with another batch.
    (runner.folder / "mine.py").write_text(
        "from transformers import TrainerCallback\n\n\n"
        "class Fails(TrainerCallback):\n"
        "    def on_step_begin(self, *args, **kwargs):\n"
        "        raise RuntimeError('before step 1')\n"
    )
    at_start = "evals.bpb.at_start=true"
    by_accumulation = ["data.batch_tokens=null", "train.gradient_accumulation_steps=2", "run.callbacks=[mine:Fails]"]
    runner.train(recipe, at_start, "model.n_embd=64", *by_accumulation, status=1)
    run = runner.train(recipe, at_start)
    manifest = json.loads((run.directory / "run_manifest.json").read_text())
    assert manifest["recipe_name"] == "mended"
    written = [row for row in read_rows(run.directory / "metrics.jsonl") if "val/bpb" in row and row["step"] == 0]
    assert [row["attempt"] for row in written] == [1, 2]
    assert manifest["results"]["val/bpb/first"] == written[1]["val/bpb"] != written[0]["val/bpb"]


@pytest.fixture
def parent(runner):
    """A recipe, and its run that went to step 10 with a checkpoint every 5."""
    train = {"max_steps": 10, "save_steps": 5, "per_device_train_batch_size": 8, "logging_steps": 1}
    recipe = runner.recipe("parent", "gpt2", train=train)
    return recipe, runner.train(recipe)


@pytest.mark.full
def test_a_fork_continues_at_its_parents_step_and_records_the_difference(runner, parent):
    recipe, whole = parent
    same = runner.train(recipe, "run.name=same", "run.fork_from=parent@5")
    assert same.values("train/loss") == {k: v for k, v in whole.values("train/loss").items() if k > 5}
    assert load_file(same.directory / "model" / "model.safetensors").keys()
    other = runner.train(
        recipe, "run.name=other", "run.fork_from=parent@5", "optimizer.groups.matrices.learning_rate=0.0"
    )
    forked = json.loads((other.directory / "run_manifest.json").read_text())["forked_from"]
    assert (forked["run"], forked["step"]) == ("parent", 5)
    assert [line.split(":")[0] for line in forked["differences"]] == ["optimizer.groups.matrices.learning_rate"]
    assert other.values("train/loss")[6] == whole.values("train/loss")[6]  # before the first update
    assert other.values("train/loss")[10] != whole.values("train/loss")[10]
    shutil.rmtree(whole.directory)  # a fork with checkpoints of its own does not need its parent
    (other.directory / "model").rename(runner.folder / "model")
    manifest = json.loads((other.directory / "run_manifest.json").read_text())
    del manifest["finished"]
    (other.directory / "run_manifest.json").write_text(json.dumps(manifest))
    again = runner.train(
        recipe, "run.name=other", "run.fork_from=parent@5", "optimizer.groups.matrices.learning_rate=0.0"
    )
    assert "going on from checkpoint-10" in again.output


@pytest.mark.full
@pytest.mark.parametrize(
    "override",
    [
        "data.batch_tokens=1024",
        "tokenizer.train_chars=20000",
        "model.n_layer=3",
        "optimizer.type=muon_adamw",
        "optimizer.schedule.batch_warmup_steps=4",
    ],
)
def test_a_fork_that_cannot_take_its_parents_state_writes_nothing(runner, parent, override):
    recipe, _ = parent
    refused = runner.train(recipe, "run.name=fork", "run.fork_from=parent@5", override, status=64)
    assert "a fork takes up parent's weights" in refused.output
    assert not refused.directory.exists()


@pytest.mark.full
def test_a_fork_that_has_nothing_left_to_train_is_refused(runner, parent):
    recipe, _ = parent
    refused = runner.train(recipe, "run.name=fork", "run.fork_from=parent", status=64)
    assert "begins at step 10, and this run ends at step 10" in refused.output
    epochs = ["train.max_steps=null", "train.num_train_epochs=0.02"]  # which only the data turn into steps
    refused = runner.train(recipe, "run.name=fork", "run.fork_from=parent", *epochs, status=64)
    assert "begins at step 10, and this run ends at step" in refused.output


@pytest.mark.full
def test_resume_goes_on_at_a_step_and_sets_later_checkpoints_aside(runner, parent):
    recipe, whole = parent
    before, model = whole.values("train/loss"), whole.directory / "model" / "model.safetensors"
    bytes_before = model.read_bytes()

    def train_again(*overrides, start=5):
        manifest = json.loads((whole.directory / "run_manifest.json").read_text())
        del manifest["finished"]
        (whole.directory / "run_manifest.json").write_text(json.dumps(manifest))
        again = runner.train(recipe, "run.resume=5", *overrides)
        assert f"going on from checkpoint-{start}" in again.output
        return again, {folder.name for folder in (again.directory / "quarantine").iterdir()}

    again, aside = train_again()
    assert aside == {"checkpoint-10", "model"}
    assert again.values("train/loss") == before
    assert model.read_bytes() == bytes_before
    other, aside = train_again("train.max_grad_norm=0.01")
    assert aside == {"checkpoint-10", "checkpoint-10.2", "model", "model.2"}
    assert other.values("train/loss")[6] == before[6]  # before the first update that is another one
    assert other.values("train/loss")[10] != before[10]
    assert model.read_bytes() != bytes_before  # and not the model of the steps that were set aside
    # The same command once more goes on: it does not throw away again what it has trained since.
    assert "the run has finished" in runner.train(recipe, "run.resume=5", "train.max_grad_norm=0.01").output
    same, aside_then = train_again("train.max_grad_norm=0.01", start=10)
    assert "went back to step 5 already" in same.output
    assert aside_then == aside


@pytest.mark.full
def test_a_run_goes_on_with_moved_data_and_refuses_changed_bytes(runner, text_files, tmp_path):
    here = shutil.copy(text_files[0], tmp_path / "text.jsonl")
    one = {"sources": [{"files": str(here)}], "validation": [{"files": str(text_files[2])}]}
    recipe = runner.recipe("moved", "gpt2", data=one, train={"max_steps": 8, "save_steps": 4, "logging_steps": 1})
    runner.kill(recipe, name="moved", after_step=5)
    there = tmp_path / "elsewhere" / "text.jsonl"
    there.parent.mkdir()
    shutil.copy(text_files[1], there)
    runner.train(recipe, f"data.sources=[{{files: {there}}}]", status=65)
    shutil.move(here, there)

    run = runner.train(recipe, f"data.sources=[{{files: {there}}}]")

    assert "going on from checkpoint-4" in run.output


@pytest.mark.full
def test_changed_text_is_refused_by_the_name_of_its_file(runner, text_files):
    copy = runner.folder / "mine.jsonl"
    shutil.copy(text_files[0], copy)
    recipe = runner.recipe(
        "text",
        "gpt2",
        data={
            "sources": [{"files": str(copy)}],
            "validation": [{"files": str(text_files[2])}],
            "row_tokens": 64,
            "batch_tokens": 512,
            "cache_dir": str(runner.cache),
        },
        tokenizer={"vocab_size": 512},
    )
    runner.kill(recipe, name="text", after_step=6)
    copy.write_text(copy.read_text().replace("the", "THE", 1))
    refused = runner.train(recipe, status=65)
    assert "mine.jsonl has other content" in refused.output


@pytest.mark.full
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_with_a_checkpoint_of_its_step(runner, number, status):
    recipe = runner.recipe(
        "signal", "gpt2", train={"max_steps": 2000, "save_steps": 10000, "per_device_train_batch_size": 8}
    )
    process = runner.start(recipe)
    directory = runner.folder / "runs" / "signal"
    wait_for_step(directory, 3, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == status, output[-2000:]
    (checkpoint,) = by_step(directory / "checkpoints")
    assert problems(checkpoint) == []
    assert f"{checkpoint.name} is whole" in output
    assert max(r["step"] for r in read_rows(directory / "metrics.jsonl") if "train/loss" in r) == int(
        checkpoint.name.split("-")[1]
    )


@pytest.mark.full
def test_a_run_in_the_background_goes_on_when_its_shell_ends(runner):
    recipe = runner.recipe(
        "shell", "gpt2", train={"max_steps": 8, "per_device_train_batch_size": 8, "logging_steps": 1}
    )
    entry = Path(__file__).parents[2] / "pipeline" / "pretrain.py"
    command = f"{sys.executable} {entry} {recipe} > shell.log 2>&1 & echo $! > pid"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    subprocess.run(["sh", "-c", command], cwd=runner.folder, env=environment | {"OMP_NUM_THREADS": "1"}, check=True)
    ends = time.monotonic() + 120
    while not (runner.folder / "runs" / "shell" / "model").exists() and time.monotonic() < ends:
        time.sleep(0.1)
    assert (runner.folder / "runs" / "shell" / "model").exists(), (runner.folder / "shell.log").read_text()


@pytest.mark.full
def test_the_death_of_the_launcher_ends_the_run_with_a_whole_checkpoint(runner):
    train = {"max_steps": 2000, "save_steps": 10000, "per_device_train_batch_size": 8}
    recipe = runner.recipe("orphan", "gpt2", train=train)
    process = runner.start(recipe, launcher=True)
    directory = runner.folder / "runs" / "orphan"
    wait_for_step(directory, 3, process)
    process.kill()
    output, _ = process.communicate(timeout=120)  # the run holds the pipe until it ends
    assert "the end of the launcher at step" in output
    (checkpoint,) = by_step(directory / "checkpoints")
    assert problems(checkpoint) == []


def test_a_signal_to_one_of_two_ranks_stops_both_at_one_step(runner):
    recipe = runner.recipe(
        "ranks", "gpt2", train={"max_steps": 2000, "save_steps": 10000, "per_device_train_batch_size": 4}
    )
    process = runner.begin(recipe, ranks=2)
    directory = runner.folder / "runs" / "ranks"
    wait_for_step(directory, 3, process)
    os.kill(process.pids[1], signal.SIGTERM)
    process.communicate()
    (checkpoint,) = by_step(directory / "checkpoints")
    assert problems(checkpoint) == []
    assert sorted(p.name for p in checkpoint.glob("rng-*")) == ["rng-0.safetensors", "rng-1.safetensors"]


def test_a_gradient_that_is_not_finite_stops_and_names_the_rows(runner):
    recipe = runner.recipe(
        "nan", "gpt2", train={"max_steps": 50, "save_steps": 2, "per_device_train_batch_size": 8, "max_grad_norm": 0.0}
    )
    # A rate that overflows fp32 within a few steps.
    stopped = runner.train(
        recipe, "optimizer.groups.head.learning_rate=1e38", "optimizer.groups.matrices.learning_rate=1e38", status=76
    )
    assert "; the update was not made" in stopped.output
    assert "row group" in stopped.output
    failure = json.loads((stopped.directory / "failure.json").read_text())
    assert failure["status"] == 76
    for checkpoint in by_step(stopped.directory / "checkpoints"):
        assert problems(checkpoint) == []


@pytest.mark.full
def test_an_error_on_another_rank_than_the_first_is_recorded(runner):
    (runner.folder / "mine.py").write_text(
        "import os\nfrom transformers import TrainerCallback\n\n\n"
        "class Fails(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        "        if os.environ['RANK'] == '1' and state.global_step == 2:\n"
        "            raise RuntimeError('rank 1 alone')\n"
    )
    recipe = runner.recipe("other", "gpt2", run={"callbacks": ["mine:Fails"]})
    process = runner.begin(recipe, ranks=2)
    output, _ = process.communicate()
    assert process.poll() != 0
    failure = json.loads((runner.folder / "runs" / "other" / "failure.json").read_text())
    assert (failure["rank"], failure["message"]) == (1, "RuntimeError: rank 1 alone"), output[-2000:]


@pytest.mark.full
@pytest.mark.parametrize(
    ("taken", "handed_on"),
    [
        ("*args, num_items_in_batch=None, **kwargs", "*args, **kwargs"),
        ("*args, shift_labels=None, **kwargs", "*args, **kwargs"),
        ("input_ids=None, labels=None", "input_ids=input_ids, labels=labels"),
    ],
    ids=["a mean of its own", "labels shifted twice", "no such arguments"],
)
def test_a_model_that_gives_another_loss_is_refused_before_step_1(runner, taken, handed_on):
    (runner.folder / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnMeanForCausalLM(LlamaForCausalLM):\n"
        f"    def forward(self, {taken}):\n"
        f"        return super().forward({handed_on})\n\n\n"
        "def own_mean(*, vocab_size, n_embd, n_head, **others):\n"
        "    sizes = {'hidden_size': n_embd, 'intermediate_size': n_embd, 'num_hidden_layers': 1}\n"
        "    return OwnMeanForCausalLM(LlamaConfig(vocab_size=vocab_size, num_attention_heads=n_head, **sizes))\n"
    )
    recipe = runner.recipe("own", "gpt2", model={"type": "mine:own_mean", "n_layer": 1, "n_embd": 32, "n_head": 2})
    refused = runner.train(recipe, status=64)
    assert "OwnMeanForCausalLM does not give the summed loss of shift_labels over num_items_in_batch" in refused.output
    assert "Traceback" not in refused.output


@pytest.mark.full
def test_a_model_type_beside_which_transformers_loads_another_tokenizer_is_refused(runner):
    model = {"type": "qwen2", "n_layer": 1, "n_embd": 32, "n_head": 2, "options": {"num_key_value_heads": 2}}
    refused = runner.train(runner.recipe("qwen2", "gpt2", model=model), status=64)
    assert "Qwen2ForCausalLM, transformers loads a tokenizer class of its own" in refused.output
    trained = runner.train(runner.recipe("qwen3", "gpt2", model=model | {"type": "qwen3"}, train={"max_steps": 2}))
    assert (trained.directory / "model" / "tokenizer.json").exists()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_spike_is_recorded_and_can_stop_the_run(runner, ranks):
    # A rate that grows hundredfold at step 25, after enough quiet steps.
    (runner.folder / "mine.py").write_text(
        "from transformers import TrainerCallback\n\n\n"
        "class Kick(TrainerCallback):\n"
        "    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):\n"
        "        if state.global_step == 25:\n"
        "            for group in optimizer.param_groups:\n"
        "                group['lr'] = 1.0\n"
    )
    train = {"max_steps": 35, "save_steps": 10, "per_device_train_batch_size": 4, "logging_steps": 1}
    recipe = runner.recipe("spike", "gpt2", train=train, run={"callbacks": ["mine:Kick"]})
    stopped = runner.train(recipe, "monitor.on_spike=stop", ranks=ranks, status=76)
    output, directory = stopped.output, stopped.directory
    assert output.count("monitor.on_spike is stop") == 1
    (event,) = (row for row in read_rows(directory / "metrics.jsonl") if row.get("event") == "spike")
    assert 26 <= event["step"] <= 28
    assert event["value"] > event["highest_usual"]
    assert json.loads((directory / "failure.json").read_text())["status"] == 76
    assert [folder.name for folder in by_step(directory / "checkpoints")] == ["checkpoint-10", "checkpoint-20"]
    assert "spike: step" in runner.train(recipe).output  # warn: said again, and the run goes on to its end


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(runner):
    recipe = runner.recipe("damage", "gpt2")
    runner.kill(recipe, name="damage", after_step=11)
    directory = runner.folder / "runs" / "damage"
    older, newest = by_step(directory / "checkpoints")[-2:]
    with open(newest / "optimizer.safetensors", "r+b") as file:
        file.truncate(100)
    again = runner.train(recipe)
    assert f"going on from {older.name}" in again.output
    assert "optimizer.safetensors has 100 bytes" in again.output
    assert (directory / "quarantine" / newest.name).is_dir()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_by_minutes_measures_its_steps_once_and_keeps_them(runner, ranks):
    recipe = runner.recipe(f"minutes-{ranks}", "gpt2", run={"minutes": 2}, train={"save_steps": 2})
    text = recipe.read_text().replace("  max_steps: 20\n", "")
    recipe.write_text(text)
    name = f"minutes-{ranks}"
    directory = runner.kill(recipe, name=name, after_step=3, ranks=ranks)
    steps = RunDirectory(directory).read_manifest()["must_match"]["train.max_steps"]
    assert "max_steps" not in (directory / "recipe.yaml").read_text()
    process = runner.start(directory / "recipe.yaml", "run.callbacks=[]", ranks=ranks)
    wait_for_step(directory, 6, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert "measuring steps" not in output
    assert f"training: {steps:,} steps" in output
