"""Chat models and conversations with them, for the terminal and the page."""

import sys
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.process.errors import DataError, readable
from pipeline.process.progress import short_count
from pipeline.process.storage import read_json
from pipeline.run_dir.rows import read_rows

UNFINISHED = "\ufffd"  # What a byte sequence decodes to that does not end as a character.


def terminal_text(text: str) -> str:
    """Return the text for a terminal: its control characters written as escapes, \\x1b for ESC."""
    return readable(text, most=len(text))


class TextStream:
    """Text of ids as they arrive: `push(id)` gives what is certain since the last call, `rest()` what is left.

    A character of several tokens is given when its last byte is there; control tokens give no text. `text` is all of
    it so far.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = 0

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        self.ids.append(token)
        text = self.text
        # More bytes can only change the unfinished end.
        return self._show(text, len(text.rstrip(UNFINISHED)))

    def rest(self) -> str:
        text = self.text
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        new = text[self.shown : end]
        self.shown = max(self.shown, end)
        return new


MOST_EXAMPLES = 4
TOOL_SIGNS = ("[", "]", "[= ", "] ")  # What is shown for the marks around a tool call and its output.


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling of an answer; temperature 0 takes the likeliest token."""

    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None
    max_new_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    """A model on its device with its tokenizer.

    chats: it was trained on conversations; otherwise it continues a text. path: its folder or Hub id. model_type: as
    its config.json names it (GPT-2 runs as Tandem's class). examples: prompts that its run was sampled with.
    """

    name: str
    model: Any
    tokenizer: Any
    chats: bool
    path: str
    model_type: str
    examples: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "chat model" if self.chats else "base model"

    @property
    def positions(self) -> int | None:
        """Return the longest sequence that the model takes, None where its config does not say."""
        from pipeline.generation.texts import positions

        return positions(self.model)

    @property
    def sizes(self) -> str:
        """Return the model's type, parameters and positions in a line."""
        parameters = short_count(self.model.num_parameters())
        read = [f"{self.positions:,} positions"] if self.positions else []
        return ", ".join([self.model_type, f"{parameters} parameters", *read])

    @cached_property
    def takes_system(self) -> bool:
        """Return whether the chat template writes a system message, which some leave out or refuse."""
        from pipeline.tokenizer.chat import prompt_ids

        if not self.chats:
            return False
        question = {"role": "user", "content": "x"}
        try:
            ids = prompt_ids(self.tokenizer, [{"role": "system", "content": "y"}, question])
            return ids != prompt_ids(self.tokenizer, [question])
        except DataError:
            return False


def open_chat_model(name: str, *, trust_code: bool = False) -> ChatModel:
    """Return the model that `name` means: a run, a checkpoint, a folder, or a Hub id, with @REVISION where one is
    pinned. trust_code: whether code files that come with it are run.

    Raises InputMissingError, ServiceError or DataError when it cannot be had.
    """
    from transformers import PreTrainedConfig
    from transformers.utils import logging

    from pipeline.evals.subject import find_subject, load
    from pipeline.hardware.device import device_info
    from pipeline.hardware.processor import initialize_vector_functions

    place, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    subject = find_subject(place, trust_code=trust_code)
    initialize_vector_functions()
    logging.disable_progress_bar()  # A bar for loading would stand before the first answer.
    model, tokenizer = load(subject, device=device_info().kind, revision=revision or None)
    config, _ = PreTrainedConfig.get_config_dict(subject.path, revision=revision or None)
    manifest = subject.run.read_manifest() if subject.run else _published_manifest(subject.path, revision or None)
    return ChatModel(
        name=_name(subject),
        model=model,
        tokenizer=tokenizer,
        chats=bool(tokenizer.chat_template) and manifest.get("stage") != "pretrain",
        path=subject.path,
        model_type=config.get("model_type", model.config.model_type),  # an adapter has its base's
        examples=_examples(subject.run),
    )


def _name(subject: Any) -> str:
    """Return the run's name, with its checkpoint where it is one, else the folder's or the Hub id."""
    if subject.run is None:
        folder = Path(subject.path)
        return folder.resolve().name if folder.is_dir() else subject.path
    run = subject.run.path.resolve().name
    return run if subject.name == "model/" else f"{run}/{subject.name}"


def _examples(run: Any) -> tuple[str, ...]:
    """Return the prompts of the run's samples."""
    if run is None:
        return ()
    prompts = dict.fromkeys(row.get("prompt") for row in read_rows(run.samples))
    return tuple(prompt for prompt in prompts if isinstance(prompt, str) and prompt.strip())[:MOST_EXAMPLES]


def _published_manifest(path: str, revision: str | None) -> dict:
    """Return the manifest that is published beside a model; empty for a model that no run of ours made."""
    from transformers.utils import cached_file

    manifest = cached_file(
        path,
        "run_manifest.json",
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return read_json(Path(manifest)) if manifest else {}


def questions(messages: list[dict]) -> list[int]:
    """Return the places of the user's messages."""
    return [place for place, message in enumerate(messages) if message["role"] == "user"]


class Conversation:
    """Messages of a conversation with a chat model, as it reads them.

    system: the system message; it may be changed between answers. notify: is called with a sentence when a part of the
    conversation is no longer read. A base model reads only what it continues: it has no messages.
    """

    def __init__(self, chat_model: ChatModel, *, system: str | None = None, notify: Callable[[str], None] = print):
        self.chat_model, self.system, self.notify = chat_model, system, notify
        self.messages: list[dict] = []
        self.answers = 0  # of this conversation, those taken back too: each is drawn with a seed of its own
        self.last: str | None = None  # The last question, or what a base model last continued.

    def answer(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """Yield the answer's text in pieces, as the model writes it. Closed early, the part that is there stays in the
        conversation.

        Raises DataError when the chat template refuses the messages; the conversation is then as it was.
        """
        from pipeline.generation.texts import stream
        from pipeline.tokenizer.chat import answer_messages
        from pipeline.tokenizer.encode import tool_marks

        chat_model = self.chat_model
        signs = dict(zip(tool_marks(chat_model.tokenizer) or (), TOOL_SIGNS, strict=False))
        # The same question asked again is drawn anew, and a whole conversation is repeated by its seed.
        settings = asdict(sampling) | {"seed": sampling.seed + self.answers}
        ids = self._ids(text, sampling.max_new_tokens)
        tokens = stream(chat_model.model, chat_model.tokenizer, ids, calculator=chat_model.chats, **settings)
        self.answers += 1
        self.last = text
        shown = TextStream(chat_model.tokenizer)
        try:
            for token in tokens:
                yield signs.get(token, "") + shown.push(token)
            yield shown.rest()
        finally:
            # Also where the reader stopped it: what was written so far is what the model said.
            if chat_model.chats:
                self.messages += answer_messages(chat_model.tokenizer, shown.ids)

    def undo(self) -> str | None:
        """Take the last question and its answer out of the conversation and return the question; None where there is
        none."""
        taken, turns = self.last, questions(self.messages)
        self.last = None
        if turns:
            del self.messages[turns[-1] :]
        if len(turns) > 1:
            self.last = self.messages[turns[-2]]["content"]
        return taken

    def clear(self) -> None:
        """Begin a new conversation, whose answers are drawn as those of the first one."""
        self.messages, self.last, self.answers = [], None, 0

    def _ids(self, text: str, max_new_tokens: int) -> list[int]:
        """Return what the model reads: the conversation, its oldest turns left out when there is no room for an
        answer."""
        from pipeline.generation.texts import document_ids, positions

        # An answer has at least a quarter of the positions, however long the conversation is.
        limit = positions(self.chat_model.model) or sys.maxsize
        room = limit - min(max_new_tokens, limit // 4)
        chat_model = self.chat_model
        ids = self._prompt(text, room) if chat_model.chats else document_ids(chat_model.tokenizer, text)
        if len(ids) > room:
            self.notify(f"only the last {room} of {len(ids)} tokens are read: the model takes {limit}")
            # The first token is BOS, by which the model knows a text's beginning.
            ids = ids[:1] + ids[len(ids) - room + 1 :]
        return ids

    def _prompt(self, text: str, room: int) -> list[int]:
        from pipeline.tokenizer.chat import prompt_ids

        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*self.messages, {"role": "user", "content": text}]
        while len(ids := prompt_ids(self.chat_model.tokenizer, system + messages, today=True)) > room:
            turns = questions(messages)
            if len(turns) == 1:
                break
            del messages[: turns[1]]
            self.notify("the oldest turn was left out: the model reads no more")
        self.messages = messages
        return ids
