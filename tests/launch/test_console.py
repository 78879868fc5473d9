"""The console command `tandem`, in the repository and installed from a wheel."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from pipeline.launch.console import MODULES, STAGES
from pipeline.launch.init import documents_of
from pipeline.recipe import read_recipe
from pipeline.sources.open import open_sources

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "pipeline" / "launch" / "console.py"
TINY = ["model.n_embd=32", "model.n_head=1", "model.n_layer=2", "train.max_steps=4", "train.eval_steps=4", "train.save_steps=4", "train.torch_compile=false", "evals.bpb.tokens=2048"]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A user's folder: texts, conversations, and a `pipeline.py` of their own."""
    (tmp_path / "pipeline.py").write_text("raise SystemExit('the user\\'s own pipeline.py was imported')\n")
    (tmp_path / "texts").mkdir()
    for number, paragraph in enumerate((ROOT / "docs" / "reliability.md").read_text().split("\n\n")):
        (tmp_path / "texts" / f"{number}.txt").write_text(paragraph)
    talk = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]}
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps(talk)}\n" * 40)
    return tmp_path


def tandem(folder, *arguments, command=(sys.executable, str(CONSOLE)), timeout=120):
    environ = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PYTHONSAFEPATH", "PYTHONPATH")}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "TANDEM_CACHE": str(folder / "cache")}
    installed = folder / "bin" / "tandem"  # what is typed next is `tandem` where that is on the path
    installed.parent.mkdir(exist_ok=True)
    installed.touch(mode=0o755)
    environ["PATH"] = f"{installed.parent}{os.pathsep}{environ['PATH']}"
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout
    )


def test_help_names_every_command_and_imports_neither_torch_nor_numpy(folder):
    code = "import sys; sys.argv = ['tandem', '--help']; from pipeline.launch.console import main; main(); print({'torch', 'numpy', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("set()\n")
    assert all(f"\n  {name} " in done.stdout for name in [*STAGES, *MODULES])


def test_an_unknown_command_ends_as_a_wrong_recipe_does(folder):
    done = tandem(folder, "pretrian")
    assert done.returncode == 64
    assert "pretrian is no command of tandem" in done.stderr


def test_a_command_runs_where_a_users_own_pipeline_lies(folder):
    done = tandem(folder, "plan", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_help_of_every_command_names_it_as_it_was_called(folder):
    commands = [*STAGES, *MODULES]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, CONSOLE, name, "--help"], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True
        )
        for name in commands
    ]
    for name, process in zip(commands, started, strict=True):
        usage = process.communicate(timeout=120)[0].splitlines()[0]
        assert re.match(rf"usage: (\S*/)?(tandem|console\.py) {name}\b", usage), usage


def test_init_cuts_a_single_text_into_documents_that_can_be_held_out(folder, monkeypatch):
    text = (ROOT / "docs" / "reliability.md").read_text()
    (folder / "book.txt").write_text(text)
    done = tandem(folder, "init", "book.txt")
    assert done.returncode == 0, done.stderr
    documents = [json.loads(line)["text"] for line in (folder / "book.jsonl").read_text().splitlines()]
    assert len(documents) > 10
    assert "".join(documents) == text
    monkeypatch.chdir(folder)
    recipe = read_recipe(["book.yaml"], stage="pretrain")
    assert recipe.data.sources[0].files == "book.jsonl"
    train, validation = open_sources(recipe.source_settings())
    assert train[0].files[0].part == "train"
    assert validation[0].files[0].part == "validation"
    assert "is not written over" in tandem(folder, "init", "book.txt", "--output", "book.yaml").stderr


@pytest.mark.parametrize("blank", ["\n\n", "\n", " "])
def test_a_text_is_cut_at_good_places_and_nothing_is_lost(blank):
    text = blank.join(f"Paragraph {number} says this and that." for number in range(400)) + "\n"
    pieces = list(documents_of(text.splitlines(keepends=True), characters=300))
    assert "".join(pieces) == text
    assert 10 < len(pieces) < 100
    assert all(len(piece) <= 5 * 300 for piece in pieces)
    if blank == "\n\n":
        assert all(piece.endswith("\n\n") for piece in pieces[:-1])


def test_blank_lines_at_the_end_of_a_text_are_no_document():
    assert list(documents_of(["A paragraph.\n", "\n", "\n", " \n"], characters=5)) == ["A paragraph.\n\n"]


@pytest.mark.parametrize(("data", "stage"), [("texts", "pretrain"), ("talks.jsonl", "sft")])
def test_init_writes_a_recipe_that_its_stage_takes_and_writes_over_nothing(folder, data, stage, monkeypatch):
    done = tandem(folder, "init", data)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(folder)
    recipe = f"{data.removesuffix('.jsonl')}.yaml"
    assert f"tandem {stage} {recipe}" in done.stdout
    written = read_recipe([recipe], stage=stage)
    assert written.data.sources[0].files == data
    # A stage 2 that has nothing to start from yet has no tokenizer to count its steps with.
    assert ("about " in Path(recipe).read_text()) == (stage == "pretrain")
    assert (written.train["eval_steps"] < 20) == (written.train["save_steps"] < 20) == (stage == "pretrain")
    again = tandem(folder, "init", data)
    assert again.returncode != 0
    assert "is not written over" in again.stderr


def test_a_wheel_has_the_recipes_and_nothing_of_an_earlier_build(tmp_path):
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("pipeline", "recipes", "accelerate_configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    left = tmp_path / "build" / "lib" / "pipeline" / "gone.py"
    left.parent.mkdir(parents=True)
    left.write_text("")
    subprocess.run([sys.executable, "setup.py", "-q", "build_py"], cwd=tmp_path, check=True)
    assert (left.parent / "recipes" / "quickstart_pretrain.yaml").is_file()
    assert (left.parent / "pretrain.py").is_file()
    assert not left.exists()


@pytest.mark.slow
def test_the_wheel_trains_and_answers_beside_a_users_own_pipeline_folder(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("installed")
    python, tool = place / "env" / "bin" / "python", (str(place / "env" / "bin" / "tandem"),)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--no-deps", "-q", "-w", place, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "env"], check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", "-q", "--no-deps", wheel], check=True)
    site = subprocess.run([python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # after the wheel's own files

    began = time.monotonic()
    assert tandem(folder, "--help", command=tool).returncode == 0
    assert time.monotonic() - began < 2
    for command in (
        ["init", "texts"],
        ["pretrain", "texts.yaml", "run.name=own", "tokenizer.vocab_size=300", *TINY],
        ["chat", "runs/own", "-p", "Who", "--max-new-tokens", "4"],
        ["pretrain", "quickstart_pretrain", "run.name=shipped", *TINY],
    ):
        done = tandem(folder, *command, command=tool, timeout=400)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    for name in ("own", "shipped"):
        assert (folder / "runs" / name / "model" / "model.safetensors").is_file()
        assert (folder / "runs" / name / "report" / "report.html").is_file()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["pretrain", "--help"]])
def test_a_reader_that_has_left_is_no_error_of_the_console_command(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, CONSOLE, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
