"""The adapters: the settings in their heads, their packages, an environment of their own."""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

from faults.conformance.driver import ROOT, Subject

FOLDER = Path(__file__).with_name("subjects")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "conformance"
SETTING = re.compile(r"^(packages|offers|docs|cold|notes): *(.*)$")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def subject(name: str) -> Subject:
    """Return the subject of an adapter, by its name or its path. Raises FileNotFoundError."""
    path = Path(name)
    if path.suffix != ".py":
        path = FOLDER / f"{name}.py"
    what, settings = head(path)
    return Subject(
        path.stem,
        adapter=path.resolve(),
        what=what,
        packages=settings.get("packages", "").replace("REPOSITORY", ROOT.as_uri()).split(),
        offers=set(settings.get("offers", "").replace(",", " ").split()),
        docs=settings.get("docs", "").split(),
        notes=settings.get("notes", ""),
        cold=settings.get("cold") == "yes",
    )


def head(path: Path) -> tuple[str, dict[str, str]]:
    """Return the text of an adapter's docstring and its settings, lines `packages: ...` with indented lines behind."""
    lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    text = []
    settings: dict[str, str] = {}
    key = None
    for line in lines:
        if match := SETTING.match(line):
            key = match[1]
            settings[key] = match[2]
        elif key and line.startswith(" "):
            settings[key] += " " + line.strip()
        else:
            key = None
            text.append(line.strip())
    return " ".join(filter(None, text)), settings


def versions(subject: Subject) -> tuple[list[str], list[str]]:
    """Return Python and name==version of the packages that the subject's interpreter has, and the missing ones."""
    names = [re.split(r"[=<>\[ @]", package)[0] for package in subject.packages]
    program = (
        "import json, sys; from importlib import metadata as m\n"
        "found = {}\n"
        "for d in m.distributions():\n"
        "    found[(d.metadata['Name'] or '').lower().replace('_', '-')] = d.version\n"
        "print(json.dumps([sys.version.split()[0], *[found.get(n.lower().replace('_', '-')) for n in sys.argv[1:]]]))"
    )
    read = subprocess.run([subject.python, "-c", program, *names], capture_output=True, text=True, check=True)
    python, *numbers = json.loads(read.stdout)
    found = dict(zip(names, numbers, strict=True))
    present = [f"Python {python}"] + [f"{name}=={version}" for name, version in found.items() if version]
    return present, [name for name, version in found.items() if not version]


def installed_python(subject: Subject, cache: Path) -> str:
    """Return the interpreter of an environment with the adapter's packages, made when it is not there."""
    key = hashlib.sha256(" ".join([sys.version, *sorted(subject.packages)]).encode()).hexdigest()[:12]
    folder = cache / key  # shared by subjects with the same packages
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        print(f"{subject.name}: installing {' '.join(subject.packages)} to {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *subject.packages], check=True)
        complete.touch()
    return str(python)
