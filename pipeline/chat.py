"""`python -m pipeline.chat RUN_OR_MODEL [-p PROMPT]`: talk to a model in the terminal."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

if not __package__:  # Started as a file: python put pipeline/ first on the path, where the package is not found.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pipeline.artifacts.errors import InputMissingError
from pipeline.artifacts.failures import exit_with_status

TOOL_SIGNS = ("[", "]", "[= ", "] ")  # What is shown for the marks around a tool call and its output.
COMMANDS = "/new starts over, /system TEXT sets the system message and starts over, /quit or Ctrl-D ends"


def main(argv: list[str]) -> int:
    arguments = _arguments(argv)
    for channel in (sys.stdin, sys.stdout, sys.stderr):
        channel.reconfigure(errors="replace")  # type: ignore[union-attr]  # A terminal without Unicode is no reason to die.
    try:
        chat = Chat(arguments)
        if arguments.prompt is not None:
            chat.answer(arguments.prompt)
        else:
            chat.talk()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130 if arguments.prompt is not None else 0
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.chat", description="Talk to a model in the terminal.", epilog=COMMANDS
    )
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="run directory, checkpoint, model folder or Hub id")
    parser.add_argument("-p", "--prompt", help="answer this and end")
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
        "--max-new-tokens", type=_number(int, 1), default=512, help="longest answer (default %(default)s)"
    )
    parser.add_argument("--greedy", action="store_true", help="as --temperature 0")
    return parser.parse_args(argv)


def _number(kind, minimum):
    def read(text: str):
        value = kind(text)
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
        return value

    read.__name__ = kind.__name__  # What argparse calls it when the text is no number.
    return read


class Chat:
    """A model, its tokenizer and the conversation so far."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.model, self.tokenizer, stage = _open(arguments.model)
        self.chats = bool(self.tokenizer.chat_template) and stage != "pretrain"
        self.system: str | None = arguments.system
        self.answers = 0
        self.new()
        if not self.chats:
            print(
                f"{arguments.model} is a base model: it was not trained to chat and continues your text.",
                file=sys.stderr,
            )

    def new(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def talk(self) -> None:
        """Lines from the terminal or a pipe until /quit or the end, an answer to each."""
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
                self.new()
            elif line == "/system" or line.startswith("/system "):
                self.system = line.removeprefix("/system").strip() or None
                self.new()
            elif line:
                try:
                    self.answer(line)
                except KeyboardInterrupt:
                    print()

    def answer(self, text: str) -> None:
        """Print what the model writes, as it writes it. Ctrl-C leaves the part that is there in the conversation."""
        from pipeline.generation.decoding import TextStream
        from pipeline.generation.stream import stream
        from pipeline.tokenizer.chat import answer_messages
        from pipeline.tokenizer.specials import tool_marks

        signs = dict(zip(tool_marks(self.tokenizer) or (), TOOL_SIGNS, strict=False))
        arguments, shown = self.arguments, TextStream(self.tokenizer)
        if self.chats:
            self.messages.append({"role": "user", "content": text})
        tokens = stream(
            self.model,
            self.tokenizer,
            self._ids(text),
            max_new_tokens=arguments.max_new_tokens,
            temperature=0.0 if arguments.greedy else arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed + self.answers,
            calculator=self.chats,
        )
        self.answers += 1
        try:
            for token in tokens:
                print(signs.get(token, "") + shown.push(token), end="", flush=True)
        finally:
            print(shown.rest())
            if self.chats:
                self.messages += answer_messages(self.tokenizer, shown.ids)

    def _ids(self, text: str) -> list[int]:
        """What the model reads: the conversation, its oldest turns left out when there is no room for an answer."""
        from pipeline.generation.stream import positions
        from pipeline.generation.texts import document_ids
        from pipeline.tokenizer.chat import prompt_ids

        limit = positions(self.model) or sys.maxsize
        room = min(self.arguments.max_new_tokens, limit // 4)
        if not self.chats:
            ids = document_ids(self.tokenizer, text)
        else:
            while len(ids := prompt_ids(self.tokenizer, self.messages)) > limit - room:
                turns = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
                if len(turns) == 1:
                    break
                del self.messages[turns[0] : turns[1]]
                print("(the oldest turn was left out: the model reads no more)", file=sys.stderr)
        if len(ids) > limit - room:
            print(
                f"(only the last {limit - room} of {len(ids)} tokens are read: the model takes {limit})",
                file=sys.stderr,
            )
            ids = ids[:1] + ids[len(ids) - (limit - room) + 1 :]
        return ids


def _open(name: str) -> tuple[Any, Any, str | None]:
    """The model on this machine's device, its tokenizer, and the stage it comes from where a run says so."""
    folder, stage = _find(name)
    from transformers.utils import logging

    from pipeline.hardware.cpu import settle_vector_functions
    from pipeline.hardware.device import device_info
    from pipeline.model.build import load_model
    from pipeline.tokenizer.ready import open_tokenizer

    tokenizer = open_tokenizer(str(folder or name), revision=None, beside=None, where=name)
    settle_vector_functions()
    logging.disable_progress_bar()  # A bar for loading would stand before the first answer.
    try:
        model = load_model(folder or name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputMissingError(
            f"{name}: no model can be loaded from it ({reason}). Name a run, a folder or a Hub id."
        ) from None
    return model.to(device_info().kind).eval(), tokenizer, stage


def _find(name: str) -> tuple[Path | None, str | None]:
    """(folder with a model, or None for a Hub id; stage of its run or None). Raises InputMissingError."""
    from pipeline.artifacts.run_directory import RunDirectory, find_run

    run = find_run(name)
    if run is not None:
        folder = run.model if run.model.is_dir() else run.whole_checkpoint()
        if folder is None:
            raise InputMissingError(
                f"{name}: the run has no model and no whole checkpoint yet. Let it train to its first checkpoint."
            )
        return folder, run.read_manifest().get("stage")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputMissingError(
                f"{name}: this folder is no run and holds no model (config.json). Name a run, a checkpoint or a model."
            )
        near = [folder for folder in path.resolve().parents[:2] if (folder / "run_manifest.json").is_file()]
        return path, RunDirectory(near[0]).read_manifest().get("stage") if near else None
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise InputMissingError(f"{name}: there is no such folder, and it cannot be a Hub id. Correct the path.")
    return None, None


if __name__ == "__main__":
    exit_with_status(main)
