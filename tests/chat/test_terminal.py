"""The chat command, on a tiny model that has learnt two answers by heart."""

import io
import os
import re
import select
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from known_answers import DIALOG, SUM

from pipeline.chat.__main__ import main, read_arguments, sampling_of
from pipeline.chat.conversation import Conversation, Sampling, open_chat_model
from pipeline.process.errors import TandemError

ROOT = Path(__file__).parents[2]
GREEDY = Sampling(temperature=0.0)


def talk(monkeypatch, capsys, lines, *arguments):
    """(status, stdout, stderr) of a conversation whose lines come through a pipe."""
    stdin = io.TextIOWrapper(io.BytesIO("".join(line + "\n" for line in lines).encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    status = main([str(a) for a in arguments])
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
    talking = Conversation(open_chat_model(str(run)))
    assert "".join(talking.answer("ping", GREEDY)) == "pong \u4e2d\u00e9!"
    list(talking.answer("again", GREEDY))
    assert talking.messages == DIALOG


def test_control_characters_from_a_model_are_escaped_before_the_terminal(run, monkeypatch, capsys):
    monkeypatch.setattr(
        Conversation, "answer", lambda *_: (piece for piece in ("\x1b]52;c;aGk=\x07", "a\tb\n", "\x9b2J\r\u202e"))
    )
    _, out, _ = talk(monkeypatch, capsys, [], run, "-p", "ping")
    assert out == "\\x1b]52;c;aGk=\\x07a\tb\n\\x9b2J\\r\\u202e\n"


def test_a_tool_call_is_answered_shown_and_remembered(run, monkeypatch, capsys):
    _, out, _ = talk(monkeypatch, capsys, ["sum", "again"], run, "--greedy")
    assert out.splitlines() == ["It's [7*8][= 56] so 56.", "still 56"]
    talking = Conversation(open_chat_model(str(run)))
    for text in ("sum", "again"):
        list(talking.answer(text, GREEDY))
    assert talking.messages == SUM


def test_a_turn_with_a_tool_call_is_left_out_as_a_whole(run):
    notices = []
    talking = Conversation(open_chat_model(str(run)), system="S", notify=notices.append)
    talking.messages = SUM[:4]
    text = "ping pong " * 10
    next(talking.answer(text, Sampling(max_new_tokens=20)))
    assert talking.messages[0] == {"role": "user", "content": text}
    assert notices == ["the oldest turn was left out: the model reads no more"]


def test_a_seed_gives_its_answer_again_and_another_seed_another(run, monkeypatch, capsys):
    def answer(seed):
        return talk(monkeypatch, capsys, [], run, "-p", "xyz", "--temperature", "3", "--top-k", "400", "--seed", seed)[
            1
        ]

    assert answer(1) == answer(1) != answer(2)


def test_a_model_is_found_in_a_run_folder_or_checkpoint(run, tmp_path, monkeypatch, capsys):
    from pipeline.run_dir.checkpoints import whole_folder

    other = tmp_path / "cut"
    other.mkdir()
    shutil.copy(run / "run_manifest.json", other)
    with whole_folder(other / "checkpoints" / "checkpoint-7") as folder:
        shutil.copytree(run / "model", folder, dirs_exist_ok=True)
    for place in (run / "model", other, other / "checkpoints" / "checkpoint-7"):
        assert talk(monkeypatch, capsys, [], place, "-p", "ping", "--greedy")[1] == "pong \u4e2d\u00e9!\n"


def test_a_base_model_says_so_and_continues_the_text(run, base, tmp_path, monkeypatch, capsys):
    status, _, err = talk(monkeypatch, capsys, [], base, "-p", "ping", "--max-new-tokens", "3")
    assert status == 0
    assert "base model" in err
    assert "base model" in talk(monkeypatch, capsys, [], base / "model", "-p", "ping", "--max-new-tokens", "3")[2]
    # As it is published: the manifest beside the model.
    shutil.copytree(base / "model", tmp_path / "published")
    shutil.copy(base / "run_manifest.json", tmp_path / "published")
    assert not open_chat_model(str(tmp_path / "published")).chats
    assert open_chat_model(str(run / "model")).chats


def test_a_base_model_has_a_lower_default_token_limit():
    for arguments, chats, most in (([], False, 128), ([], True, 512), (["--max-new-tokens", "700"], False, 700)):
        assert sampling_of(read_arguments(["model", *arguments]), chats=chats).max_new_tokens == most


def test_a_conversation_longer_than_the_model_loses_its_oldest_turns(run, monkeypatch, capsys):
    status, out, err = talk(
        monkeypatch, capsys, ["ping pong " * 3] * 6 + ["a very long line " * 60], run, "--max-new-tokens", "8"
    )
    assert status == 0
    assert len(out.splitlines()) >= 7
    assert "the oldest turn was left out" in err
    assert "only the last" in err


def test_what_is_no_model_is_reported_with_its_status(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    (waiting / "run_manifest.json").write_text("{}")
    for place, expected, reason in (
        (tmp_path / "empty", 66, "config.json"),
        (tmp_path / "none", 66, "no such folder"),
        (waiting, 66, "nor a whole checkpoint"),
        ("nobody/nothing", 69, "Hub"),  # Which is away in the tests.
    ):
        with pytest.raises(TandemError, match=reason) as caught:  # which ends the process with its status
            talk(monkeypatch, capsys, [], place, "-p", "x")
        assert caught.value.status == expected
        assert capsys.readouterr().out == ""


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(run, monkeypatch, capsys):
    from pipeline.generation import texts

    whole = texts.stream

    def cut(*args, **kwargs):
        for n, token in enumerate(whole(*args, **kwargs)):
            if n == 2 and not done:
                done.append(True)
                raise KeyboardInterrupt
            yield token

    done = []
    monkeypatch.setattr(texts, "stream", cut)
    status, out, _ = talk(monkeypatch, capsys, ["ping", "/new", "ping"], run, "--greedy")
    assert status == 0
    assert done
    assert out.splitlines()[-1] == "pong \u4e2d\u00e9!"
    done.clear()
    assert talk(monkeypatch, capsys, [], run, "-p", "ping", "--greedy")[0] == 130


def test_the_command_works_through_a_pipe(run):
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.chat", str(run), "--greedy"],
        input="ping\nagain\n",
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "pong \u4e2d\u00e9!\nand pong it is\n"


def test_help_is_quick_and_wrong_numbers_are_refused_without_torch(capsys):
    started = time.perf_counter()
    program = "import sys; from pipeline.chat.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("False\n")
    assert "/system" in done.stdout
    assert time.perf_counter() - started < 5  # A second on an idle machine.
    with pytest.raises(SystemExit):
        main(["x", "--temperature", "-1"])
    assert "-1 is below 0" in capsys.readouterr().err


def test_options_of_the_page_and_the_terminal_cannot_be_mixed(capsys):
    with pytest.raises(SystemExit):
        main(["x", "--web", "-p", "hello"])
    assert "give one of them" in capsys.readouterr().err


def test_without_gradio_the_page_is_refused_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)  # importing it is an error
    with pytest.raises(TandemError, match=r'pip install "tandem-llm\[web\]"') as caught:
        talk(monkeypatch, capsys, [], "no/such/model", "--web")
    assert caught.value.status == 66


def test_a_conversation_is_as_it_was_when_the_template_refuses_it(run):
    from pipeline.process.errors import DataError

    talking = Conversation(open_chat_model(str(run)))
    list(talking.answer("ping", GREEDY))
    before = list(talking.messages)
    talking.chat_model.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(DataError):
        next(talking.answer("again", GREEDY))
    assert talking.messages == before


# Somebody at a terminal: a real process on a pseudo-terminal, whose keys are bytes.

PROMPT = r"(?:^|\n)> $"
MORE = r"\.\.\. $"


class Keyboard:
    def __init__(self, process: int, terminal: int):
        self.process, self.terminal, self.screen = process, terminal, ""

    def type(self, keys: str, *, until: str = PROMPT) -> str:
        """Return what the terminal shows from these keys on, when it matches."""
        if "\x03" in keys:
            time.sleep(0.5)  # of a signal that comes before readline waits for a key it learns with the next key only
        os.write(self.terminal, keys.encode())
        return self.wait(until)

    def wait(self, until: str) -> str:
        start, ends = len(self.screen), time.monotonic() + 120
        while not re.search(until, self.screen[start:]):
            assert time.monotonic() < ends, self.screen
            if select.select([self.terminal], [], [], 0.2)[0]:
                try:
                    read = os.read(self.terminal, 65536).decode(errors="replace")
                except OSError:  # Linux: the process has ended
                    read = ""
                if not read:
                    break
                self.screen += read.replace("\r\n", "\n").replace("\x1b[?2004h", "").replace("\x1b[?2004l\r", "")
        return self.screen[start:]

    def status(self) -> int:
        """Return the exit status of the process, which must be about to end."""
        self.wait(r"\Z(?!)")  # the end
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


@contextmanager
def keyboard(*words, cache: Path, code: str | None = None):
    pty = pytest.importorskip("pty")
    own = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TANDEM_CACHE": str(cache),
        "TERM": "dumb",
        "PYTHONPATH": str(ROOT),
        "INPUTRC": os.devnull,
    }
    command = [sys.executable, *(("-c", code) if code else ("-m", "pipeline.chat")), *map(str, words)]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, command, own)
    keys = Keyboard(process, terminal)
    try:
        keys.wait(PROMPT)
        yield keys
    finally:
        os.close(terminal)  # hangs up: a process that still runs ends
    assert "Traceback" not in keys.screen, keys.screen


def test_the_terminal_names_model_and_commands_and_ctrl_c_asks_again(run, tmp_path):
    with keyboard(run, "--greedy", cache=tmp_path) as keys:
        assert "parrot: chat model, gpt2, " in keys.screen
        assert "128 positions\n" in keys.screen
        assert f"in {run / 'model'}\n" in keys.screen
        shown = keys.type("/help\n")
        assert all(f"  {name}" in shown for name in ("/help", "/new", "/system", "/retry", "/undo", "/quit", '"""'))
        assert "Ctrl-D or /quit ends" in keys.type("half a line\x03")
        assert "Ctrl-D or /quit ends" in keys.type("\x03")
        assert "pong" in keys.type("ping\n")
        assert "and pong it is" in keys.type("again\n")
        assert "and pong it is" in keys.type("/retry\n")
        assert "(taken back: again)" in keys.type("/undo\n")
        assert "and pong it is" in keys.type("again\n")
        assert "(a new conversation)" in keys.type("/clear\n")
        assert "what?" in keys.type("again\n")
        shown = keys.type("/pink floyd\n")
        assert "/pink is no command; /help lists them" in shown
        keys.type("/new\n")
        assert "there is no message to take back" in keys.type("/undo\n")
        os.write(keys.terminal, b"\x04")
        assert keys.status() == 0


def test_a_message_of_several_lines_stands_between_triple_quotes(run, tmp_path, monkeypatch, capsys):
    with keyboard(run, cache=tmp_path) as keys:
        keys.type('"""one\n', until=MORE)
        keys.type("/two\n", until=MORE)
        keys.type('three"""\n')
        assert "(taken back: one\n/two\nthree)" in keys.type("/undo\n")
        keys.type('"""lost\n', until=MORE)
        assert "Ctrl-D or /quit ends" in keys.type("\x03")
        assert "there is no message to take back" in keys.type("/undo\n")
    lines = ['"""', "ping", '"""', '"""again"""', '"""', "again"]  # the last one ends with the pipe
    assert talk(monkeypatch, capsys, lines, run, "--greedy")[1].splitlines()[:2] == [
        "pong \u4e2d\u00e9!",
        "and pong it is",
    ]


def test_without_readline_the_terminal_works(run, tmp_path):
    main = "import sys; sys.modules['readline'] = None; from pipeline.chat.__main__ import main; sys.exit(main(sys.argv[1:]))"
    with keyboard(run, "--greedy", cache=tmp_path, code=main) as keys:
        assert "pong" in keys.type("ping\n")


def test_ctrl_c_stops_an_answer_and_the_next_message_is_answered(babbler, tmp_path):
    with keyboard(babbler, "--greedy", "--max-new-tokens", "4000", cache=tmp_path) as keys:
        keys.type("xyz\n", until=r"xyz\n.{20}")
        stopped = keys.type("\x03")
        assert len(stopped) < 8000
        keys.type("and\n", until=r"and\n.{20}")
        keys.type("\x03")
        assert "(taken back: and)" in keys.type("/undo\n")
        assert "(taken back: xyz)" in keys.type("/undo\n")
        os.write(keys.terminal, b"/quit\n")
        assert keys.status() == 0


def test_a_base_model_says_it_continues_text_without_system_messages(base, tmp_path):
    with keyboard(base, "--max-new-tokens", "3", cache=tmp_path) as keys:
        assert "base is a base model: it was not trained to chat and continues your text" in keys.screen
        assert "/system" not in keys.type("/help\n")
        assert "reads no system message: it is a base model" in keys.type("/system x\n")


def test_a_template_without_a_system_message_is_said_to_have_none(run):
    speaker = open_chat_model(str(run))
    assert speaker.takes_system
    for template in (
        "{% for message in messages if message.role != 'system' %}<|user|>{{ message.content }}<|end|>{% endfor %}<|assistant|>",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}<|user|>{{ messages[0].content }}<|assistant|>",
    ):
        other = open_chat_model(str(run))
        other.tokenizer.chat_template = template
        assert not other.takes_system


def test_an_unknown_command_in_a_pipe_is_not_sent(run, monkeypatch, capsys):
    _, out, err = talk(monkeypatch, capsys, ["/agian", "again", "/retry", "/undo", "again"], run, "--greedy")
    assert out.splitlines() == ["what?", "what?", "what?"]
    assert "/agian is no command" in err


def test_help_names_the_command_as_it_was_typed(tmp_path):
    (tmp_path / "tandem").touch(mode=0o755)
    environ = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    for command, name in (
        (("-m", "pipeline.chat"), "python -m pipeline.chat"),
        ((str(ROOT / "pipeline" / "launch" / "console.py"), "chat"), "tandem chat"),
    ):
        done = subprocess.run(
            [sys.executable, *command, "--help"], capture_output=True, text=True, cwd=ROOT, env=environ
        )
        assert done.stdout.startswith(f"usage: {name} [-h]"), done.stderr
