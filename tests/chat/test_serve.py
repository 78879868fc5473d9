"""An OpenAI client and `transformers chat`, answered by `transformers serve`, on a model that knows its answers by heart."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from pipeline.chat.serve import _serve, main
from pipeline.process.errors import TandemError

ROOT = Path(__file__).parents[2]
NEEDED = ("openai", "fastapi", "uvicorn")


@contextmanager
def server(command: list[str], log: Path):
    """The base URL of a server on a free port, which SIGINT ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(log, "w") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, stderr=out, env=environment, cwd=log.parent
        )
    try:
        until = time.monotonic() + 240
        while "running on" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield f"http://localhost:{port}"
        process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        process.kill()


def answers(base_url: str, model: str, messages: list[dict]) -> tuple[list[str], str | None]:
    """The pieces of a streamed answer, and why it ended."""
    from openai import OpenAI

    with OpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=100, max_retries=0) as client:
        stream = client.chat.completions.create(
            model=model, messages=messages, stream=True, temperature=0.0, max_tokens=40
        )
        choices = [choice for chunk in stream for choice in chunk.choices]
    return [c.delta.content for c in choices if c.delta.content], choices[-1].finish_reason


DIALOG = [
    {"role": "user", "content": "ping"},
    {"role": "assistant", "content": "pong \u4e2d\u00e9!"},
    {"role": "user", "content": "again"},
]


@pytest.fixture(scope="module")
def own_code(run, tokenizer, tmp_path_factory):
    """A run whose model needs its own code, and knows nothing."""
    from pipeline.model.build import build_model
    from pipeline.model.saved import save_model
    from pipeline.recipe.sizes import MODERN

    path = tmp_path_factory.mktemp("runs") / "modern"
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 96, "sliding_window": 16}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    save_model(build_model("tandem", {**MODERN, **sizes, "vocab_size": len(tokenizer), **ids}, seed=0), path / "model")
    tokenizer.save_pretrained(path / "model")
    shutil.copy(run / "run_manifest.json", path)
    return path


def test_an_openai_client_streams_the_answer_up_to_the_end_token(run, tmp_path):
    for package in NEEDED:
        pytest.importorskip(package)
    model = str(run / "model")
    transformers = [sys.executable, "-c", "from transformers.cli.transformers import app; app()"]
    ours = [sys.executable, "-m", "pipeline.chat.serve", str(run)]
    # A plain GPT-2 needs nothing of ours.
    for name, command in (("theirs", [*transformers, "serve", model]), ("ours", ours)):
        with server(command, tmp_path / name) as url:
            pieces, reason = answers(url, model, DIALOG[:1])
            assert ("".join(pieces), reason) == ("pong \u4e2d\u00e9!", "stop")
            assert len(pieces) > 3
            assert "".join(answers(url, model, DIALOG)[0]) == "and pong it is"
            if name == "ours":
                assert "pong" in _transformers_chat(url, model, transformers, tmp_path)


def _transformers_chat(url: str, model: str, transformers: list[str], folder: Path) -> str:
    pytest.importorskip("rich")
    # huggingface_hub's client refuses every address when it is told to stay offline, this machine's too.
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | {"HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [*transformers, "chat", model, url, "max_new_tokens=40"],
        input="ping\n!exit\n",
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r"\x1b\[[\d;?]*\w", "", done.stdout)


def test_a_model_with_its_own_code_is_served_too(own_code, tmp_path):
    for package in NEEDED:
        pytest.importorskip(package)
    with server([sys.executable, "-m", "pipeline.chat.serve", str(own_code)], tmp_path / "log") as url:
        assert f"requests name the model {own_code / 'model'}" in (tmp_path / "log").read_text()
        pieces, _ = answers(url, str(own_code / "model"), DIALOG[:1])
        assert pieces


def test_what_is_missing_is_reported_in_a_sentence(run, monkeypatch):
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    with pytest.raises(TandemError, match=r'pip install "transformers\[serving\]"') as caught:
        main([str(run)])
    assert caught.value.status == 66


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [
        (click.UsageError("No such option: --nope"), 64, "command line: transformers serve: No such option: --nope"),
        (SystemExit(3), 64, "the server did not start"),
        (ValueError("size 0\nmore"), 65, r"model: transformers serve cannot serve it \(size 0\)"),
    ],
)
def test_what_ends_transformers_own_command_is_a_sentence(raised, status, words):
    def app(command, *, standalone_mode):
        raise raised

    with pytest.raises(TandemError, match=words) as caught:
        _serve(app, ["serve"], path="model")
    assert caught.value.status == status


@pytest.mark.parametrize("raised", [KeyboardInterrupt, click.Abort])
def test_ctrl_c_ends_the_server_with_the_status_of_one(raised):
    def app(command, *, standalone_mode):
        assert not standalone_mode
        raise raised

    assert _serve(app, ["serve"], path="model") == 130


def test_a_hub_model_that_needs_its_own_code_is_not_served(monkeypatch):
    found = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda path, revision: (found, {}))
    monkeypatch.setattr("pipeline.evals.subject.is_hub_away", lambda: False)
    with pytest.raises(TandemError, match="evil/run: its model_type 'evil' is known only to code") as caught:
        main(["evil/run@main"])
    assert caught.value.status == 64
