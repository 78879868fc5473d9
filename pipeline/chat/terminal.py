"""A conversation in the terminal or through a pipe."""

import sys
from contextlib import closing

from pipeline.chat.conversation import Conversation, Sampling, Speaker
from pipeline.generation.decoding import terminal_text

COMMANDS = "/new starts over, /system TEXT sets the system message and starts over, /quit or Ctrl-D ends"


class Terminal:
    """Reads lines and prints an answer to each; `conversation` is the one that goes on."""

    def __init__(self, speaker: Speaker, *, system: str | None, sampling: Sampling):
        self.sampling = sampling
        self.conversation = Conversation(speaker, system=system, tell=lambda what: print(f"({what})", file=sys.stderr))
        if not speaker.chats:
            print(
                f"{speaker.name} is a base model: it was not trained to chat and continues your text.", file=sys.stderr
            )

    def talk(self) -> None:
        """Lines until /quit or the end. Ctrl-C ends an answer, and leaves the part that is there in the conversation."""
        shown = sys.stdin.isatty()
        if shown:
            import readline  # noqa: F401  # Arrow keys and history in input().

            print(f"{COMMANDS}; Ctrl-C stops an answer.", file=sys.stderr)
        while True:
            try:
                line = input("> " if shown else "").strip()
            except EOFError:
                if shown:
                    print()
                return
            if line == "/quit":
                return
            if line == "/new":
                self.conversation.messages = []
            elif line == "/system" or line.startswith("/system "):
                self.conversation.system = line.removeprefix("/system").strip() or None
                self.conversation.messages = []
            elif line:
                try:
                    self.answer(line)
                except KeyboardInterrupt:
                    print()

    def answer(self, text: str) -> None:
        """Print what the model writes, as it writes it."""
        with closing(self.conversation.answer(text, self.sampling)) as pieces:
            for piece in pieces:
                print(terminal_text(piece), end="", flush=True)
        print()
