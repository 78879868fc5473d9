"""python -m pipeline.chat RUN_OR_MODEL [-p PROMPT] [--web]: talk to a model in the terminal or in a browser."""

import argparse
import sys
from contextlib import closing, suppress

from pipeline.chat.conversation import ChatModel, Conversation, Sampling, open_chat_model, terminal_text
from pipeline.process.commands import program
from pipeline.process.errors import TandemError
from pipeline.run_dir.failures import exit_with_status

QUOTES = '"""'
COMMANDS = {
    "/help": "show this list",
    "/new": "start over (/clear does the same)",
    "/system TEXT": "set the system message and start over; without TEXT there is none",
    "/retry": "answer your last message again",
    "/undo": "take your last message and its answer back",
    "/quit": "end, as Ctrl-D does",
    QUOTES: "begins a message of several lines; the next one ends it",
}


class Terminal:
    """Read messages and print an answer to each; `conversation` is the one that goes on.

    Answers go to stdout, all else to stderr, so that a pipe carries answers alone.
    """

    def __init__(self, chat_model: ChatModel, *, system: str | None, sampling: Sampling):
        self.sampling = sampling
        self.conversation = Conversation(chat_model, system=system, notify=lambda what: note(f"({what})"))
        self.chat_model = chat_model
        self.shown = False  # whether somebody types and sees the prompt
        if system and not chat_model.takes_system:
            note(f"{chat_model.name} reads no system message, so --system changes nothing.")

    def talk(self) -> None:
        """Answer messages until /quit or the end.

        Ctrl-C ends an answer, and the part that is there stays in the conversation; at the prompt it drops what was
        typed.
        """
        self.shown = sys.stdin.isatty()
        if self.shown:
            with suppress(ImportError):  # Windows has none
                import readline  # noqa: F401 - gives input() arrow keys and the lines of this session
            self.introduce()
        elif not self.chat_model.chats:
            note(is_base(self.chat_model))
        while True:
            try:
                text, quoted = self.read()
            except EOFError:
                if self.shown:
                    print()
                return
            except KeyboardInterrupt:
                if not self.shown:
                    raise
                note("\nCtrl-D or /quit ends.")
                continue
            if text in ("/quit", "/exit") and not quoted:
                return
            # An answer can be stopped, and what a message does wrong does not end the conversation.
            try:
                if text.startswith("/") and not quoted:
                    self.command(text)
                elif text:
                    self.answer(text)
            except KeyboardInterrupt:
                print()
            except TandemError as error:
                if not self.shown:
                    raise  # whoever reads the pipe learns it by the status
                note(f"error: {error}")

    def introduce(self) -> None:
        chat_model = self.chat_model
        note(f"{chat_model.name}: {chat_model.kind}, {chat_model.sizes}")
        note(f"in {chat_model.path}")
        if not chat_model.chats:
            note(is_base(chat_model))
        note("/help lists the commands. Ctrl-C stops an answer, Ctrl-D ends.\n")

    def read(self) -> tuple[str, bool]:
        """Return the next message, and whether it was between triple quotes. Raises EOFError at the end."""
        text = input("> " if self.shown else "").strip()
        if not text.startswith(QUOTES):
            return text, False
        lines = [text.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(input("... " if self.shown else ""))
            except EOFError:  # the message ends where the input does
                break
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip(), True

    def command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/help":
            for known, meaning in COMMANDS.items():
                if known != "/system TEXT" or self.chat_model.takes_system:
                    note(f"  {known:<13} {meaning}")
        elif name in ("/new", "/clear"):
            self.conversation.clear()
            self.confirm("a new conversation")
        elif name == "/system":
            self.set_system(rest.strip())
        elif name in ("/undo", "/retry"):
            asked = self.conversation.undo()
            if asked is None:
                note(f"(there is no message to {'take back' if name == '/undo' else 'answer again'})")
            elif name == "/retry":
                self.answer(asked)
            else:
                self.confirm(f"taken back: {terminal_text(asked)}")
        else:
            note(
                f"({terminal_text(name)} is no command; /help lists them. "
                f"To send a message that begins with /, write it between {QUOTES})"
            )

    def set_system(self, text: str) -> None:
        if not self.chat_model.takes_system:
            why = "its chat template has no place for one" if self.chat_model.chats else "it is a base model"
            note(f"({self.chat_model.name} reads no system message: {why})")
            return
        self.conversation.system = text or None
        self.conversation.clear()
        self.confirm("a new conversation with this system message" if text else "a new conversation without one")

    def confirm(self, what: str) -> None:
        if self.shown:
            note(f"({what})")

    def answer(self, text: str) -> None:
        """Print what the model writes, as it writes it."""
        with closing(self.conversation.answer(text, self.sampling)) as pieces:
            for piece in pieces:
                print(terminal_text(piece), end="", flush=True)
        print()


def is_base(chat_model: ChatModel) -> str:
    return (
        f"{chat_model.name} is a base model: it was not trained to chat and continues your text, "
        "each time without the lines before."
    )


def note(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


CONTINUED_TOKENS = 128  # of a base model, which seldom ends a text by itself


def main(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    for channel in (sys.stdin, sys.stdout, sys.stderr):
        # A terminal without Unicode is no reason to die.
        channel.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        if arguments.web:
            from pipeline.chat.page import require_gradio

            require_gradio()  # before the model is loaded
        _talk(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130 if arguments.prompt is not None else 0
    return 0


def _talk(arguments: argparse.Namespace) -> None:
    if arguments.prompt is None and sys.stderr.isatty():
        note(f"Loading {arguments.model} ...")  # importing torch takes seconds
    chat_model = open_chat_model(arguments.model, trust_code=arguments.trust_code)
    sampling = sampling_of(arguments, chats=chat_model.chats)
    if arguments.web:
        from pipeline.chat.page import show

        show(chat_model, system=arguments.system, sampling=sampling)
        return

    terminal = Terminal(chat_model, system=arguments.system, sampling=sampling)
    if arguments.prompt is not None:
        if not chat_model.chats:
            note(is_base(chat_model))
        terminal.answer(arguments.prompt)
    else:
        terminal.talk()


def sampling_of(arguments: argparse.Namespace, *, chats: bool) -> Sampling:
    return Sampling(
        temperature=0.0 if arguments.greedy else arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        max_new_tokens=arguments.max_new_tokens or (Sampling.max_new_tokens if chats else CONTINUED_TOKENS),
        seed=arguments.seed,
    )


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("chat"),
        description="Talk to a model in the terminal, or on a page of this machine.",
        epilog="In the terminal:\n" + "\n".join(f"  {name:<13} {meaning}" for name, meaning in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        help="run directory, checkpoint, model folder or Hub id (ID@REVISION pins one)",
    )
    parser.add_argument("-p", "--prompt", help="answer this and end")
    parser.add_argument(
        "--web", action="store_true", help="a page in the browser, for this machine only; prints its address"
    )
    parser.add_argument(
        "--trust-code", action="store_true", help="run code files that come with the model, which may do anything"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--temperature", type=_number(float, 0), default=0.8, help="0 takes the likeliest token (default %(default)s)"
    )
    parser.add_argument(
        "--top-k", type=_number(int, 1), default=50, help="draw from the k likeliest tokens (default %(default)s)"
    )
    parser.add_argument("--top-p", type=_number(float, 0), help="draw from the likeliest tokens that hold this share")
    parser.add_argument("--seed", type=_number(int, 0), default=0, help="of the drawing (default %(default)s)")
    parser.add_argument(
        "--max-new-tokens",
        type=_number(int, 1),
        help=(f"longest answer (default {Sampling.max_new_tokens}; {CONTINUED_TOKENS} of a base model)"),
    )
    parser.add_argument("--greedy", action="store_true", help="as --temperature 0")
    arguments = parser.parse_args(argv)
    if arguments.web and arguments.prompt is not None:
        parser.error("-p answers in the terminal, and --web opens a page: give one of them")
    return arguments


def _number(kind, minimum):
    def read(text: str):
        value = kind(text)
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
        return value

    read.__name__ = kind.__name__  # What argparse calls it when the text is no number.
    return read


if __name__ == "__main__":
    exit_with_status(main)
