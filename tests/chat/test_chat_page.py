"""The page on a tiny model that has learnt its answers by heart: its answers, and the server as a program sees it."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from known_answers import ALONE, DIALOG, SUM

pytest.importorskip("gradio")

from pipeline.chat.conversation import open_chat_model
from pipeline.chat.page import Answers, chat_interface
from pipeline.process.errors import DataError

ROOT = Path(__file__).parents[2]
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
def page(model, *, arguments=(), log: Path):
    """(address, process) of `python -m pipeline.chat MODEL --web`, which ends by SIGTERM with status 0."""
    (log.parent / "sitecustomize.py").write_text(WATCH)
    own = {k: v for k, v in os.environ.items() if not k.startswith("GRADIO_")}
    path = os.pathsep.join(filter(None, [str(log.parent), str(ROOT), os.environ.get("PYTHONPATH")]))
    own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "http_proxy": "http://192.0.2.1:9"}
    command = [sys.executable, "-m", "pipeline.chat", str(model), "--web", *arguments]
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=own)
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


@pytest.fixture
def answers(run):
    return Answers(open_chat_model(str(run)))


def said(answers: Answers, *texts: str) -> list[dict]:
    """Return the history that Gradio has after these messages."""
    history: list[dict] = []
    for text in texts:
        *_, answer = answers.answer(text, history, temperature=0.0)
        turn = (("user", text), ("assistant", answer))
        history += [{"role": role, "content": [{"type": "text", "text": shown}]} for role, shown in turn]
    return history


def shown(history: list[dict]) -> list[str]:
    return [turn["content"][0]["text"] for turn in history]


def test_an_answer_grows_and_depends_on_the_conversation(answers):
    assert shown(said(answers, "ping", "again")) == [message["content"] for message in DIALOG]
    assert shown(said(answers, "again")) == [message["content"] for message in ALONE]
    *_, answer = answers.answer("ping", [], system=" Be a pirate ", temperature=0.0)
    assert answer == "arr"


def test_a_tool_call_is_shown_and_remembered_as_the_model_wrote_it(answers):
    history = said(answers, "sum", "again")
    assert shown(history)[1::2] == ["It's [7*8][= 56] so 56.", "still 56"]
    assert answers._messages(history) == SUM


def test_what_was_shown_of_a_stopped_answer_is_in_the_conversation(babbler):
    answers = Answers(open_chat_model(str(babbler)))
    growing = answers.answer("xyz", [], temperature=0.0, max_new_tokens=4000)
    first = next(growing)
    growing.close()
    assert [message["content"] for message in answers.written[first]]


def test_a_repeated_question_is_drawn_anew(answers):
    found = {list(answers.answer("ping", [], temperature=2.0, top_k=0))[-1] for _ in range(4)}
    assert len(found) > 1


def test_a_refused_message_is_an_error_of_the_page(answers):
    import gradio

    answers.chat_model.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(gradio.Error) as caught:
        said(answers, "ping")
    assert isinstance(caught.value.__cause__, DataError | None)


def test_no_more_tokens_are_offered_than_the_model_has_positions(run):
    from pipeline.chat.conversation import Sampling

    chat_model = open_chat_model(str(run))
    interface = chat_interface(chat_model, system=None, sampling=Sampling(max_new_tokens=512))
    (tokens,) = [one for one in interface.additional_inputs if getattr(one, "label", None) == "max_new_tokens"]
    assert (tokens.maximum, tokens.value) == (128, 128)


@pytest.mark.full  # starts the command
def test_the_page_answers_its_own_address_only(run, tmp_path):
    import httpx
    from gradio_client import Client

    with page(run, arguments=["--greedy"], log=tmp_path / "log") as (address, _):
        client = Client(address, verbose=False)
        assert client.predict("ping", api_name="/answer") == "pong \u4e2d\u00e9!"
        assert client.predict("again", api_name="/answer") == "and pong it is"  # of one conversation
        assert httpx.get(address).status_code == 200
        port = address.rstrip("/").rsplit(":", 1)[1]
        assert httpx.get(address, headers={"Host": f"localhost:{port}"}).status_code == 200
        for host in (f"evil.example:{port}", "127.0.0.1.evil.example"):
            assert httpx.get(address, headers={"Host": host}).status_code == 400


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
