"""Formats of rows: text, prompt and completion, messages, and a user's own function."""

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.process.errors import RecipeError
from pipeline.process.user_code import CodeFolder, import_attribute
from pipeline.recipe.schema import FORMATS
from pipeline.sources.raw_rows import lone_surrogate

# What a conversation must be to be trained on.

ROLES = ("system", "user", "assistant", "tool")
KEPT = ("role", "content", "tool_calls", "name", "tool_call_id")
# Other names of the roles, as ShareGPT files and those after its model have them (LLaMA-Factory, axolotl, FastChat).
ROLE_NAMES = {
    "human": "user",
    "prompter": "user",  # of OASST
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function_call": "function_call",
    "observation": "tool",
    **{role: role for role in ROLES},
}
TREE_KEYS = {"message_id", "role", "text"}  # of a tree's root message


class UntrainableConversation(ValueError):
    """A conversation in good form that nothing can be learned from, as every large set has some: no answer, an empty one,
    or turns in an order that no chat template renders. Training leaves it out and counts it; the row is not damaged."""


def messages_of(value: Any) -> list[dict]:
    """Return plain messages from any of the usual forms of a conversation: {role, content}, ShareGPT's {from, value}, texts in
    turns with the user's first, pairs {input, output}, or an OASST tree. Raises ValueError with the reason when it is none
    of them."""
    if is_tree(value):
        value = _best_path(value)
    if not isinstance(value, list):
        raise ValueError(f"the messages are {_kind(value)}, not a list")
    messages: list[Any] = []
    for place, turn in enumerate(value):
        # A key that is None is none: parquet gives each turn of a column every key that one of them has.
        role = turn.get("role") if isinstance(turn, dict) else None
        if isinstance(turn, str):
            messages.append({"role": "assistant" if place % 2 else "user", "content": turn})
        elif not isinstance(turn, dict):
            messages.append(turn)
        elif isinstance(role, str):
            messages.append({**turn, "role": ROLE_NAMES.get(role.lower(), role)})
        elif "input" in turn and "output" in turn:
            messages += _turn(turn["input"], turn["output"])
        elif role is None and turn.get("from") is not None:
            role = ROLE_NAMES.get(str(turn["from"]).lower())
            if role is None:
                raise ValueError(f"turn {place} is from {turn['from']!r}, not one of {', '.join(ROLE_NAMES)}")
            content = turn.get("value")
            messages.append(_call(content, place) if role == "function_call" else {"role": role, "content": content})
        else:
            messages.append(turn)
    return plain_messages(messages)


def _turn(question: Any, answer: Any) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def is_tree(value: Any) -> bool:
    """Return whether it is the root message of a tree, as the files *.trees.jsonl.gz of OASST have them."""
    return isinstance(value, dict) and value.keys() >= TREE_KEYS


def _best_path(tree: dict) -> list[dict]:
    """Return the messages from the root along the best-ranked replies (rank 0 is the best), up to the last answer."""
    path, message = [tree], tree
    while replies := [reply for reply in message.get("replies") or [] if not reply.get("deleted")]:
        message = min(replies, key=lambda reply: math.inf if reply.get("rank") is None else reply["rank"])
        path.append(message)
    if len(path) > 1 and path[-1].get("role") == "prompter":
        path.pop()
    return [{"role": message.get("role"), "content": message.get("text")} for message in path]


def _call(value: Any, place: int) -> dict:
    """Return the assistant's message of a ShareGPT turn `function_call`: a JSON object with name and arguments, or several."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"turn {place} is a function call that is not JSON ({error})") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def plain_messages(value: Any) -> list[dict]:
    """Return the messages with only the keys that a chat template reads. Raises ValueError with the reason when they are none.

    Keys that are None are left out: a parquet column gives every message every key. Content may be a list of text parts,
    which is joined. Raises UntrainableConversation where only the order or an empty text is in the way.
    """
    if not isinstance(value, list):
        raise ValueError(f"the messages are {_kind(value)}, not a list")
    messages = []
    for place, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"message {place} is {_kind(message)}, not a mapping of role and content")
        plain = {key: message[key] for key in KEPT if message.get(key) is not None}
        content = plain.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            plain["content"] = content = "".join(str(part.get("text", "")) for part in content)
        if content is not None and not isinstance(content, str):
            raise ValueError(f"the content of message {place} is {_kind(content)}, not text")
        messages.append(plain)
        reason = _form_problem(plain, place)
        if reason:
            raise ValueError(reason)
    reason = problem(messages)
    if reason:
        raise UntrainableConversation(reason)
    return messages


def _form_problem(message: dict, place: int) -> str | None:
    """Return why this is no message, whatever surrounds it, or None."""
    if message.get("role") not in ROLES:
        return f"message {place} has the role {message.get('role')!r}, not one of {', '.join(ROLES)}"
    calls = message.get("tool_calls")
    if message["role"] == "assistant" and calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            return f"message {place} has tool_calls that are not a list of mappings"
        for call in calls:
            function = call.get("function", call)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return f"message {place} has a tool call without a function name"
    return None


def problem(messages: list[dict]) -> str | None:
    """Return why these messages, each in good form, cannot be trained on, or None."""
    if not messages:
        return "the conversation has no messages"
    previous, can_use_tool, answers = "start", False, 0
    for place, message in enumerate(messages):
        role = message["role"]
        where = f"message {place}"
        if role == "system" and previous != "start":
            return f"{where} is a system message, which may only come first"
        if role == "user" and previous == "user":
            return f"{where} is a second user message in a row"
        if role == "user" and previous == "tool":
            return f"{where} is a user message where the assistant should answer the tool"
        if role == "assistant":
            if previous in ("start", "system"):
                return f"{where} is an assistant message before any user message"
            if previous == "assistant":
                return f"{where} is a second assistant message in a row"
            if not message.get("tool_calls") and not (message.get("content") or "").strip():
                return f"{where} (assistant) is empty"
            can_use_tool = bool(message.get("tool_calls"))
            answers += 1
        if role == "tool":
            if previous not in ("assistant", "tool") or not can_use_tool:
                return f"{where} is a tool message that no tool call of an assistant asked for"
            if "content" not in message:
                return f"{where} is a tool message without content"
        if role in ("system", "user") and "content" not in message:
            return f"{where} ({role}) has no content"
        previous = role
    return None if answers else "no assistant message: nothing to train on"


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "a mapping",
    }
    return names.get(type(value), type(value).__name__)


# How a row becomes a document or a conversation.

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
        """Return the columns that a reader of columns need not leave out; None for all."""
        names = ([self.column] if self.column else []) + [column for _, column in self.columns]
        return list(dict.fromkeys(names)) or None

    @property
    def required_columns(self) -> list[str]:
        """Return the columns without which a file is of another form."""
        optional = OPTIONAL_ROLES if self.recognised else ()
        named = [column for role, column in self.columns if role not in optional]
        return list(dict.fromkeys(([self.column] if self.column else []) + named))

    def reader(self) -> Callable[[Any], str | list[dict] | None]:
        """Return the function row -> text or messages; it raises ValueError with the reason for a row it cannot read."""
        read = self._reader()
        return lambda row: _whole_characters(read(row))

    def _reader(self) -> Callable[[Any], str | list[dict] | None]:
        if self.name == "text":
            return lambda row: _text(_column(row, self.column))
        if self.name in ("messages", "turns"):
            return self._messages
        if self.columns:
            return self._exchange
        if self.name in WHOLE_ROW:
            return WHOLE_ROW[self.name]
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
        """Return messages from a prompt and a response; each is a text, or messages as TRL's conversational form has them."""
        named = dict(self.columns)
        prompt, response = _column(row, named["prompt"]), _column(row, named["response"])
        if isinstance(prompt, str):
            prompt = "\n\n".join([prompt, *self._texts(row, "context")])
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        answered = response if isinstance(response, list) else [{"role": "assistant", "content": response}]
        system = [] if _begins_with_system(asked) else self._texts(row, "system")[:1]
        history = row.get(named.get("history")) or []
        earlier = [message for question, answer in history for message in _turn(question, answer)]
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
        """Return what must be equal for two readings to give the same: the name, the column, and the code of an own function."""
        if self.name in FORMATS:
            parts = [str(self.column)] if self.column or not self.columns else []
            return f"{self.name}({', '.join([*parts, *map('='.join, self.columns)])})"
        function = import_attribute(self.name, self.folder)
        module = sys.modules.get(getattr(function, "__module__", "") or "")
        path = getattr(module, "__file__", None)
        code = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path and Path(path).is_file() else ""
        return f"{self.name}({code})"


def format_of(spec, *, kind: str, where: str, folder: CodeFolder | str | None) -> Format:
    """Return the format of a recipe's source, as far as the recipe says it; else the default, whose name is the kind's.

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
        if name in WHOLE_ROW:
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


def _whole_characters(item: str | list[dict] | None) -> str | list[dict] | None:
    """Return the item. Raises ValueError for half of a character, as a JSON escape can make it: no UTF-8 can hold it, and no
    tokenizer can read it."""
    texts = [item] if isinstance(item, str) else [message.get("content") or "" for message in item or ()]
    for text in texts:
        if (at := lone_surrogate(text)) is not None:
            raise ValueError(f"holds half of a surrogate pair (U+{ord(text[at]):04X}), which is no character")
    return item


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
            return messages_of(_turn(text, row[response]))
    pairs = ", ".join(f"{prompt} and {response}" for prompt, _, response in PROMPT_RESPONSE)
    raise ValueError(
        f"there is no pair of prompt and response columns ({pairs}); found: {', '.join(map(str, row)) or 'none'}"
    )


# The formats of FORMATS that read a row as a whole, not one column of it: row -> text, or messages through messages_of.
WHOLE_ROW: dict[str, Callable[[Any], str | list[dict]]] = {"prompt_response": _prompt_response}
