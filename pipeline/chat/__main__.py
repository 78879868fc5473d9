"""python -m pipeline.chat RUN_OR_MODEL [-p PROMPT] [--web]: talk to a model in the terminal, or to several in a browser."""

import argparse
import sys

from pipeline.chat.conversation import Sampling, open_speaker
from pipeline.chat.terminal import COMMANDS, Terminal, is_base, note
from pipeline.process.commands import program
from pipeline.run_dir.failures import exit_with_status

CONTINUED_TOKENS = 128  # of a base model, which seldom ends a text by itself


def main(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    for channel in (sys.stdin, sys.stdout, sys.stderr):
        channel.reconfigure(errors="replace")  # type: ignore[union-attr]  # A terminal without Unicode is no reason to die.
    try:
        if arguments.web:
            from pipeline.chat.page import require_gradio

            require_gradio()  # before the models are loaded
        _talk(arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130 if arguments.prompt is not None else 0
    return 0


def _talk(arguments: argparse.Namespace) -> None:
    speakers = []
    for name in arguments.models:
        if arguments.prompt is None and sys.stderr.isatty():
            note(f"Loading {name} ...")  # which imports torch first: seconds without a word
        speakers.append(open_speaker(name, trust_code=arguments.trust_code))
    sampling = sampling_of(arguments, chats=any(speaker.chats for speaker in speakers))
    if arguments.web:
        from pipeline.chat.page import show

        show(speakers, system=arguments.system, sampling=sampling)
        return

    terminal = Terminal(speakers[0], system=arguments.system, sampling=sampling)
    if arguments.prompt is not None:
        if not speakers[0].chats:
            note(is_base(speakers[0]))
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


# fmt: off
def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("chat"),
        description="Talk to a model in the terminal, or to one or several side by side on a local page.",
        epilog="In the terminal:\n" + "\n".join(f"  {name:<13} {meaning}" for name, meaning in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="RUN_OR_MODEL", help="run directory, checkpoint, model folder or Hub id (ID@REVISION pins one); several with --web only")
    parser.add_argument("-p", "--prompt", help="answer this and end")
    parser.add_argument("--web", action="store_true", help="a page in the browser, for this machine only; prints its address")
    parser.add_argument("--trust-code", action="store_true", help="run code files that come with the model, which may do anything")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=_number(float, 0), default=0.8, help="0 takes the likeliest token (default %(default)s)")
    parser.add_argument("--top-k", type=_number(int, 1), default=50, help="draw from the k likeliest tokens (default %(default)s)")
    parser.add_argument("--top-p", type=_number(float, 0), help="draw from the likeliest tokens that hold this share")
    parser.add_argument("--seed", type=_number(int, 0), default=0, help="of the drawing (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=_number(int, 1), help=f"longest answer (default {Sampling.max_new_tokens}; {CONTINUED_TOKENS} where the model only goes on with texts)")
    parser.add_argument("--greedy", action="store_true", help="as --temperature 0")
    arguments = parser.parse_args(argv)
    if arguments.web and arguments.prompt is not None:
        parser.error("-p answers in the terminal, and --web opens a page: give one of them")
    if len(arguments.models) > 1 and not arguments.web:
        parser.error("several models stand side by side on the page only: add --web, or name one")
    return arguments
# fmt: on


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
