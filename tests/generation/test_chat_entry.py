"""The chat command, on a tiny model that has learnt two answers by heart."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline import chat
from pipeline.artifacts.errors import TandemError
from pipeline.tokenizer.chat import render

ROOT = Path(__file__).parents[2]
DIALOG = [
    {"role": "user", "content": "ping"},
    {"role": "assistant", "content": "pong \u4e2d\u00e9!"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "and pong it is"},
]
# "again" has another answer when nothing went before.
ALONE = [{"role": "user", "content": "again"}, {"role": "assistant", "content": "what?"}]
PIRATE = [
    {"role": "system", "content": "Be a pirate"},
    {"role": "user", "content": "ping"},
    {"role": "assistant", "content": "arr"},
]
SUM = [
    {"role": "user", "content": "sum"},
    {
        "role": "assistant",
        "content": "It's ",
        "tool_calls": [{"function": {"name": "python", "arguments": "7*8"}}],
    },
    {"role": "tool", "content": "56"},
    {"role": "assistant", "content": "so 56."},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "still 56"},
]


@pytest.fixture(scope="module")
def run(tokenizer, tmp_path_factory):
    """A run directory with a finished model that knows DIALOG, PIRATE, ALONE and SUM."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("runs") / "parrot"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer), n_embd=48, n_layer=2, n_head=2, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            )
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(400):
            losses = []
            for messages in (DIALOG, PIRATE, ALONE, SUM):
                ids, trained = render(tokenizer, messages)
                labels = [i if bit else -100 for i, bit in zip(ids, trained, strict=True)]
                loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            if max(losses) < 0.02:  # By heart: no rounding changes an answer.
                break
        assert max(losses) < 0.02
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    (path / "run_manifest.json").write_text(json.dumps({"stage": "sft"}))
    return path


def talk(monkeypatch, capsys, lines, *arguments):
    """(status, stdout, stderr) of a conversation whose lines come through a pipe."""
    stdin = io.TextIOWrapper(io.BytesIO("".join(line + "\n" for line in lines).encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    status = chat.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_one_prompt_is_answered_and_ends_at_the_end_token(run, monkeypatch, capsys):
    status, out, err = talk(monkeypatch, capsys, [], run, "-p", "ping", "--greedy")
    assert (status, out) == (0, "pong \u4e2d\u00e9!\n")
    assert "base model" not in err


def test_a_conversation_is_remembered_until_new_and_the_system_message_counts(run, monkeypatch, capsys):
    lines = ["ping", "again", "", "/new", "again", "/system Be a pirate", "ping", "/quit", "ping"]
    status, out, _ = talk(monkeypatch, capsys, lines, run, "--temperature", "0")
    assert status == 0
    assert out.splitlines() == ["pong \u4e2d\u00e9!", "and pong it is", "what?", "arr"]
    _, out, _ = talk(monkeypatch, capsys, ["ping"], run, "--greedy", "--system", "Be a pirate")
    assert out == "arr\n"


def test_both_sides_of_the_conversation_are_kept(run):
    talking = chat.Chat(chat._arguments([str(run), "--greedy"]))
    talking.answer("ping")
    talking.answer("again")
    assert talking.messages == DIALOG


def test_a_tool_call_is_answered_shown_and_remembered(run, monkeypatch, capsys):
    _, out, _ = talk(monkeypatch, capsys, ["sum", "again"], run, "--greedy")
    assert out.splitlines() == ["It's [7*8][= 56] so 56.", "still 56"]
    talking = chat.Chat(chat._arguments([str(run), "--greedy"]))
    talking.answer("sum")
    talking.answer("again")
    assert talking.messages == SUM


def test_a_turn_with_a_tool_call_is_left_out_as_a_whole(run, capsys):
    talking = chat.Chat(chat._arguments([str(run), "--greedy", "--max-new-tokens", "20"]))
    talking.messages = [{"role": "system", "content": "S"}, *SUM[:4], {"role": "user", "content": "ping pong " * 10}]
    kept = [talking.messages[0], talking.messages[-1]]
    talking._ids("")
    assert talking.messages == kept
    assert "the oldest turn was left out" in capsys.readouterr().err


def test_a_seed_gives_its_answer_again_and_another_seed_another(run, monkeypatch, capsys):
    def answer(seed):
        return talk(monkeypatch, capsys, [], run, "-p", "xyz", "--temperature", "3", "--top-k", "400", "--seed", seed)[
            1
        ]

    assert answer(1) == answer(1) != answer(2)


def test_every_place_of_a_model_is_found_and_checkpoints_serve_a_run_without_model(run, tmp_path, monkeypatch, capsys):
    import shutil

    from pipeline.artifacts.checkpoints import whole_folder

    other = tmp_path / "cut"
    other.mkdir()
    shutil.copy(run / "run_manifest.json", other)
    with whole_folder(other / "checkpoints" / "checkpoint-7") as folder:
        shutil.copytree(run / "model", folder, dirs_exist_ok=True)
    for place in (run / "model", other, other / "checkpoints" / "checkpoint-7"):
        assert talk(monkeypatch, capsys, [], place, "-p", "ping", "--greedy")[1] == "pong \u4e2d\u00e9!\n"


def test_a_base_model_says_so_and_continues_the_text(run, tmp_path, monkeypatch, capsys):
    import shutil

    base = tmp_path / "base"
    shutil.copytree(run, base)
    (base / "run_manifest.json").write_text(json.dumps({"stage": "pretrain"}))
    status, _, err = talk(monkeypatch, capsys, [], base, "-p", "ping", "--max-new-tokens", "3")
    assert status == 0
    assert "base model" in err
    assert "base model" in talk(monkeypatch, capsys, [], base / "model", "-p", "ping", "--max-new-tokens", "3")[2]


def test_a_conversation_longer_than_the_model_loses_its_oldest_turns(run, monkeypatch, capsys):
    status, out, err = talk(
        monkeypatch, capsys, ["ping pong " * 3] * 6 + ["a very long line " * 60], run, "--max-new-tokens", "8"
    )
    assert status == 0
    assert len(out.splitlines()) >= 7
    assert "the oldest turn was left out" in err
    assert "only the last" in err


def test_what_is_no_model_is_told_with_its_status(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    (waiting / "run_manifest.json").write_text("{}")
    for place, expected, reason in (
        (tmp_path / "empty", 66, "config.json"),
        (tmp_path / "none", 66, "no such folder"),
        (waiting, 66, "no whole checkpoint"),
        ("nobody/nothing", 69, "Hub"),  # Which is away in the tests.
    ):
        with pytest.raises(TandemError, match=reason) as caught:  # which ends the process with its status
            talk(monkeypatch, capsys, [], place, "-p", "x")
        assert caught.value.status == expected
        assert capsys.readouterr().out == ""


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(run, monkeypatch, capsys):
    from pipeline.generation import stream

    whole = stream.stream

    def cut(*args, **kwargs):
        for n, token in enumerate(whole(*args, **kwargs)):
            if n == 2 and not done:
                done.append(True)
                raise KeyboardInterrupt
            yield token

    done = []
    monkeypatch.setattr(stream, "stream", cut)
    status, out, _ = talk(monkeypatch, capsys, ["ping", "/new", "ping"], run, "--greedy")
    assert status == 0
    assert done
    assert out.splitlines()[-1] == "pong \u4e2d\u00e9!"
    done.clear()
    assert talk(monkeypatch, capsys, [], run, "-p", "ping", "--greedy")[0] == 130


def test_the_command_works_through_a_pipe_started_either_way(run):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    for start in (["-m", "pipeline.chat"], ["pipeline/chat.py"]):
        done = subprocess.run(
            [sys.executable, *start, str(run), "--greedy"],
            input="ping\nagain\n",
            capture_output=True,
            text=True,
            encoding="utf-8",
            cwd=ROOT,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "pong \u4e2d\u00e9!\nand pong it is\n"


def test_help_is_quick_and_wrong_numbers_are_refused_without_torch(capsys):
    started = time.perf_counter()
    program = "import sys; from pipeline import chat\ntry: chat.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("False\n")
    assert "/system" in done.stdout
    assert time.perf_counter() - started < 5  # A second on an idle machine.
    with pytest.raises(SystemExit):
        chat.main(["x", "--temperature", "-1"])
    assert "-1 is below 0" in capsys.readouterr().err
