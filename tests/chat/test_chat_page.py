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
from known_answers import MARKUP

pytest.importorskip("gradio")

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "  <script>document.title = 'ran'</script> <img src=x onerror=\"document.title = 'ran'\"> ![x](https://example.com/x.png) **b**\n"
    "\t[l](javascript:alert(1)) $$x^2$$ <|bos|><|assistant_end|> &lt; <think>t</think></span></div><style>*{display:none}</style>"
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
    """A tab, with what it asked for and what its console complained of. beside: another tab of the same browser."""

    def __init__(self, browser, address: str, *, width=1280, height=800, beside=None, **context):
        size = {"width": width, "height": height}
        self.context = beside.context if beside else browser.new_context(viewport=size, **context)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.tab = self.context.new_page()
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
        before = self.tab.locator(".message-content").count()
        self.box.fill(text)
        self.box.press("Enter")
        self.tab.wait_for_function(f"document.querySelectorAll('.message-content').length > {before}")

    def say(self, text: str) -> list[str]:
        """All messages, when the answer is there."""
        self.send(text)
        return self.settled()

    def settled(self) -> list[str]:
        """All messages, when no answer grows any more: each has its copy button then."""
        self.tab.wait_for_function(
            "document.querySelector('.submit-button') && "
            "[...document.querySelectorAll('.message-content')].every(one => one.querySelector('.copy'))"
        )
        return self.messages()

    def messages(self) -> list[str]:
        """What was written, as the copy buttons give it; of an answer that grows, what is shown."""
        return self.tab.locator(".message-content").evaluate_all(
            "found => found.map(one => (one.querySelector('.source') ?? one.querySelector('.plain, .prose')).textContent)"
        )

    def set(self, label: str, value) -> None:
        if not self.tab.get_by_label("seed").is_visible():
            self.tab.get_by_role("button", name="Settings").click()
        field = self.tab.get_by_label(label).first
        field.fill(str(value))
        field.press("Tab")

    def press(self, name: str) -> None:
        self.tab.get_by_role("button", name=name).click()

    def box_of(self, selector: str, place: int = 0) -> dict[str, float]:
        return self.tab.locator(selector).nth(place).bounding_box()


GREEDY = ("--greedy", "--max-new-tokens", "100")


@pytest.fixture(scope="module")
def address(run, base, tmp_path_factory):
    """A page of both models."""
    with page(run, base, arguments=GREEDY, log=tmp_path_factory.mktemp("both") / "log") as (address, _):
        assert address.startswith("http://127.0.0.1:")
        yield address


@pytest.fixture(scope="module")
def alone(run, tmp_path_factory):
    """A page of the chat model."""
    with page(run, arguments=GREEDY, log=tmp_path_factory.mktemp("alone") / "log") as (address, _):
        yield address


def test_a_conversation_of_turns_ends_at_the_end_token_and_a_users_hostile_text_stays_text(address, browser):
    visitor = Visitor(browser, address)
    said = visitor.say("ping")
    assert said[:2] == ["ping", "pong \u4e2d\u00e9!"]
    assert len(said) == 4  # the base model continues the same text beside it
    assert said[2] == "ping"
    said = visitor.say("again")
    assert said[:4] == ["ping", "pong \u4e2d\u00e9!", "again", "and pong it is"]
    said = visitor.say(HOSTILE)
    assert said[4] == HOSTILE.strip()
    shown = visitor.tab.locator(".message-content .plain").evaluate_all("found => found.map(one => one.textContent)")
    assert HOSTILE.strip() in shown
    assert visitor.tab.title() != "ran"
    wrong = "img, script, style, a, think, iframe"
    assert visitor.tab.locator(", ".join(f".message-content .plain {tag}" for tag in wrong.split(", "))).count() == 0

    other = Visitor(browser, address, width=360)  # knows nothing of the first one
    assert other.say("again")[:2] == ["again", "what?"]
    assert other.tab.evaluate("document.documentElement.scrollWidth") <= 360
    other.press("New conversation")
    other.tab.locator(".message-content").first.wait_for(state="hidden")
    other.set("System message", "Be a pirate")
    assert other.say("ping")[:2] == ["ping", "arr"]
    for one in (visitor, other):
        assert {url.split("/")[2] for url in one.asked if url.startswith("http")} == {address.split("/")[2]}
        assert one.complaints == []


def test_a_models_markdown_is_shown_its_html_stays_text_and_the_copy_button_gives_what_it_wrote(alone, browser):
    visitor = Visitor(browser, alone)
    assert visitor.say("markup") == [message["content"] for message in MARKUP]
    answer = visitor.tab.locator(".message-content .prose")
    assert answer.locator("strong").inner_text() == "b"
    assert answer.locator("code").inner_text() == "1<2"
    assert answer.locator("li").inner_text() == "<script>document.title=1</script>"
    assert answer.locator("script").count() == 0
    assert visitor.tab.title() == "parrot - Tandem"
    visitor.tab.get_by_title("Copy the message").last.click()
    assert visitor.tab.evaluate("navigator.clipboard.readText()") == MARKUP[1]["content"]
    assert visitor.complaints == []


def test_another_tab_begins_a_conversation_of_its_own(alone, browser):
    visitor = Visitor(browser, alone)
    visitor.set("System message", "")
    first = visitor.say("ping")
    assert visitor.say("again") == [*first, "again", "and pong it is"]  # the model read it too
    other = Visitor(browser, alone, beside=visitor)
    assert other.say("again") == ["again", "what?"]
    other.press("New conversation")
    other.tab.locator(".message-content").first.wait_for(state="hidden")
    assert other.messages() == []


def test_an_answer_is_given_again_and_an_example_is_asked(address, browser):
    visitor = Visitor(browser, address)
    visitor.tab.locator(".example").first.click()  # the prompt of the run's samples
    visitor.tab.locator(".message-content").nth(3).wait_for()
    first = visitor.settled()
    assert first[:2] == ["ping", "pong \u4e2d\u00e9!"]
    visitor.set("temperature", "2")
    visitor.set("top_k", "0")
    visitor.press("Regenerate")
    visitor.tab.wait_for_function(f"!document.querySelector('.conversation').innerText.includes({first[1]!r})")
    again = visitor.settled()
    assert len(again) == 4
    assert (again[0], again[2]) == ("ping", "ping")
    assert again[1] != first[1]
    visitor.set("temperature", "0")
    visitor.press("Regenerate")
    visitor.tab.wait_for_function(f"document.querySelector('.conversation').innerText.includes({first[1]!r})")
    assert visitor.say("again")[:4] == [*first[:2], "again", "and pong it is"]


def test_the_card_says_what_a_model_is_and_no_more_tokens_are_offered_than_it_has_positions(address, browser, run):
    visitor = Visitor(browser, address)
    chat, base = visitor.tab.locator(".model").all_inner_texts()
    assert chat.split("\n")[0].split() == ["parrot", "chat", "model"]
    assert "gpt2, " in chat
    assert "k parameters, 128 positions" in chat
    assert "trained on dialogs (6.4k tokens)" in chat
    assert str(run / "model") in chat
    assert "base model" in base
    visitor.set("seed", "1")
    slider = visitor.tab.locator("input[type=range][aria-label*=max_new_tokens]")
    assert slider.get_attribute("max") == "128"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fills_1400_and_390_pixels_in_light_and_dark(alone, address, browser, scheme):
    for place, models, width, height, least in (
        (alone, 1, 1400, 900, 800), (address, 2, 1400, 900, 600), (alone, 1, 390, 844, 340), (address, 2, 390, 844, 340)
    ):  # fmt: skip
        visitor = Visitor(browser, place, width=width, height=height, color_scheme=scheme)
        visitor.say("ping")
        talks = [visitor.box_of(".conversation", number) for number in range(models)]
        assert all(talk["width"] >= least and talk["height"] >= 180 for talk in talks), talks
        if models == 2:
            beside = talks[0]["y"] == talks[1]["y"]
            assert beside == (width == 1400)
        cut = "[...document.querySelectorAll('.gradio-container *')].filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.source')).map(e => e.className)"
        assert visitor.tab.evaluate(cut) == []
        assert visitor.tab.evaluate("document.documentElement.scrollHeight") <= height
        assert visitor.box_of("textarea[placeholder^=Message]")["y"] < height - 60
        ground, ink = (
            visitor.tab.evaluate(f"getComputedStyle(document.querySelector({selector!r})).{what}")
            for selector, what in (("body", "backgroundColor"), (".message-content .plain", "color"))
        )
        bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) > 382 for colour in (ground, ink)]
        assert bright == ([True, False] if scheme == "light" else [False, True]), (ground, ink)


def whole_answer(model, prompt, arguments):
    command = [sys.executable, "-m", "pipeline.chat", model, "-p", prompt, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_an_answer_streams_and_the_stop_button_ends_it_where_it_is(babbler, browser, tmp_path):
    arguments = ["--greedy", "--max-new-tokens", "4000"]
    with page(babbler, arguments=arguments, log=tmp_path / "log") as (address, _):
        visitor = Visitor(browser, address)
        lengths = []
        visitor.send("xyz")
        visitor.tab.locator(".stop-button").wait_for()
        while len(set(lengths)) < 3:  # it grows before it ends
            lengths.append(len("".join(visitor.messages()[1:])))
            assert visitor.tab.locator(".stop-button").is_visible()
        visitor.tab.locator(".stop-button").click()
        visitor.settled()
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
        assert visitor.settled()[:3] == [*stopped, "and"]
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


def test_a_port_that_is_taken_is_reported(run, tmp_path):
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
