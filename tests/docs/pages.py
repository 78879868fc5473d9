"""The fenced blocks of the pages of docs/, and their commands run as a user types them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def page_text(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def blocks(name: str, language: str) -> list[str]:
    """Return the page's blocks of that language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page_text(name), re.S | re.M)


def commands(name: str) -> list[list[str]]:
    """Return the words of each command in the page's `sh` blocks, in order."""
    lines = "".join(blocks(name, "sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def write_named_blocks(name: str, folder: Path) -> list[str]:
    """Write the page's blocks whose first line is `# FILE` into the folder. Return the files' names."""
    found = [
        (named[1], block)
        for language in ("python", "yaml")
        for block in blocks(name, language)
        if (named := re.match(r"# ([\w./-]+\.(?:py|yaml))\b", block))
    ]
    for file, block in found:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(block)
    return [file for file, _ in found]


def run(words: list[str], *, folder: Path, cache: Path, status: int = 0, **environment: str) -> str:
    """Run a command of a page in the folder: `tandem` is this checkout's, `python` this interpreter. Return what it prints."""
    program = {"tandem": [sys.executable, "-m", "pipeline.launch.console"], "python": [sys.executable]}[words[0]]
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TANDEM_CACHE": str(cache),
            "OMP_NUM_THREADS": "1",
            "HF_MODULES_CACHE": str(cache / "modules"),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert done.returncode == status, f"{shlex.join(words)}\n{done.stdout[-4000:]}"
    return done.stdout
