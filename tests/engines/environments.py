"""Environments of other programs' packages, which the tests of tests/engines make once and find again.

`bash run_tests.sh tests/engines -m ""` installs every engine that the index has and runs all of these tests; from then on
`bash run_tests.sh --all` runs those of the engines that are installed.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

# Kept between runs: a wheel of an engine has up to a gigabyte.
FOLDER = Path(os.environ.get("TANDEM_ENGINES", Path.home() / ".cache" / "tandem-engines"))
INSTALL_S = 900


def slow_unless_installed(*requirements: str, without: tuple[str, ...] = ()) -> list[pytest.MarkDecorator]:
    """Return the marks of a module whose engine the suite runs where it is installed already, and does not install."""
    places = (_environment(requirements, without) / "installed", _packages(requirements))
    return [] if any(place.exists() for place in places) else [pytest.mark.slow]


def _environment(requirements: tuple[str, ...], without: tuple[str, ...]) -> Path:
    key = hashlib.sha256(json.dumps([requirements, without, sys.version]).encode()).hexdigest()[:12]
    return FOLDER / f"{requirements[0].partition('=')[0]}-{key}"


def _packages(requirements: tuple[str, ...]) -> Path:
    return FOLDER / "+".join(requirements).replace("==", "-")


@cache
def python_with(*requirements: str, without: tuple[str, ...] = ()) -> str:
    """Return a Python that has these packages and nothing of this one's; skip the test where they cannot be installed.

    without: packages that come with them and are taken out again. Only wheels are taken: nothing is compiled.
    """
    folder = _environment(requirements, without)
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return str(python)
    if (folder / "failed").exists():
        pytest.skip(f"{requirements[0]} could not be installed here: {(folder / 'failed').read_text()}")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:"]
    try:
        done = subprocess.run([*install, *requirements], capture_output=True, text=True, timeout=INSTALL_S)
        reason = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        reason = [f"not within {INSTALL_S} s"]
    if reason:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "failed").write_text(reason[0])
        pytest.skip(f"{requirements[0]} could not be installed here: {reason[0]}")
    if without:
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *without], check=True)
    (folder / "installed").touch()
    return str(python)


@cache
def folder_with(*requirements: str, dependencies: bool = False) -> str:
    """Return a folder with these packages alone, for PYTHONPATH: all else is this environment's. Skip where they cannot be had."""
    folder = _packages(requirements)
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        install = [sys.executable, "-m", "pip", "install", "-q", "--only-binary", ":all:", "--target", str(unfinished)]
        install += [*requirements] if dependencies else ["--no-deps", *requirements]
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode:
            pytest.skip(f"{requirements[0]} could not be installed here: {done.stderr.strip()[-200:]}")
        try:
            unfinished.rename(folder)
        except OSError:  # another worker was sooner
            shutil.rmtree(unfinished)
    return str(folder)


def run_there(python: str, script: str, *arguments: str, cwd: Path, timeout: float = 300, **environment: str) -> str:
    """Run the script with that Python, which sees nothing of this package; return what it printed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    (cwd / "engine.py").write_text(script)
    done = subprocess.run(
        [python, "engine.py", *arguments],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout
