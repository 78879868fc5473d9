"""How a row becomes a document or a conversation.

Built-in: text, messages, turns, prompt_response. Any other is `module:attr` of a module beside the recipe: a
function that takes the row (a dict) and returns a str, a list of messages, or None to pass the row over; what it raises
makes the row a bad row.
"""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.errors import RecipeError
from pipeline.artifacts.user_code import CodeFolder, import_attribute
from pipeline.sources.conversation import plain_messages

BUILT_IN = {"text": "text", "messages": "chat", "turns": "chat", "prompt_response": "chat"}
TURN_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}
# The column pairs of the well-known instruction sets; a third column is put below the instruction when it has text.
PROMPT_RESPONSE = (
    ("prompt", None, "response"),
    ("prompt", None, "completion"),
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("question", None, "answer"),
)


@dataclass(frozen=True)
class Format:
    """A row's reading. column: the one column that is read, or None when the whole row is."""

    name: str
    kind: str
    column: str | None
    folder: CodeFolder | str | None = None

    def reader(self) -> Callable[[Any], str | list[dict] | None]:
        """The function row -> text or messages; it raises ValueError with the reason for a row it cannot read."""
        read = self._reader()

        def read_whole_characters(row: Any) -> str | list[dict] | None:
            item = read(row)
            _must_be_characters(item)
            return item

        return read_whole_characters

    def _reader(self) -> Callable[[Any], str | list[dict] | None]:
        if self.name == "text":
            return lambda row: _text(_column(row, self.column))
        if self.name == "messages":
            return lambda row: plain_messages(row if isinstance(row, list) else _column(row, self.column))
        if self.name == "turns":
            return lambda row: plain_messages(_turns(row if isinstance(row, list) else _column(row, self.column)))
        if self.name == "prompt_response":
            return _prompt_response
        function, wanted = import_attribute(self.name, self.folder), self.kind

        def own(row: Any) -> str | list[dict] | None:
            value = function(row)
            if value is None:
                return None
            return _text(value) if wanted == "text" else plain_messages(value)

        return own

    def identity(self) -> str:
        """What must be equal for two readings to give the same: the name, the column, and the code of an own function."""
        if self.name in BUILT_IN:
            return f"{self.name}({self.column})"
        function = import_attribute(self.name, self.folder)
        module = sys.modules.get(getattr(function, "__module__", "") or "")
        path = getattr(module, "__file__", None)
        code = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path and Path(path).is_file() else ""
        return f"{self.name}({code})"


def format_of(spec, *, kind: str, where: str, folder: CodeFolder | str | None) -> Format:
    """The format of a recipe's source. Raises RecipeError when there is none of that name or it gives the other kind."""
    name = spec.format or ("text" if kind == "text" else "messages")
    if name in BUILT_IN:
        if BUILT_IN[name] != kind:
            have, need = ("conversations", "documents") if kind == "text" else ("documents", "conversations")
            raise RecipeError(
                f"{where}.format: {name} gives {have}, and this stage reads {need}. Use a source and a format of {need}, or run the other stage."
            )
        if name == "text":
            return Format(name, kind, spec.text_column or "text")
        if name == "prompt_response":
            return Format(name, kind, None)
        return Format(name, kind, spec.messages_column or ("messages" if name == "messages" else "conversations"))
    if ":" not in name:
        raise RecipeError(
            f"{where}.format: there is no format {name!r}. Use one of {', '.join(BUILT_IN)}, or module:attr."
        )
    function = import_attribute(name, folder, where=f"{where}.format")
    if not callable(function):
        raise RecipeError(
            f"{where}.format: {name} is no function. Name a function that takes a row and returns a text or messages."
        )
    return Format(name, kind, None, folder)


def _column(row: Any, column: str | None) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f"the row is {type(row).__name__}, not a mapping of columns")
    if column not in row:
        raise ValueError(f"there is no column {column!r}; found: {', '.join(map(str, row)) or 'none'}")
    return row[column]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the text is {'null' if value is None else type(value).__name__}, not text")
    return value


def _must_be_characters(item: str | list[dict] | None) -> None:
    """A JSON escape can make half of a character, which no UTF-8 can hold and no tokenizer can read."""
    texts = [item] if isinstance(item, str) else [message.get("content") or "" for message in item or ()]
    for text in texts:
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"holds half of a surrogate pair (U+{ord(text[error.start]):04X}), which is no character"
                ) from error


def _turns(value: Any) -> list[dict]:
    """Messages from a list of texts, user first and in turns, or of mappings {from, value}."""
    if not isinstance(value, list):
        raise ValueError(f"the turns are {'null' if value is None else type(value).__name__}, not a list")
    messages: list[dict[str, Any]] = []
    for place, turn in enumerate(value):
        if isinstance(turn, str):
            messages.append({"role": "assistant" if place % 2 else "user", "content": turn})
        elif isinstance(turn, dict) and "from" in turn:
            role = TURN_ROLES.get(str(turn["from"]).lower())
            if role is None:
                raise ValueError(f"turn {place} is from {turn['from']!r}, not one of {', '.join(TURN_ROLES)}")
            messages.append({"role": role, "content": turn.get("value")})
        else:
            raise ValueError(f"turn {place} is neither a text nor a mapping of from and value")
    return messages


def _prompt_response(row: Any) -> list[dict]:
    if not isinstance(row, dict):
        raise ValueError(f"the row is {type(row).__name__}, not a mapping of columns")
    for prompt, context, response in PROMPT_RESPONSE:
        if prompt in row and response in row:
            text: Any = row[prompt]
            if context and isinstance(row.get(context), str) and row[context].strip() and isinstance(text, str):
                text = f"{text}\n\n{row[context]}"
            return plain_messages([{"role": "user", "content": text}, {"role": "assistant", "content": row[response]}])
    pairs = ", ".join(f"{prompt} and {response}" for prompt, _, response in PROMPT_RESPONSE)
    raise ValueError(
        f"there is no pair of prompt and response columns ({pairs}); found: {', '.join(map(str, row)) or 'none'}"
    )
