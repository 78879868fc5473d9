"""Signals for real runs, in the phases and through the launchers of DESIGN section 6: one whole checkpoint at one agreed
step, and the same command goes on to the weights of a run that was not cut."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pipeline.run_dir.checkpoints import by_step, problems
from pipeline.run_dir.rows import read_rows
from tests.runner import Runner, WarmRunner

ROOT = Path(__file__).parents[2]
# Notes forward passes in evaluation mode, of one row (sampling) or several (evaluation), and slows those of $SLOW from a step on.
SLOW = """
import os, time
from transformers import TrainerCallback

PHASE, STEP, SECONDS = (os.environ.get("SLOW") or "none 0 0").split()

class Slow(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def wait(module, inputs):
            phase = "sampling" if len(inputs[0]) == 1 else "evaluation"
            if not model.training and phase == PHASE and state.global_step >= int(STEP):
                with open(f"{PHASE}-{STEP}-{os.environ.get('RANK', 0)}", "a") as file:
                    file.write("x")
                time.sleep(float(SECONDS))
        model.get_input_embeddings().register_forward_pre_hook(wait)

def slow_text(row):
    open(f"reading-{os.environ.get('RANK', 0)}", "w").close()
    time.sleep(float(os.environ.get("SLOW_ROW_S", 0)))
    return row["text"]
"""
TRAIN = {"max_steps": 12, "save_steps": 1000, "eval_steps": 4, "per_device_train_batch_size": 1}


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files, warm) -> WarmRunner:
    return WarmRunner(tmp_path, cache, text_files, chat_files, warm)


def launch(kind: str, runner: Runner, recipe: Path, *overrides: str, ranks: int, **environment: str):
    if kind == "accelerate":
        return runner.start(recipe, *overrides, ranks=ranks, launcher=True, **environment)
    python = {
        "script": ["bash", str(ROOT / "run_pretrain.sh")],
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)),
            *("--standalone", str(ROOT / "pipeline" / "pretrain.py")),
        ],
    }[kind]
    settings = {"VIRTUAL_ENV": sys.prefix, "NPROC": str(ranks), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **settings, **environment}
    return subprocess.Popen(
        [*python, str(recipe), *overrides], **pipes, env=environment, cwd=runner.folder, start_new_session=True
    )


def wait_until(condition: Callable[[], object], process: subprocess.Popen):
    ends = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0][-4000:]
        if time.monotonic() > ends:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
            raise AssertionError("waited too long:\n" + process.communicate()[0][-4000:])
        time.sleep(0.01)


def ranks_of(process: subprocess.Popen, recipe: Path) -> list[psutil.Process]:
    """The training processes below a launcher, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            words, rank = child.cmdline(), child.environ().get("RANK", "0")
        except psutil.Error:
            continue
        if str(recipe) in words and str(ROOT / "pipeline" / "pretrain.py") in words[:3]:  # python [-u] ENTRY RECIPE
            found[int(rank)] = child
    return [found[rank] for rank in sorted(found)]


def has_step(runner: Runner, recipe: Path, step: int) -> bool:
    rows = read_rows(runner.folder / "runs" / recipe.stem / "metrics.jsonl")
    return any(row.get("step", 0) >= step and "event" not in row for row in rows)


def whole_checkpoints(runner: Runner, recipe: Path) -> list[str]:
    folders = by_step(runner.folder / "runs" / recipe.stem / "checkpoints")
    assert not any(problems(folder) for folder in folders)
    return [folder.name for folder in folders]


def equal_models(first: Path, second: Path) -> bool:
    one, other = (load_file(path / "model" / "model.safetensors") for path in (first, second))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.full
def test_evaluation_and_sampling_are_left_early_and_done_first_after_resume(runner):
    (runner.folder / "mine.py").write_text(SLOW)
    recipe = runner.recipe(
        "phases",
        "modern",
        run={"callbacks": ["mine:Slow"]},
        train=TRAIN | {"max_steps": 8, "per_device_train_batch_size": 4},
        evals={"bpb": {"tokens": 16384, "document_bytes": 4000, "at_start": False, "batch_rows": 4}},
        samples={"every_steps": None, "prompts": ["The"], "max_new_tokens": 40},
    )
    rows = runner.folder / "runs" / "phases"

    def cut(phase: str, step: int, seen_by: int) -> str:
        process = runner.begin(recipe, ranks=2, SLOW=f"{phase} {step} 0.4")
        seen = runner.folder / f"{phase}-{step}-{seen_by}"
        wait_until(lambda: seen.exists() and len(seen.read_text()) >= 2, process)
        os.kill(process.pids[1], signal.SIGTERM)
        output, _ = process.communicate()
        assert f"at step {step}; checkpoint-{step} is whole" in output, output[-3000:]
        assert len(seen.read_text()) < 20  # of 32 batches, of 40 tokens
        return output

    def steps_with(file: str, name: str) -> list[int]:
        return sorted({row["step"] for row in read_rows(rows / file) if name in row})

    cut("sampling", 4, seen_by=0)
    assert whole_checkpoints(runner, recipe) == ["checkpoint-4"]
    assert steps_with("metrics.jsonl", "val/bpb") == [4]
    assert steps_with("samples.jsonl", "text") == []
    cut("evaluation", 8, seen_by=1)  # the last one: the run is not finished without it
    assert whole_checkpoints(runner, recipe) == ["checkpoint-4", "checkpoint-8"]
    assert steps_with("metrics.jsonl", "val/bpb") == steps_with("samples.jsonl", "text") == [4]
    assert not (rows / "model").exists()
    end = runner.train(recipe, ranks=2)
    assert steps_with("metrics.jsonl", "val/bpb") == steps_with("samples.jsonl", "text") == [4, 8]
    uncut = runner.train(recipe, "run.name=uncut", ranks=2)
    assert equal_models(end.directory, uncut.directory)
    assert end.values("train/loss") == uncut.values("train/loss")
    assert end.values("val/bpb") == uncut.values("val/bpb")


def test_a_signal_to_one_rank_waiting_before_step_1_ends_both_ranks(runner):
    (runner.folder / "mine.py").write_text(SLOW)
    recipe = runner.recipe("early", "gpt2", train=TRAIN | {"max_steps": 2}, tokenizer={"vocab_size": 300})
    sources = [f"data.sources=[{{files: {runner.text_files[0]}, format: 'mine:slow_text'}}]"]
    process = launch("script", runner, recipe, *sources, ranks=2, SLOW_ROW_S="0.5")
    wait_until((runner.folder / "reading-0").exists, process)
    time.sleep(1)
    assert not (runner.folder / "reading-1").exists()  # it waits in a collective for what rank 0 finds
    ranks_of(process, recipe)[1].terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output[-3000:]
    assert "SIGTERM before the first step of this start; nothing is lost." in output
    assert "Traceback" not in output


CASES = [
    pytest.param("script", 2, signal.SIGHUP, "agent", 75, id="script-agent-accumulation"),
    pytest.param("torchrun", 2, signal.SIGTERM, "agent", 1, id="torchrun-agent"),
    *(
        pytest.param(kind, ranks, signal.SIGTERM, target, 75 if kind == "script" else None, marks=pytest.mark.slow)
        for kind in ("script", "accelerate", "torchrun")
        for ranks in (1, 2)
        for target in ("agent", "all", "first", "last")
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "ranks", "number", "target", "status"), CASES)
def test_one_whole_checkpoint_at_one_step_through_every_launcher(runner, kind, ranks, number, target, status):
    recipe = runner.recipe("launched", "gpt2", train=TRAIN | {"max_steps": 2000, "eval_steps": 5000})
    process = launch(kind, runner, recipe, ranks=ranks)
    wait_until(lambda: has_step(runner, recipe, 3), process)
    below = ranks_of(process, recipe)
    assert len(below) == ranks
    for one in {"agent": [psutil.Process(process.pid)], "all": below, "first": below[:1], "last": below[-1:]}[target]:
        one.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert status is None or process.returncode == status, output[-3000:]
    (checkpoint,) = whole_checkpoints(runner, recipe)
    assert f"at step {checkpoint.removeprefix('checkpoint-')}; {checkpoint} is whole. Run the same command" in output
    files = os.listdir(runner.folder / "runs" / "launched" / "checkpoints" / checkpoint)
    assert sum(name.startswith("rng-") for name in files) == ranks
    psutil.wait_procs(below, timeout=60)
    assert not any(one.is_running() for one in below)
