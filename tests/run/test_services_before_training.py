"""The probe of the Hub against a server on this machine, W&B's login, by what lies in the environment, and trackers' packages."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.callbacks.trackers import PACKAGES
from pipeline.process.commands import command
from pipeline.recipe.schema import Recipe
from pipeline.run.checks import service_findings

ROOT = Path(__file__).parents[2]
WRITER, READER = "hf_" + "writer" * 4, "hf_" + "reader" * 4
ORGS = [{"name": "lab", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}]


class _Handler(BaseHTTPRequestHandler):
    """A Hub that knows two tokens and four repositories; it keeps every call."""

    calls: list[str]

    def log_message(self, *arguments):
        pass

    def answer(self, status, body=None, **headers):
        content = json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(content)),
            "Content-Type": "application/json",
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.calls.append(f"{self.command} {self.path}")
        if self.path == "/api/validate-yaml":
            card = self.rfile.read(int(self.headers["Content-Length"])).decode()
            return self.answer(400 if "free-beer" in card else 200, {"errors": [], "warnings": []})
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            return self.answer(401, {"error": "Invalid credentials"})
        if self.path == "/api/whoami-v2":
            role = "write" if token == WRITER else "read"
            return self.answer(200, {"name": "somebody", "orgs": ORGS, "auth": {"accessToken": {"role": role}}})
        repo = "/".join(self.path.split("/")[3:5])
        if repo == "somebody/slow":
            time.sleep(3)  # longer than the probe waits, which then is gone
            return self.log_message()
        if repo == "somebody/broken":
            return self.answer(500)
        if repo not in ("somebody/private", "somebody/public", "somebody/locked", "somebody/slow"):
            return self.answer(404, {"error": "no"}, X_Error_Code="RepoNotFound")
        if self.path.endswith("/auth-check/write"):
            return self.answer(403 if repo == "somebody/locked" else 200)
        return self.answer(200, {"id": repo, "modelId": repo, "private": repo != "somebody/public", "siblings": []})

    do_POST = do_PUT = do_DELETE = do_GET


ASK = """
import json, os, sys
import pipeline.hub.write_access as checks
import pipeline.run.checks as services
from pipeline.recipe.schema import Recipe
for repo_id, token in json.loads(sys.argv[1]):
    checks.PATIENCE_S = 1.0 if "slow" in repo_id else 60.0
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    recipe = Recipe(path="r.yaml")
    recipe.hub.id, recipe.run.directory, recipe.run.name = repo_id, sys.argv[2], "mine"
    recipe.hub.license = os.environ.get("LICENSE_OF_THE_TEST")
    problems, notes = services.service_findings(recipe)
    print(json.dumps([[type(p).__name__ for p in problems], [p.status for p in problems], "\\n".join([*map(str, problems), *notes])]))
"""


def ask(cases, folder, url, **environment):
    """What is found for each (repository, token), in one process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {
        "HF_ENDPOINT": url, "HF_HOME": str(folder), "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1", **environment,
    }  # fmt: skip
    command = [sys.executable, "-c", ASK, json.dumps(cases), str(folder / "runs")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


CASES = [  # repository, token, whether it is refused, what is said
    ("somebody/private", WRITER, False, ""),
    ("private", WRITER, False, ""),
    ("somebody/new", WRITER, False, ""),
    ("lab/new", WRITER, False, ""),
    ("somebody/private", None, True, "there is no token of the Hub here"),
    ("somebody/private", "hf_" + "expired" * 4, True, "refuses to let this token write to somebody/private (status 401)"),
    ("somebody/locked", WRITER, True, "refuses to let this token write to somebody/locked (status 403)"),
    ("somebody/new", READER, True, "this token may only read"),
    ("club/new", WRITER, True, "this token may only read"),
    ("others/new", WRITER, True, "somebody cannot create it: it is no member of others. Name one of lab, somebody, or"),
    ("somebody/public", WRITER, True, "somebody/public exists and is public, and hub.private is true"),
    ("some body/x", WRITER, True, "Write NAMESPACE/NAME"),
    ("somebody/broken", WRITER, False, "the Hub did not say whether somebody/broken may be written"),
    ("somebody/slow", WRITER, False, "no answer in 1 s"),
]  # fmt: skip


@pytest.fixture
def hub():
    """(address, calls)"""
    calls: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"calls": calls}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", calls
    server.shutdown()
    server.server_close()


def test_a_hub_that_would_refuse_the_model_is_reported_before_step_1(hub, tmp_path):
    url, calls = hub
    found = ask([case[:2] for case in CASES], tmp_path, url)
    for (repo_id, token, refused, said), (kinds, statuses, text) in zip(CASES, found, strict=True):
        assert (kinds, statuses) == ((["ServiceError"], [69]) if refused else ([], [])), (repo_id, text)
        assert text.startswith("r.yaml: hub.id: ") if said else text == "", (repo_id, text)
        assert said in text, (repo_id, text)
        assert token is None or token not in text
    assert {call.split()[0] for call in calls} == {"GET"}


def test_a_license_unknown_to_the_hub_is_reported_before_step_1(hub, tmp_path):
    for license, refused in (("free-beer", True), ("apache-2.0", False)):
        ((kinds, _, text),) = ask([("somebody/private", WRITER)], tmp_path, hub[0], LICENSE_OF_THE_TEST=license)
        assert kinds == (["ServiceError"] if refused else [])
        assert ("the Hub knows no license 'free-beer' (hub.license)" in text) is refused


def test_a_hub_that_refuses_a_run_in_progress_is_only_noted(hub, tmp_path):
    cases = [case for case in CASES if case[2]]
    (tmp_path / "runs" / "mine" / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    found = ask([case[:2] for case in cases], tmp_path, hub[0])
    for (repo_id, _, _, said), (kinds, _, text) in zip(cases, found, strict=True):
        assert kinds == [], (repo_id, text)
        assert said in text
        assert f"`{command('hub', 'push', tmp_path / 'runs' / 'mine')}`" in text


def test_a_hub_that_is_away_is_a_note(tmp_path):
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        ((kinds, _, text),) = ask([("a/b", WRITER)], tmp_path, "http://127.0.0.1:9", **environment)
        assert kinds == []
        assert ("HF_HUB_OFFLINE is set" if environment else "the Hub did not say whether a/b may be written") in text


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    for name in (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "WANDB_DISABLED",
        "WANDB_BASE_URL",
        "WANDB_IDENTITY_TOKEN_FILE",
        "NETRC",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def wandb_notes():
    recipe = Recipe(path="r.yaml")
    recipe.monitor.trackers = ["wandb"]
    return service_findings(recipe)[1]


def test_wandb_without_a_login_is_said_before_step_1(logged_out):
    (note,) = wandb_notes()
    assert note.startswith("r.yaml: monitor.trackers: nobody is logged in to W&B")
    assert "WANDB_MODE=offline" in note
    assert service_findings(Recipe()) == ([], [])


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_API_KEY", "k" * 40), ("WANDB_MODE", "offline"), ("WANDB_MODE", "disabled")]
)
def test_wandb_with_a_login_or_offline_needs_no_note(logged_out, name, value):
    logged_out.setenv(name, value)
    assert wandb_notes() == []


@pytest.mark.parametrize("file", [".netrc", "elsewhere"])
def test_wandb_finds_its_login_in_netrc_by_its_host(logged_out, tmp_path, file):
    (tmp_path / file).write_text("machine wandb.lab.org login user password k\n")
    if file == "elsewhere":
        logged_out.setenv("NETRC", str(tmp_path / file))
    assert len(wandb_notes()) == 1
    logged_out.setenv("WANDB_BASE_URL", "https://wandb.lab.org")
    assert wandb_notes() == []


def test_a_missing_tracker_stops_a_new_run_and_is_noted_on_resume(monkeypatch, tmp_path):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "trackio" else there(name, *a))
    recipe = Recipe(path="r.yaml")
    recipe.run.directory, recipe.run.name = str(tmp_path), "mine"
    recipe.monitor.trackers = ["tensorboard", "trackio"]
    (problem,), notes = service_findings(recipe)
    assert (problem.status, notes) == (66, [])
    assert str(problem) == (
        "r.yaml: monitor.trackers: trackio is not installed, so it would get no numbers. "
        "Install it (pip install 'trackio>=0.43,<1'), or remove it from the list."
    )
    (tmp_path / "mine" / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    problems, (note,) = service_findings(recipe)
    assert (problems, note) == ([], str(problem))
    recipe.monitor.trackers = ["tensorboard", "wandb"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert service_findings(recipe) == ([], [])


def test_the_package_that_is_named_is_the_one_of_the_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["trackio"] == [PACKAGES["trackio"]]
