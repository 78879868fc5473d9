"""A Space's folder: the chat page for published models, with this program, which runs it there."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import yaml

import pipeline
from pipeline.process.commands import command
from pipeline.process.errors import CannotWriteError, InputMissingError
from pipeline.process.storage import new_folder, write_text
from pipeline.run_dir.run_directory import RunDirectory

GRADIO = "6.31.0"  # The page was looked at with this one, and a Space installs the version that its README names.
PACKAGES = (
    "torch", "transformers", "accelerate", "safetensors", "tiktoken", "jinja2", "markdown-it-py", "pyyaml", "psutil",
)  # fmt: skip

APP = '''"""The chat page of {names}."""

from pipeline.run_dir.failures import exit_with_status
from pipeline.chat.__main__ import main

MODELS = {models}

if __name__ == "__main__":
    exit_with_status(lambda _: main([*MODELS, "--web"]))
'''


def write_space(runs: list[RunDirectory], *, output: Path) -> None:
    """Write the folder, whole or not at all; several runs are side by side on the page.

    Raises InputMissingError when a run was not pushed, CannotWriteError when the folder is there already.
    """
    if output.exists():
        raise CannotWriteError(f"{output}: is there already. Remove it, or name another folder with --output.")
    ids, pinned, waiting = [], [], []
    for run in runs:
        hub = run.read_manifest().get("hub") or {}
        if not hub.get("commit"):
            waiting.append(str(run.path))
            continue
        ids.append(hub["id"])
        pinned.append(f"{hub['id']}@{hub['commit']}")
    if waiting:
        raise InputMissingError(
            f"{', '.join(waiting)}: not published, so a Space has no model to load. Push first: "
            f"{command('hub', 'push', waiting[0])}"
        )
    versions = [f"{name}=={version(name).split('+')[0]}" for name in PACKAGES]  # +cpu is a build, not a version
    with new_folder(output) as folder:
        write_text(folder / "app.py", APP.format(names=", ".join(ids), models=json.dumps(pinned, indent=4)))
        write_text(folder / "requirements.txt", "\n".join([f"gradio=={GRADIO}", *versions]) + "\n")
        write_text(folder / "README.md", _readme(ids))
        shutil.copytree(
            Path(pipeline.__file__).parent, folder / "pipeline", ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )


def _readme(ids: list[str]) -> str:
    front = {
        "title": ids[0].split("/")[-1],
        "sdk": "gradio",
        "sdk_version": GRADIO,
        "python_version": "3.11",
        "app_file": "app.py",
        "models": ids,
    }
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\nTalks to {', '.join(ids)}. `app.py` names the commits; "
        "`pipeline/` is the program that trained them. A private model needs a secret HF_TOKEN that may read it.\n"
    )
