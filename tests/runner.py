"""Real runs on tiny recipes over real text, started the way a user starts them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from pipeline.run_dir.checkpoints import take_lock
from pipeline.run_dir.rows import last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from tests.manifest_page import unknown_keys
from tests.warm_commands import Started, WarmCommands

ROOT = Path(__file__).parents[1]
# For a run, a step or a push: a start takes ten seconds of the processor, and a busy machine gives a twentieth of one.
WAIT_S = 300

# The two models that every contract is held on: plain GPT-2 with AdamW, and all modern options with Muon and windows
# shorter than the row. And the one whose forward is transformers' own.
MODELS = {
    "gpt2": {
        "model": {
            "n_layer": 4,
            "n_embd": 32,
            "n_head": 2,
            "options": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
        "optimizer": {"type": "adamw"},
    },
    "modern": {
        "model": {"preset": "modern", "n_layer": 4, "n_embd": 32, "n_head": 2, "options": {"sliding_window": 16}},
        "optimizer": {"type": "muon_adamw"},
    },
    "portable": {
        "model": {"preset": "portable", "n_layer": 4, "n_embd": 32, "n_head": 2},
        "optimizer": {"type": "muon_adamw"},
    },
}


# A callback for runs that are to be hit at a step: however fast the steps and however late the hand, it is not too late.
PACED = """
import os
import time

from transformers import TrainerCallback


class Paced(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(float(os.environ.get("STEP_S", 0)))
        if state.global_step >= int(os.environ.get("WAIT_BEHIND_STEP", 1_000_000)):
            time.sleep(600)
"""


def wait_for_step(directory: Path, step: int, process: subprocess.Popen | Started) -> None:
    """Until the run has logged that step, or ended."""
    ends = time.monotonic() + WAIT_S
    while process.poll() is None and not any(
        row.get("step", 0) >= step and "event" not in row for row in read_rows(directory / "metrics.jsonl")
    ):
        assert time.monotonic() < ends, f"{directory}: waited too long for step {step}"
        time.sleep(0.002)


def check_manifest(directory: Path) -> None:
    """Whatever a run came to, its manifest is as documented."""
    manifest = RunDirectory(directory).read_manifest()
    assert not unknown_keys(manifest), f"document in docs/manifest.md: {unknown_keys(manifest)}"


def _as_from_a_terminal() -> None:
    """A test run in the background has SIGINT ignored, under nohup SIGHUP too, and its children would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Result:
    status: int
    output: str
    directory: Path

    def __post_init__(self):
        check_manifest(self.directory)

    def rows(self) -> list[dict]:
        return last_attempts(read_rows(self.directory / "metrics.jsonl"))

    def values(self, name: str) -> dict[int, float]:
        """The metric by step, as the run counts."""
        return {row["step"]: row[name] for row in self.rows() if name in row}


class Runner:
    """Writes recipes and runs them the way a user does."""

    def __init__(self, folder: Path, cache: Path, text_files: list[Path], chat_files: list[Path]):
        self.folder, self.cache, self.text_files, self.chat_files = folder, cache, text_files, chat_files

    def recipe(self, name: str, model: str, /, **sections) -> Path:
        """A tiny recipe over the text files; `sections` are merged over it."""
        recipe = {
            "run": {"stage": "pretrain", "directory": str(self.folder / "runs"), "name": name},
            "tokenizer": {"vocab_size": 512, "train_chars": 300_000},
            "data": {
                "sources": [{"files": str(path)} for path in self.text_files[:2]],
                "validation": [{"files": str(self.text_files[2])}],
                "row_tokens": 64,
                "batch_tokens": 512,
                "shard_rows": 128,
                "cache_dir": str(self.cache),
            },
            "train": {
                "max_steps": 20,
                "per_device_train_batch_size": 4,
                "logging_steps": 1,
                "save_steps": 5,
                "eval_steps": 100,
                "seed": 7,
            },
            "evals": {"bpb": {"tokens": 4096, "document_bytes": 4000, "at_start": False}},
            "samples": {"every_steps": 0},
            "monitor": {"trackers": []},
        }
        for section, keys in {**MODELS[model], **sections}.items():
            recipe[section] = {**recipe.get(section, {}), **keys}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    def sft_recipe(self, name: str, model: str, /, **sections) -> Path:
        """A tiny SFT recipe over the chat files; from new weights, with a tokenizer of its own."""
        chat = {
            "sources": [{"files": str(self.chat_files[0])}],
            "validation": [{"files": str(self.chat_files[1])}],
            "row_tokens": 128,
            "batch_tokens": 1024,
        }
        recipe = yaml.safe_load(self.recipe(name, model, **sections).read_text())
        recipe["run"]["stage"] = "sft"
        recipe["data"] |= chat
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    def command(
        self,
        recipe: Path,
        *overrides: str,
        stage: str = "pretrain",
        ranks: int = 1,
        launcher: bool = False,
        sharded: bool = False,
        replicas: int = 1,
        tensor_parallel: bool = False,
    ) -> list[str]:
        python = [sys.executable]
        if ranks > 1 or launcher:
            of_several = "tp" if tensor_parallel else "hsdp" if replicas > 1 else "fsdp2" if sharded else "cpu_2"
            config = ROOT / "accelerate_configs" / f"{of_several if ranks > 1 else 'cpu'}.yaml"
            python += [
                "-m",
                "accelerate.commands.launch",
                "--config_file",
                str(config),
                "--num_processes",
                str(ranks),
            ]
            if tensor_parallel:
                python += ["--parallelism_config_tp_size", str(ranks)]
            if replicas > 1:
                python += ["--parallelism_config_dp_shard_size", str(ranks // replicas)]
        return [*python, str(ROOT / "pipeline" / f"{stage}.py"), str(recipe), *overrides]

    def start(
        self,
        recipe: Path,
        *overrides: str,
        stage: str = "pretrain",
        ranks: int = 1,
        launcher: bool = False,
        sharded: bool = False,
        replicas: int = 1,
        **environment: str,
    ) -> subprocess.Popen:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
        shape = {"ranks": ranks, "launcher": launcher, "sharded": sharded, "replicas": replicas}
        command = self.command(recipe, *overrides, stage=stage, **shape)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(
            command, **pipes, env=environment, cwd=self.folder, start_new_session=True, preexec_fn=_as_from_a_terminal
        )

    def begin(self, *arguments, **how):
        """Start a run that is killed."""
        return self.start(*arguments, **how)

    def kill_ranks(self, process, words: set[str]) -> None:
        """`kill -9` the launcher, and the ranks, which it starts in sessions of their own."""
        for one in psutil.process_iter(["cmdline"]):
            if words <= set(one.info["cmdline"] or []):
                one.kill()

    def kill(
        self,
        recipe: Path,
        *overrides: str,
        name: str,
        after_step: int,
        ready: Callable[[Path], bool] = lambda directory: True,
        **how,
    ) -> Path:
        """Start a run, let it wait behind that step, and `kill -9` all its processes once it is `ready`; a checkpoint that was
        being written then is complete on return."""
        (self.folder / "paced.py").write_text(PACED)
        more = ["run.callbacks=[paced:Paced]", *overrides]
        process = self.begin(recipe, f"run.name={name}", *more, **how, WAIT_BEHIND_STEP=str(after_step))
        directory = self.folder / "runs" / name
        try:
            wait_for_step(directory, after_step, process)
            ends = time.monotonic() + WAIT_S
            while process.poll() is None and not ready(directory):
                assert time.monotonic() < ends, f"{directory}: waited too long to be ready"
                time.sleep(0.1)
            ended = process.poll() is not None
        finally:
            self.kill_ranks(process, {str(recipe), f"run.name={name}"})  # of a test that failed too
            output, _ = process.communicate()
        assert not ended, f"the run ended before it could be killed:\n{output[-3000:]}"
        take_lock(directory / "checkpoints", wait_s=60).release()
        assert not (directory / "model").exists()
        check_manifest(directory)
        return directory

    def train(self, recipe: Path, *overrides: str, status: int = 0, **how) -> Result:
        process = self.start(recipe, *overrides, **how)
        try:
            output, _ = process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
            raise
        assert process.returncode == status, output[-4000:]
        return Result(status, output, self._directory(recipe, overrides))

    def _directory(self, recipe: Path, overrides: tuple[str, ...]) -> Path:
        name = next((o.removeprefix("run.name=") for o in overrides if o.startswith("run.name=")), recipe.stem)
        return self.folder / "runs" / name


class WarmRunner(Runner):
    """Whole runs, and those that are killed, are forked without the seconds of importing; every rank has one thread, also of a
    run that `start` starts, which is the cold command."""

    def __init__(self, folder: Path, cache: Path, text_files: list[Path], chat_files: list[Path], warm: WarmCommands):
        super().__init__(folder, cache, text_files, chat_files)
        self.warm = warm

    def start(self, *arguments, **how) -> subprocess.Popen:
        return super().start(*arguments, **{"LOCAL_WORLD_SIZE": "2", **how})

    def begin(self, recipe: Path, *overrides: str, stage: str = "pretrain", **how) -> Started:
        return self.warm.start(stage, str(recipe), *overrides, folder=self.folder, **_as_launched(**how))

    def kill_ranks(self, process: Started, words: set[str]) -> None:
        process.kill()

    def train(self, recipe: Path, *overrides: str, status: int = 0, stage: str = "pretrain", **how) -> Result:
        ended = self.warm.run(stage, str(recipe), *overrides, folder=self.folder, **_as_launched(**how))
        assert ended.statuses == [status] * how.get("ranks", 1), ended.output[-4000:]
        return Result(status, ended.output, self._directory(recipe, overrides))


def _as_launched(*, sharded: bool = False, replicas: int = 1, tensor_parallel: bool = False, **how) -> dict:
    """Return the arguments of a warm command with the environment that `accelerate launch` makes of a shape."""
    how |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if sharded else {}
    if replicas > 1:
        sizes = {"DP_REPLICATE": replicas, "DP_SHARD": how["ranks"] // replicas, "TP": 1, "CP": 1, "SP": 1}
        how |= {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}
    if tensor_parallel:
        how["PARALLELISM_CONFIG_TP_SIZE"] = str(how["ranks"])
    if replicas > 1 or tensor_parallel:
        how["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    return how
