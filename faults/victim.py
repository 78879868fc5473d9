"""The run that is put to the test: a `modern` model of a million parameters with Muon, that logs, evaluates, samples, saves
and has its data tokenized while it trains. Beside it plain GPT-2 with AdamW, and SFT.
"""

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from faults import evidence, injector
from faults.processes import ColdRun, ForkedRun, Run
from tests.conftest import ROOT, docstrings
from tests.runner import Runner

SAVE_STEPS, MAX_STEPS = 4, 24
WAIT_S = 300  # for one start; the machine may be busy
SLOW_US = 8000  # a slow disk: what makes most of a run's time the writing of checkpoints

MODELS = {
    "modern": {
        "model": {"preset": "modern", "n_layer": 4, "n_embd": 128, "n_head": 4, "options": {"sliding_window": 16}},
        "optimizer": {"type": "muon_adamw"},
    },
    # GPT-2's own dropout: the random state has to come back too.
    "gpt2": {"model": {"n_layer": 4, "n_embd": 144, "n_head": 4, "options": {}}, "optimizer": {"type": "adamw"}},
}


@dataclass(frozen=True)
class Setting:
    """What must stay the same for two runs to be bitwise equal."""

    model: str = "modern"
    stage: str = "pretrain"
    ranks: int = 1
    accumulation: int = 2
    max_steps: int = MAX_STEPS
    keep: int = 2  # checkpoints
    sharded: bool = False
    report: bool = True  # False: a forked run writes none, which is several seconds

    @property
    def name(self) -> str:
        ranks = f"{self.ranks}ranks" + "-sharded" * self.sharded
        return f"{self.stage}-{self.model}-{ranks}-{self.accumulation}acc-{self.max_steps}steps-keep{self.keep}"

    def with_ranks(self, ranks: int) -> "Setting":
        return replace(self, ranks=ranks, accumulation=max(1, self.accumulation * self.ranks // ranks))


class Lab:
    """Texts, recipes, caches and the uncut runs that others are compared with, all below one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.texts, self.trials = folder / "texts", folder / "trials"
        self.made = folder / f"made-{_code()}"  # of this code: another may write its files otherwise
        self.cache, self.partly, self.bases = folder / "cache", self.made / "cache-partly", self.made / "bases"
        for path in (self.texts, self.trials, self.made):
            path.mkdir(parents=True, exist_ok=True)
        text_files = [self.texts / f"part-{n}.jsonl" for n in range(3)]
        chat_files = [self.texts / f"chat-{n}.jsonl" for n in range(2)]
        if not chat_files[-1].exists():
            _write_texts(text_files, chat_files)
        self.runner = Runner(folder / "recipes", self.cache, text_files, chat_files)
        self.runner.folder.mkdir(exist_ok=True)

    def recipe(self, setting: Setting) -> Path:
        make = self.runner.sft_recipe if setting.stage == "sft" else self.runner.recipe
        rows = 8
        path = make(
            setting.name,
            setting.model,
            **MODELS[setting.model],
            data={
                "shard_rows": 16,
                **({} if setting.stage == "pretrain" else {"row_tokens": 128}),
            },
            train={
                "max_steps": setting.max_steps,
                "per_device_train_batch_size": rows // (setting.ranks * setting.accumulation),
                "logging_steps": 1,
                "save_steps": SAVE_STEPS,
                "save_total_limit": setting.keep,
                "eval_steps": 2 * SAVE_STEPS,
                "seed": 7,
            },
            samples={"every_steps": 2 * SAVE_STEPS, "prompts": ["The", "A"], "max_new_tokens": 4},
        )
        return path

    def start(
        self,
        setting: Setting,
        directory: Path,
        *overrides: str,
        cold: bool = False,
        cache: Path | None = None,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
    ) -> Run:
        """Start the command for the run `directory`; a further call is the same command again. log: takes what it prints."""
        where = [f"run.directory={directory.parent}", f"run.name={directory.name}"]
        where += [f"data.cache_dir={cache or self.cache}", *overrides]
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})}
        if setting.ranks == 1:
            environment["LOCAL_WORLD_SIZE"] = "2"  # one thread: two that meet on a busy core wait for each other
        directory.parent.mkdir(parents=True, exist_ok=True)
        log = log or directory.parent / f"{directory.name}.log"
        arguments = [str(self.recipe(setting)), *where]
        if not cold:
            if not setting.report:
                environment["FAULTS_NO_REPORT"] = "1"
            if setting.sharded:  # as accelerate launch does
                environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
            return ForkedRun(
                arguments,
                stage=setting.stage,
                ranks=setting.ranks,
                environment=environment,
                folder=self.folder,
                log=log,
            )
        how = {"ranks": setting.ranks, "launcher": setting.ranks > 1, "sharded": setting.sharded}
        command = self.runner.command(Path(arguments[0]), *where, stage=setting.stage, **how)
        environment["NPROC"] = str(setting.ranks)
        return ColdRun(command, environment=environment, folder=self.folder, log=log)

    def finish(
        self, setting: Setting, directory: Path, *overrides: str, log: Path | None = None, **how
    ) -> tuple[int | None, str]:
        """Start it and wait for the end: status and what this start printed. One that hangs is ended, its status is None."""
        log = log or directory.parent / f"{directory.name}.log"
        before = log.stat().st_size if log.exists() else 0
        run = self.start(setting, directory, *overrides, log=log, **how)
        status = run.wait(WAIT_S)
        if status is None:
            run.kill_everything()
        return status, log.read_bytes()[before:].decode(errors="replace")

    def reference(self, setting: Setting) -> dict[str, str]:
        """The final state of the uncut run, trained once."""
        kept = self.made / "references" / f"{setting.name}.json"
        if not kept.exists():
            directory = self.trial(f"reference-{setting.name}") / "run"
            status, output = self.finish(setting, directory)
            assert status == 0, output
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(evidence.final_state(directory)))
            shutil.rmtree(directory.parent)
        return json.loads(kept.read_text())

    def trial(self, name: str) -> Path:
        """An empty folder for one trial."""
        folder = self.trials / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def partly_prepared(self, setting: Setting, trial: Path) -> Path:
        """A cache of its own for the trial, in which the first shards lie: the rest is tokenized while it trains.

        It is what a run on a slow disk leaves when it is killed after its first step.
        """
        template = self.partly / f"{setting.stage}-{setting.max_steps}"
        if not template.exists():
            making = self.trial(f"partly-{template.name}")
            slow = injector.faults(slow_us=100_000, slow_under=making / "cache")
            shutil.copytree(self._tokenizers(setting), making / "cache" / "tokenizers")
            run = self.start(setting, making / "run", cache=making / "cache", environment=slow)
            while run.poll() is None and evidence.logged_step(making / "run") < 1:
                time.sleep(0.01)
            assert run.poll() is None, run.output
            run.kill_everything()
            counts = [len(list(f.glob("shard-*.json"))) for f in (making / "cache" / "shards").iterdir()]
            assert min(counts) < max(counts), f"every shard was made before the kill: {counts}"
            self.partly.mkdir(exist_ok=True)
            (making / "cache").rename(template)
            shutil.rmtree(making)
        return Path(shutil.copytree(template, trial / "cache"))

    def _tokenizers(self, setting: Setting) -> Path:
        self.reference(setting)
        return self.cache / "tokenizers"


def _code() -> str:
    files = sorted((ROOT / "pipeline").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _write_texts(text_files: list[Path], chat_files: list[Path]) -> None:
    texts = docstrings(modules=60)
    for number, path in enumerate(text_files):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[number::3]))
    for number, path in enumerate(chat_files):
        turns = []
        for i, text in enumerate(texts[number::2]):
            answer = {"role": "assistant", "content": text[: 20 + 7 * (i % 40)]}
            turns.append({"messages": [{"role": "user", "content": "What does it do?"}, answer]})
        path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))


def default_folder() -> Path:
    return Path(os.environ.get("TANDEM_FAULTS", ROOT / "runs" / "faults"))
