"""`transformers serve` itself answers as transformers' generate does: of stock forms its own command, of ours `pipeline.chat.serve`.

Its packages (fastapi, uvicorn, openai) come from a folder of their own; the questions are plain HTTP of OpenAI's form.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from environments import folder_with, slow_unless_installed
from forms import CHATS, TEXTS, greedy, load, write_forms

ROOT = Path(__file__).parents[2]
SERVING = ("fastapi", "uvicorn", "openai")
pytestmark = [pytest.mark.full, *slow_unless_installed(*SERVING)]
COMMANDS = {
    "portable": ["-m", "transformers.cli.transformers", "serve"],
    "modern": ["-m", "pipeline.chat.serve"],
}


def start(command: list[str], folder: Path) -> tuple[subprocess.Popen, int]:
    """Return a server of the model in that folder, which answers, and its port. Raise OSError where the port is taken."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT), folder_with(*SERVING, dependencies=True)])
    log = folder / "server.log"
    with open(log, "w") as out:
        given = {"stdout": out, "stderr": out, "cwd": folder, "env": os.environ | {"PYTHONPATH": path}}
        process = subprocess.Popen([sys.executable, *command, str(folder), "--port", str(port)], **given)
    try:
        until = time.monotonic() + 240
        while "running on" not in log.read_text():
            if process.poll() is not None and "address already in use" in log.read_text():
                raise OSError(log.read_text())
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
    except BaseException:
        process.kill()
        raise
    return process, port


@contextmanager
def served(command: list[str], folder: Path):
    """Yield a function that asks the server of the model in that folder; SIGINT ends it."""
    try:
        process, port = start(command, folder)
    except OSError:  # another program took the port before the server did
        process, port = start(command, folder)

    def ask(messages, **more):
        body = {"model": str(folder), "messages": messages, "temperature": 0, "max_tokens": 32, **more}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        answer = json.load(urllib.request.urlopen(request, timeout=120))
        return answer["choices"][0], answer["usage"]

    try:
        yield ask
        process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        process.kill()


@pytest.mark.parametrize("form", COMMANDS)
def test_the_server_s_greedy_answers_conversations_and_ends_are_those_of_generate(form, tmp_path):
    write_forms(tmp_path, form)
    model, tokenizer = load(tmp_path / form)
    chats = [*CHATS, *([{"role": "user", "content": text[:60]}] for text in TEXTS[:18])]
    with served(COMMANDS[form], tmp_path / form) as ask:
        for messages in chats:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            tokens = greedy(model, ids)
            choice, usage = ask(messages)
            assert choice["message"]["content"] == re.split(r"<\|(?:end|bos)\|>", tokenizer.decode(tokens))[0]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), len(tokens))
        for end in model.generation_config.eos_token_id:
            choice, usage = ask(chats[0], logit_bias={end: 100.0})
            assert (choice["finish_reason"], usage["completion_tokens"]) == ("stop", 1)
