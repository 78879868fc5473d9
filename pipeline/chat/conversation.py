"""Models that are ready to talk and conversations with them, for the terminal and the page."""

import sys
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.process.errors import readable

# Ids to text while they arrive: a character of several tokens is shown when its last byte is there.

UNFINISHED = "\ufffd"  # What a byte sequence decodes to that does not end as a character.


def terminal_text(text: str) -> str:
    """Return the text for a terminal: its control characters written as escapes, \\x1b for ESC."""
    return readable(text, most=len(text))


class TextStream:
    """`push(id)` gives the text that is certain since the last call, `rest()` what is left at the end.

    Control tokens give no text. `text` is all of it so far.
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
class Speaker:
    """A model on its device with its tokenizer. chats: it was trained on conversations; otherwise it continues a text."""

    name: str
    model: Any
    tokenizer: Any
    chats: bool


def open_speaker(name: str, *, trust_code: bool = False) -> Speaker:
    """Return the model that `name` means: a run, a checkpoint, a folder, or a Hub id, with @REVISION where one is pinned.
    trust_code: whether code files that come with it are run.

    Raises InputMissingError, ServiceError or DataError when it cannot be had.
    """
    from transformers.utils import logging

    from pipeline.evals.subject import find_subject, load
    from pipeline.hardware.cpu import settle_vector_functions
    from pipeline.hardware.device import device_info

    place, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    subject = find_subject(place, trust_code=trust_code)
    settle_vector_functions()
    logging.disable_progress_bar()  # A bar for loading would stand before the first answer.
    model, tokenizer = load(subject, device=device_info().kind, revision=revision or None)
    stage = subject.stage or _published_stage(subject.path, revision or None)
    return Speaker(
        name=place, model=model, tokenizer=tokenizer, chats=bool(tokenizer.chat_template) and stage != "pretrain"
    )


def _published_stage(path: str, revision: str | None) -> str | None:
    """Return the stage in the manifest that is published beside a model; None for a model that no run of ours made."""
    from transformers.utils import cached_file

    from pipeline.process.storage import read_json

    manifest = cached_file(
        path,
        "run_manifest.json",
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return read_json(Path(manifest)).get("stage") if manifest else None


class Conversation:
    """Messages of a conversation with a speaker, as it reads them.

    system: the system message; it may be changed between answers. tell: is called with a sentence when a part of the
    conversation is no longer read.
    """

    def __init__(self, speaker: Speaker, *, system: str | None = None, notify: Callable[[str], None] = print):
        self.speaker, self.system, self.notify = speaker, system, notify
        self.messages: list[dict] = []
        self.answers = 0

    def answer(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """Yield the answer's text in pieces, as the model writes it. Closed early, the part that is there stays in the conversation.

        Raises DataError when the chat template refuses the messages; the conversation is then as it was.
        """
        from pipeline.generation.stream import stream
        from pipeline.tokenizer.chat import answer_messages
        from pipeline.tokenizer.specials import tool_marks

        speaker = self.speaker
        signs = dict(zip(tool_marks(speaker.tokenizer) or (), TOOL_SIGNS, strict=False))
        settings = asdict(sampling) | {"seed": sampling.seed + self.answers}
        ids = self._ids(text, sampling.max_new_tokens)
        tokens = stream(speaker.model, speaker.tokenizer, ids, calculator=speaker.chats, **settings)
        self.answers += 1
        shown = TextStream(speaker.tokenizer)
        try:
            for token in tokens:
                yield signs.get(token, "") + shown.push(token)
            yield shown.rest()
        finally:
            if speaker.chats:
                self.messages += answer_messages(speaker.tokenizer, shown.ids)

    def _ids(self, text: str, max_new_tokens: int) -> list[int]:
        """Return what the model reads: the conversation, its oldest turns left out when there is no room for an answer."""
        from pipeline.generation.stream import positions
        from pipeline.generation.texts import document_ids

        limit = positions(self.speaker.model) or sys.maxsize
        room = limit - min(max_new_tokens, limit // 4)
        ids = self._prompt(text, room) if self.speaker.chats else document_ids(self.speaker.tokenizer, text)
        if len(ids) > room:
            self.notify(f"only the last {room} of {len(ids)} tokens are read: the model takes {limit}")
            ids = ids[:1] + ids[len(ids) - room + 1 :]
        return ids

    def _prompt(self, text: str, room: int) -> list[int]:
        from pipeline.tokenizer.chat import prompt_ids

        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*self.messages, {"role": "user", "content": text}]
        while len(ids := prompt_ids(self.speaker.tokenizer, system + messages, today=True)) > room:
            turns = [place for place, message in enumerate(messages) if message["role"] == "user"]
            if len(turns) == 1:
                break
            del messages[: turns[1]]
            self.notify("the oldest turn was left out: the model reads no more")
        self.messages = messages
        return ids
