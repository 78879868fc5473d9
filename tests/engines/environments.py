"""Environments of other programs' packages, which the tests of tests/engines make once and find again."""

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
INSTALL_S = 240


@cache
def python_with(*requirements: str, without: tuple[str, ...] = ()) -> str:
    """Return a Python that has these packages and nothing of this one's; skip the test where they cannot be installed.

    without: packages that come with them and are taken out again. Only wheels are taken: nothing is compiled.
    """
    key = hashlib.sha256(json.dumps([requirements, without, sys.version]).encode()).hexdigest()[:12]
    folder = FOLDER / f"{requirements[0].partition('=')[0]}-{key}"
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
def folder_with(requirement: str) -> str:
    """Return a folder with this package alone, for PYTHONPATH: what it needs is this environment's. Skip where it cannot be had."""
    folder = FOLDER / requirement.replace("==", "-")
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(unfinished), requirement]
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode:
            pytest.skip(f"{requirement} could not be installed here: {done.stderr.strip()[-200:]}")
        unfinished.rename(folder)
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
