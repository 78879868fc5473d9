"""The page, driven as a visitor drives it, on a tiny model that has learnt its answers by heart."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("gradio")

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "  <script>document.title = 'ran'</script> <img src=x onerror=\"document.title = 'ran'\"> ![x](https://example.com/x.png) **b**\n"
    "    [l](javascript:alert(1)) $x^2$ <|bos|><|assistant_end|> &lt; <think>t</think>"
)
# Put on the path of the page's process: names every address beyond loopback that is asked for.
WATCH = """
import socket, sys
def hook(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] not in ("127.0.0.1", "::1", "localhost"):
        print("WENT OUT", arguments[1], file=sys.stderr, flush=True)
    if event == "socket.getaddrinfo" and arguments[0] not in ("127.0.0.1", "::1", "localhost", None):
        print("WENT OUT", arguments[0], file=sys.stderr, flush=True)
sys.addaudithook(hook)
"""


@contextmanager
def page(*models, arguments=(), log: Path, command=("-m", "pipeline.chat"), cwd=ROOT, environment=None):
    """(address, process) of `python -m pipeline.chat MODELS --web`, which ends by SIGTERM with status 0."""
    (log.parent / "sitecustomize.py").write_text(WATCH)
    own = {k: v for k, v in os.environ.items() if not k.startswith("GRADIO_")}
    path = os.pathsep.join([str(log.parent), *([] if cwd != ROOT else [str(ROOT)])])
    own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "http_proxy": "http://192.0.2.1:9"} | (environment or {})
    asked = [*map(str, models), "--web", *arguments] if models else []
    with open(log, "w") as out:
        process = subprocess.Popen([sys.executable, *command, *asked], stdout=out, stderr=out, cwd=cwd, env=own)
        try:
            until = time.monotonic() + 240
            while not (found := re.search(r"(http://\S+) shows ", log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            yield found[1], process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                status = process.wait(30)
            finally:
                process.kill()
    assert status == 0
    assert "WENT OUT" not in log.read_text(), log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visitor:
    """A tab, with what it asked for and what its console complained of."""

    def __init__(self, browser, address: str, **size):
        self.tab = browser.new_page(viewport={"width": size.get("width", 1280), "height": 800})
        self.tab.set_default_timeout(60_000)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.goto(address)
        self.box = self.tab.get_by_placeholder("Message")
        self.box.wait_for()

    def send(self, text: str) -> None:
        self.box.fill(text)
        self.box.press("Enter")
        self.tab.locator(".stop-button").wait_for(state="visible")

    def say(self, text: str) -> list[str]:
        """All messages, when the answer is there."""
        self.send(text)
        self.tab.locator(".submit-button").wait_for(state="visible")
        return self.messages()

    def messages(self) -> list[str]:
        return self.tab.locator(".message-content .md").evaluate_all("found => found.map(one => one.textContent)")

    def set(self, label: str, value) -> None:
        if not self.tab.get_by_label("seed").is_visible():
            self.tab.get_by_role("button", name="Settings").click()
        field = self.tab.get_by_label(label).first
        field.fill(str(value))
        field.press("Tab")


def test_a_conversation_of_turns_ends_at_the_end_token_and_hostile_text_stays_text(run, base, browser, tmp_path):
    with page(run, base, arguments=["--greedy", "--max-new-tokens", "24"], log=tmp_path / "log") as (address, _):
        assert address.startswith("http://127.0.0.1:")
        visitor = Visitor(browser, address)
        said = visitor.say("ping")
        assert said[:2] == ["ping", "pong \u4e2d\u00e9!"]
        assert len(said) == 4  # the base model continues the same text beside it
        said = visitor.say("again")
        assert said[:4] == ["ping", "pong \u4e2d\u00e9!", "again", "and pong it is"]
        said = visitor.say(HOSTILE)
        assert said[4] == HOSTILE.strip()
        assert visitor.tab.title() == "Tandem"
        assert visitor.tab.locator(".message-content img, .message-content script, .message-content a").count() == 0

        other = Visitor(browser, address, width=360)  # knows nothing of the first one
        assert other.say("again")[:2] == ["again", "what?"]
        assert other.tab.evaluate("document.documentElement.scrollWidth") <= 360
        other.tab.get_by_role("button", name="New conversation").click()
        other.tab.locator(".message-content").first.wait_for(state="hidden")
        other.set("System message", "Be a pirate")
        assert other.say("ping")[:2] == ["ping", "arr"]
        for one in (visitor, other):
            assert {url.split("/")[2] for url in one.asked if url.startswith("http")} == {address.split("/")[2]}
            assert one.complaints == []


@pytest.fixture
def babbler(tokenizer, tmp_path):
    """A model that never ends by itself."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 4096, "initializer_range": 0.3}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ids))
    with torch.no_grad():
        model.transformer.wte.weight[list(ids.values())] = 0.0
    model.save_pretrained(tmp_path / "babbler")
    tokenizer.save_pretrained(tmp_path / "babbler")
    return tmp_path / "babbler"


def whole_answer(model, prompt, arguments):
    command = [sys.executable, "-m", "pipeline.chat", model, "-p", prompt, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_an_answer_streams_and_the_stop_button_ends_it_where_it_is(babbler, browser, tmp_path):
    arguments = ["--greedy", "--max-new-tokens", "3000"]
    with page(babbler, arguments=arguments, log=tmp_path / "log") as (address, _):
        visitor = Visitor(browser, address)
        lengths = []
        visitor.send("xyz")
        while len(set(lengths)) < 5:  # it grows before it ends
            lengths.append(len("".join(visitor.messages()[1:])))
            assert visitor.tab.locator(".stop-button").is_visible()
        visitor.tab.locator(".stop-button").click()
        visitor.tab.locator(".submit-button").wait_for(state="visible")
        time.sleep(1)  # for pieces that were on their way
        stopped = visitor.messages()
        assert len(stopped) == 2
        # Else the test would pass without the click, once the answer came to its own end.
        assert 0 < len(stopped[1]) < 0.9 * len(whole_answer(babbler, "xyz", arguments))
        time.sleep(1)
        assert visitor.messages() == stopped
        visitor.send("and")  # the conversation goes on
        visitor.tab.locator(".message-content").nth(3).wait_for()
        visitor.tab.locator(".stop-button").click()
        visitor.tab.locator(".submit-button").wait_for(state="visible")
        assert visitor.messages()[:3] == [*stopped, "and"]
        assert visitor.complaints == []


def test_the_page_answers_its_own_address_only_and_takes_no_files_and_no_flood(run, tmp_path):
    import httpx

    with page(run, log=tmp_path / "log") as (address, _):
        port = address.rstrip("/").rsplit(":", 1)[1]
        opened = httpx.get(address)
        assert opened.status_code == 200
        assert "frame-ancestors 'self'" in opened.headers["content-security-policy"]
        assert httpx.get(
            address, headers={"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
        ).is_success
        for headers in (
            {"Host": f"evil.example:{port}"},
            {"Origin": "http://evil.example"},
            {"Host": "127.0.0.1.evil.example"},
        ):
            refused = httpx.get(f"{address}config", headers=headers)
            assert refused.status_code == 403
            assert "access-control-allow-origin" not in refused.headers
        for path in ("gradio_api/upload", "upload", "gradio_api/upload/"):
            assert httpx.post(f"{address}{path}", files={"files": b"x" * 1000}).status_code == 404
        flood = b"x" * 20_000_000
        assert httpx.post(f"{address}gradio_api/queue/join", content=flood).status_code == 413
        assert httpx.post(f"{address}gradio_api/queue/join", content=iter([flood])).status_code == 413


def test_what_is_shown_is_the_text_after_gradio_has_dedented_and_the_browser_parsed_it():
    import html
    import inspect

    from hypothesis import given
    from hypothesis import strategies as st

    from pipeline.chat.page import escaped

    @given(st.text(alphabet="<>&;#\t\n aé\"'6", max_size=20))
    def holds(text):
        shown = html.unescape(inspect.cleandoc(escaped(text)))
        assert shown.rstrip("\n") == text.rstrip("\n")
        assert not set("<>") & set(escaped(text))

    holds()


def test_a_port_that_is_taken_is_told(run, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment = os.environ | {
            "GRADIO_SERVER_PORT": str(taken.getsockname()[1]),
            "GRADIO_NUM_PORTS": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "pipeline.chat", str(run), "--web"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=240,
        )
    assert done.returncode == 69, done.stderr
    assert "GRADIO_SERVER_PORT" in done.stderr
    assert "Traceback" not in done.stderr
