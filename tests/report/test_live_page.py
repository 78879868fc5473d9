"""--serve: the page of a run that trains follows its files, keeps what the reader unfolded, and answers this machine alone."""

import json
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pipeline.process.storage import lock, write_json
from pipeline.report.__main__ import main
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from tests.report.browser import CHROMIUM, opened
from tests.report.test_page_in_browser import DRAWN
from tests.report.test_report import write_run

ROOT = Path(__file__).parents[2]
NOTICE = "document.querySelector('.notice')?.innerText ?? ''"


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(write_run(tmp_path / "live", finished=False))
    run.update_manifest(status="running", inputs={"max_steps": 100})
    for step in (38, 40):
        log_step(run, step)
    return run


@pytest.fixture
def address(run):
    command = [sys.executable, "-m", "pipeline.report", str(run.path), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process.stdout.readline().split()[0]
        process.terminate()


def log_step(run, step):
    numbers = {"tokens": step * 4096, "train/loss": 4.0, "train/loss_ema": 4.5}
    append_row(run.metrics, {"step": step, "attempt": 2, "time": 1.79e9 + step, **numbers})


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
def test_the_served_page_follows_a_run_to_failure_and_keeps_unfolded_parts(run, address):
    held = lock(run.lock)  # as the training holds it
    before = sorted(path for path in run.path.rglob("*") if path.is_file())
    with opened(address, width=1000, height=500) as page:
        page.until(DRAWN)
        assert page.run(NOTICE) == "Training: step 40 of 100."
        page.run("document.getElementById('system').closest('details').open = true")
        page.run("document.querySelector('[data-curve=\"train/loss\"]').click()")
        page.run("axis.value = 'tokens', axis.dispatchEvent(new Event('change')), scrollTo(0, 300)")
        for step in (45, 50):
            log_step(run, step)
            page.until(f"({NOTICE}) === 'Training: step {step} of 100.' && {DRAWN}")
            assert page.run("[...document.querySelectorAll('details[open] h2')].map((node) => node.id)") == ["system"]
            assert page.run("[scrollY, axis.value]") == [300, "tokens"]
            lines = "Bokeh.documents[0].roots()[0].renderers.filter((line) => line.name)"
            assert page.run(f"{lines}.map((line) => [line.name, line.visible, line.glyph.x.field])") == [["train/loss", False, "tokens"], ["train/loss_ema", True, "tokens"]]  # fmt: skip
        assert sorted(path for path in run.path.rglob("*") if path.is_file()) == before
        held.release()
        write_json(run.failure, {"status": 76, "class": "DivergedError", "message": "step 51: nan"})
        page.until(f"({NOTICE}) === 'Stopped with status 76 (DivergedError): step 51: nan' && {DRAWN}")
        assert page.complaints() == []
        assert {url.removeprefix(address) for url in page.asked_for()} <= {"", "version"}


def test_foreign_hosts_and_origins_are_refused_and_only_the_page_is_served(run, address):
    def status(path="", **headers):
        try:
            with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    assert status() == status("version") == status(Host="localhost:1") == 200
    for headers in (
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Origin": "http://evil.example"},
        {"Host": "["},
    ):
        assert status(**headers) == status("version", **headers) == 403, headers
    assert status("run_manifest.json") == status("../metrics.jsonl") == status("%2e%2e/recipe.yaml") == 404


def test_the_page_made_before_stands_where_the_files_cannot_be_read(run, monkeypatch):
    from pipeline.report import serve as live

    page = live.LivePage(str(run.path))
    first = page.current()
    assert page.current() is first  # not made again while nothing has changed
    log_step(run, 60)
    with monkeypatch.context() as broken:
        broken.setattr(live, "read_run", lambda name: json.loads("{"))
        assert page.current() is first
    assert "of 100" in page.current() != first


def test_several_runs_or_a_log_cannot_be_followed(run, capsys):
    for runs in ([run.path, run.path], [run.metrics]):
        with pytest.raises(SystemExit):
            main([*map(str, runs), "--serve"])
        assert "--serve follows one run directory" in capsys.readouterr().err


def test_a_browser_that_leaves_early_prints_no_traceback(run):
    log_step(run, 50)
    command = [sys.executable, "-m", "pipeline.report", str(run.path), "--serve", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=ROOT, **pipes) as process:
        address = process.stdout.readline().split()[0]
        port = int(address.rstrip("/").rpartition(":")[2])
        for _ in range(3):
            client = socket.create_connection(("127.0.0.1", port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            client.close()  # with a reset
        assert urllib.request.urlopen(address, timeout=60).status == 200
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == ""
