"""How a row becomes a document or a conversation.

Built-in: text, messages (and turns, another name for it), prompt_response. Any other is `module:attr`, of a module beside the
recipe: a function that takes the row (a dict) and returns a str, a list of messages, or None to pass the row over;
what it raises makes the row a bad row. A source that names none gets what its rows show (recognition.py).
"""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.errors import RecipeError
from pipeline.artifacts.user_code import CodeFolder, import_attribute
from pipeline.recipe.schema import FORMATS
from pipeline.sources.conversation import messages_of

# Usual names of a column of text, and of one of messages.
TEXT_COLUMNS = ("text", "content", "contents", "document", "body", "article", "story", "page", "passage", "raw_content")
CHAT_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns", "chat")
# The column pairs that `format: prompt_response` looks for in each row, with a column that is put below the prompt.
PROMPT_RESPONSE = (
    ("prompt", None, "response"),
    ("prompt", None, "completion"),
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("question", None, "answer"),
)
OPTIONAL_ROLES = ("context", "system", "history")


@dataclass(frozen=True)
class Format:
    """A row's reading. column: the one column of text or messages, or None when several or the whole row are read.

    columns: (role, column) of COLUMN_ROLES beside or instead of it. recognised: found by looking at the rows, so that
    columns of OPTIONAL_ROLES need not be there.
    """

    name: str
    kind: str
    column: str | None
    folder: CodeFolder | str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    recognised: bool = False

    @property
    def read_columns(self) -> list[str] | None:
        """The columns that a reader of columns need not leave out; None for all."""
        names = ([self.column] if self.column else []) + [column for _, column in self.columns]
        return list(dict.fromkeys(names)) or None

    @property
    def required_columns(self) -> list[str]:
        """Those without which a file is of another form."""
        optional = OPTIONAL_ROLES if self.recognised else ()
        named = [column for role, column in self.columns if role not in optional]
        return list(dict.fromkeys(([self.column] if self.column else []) + named))

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
        if self.name in ("messages", "turns"):
            return self._messages
        if self.name == "prompt_response":
            return self._exchange if self.columns else _prompt_response
        function, wanted = import_attribute(self.name, self.folder), self.kind

        def own(row: Any) -> str | list[dict] | None:
            value = function(row)
            if value is None:
                return None
            return _text(value) if wanted == "text" else messages_of(value)

        return own

    def _messages(self, row: Any) -> list[dict]:
        if isinstance(row, list):
            return messages_of(row)
        value = _column(row, self.column)
        system = self._texts(row, "system")
        if system and isinstance(value, list) and not _begins_with_system(value):
            value = [{"role": "system", "content": system[0]}, *value]
        return messages_of(value)

    def _exchange(self, row: Any) -> list[dict]:
        """Messages from a prompt and a response; each is a text, or messages as TRL's conversational form has them."""
        named = dict(self.columns)
        prompt, response = _column(row, named["prompt"]), _column(row, named["response"])
        if isinstance(prompt, str):
            prompt = "\n\n".join([prompt, *self._texts(row, "context")])
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        answered = response if isinstance(response, list) else [{"role": "assistant", "content": response}]
        system = [] if _begins_with_system(asked) else self._texts(row, "system")[:1]
        history = row.get(named.get("history")) or []
        earlier = [
            message
            for question, answer in history
            for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        ]
        return messages_of([*({"role": "system", "content": text} for text in system), *earlier, *asked, *answered])

    def _texts(self, row: dict, role: str) -> list[str]:
        """Return what the columns of an optional role hold in this row, where it is more than white space."""
        found = []
        for name in (column for named, column in self.columns if named == role):
            value = row.get(name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"the column {name!r} holds {type(value).__name__}, not text")
            if value and value.strip():
                found.append(value)
        return found

    def identity(self) -> str:
        """What must be equal for two readings to give the same: the name, the column, and the code of an own function."""
        if self.name in FORMATS:
            parts = [self.column] if self.column or not self.columns else []
            return (
                f"{self.name}({', '.join([*map(str, parts), *(f'{role}={column}' for role, column in self.columns)])})"
            )
        function = import_attribute(self.name, self.folder)
        module = sys.modules.get(getattr(function, "__module__", "") or "")
        path = getattr(module, "__file__", None)
        code = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path and Path(path).is_file() else ""
        return f"{self.name}({code})"


def format_of(spec, *, kind: str, where: str, folder: CodeFolder | str | None) -> Format:
    """The format of a recipe's source, as far as the recipe says it; else the default, whose name is the kind's.

    Raises RecipeError when there is none of that name or it gives the other kind.
    """
    if spec.columns:
        return _format_of_columns(spec.columns, kind=kind, where=where)
    name = spec.format or ("text" if kind == "text" else "messages")
    if name in FORMATS:
        if FORMATS[name] != kind:
            raise _other_kind(f"{where}.format: {name}", kind)
        if name == "text":
            return Format(name, kind, spec.text_column or "text")
        if name == "prompt_response":
            return Format(name, kind, None)
        return Format(name, kind, spec.messages_column or ("messages" if name == "messages" else "conversations"))
    if ":" not in name:
        raise RecipeError(
            f"{where}.format: there is no format {name!r}. Use one of {', '.join(FORMATS)}, or module:attr."
        )
    function = import_attribute(name, folder, where=f"{where}.format")
    if not callable(function):
        raise RecipeError(
            f"{where}.format: {name} is no function. Name a function that takes a row and returns a text or messages."
        )
    return Format(name, kind, None, folder)


def _format_of_columns(columns: dict[str, str], *, kind: str, where: str) -> Format:
    if ("text" in columns) != (kind == "text"):
        raise _other_kind(f"{where}.columns: {{{', '.join(columns)}}}", kind)
    if "text" in columns:
        return Format("text", kind, columns["text"])
    named = tuple((role, columns[role]) for role in columns if role not in ("text", "messages"))
    if "messages" in columns:
        return Format("messages", kind, columns["messages"], columns=named)
    return Format("prompt_response", kind, None, columns=named)


def _other_kind(what: str, kind: str) -> RecipeError:
    have, need = ("conversations", "documents") if kind == "text" else ("documents", "conversations")
    return RecipeError(
        f"{what} gives {have}, and this stage reads {need}. Use a source and a format of {need}, or run the other stage."
    )


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


def _begins_with_system(messages: list) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, dict) and "system" in (first.get("role"), first.get("from"))


def _prompt_response(row: Any) -> list[dict]:
    if not isinstance(row, dict):
        raise ValueError(f"the row is {type(row).__name__}, not a mapping of columns")
    for prompt, context, response in PROMPT_RESPONSE:
        if prompt in row and response in row:
            text: Any = row[prompt]
            if context and isinstance(row.get(context), str) and row[context].strip() and isinstance(text, str):
                text = f"{text}\n\n{row[context]}"
            return messages_of([{"role": "user", "content": text}, {"role": "assistant", "content": row[response]}])
    pairs = ", ".join(f"{prompt} and {response}" for prompt, _, response in PROMPT_RESPONSE)
    raise ValueError(
        f"there is no pair of prompt and response columns ({pairs}); found: {', '.join(map(str, row)) or 'none'}"
    )
