"""A training where modules of POSIX are missing: a recipe to its end, an answer and a report."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.run_dir.checkpoints import by_step, problems

ROOT = Path(__file__).parents[2]
# What Windows' Python does not come with.
MISSING = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "posix_ipc")
# Not of every library: on Linux some count on them, as on Windows they do not.
BLOCK = f"""
import builtins
kept = builtins.__import__

def without(name, globals=None, locals=None, fromlist=(), level=0):
    who, file = (globals or {{}}).get("__name__") or "", (globals or {{}}).get("__file__") or ""
    if name in {MISSING!r} and (who.startswith(("pipeline", "filelock")) or {str(ROOT / "pipeline")!r} in file or who == "__main__"):
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return kept(name, globals, locals, fromlist, level)

builtins.__import__ = without
"""
PACKAGE = list((ROOT / "pipeline").rglob("*.py"))


@pytest.fixture
def without(tmp_path, monkeypatch):
    """An environment in which each Python process, started by whichever other, lacks these modules."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCK)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def run(*command, environ, timeout=240):
    done = subprocess.run(
        [sys.executable, *command], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_no_module_imports_one_that_other_systems_lack_without_a_way_around():
    found = []
    for path in PACKAGE:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name in MISSING]
    assert not found


def test_a_training_ends_answers_and_reports_without_the_modules_of_posix(runner, without):
    recipe = runner.recipe("other", "gpt2", train={"max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 4})
    out = run("-c", "import fcntl", environ=os.environ) if os.name == "posix" else ""
    assert out == ""
    with pytest.raises(AssertionError, match="fcntl"):
        run("-c", "import fcntl", environ=without)
    # A cache of its own: to filelock's soft locks, which this system is left with, each file that flock left is held.
    shown = run("pipeline/pretrain.py", str(recipe), f"data.cache_dir={runner.folder / 'own'}", environ=without)
    directory = runner.folder / "runs" / "other"
    last = shown[shown.index(f"{directory}: finished") :].splitlines()
    assert [line.split()[0] for line in last] == [str(directory) + ":", "result", "time", "model", "talk", "stage"]
    # Six steps may leave the score as it was to three digits: then it stands alone.
    assert re.fullmatch(r"result +val/bpb (\d\.\d{3} -> )?\d\.\d{3} \(lower is better\)", last[1])
    assert str(directory / "report" / "report.html") in last[3]
    assert [folder.name for folder in by_step(directory / "checkpoints")] == ["checkpoint-3", "checkpoint-6"]
    assert all(not problems(folder) for folder in by_step(directory / "checkpoints"))
    answer = run("-m", "pipeline.chat", str(directory), "-p", "The", "--max-new-tokens", "4", environ=without)
    assert answer.strip()
    run("-m", "pipeline.report", str(directory), environ=without)
    assert (directory / "report" / "report.html").is_file()
