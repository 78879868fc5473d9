"""What is printed cannot steer the terminal, whoever's text a part of it is."""

import io
import sys

from pipeline.process.errors import readable
from pipeline.process.secrets import printed_text, redact_output

STEERING = "\x1b]52;c;aGk=\x07\x1b[2J\x9b1m\u202e\x00"


def test_control_characters_become_escapes_and_lines_and_tabs_stay():
    assert printed_text(f"a\t{STEERING}\n") == "a\t\\x1b]52;c;aGk=\\x07\\x1b[2J\\x9b1m\\u202e\\x00\n"


def test_colours_and_progress_bars_of_our_own_are_printed_as_they_are():
    own = "\x1b[32mgreen\x1b[0m \x1b[1;31mred\x1b[m\r 50%\x1b[A\x1b[K\n"
    assert printed_text(own) == own
    assert printed_text(f"\x1b[32m{STEERING}") == "\x1b[32m" + readable(STEERING)


def test_nothing_that_a_command_prints_steers_the_terminal(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    redact_output()
    print(STEERING)
    print(STEERING, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        assert stream.getvalue() == readable(STEERING) + "\n"
