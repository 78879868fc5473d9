"""Quickstart chat runs of a few steps in the three forms of model/, and the examples of docs/build_on.md run beside them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.build_on.page import COMMANDS, EXAMPLES

ROOT = Path(__file__).parents[2]
# model_type of the finished model -> what makes the quickstart recipes' model one.
FORMS = {
    "gpt2": [
        "model.preset=gpt2",
        "model.options.window_pattern=null",
        "optimizer.type=adamw",
        "optimizer.groups=null",
    ],
    "nanochat": [
        *(f"model.options.{name}=false" for name in ("value_embeddings", "residual_lambdas", "backout", "smear")),
        "model.options.qk_norm_scale=1.0",
        "model.options.window_pattern=null",
    ],
    "tandem": ["model.options.window_pattern=SSSL", "model.options.sliding_window=64"],
}
SMALL = ["model.n_embd=64", "model.n_layer=4", "model.n_head=2", "model.attn_implementation=null"]
SHORT = [
    "train.max_steps=20",
    "optimizer.schedule.warmup_steps=0",
    "train.torch_compile=false",
    "train.save_strategy=no",
    "train.eval_strategy=no",
    "samples.every_steps=0",
]


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What a command prints; the models' code is kept in the folder."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def chat_runs(tmp_path_factory, cache):
    """`chat_runs(form)`: the directory of that form's chat run, trained once by the quickstart's recipes."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def train(form: str) -> Path:
        if form not in made:
            for stage, begin in (("pretrain", SMALL), ("sft", [f"model.start_from={folder / form}-pretrain"])):
                recipe = ROOT / "recipes" / f"quickstart_{stage}.yaml"
                more = [f"run.directory={folder}", f"run.name={form}-{stage}", f"data.cache_dir={cache}"]
                entry = str(ROOT / "pipeline" / f"{stage}.py")
                run([sys.executable, entry, str(recipe), *FORMS[form], *SHORT, *begin, *more], folder)
            made[form] = folder / f"{form}-sft"
        return made[form]

    return train


class Workplace:
    """A folder as the page supposes it: the run under runs/NAME, the files of data beside it."""

    def __init__(self, folder: Path, chat_run: Path, form: str):
        self.path, self.run, self.form = folder, chat_run, form
        (folder / "runs").mkdir()
        (folder / "runs" / "NAME").symlink_to(chat_run, target_is_directory=True)
        config = json.loads((self.model / "config.json").read_text())
        assert config["model_type"] == form

    @property
    def model(self) -> Path:
        return self.path / "runs" / "NAME" / "model"

    def write_lines(self, name: str, rows: list[dict]) -> None:
        (self.path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def example(self, name: str, then: str = "") -> dict:
        """The example run as it stands in a process without this package; then `then` with its variables, which fills `results`."""
        on_a_cpu = re.sub(
            r"(?<=Config\(\n)( +)(?=output_dir)", r"\1use_cpu=True, ", EXAMPLES[name]
        )  # as the page says
        (self.path / f"{name}.py").write_text(on_a_cpu)
        code = f"""
import json, sys
sys.modules["pipeline"] = None  # importing it is an error
results = {{}}
exec(compile(open("{name}.py").read(), "{name}.py", "exec"))
{then}
json.dump(results, open("results.json", "w"))
"""
        (self.path / "driver.py").write_text(code)
        self.printed = run([sys.executable, "-P", "driver.py"], self.path)
        return json.loads((self.path / "results.json").read_text())

    def command(self, begin: str) -> str:
        """The page's one command that begins so, and what it prints."""
        (line,) = [line for line in COMMANDS if line.startswith(begin)]
        python, *rest = shlex.split(line, comments=True)
        assert python == "python"
        return run([sys.executable, *rest], self.path, PYTHONPATH=str(ROOT))


@pytest.fixture(params=list(FORMS))
def place(request, chat_runs, tmp_path):
    return Workplace(tmp_path, chat_runs(request.param), request.param)
