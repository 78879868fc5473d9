"""Recognition of a source that names neither a format nor a column, by its first rows: text, a usual form of
conversations, or neither.

The same rows give the same answer on every machine. Where `text` or `messages` is among the columns nothing else
counts: files that were read before are read as before.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from pipeline.process.commands import command
from pipeline.process.errors import ServiceError
from pipeline.sources.files import SourceFile
from pipeline.sources.formats import CHAT_COLUMNS, TEXT_COLUMNS, TOOLS, Format, tools_of
from pipeline.sources.raw_rows import (
    BEGINNINGS,
    check_content,
    kind_of,
    open_bytes,
    read_blocks,
)
from pipeline.sources.verify import HEAD_BYTES, ONE_OBJECT, holds_columns

LOOKED_AT_ROWS = 64
LOOKED_AT_FILES = 8  # The first of them that can be read decides.

PROMPTS = ("prompt", "instruction", "question", "query", "problem", "inputs", "input")
RESPONSES = ("response", "completion", "output", "answer", "solution", "targets")
NO_CONVERSATIONS = "no usual form of conversations"
SYSTEM = ("system", "system_prompt")
MESSAGES = Format("messages", "chat", "messages", recognised=True)
LISTS_OF_TURNS = {
    "messages": "chat messages",
    "turns": "ShareGPT conversations",
    "exchanges": "conversations of input and output",
    "texts": "conversations of texts in turns",
}


@dataclass(frozen=True)
class Recognised:
    """name: for people, with the columns. format: how the rows are read, None where they cannot be. refusal: why not,
    as `verb ... . What to do.`, for a sentence that begins with the file. is_default: read as always, nothing to
    announce."""

    name: str
    format: Format | None = None
    refusal: str = ""
    is_default: bool = False


def recognise(rows: Iterable[Any], *, kind: str) -> Recognised | None:
    """Return what the rows are for a stage of that kind (text or chat); None when none of them has columns."""
    rows = [row for row in rows if isinstance(row, dict) or _type_of(row) in LISTS_OF_TURNS]
    mappings = [row for row in rows if isinstance(row, dict)]
    types = column_types(mappings)
    if not rows:
        return None
    if holds_columns(mappings):
        return Recognised("one JSON object of columns", refusal=ONE_OBJECT)
    chat: Recognised | None = Recognised("chat messages", MESSAGES, is_default=True)
    if mappings:  # else each row is a list of messages
        chat = _chat(types)
    if kind == "text":
        return _text(chat, types, mappings)
    return chat or _no_conversations(types)


def column_types(rows: list[dict]) -> dict[str, str]:
    """Return what each column holds: text, number, boolean, mapping, null, a list by what is in it (messages, turns,
    exchanges, texts, list), tools, or `mixed`."""
    # What all values of a column are: null fits with everything, an empty list with any list of turns.
    types: dict[str, str] = {}
    for row in rows:
        for name, value in row.items():
            found, before = _type_of(value, name), types.get(name, "null")
            if before in ("null", found) or (before == "list" and found in LISTS_OF_TURNS):
                types[name] = found
            elif found != "null" and not (found == "list" and before in LISTS_OF_TURNS):
                types[name] = "mixed"
            else:
                types[name] = before
    return types


def _type_of(value: Any, column: str = "") -> str:
    if column in TOOLS:
        with suppress(ValueError):
            return "tools" if tools_of(value) else "null"
    if isinstance(value, list):
        first = next((item for item in value if item is not None), None)
        if isinstance(first, str):
            return "texts"
        keys = first.keys() if isinstance(first, dict) else ()
        # In this order: a row that is of two forms is read as the first of them.
        if "role" in keys and ("content" in keys or "tool_calls" in keys):
            return "messages"
        if "from" in keys and "value" in keys:
            return "turns"
        return "exchanges" if "input" in keys and "output" in keys else "list"
    simple = {type(None): "null", str: "text", bool: "boolean", int: "number", float: "number", dict: "mapping"}
    return simple.get(type(value), type(value).__name__)


def _no_conversations(types: dict[str, str]) -> Recognised:
    found = f"has no column 'messages'; found: {', '.join(types) or 'none'}"
    texts = [name for name, kind in types.items() if kind == "text" and name.lower() in TEXT_COLUMNS]
    if texts:
        return Recognised(
            NO_CONVERSATIONS,
            refusal=(
                f"{found}. It holds plain text, and SFT trains on conversations. Train the stage pretrain with "
                f"it ({command('pretrain')}), or name columns of a conversation: columns: {{prompt: COLUMN, "
                "response: COLUMN}."
            ),
        )
    return Recognised(
        NO_CONVERSATIONS,
        refusal=(
            f"{found}. They are no usual form of conversations (docs/data.md). Name them: columns: {{prompt: "
            "COLUMN, response: COLUMN}, or {messages: COLUMN}, or write a format module:attr."
        ),
    )


def _chat(types: dict[str, str]) -> Recognised | None:
    """Return the conversations that these columns are, refused or not; None when they look like none."""
    if "messages" in types:
        form = replace(MESSAGES, columns=_optional(types, tools=TOOLS))
        return Recognised(f"chat messages ({_columns_of(form, types)})", form, is_default=not form.columns)
    if types.keys() >= {"chosen", "rejected"}:
        return _preferences(types)
    if types.keys() >= {"prompt", "completion", "label"} and types["label"] in ("boolean", "number"):
        return Recognised(
            "answers judged good or bad (columns prompt, completion, label)",
            refusal=(
                "holds answers judged good or bad (columns prompt, completion, label), as KTO takes them, and "
                "SFT would train on the bad ones too. Keep the rows whose label is true, without that column; or "
                "train TRL's KTOTrainer on the finished model (docs/build_on.md)."
            ),
        )
    # A column of a usual name, or else any that holds lists of turns and is no prompt or response.
    named, others = [], []
    for name, kind in types.items():
        if name.lower() in CHAT_COLUMNS and kind in LISTS_OF_TURNS:
            named.append(name)
        elif kind in ("messages", "turns") and name.lower() not in PROMPTS + RESPONSES:
            others.append(name)
    columns = named or others
    if len(columns) > 1:
        return _ambiguous("could each be the conversation", columns, f"{{messages: {columns[0]}}}")
    if columns:
        form = replace(MESSAGES, column=columns[0], columns=_optional(types, system=SYSTEM, tools=TOOLS))
        return Recognised(f"{LISTS_OF_TURNS[types[columns[0]]]} ({_columns_of(form, types)})", form)
    return _exchange(types)


def _preferences(types: dict[str, str]) -> Recognised:
    if types["chosen"] in ("text", "messages") and types.get("prompt") == types["chosen"]:
        cure = "columns: {prompt: prompt, response: chosen}"
    elif types["chosen"] in LISTS_OF_TURNS:
        cure = "columns: {messages: chosen}"
    else:
        cure = "a format module:attr that makes messages of `chosen`"
    return Recognised(
        "preference pairs (columns chosen, rejected)",
        refusal=(
            "holds preference pairs (columns chosen, rejected), and SFT trains on conversations. Train on the "
            f"chosen answers alone with {cure}; or train TRL's DPOTrainer on the finished model "
            "(docs/build_on.md)."
        ),
    )


def _exchange(types: dict[str, str]) -> Recognised | None:
    """Return a prompt and a response in columns of their own, in any case of letters."""
    # Of names that differ in case alone, the first column counts.
    lower = {name.lower(): name for name in reversed(list(types))}
    usable = {small: name for small, name in lower.items() if types[name] in ("text", "messages")}
    prompts = [name for name in PROMPTS if name in usable]
    if len(prompts) > 1 and "input" in prompts:
        prompts.remove("input")  # what an instruction is about
    responses = [name for name in RESPONSES if name in usable]
    if not prompts or not responses:
        return None
    for several, role in ((prompts, "prompt"), (responses, "response")):
        if len(several) > 1:
            meant = {usable[small] for small in several}
            columns = [name for name in types if name in meant]
            named = {"prompt": usable[prompts[0]], "response": usable[responses[0]], role: columns[0]}
            listed = ", ".join(f"{key}: {column}" for key, column in named.items())
            return _ambiguous(f"could each be the {role}", columns, f"{{{listed}}}")
    prompt, response = usable[prompts[0]], usable[responses[0]]
    contexts = [lower.get(name, name) for name in ("input", "context") if name != prompts[0]]
    optional = _optional(types, context=contexts, system=SYSTEM, history=("history",), tools=TOOLS)
    pair = (("prompt", prompt), ("response", response))
    form = Format("prompt_response", "chat", None, columns=(*pair, *optional), recognised=True)
    known = {("instruction", "output"): "Alpaca instructions", ("instruction", "response"): "Dolly instructions"}
    label = known.get((prompts[0], responses[0]), "prompts and responses")
    if types[prompt] == "messages":
        label = f"{label} as messages"
    return Recognised(f"{label} ({_columns_of(form, types)})", form)


def _optional(types: dict[str, str], **roles: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return (role, column) for columns that are read where a row has them, also when the rows that were looked at
    have none, but for tools: of those the usual names are read anyway."""
    wanted = {"history": ("list", "null"), "tools": ("tools",)}
    found = []
    for role, names in roles.items():
        for name in names:
            if types.get(name, "null") in wanted.get(role, ("text", "null")):
                found.append((role, name))
    return tuple(found)


def _text(chat: Recognised | None, types: dict[str, str], rows: list[dict]) -> Recognised:
    if "text" in types:
        return Recognised("text (column text)", Format("text", "text", "text", recognised=True), is_default=True)
    texts = [name for name, kind in types.items() if kind == "text"]
    named = [name for name in texts if name.lower() in TEXT_COLUMNS]
    found = f"has no column 'text'; found: {', '.join(types) or 'none'}"
    if len(named) == 1:
        return Recognised(f"text (column {named[0]})", Format("text", "text", named[0], recognised=True))
    if named:
        return Recognised(
            f"text (column {' or '.join(named)})",
            refusal=f"{found}. {' and '.join(named)} could each be the text. Set text_column: {named[0]}.",
        )
    # A guess for the message: the column with the most text.
    longest = max(texts, key=lambda name: sum(len(row.get(name) or "") for row in rows), default="COLUMN")
    if chat is not None:
        stage = "Name"
        if chat.format:
            stage = f"Train the stage SFT with it ({command('sft')}; run.stage: sft), or name"
        return Recognised(
            chat.name,
            refusal=(
                f"holds {chat.name}, and pretraining reads plain text. {stage} the column that holds text: "
                f"text_column: {longest}."
            ),
        )
    if not texts:
        return Recognised(
            "no text",
            refusal=f"{found}, and none of them holds text. Name other files, or write a format module:attr.",
        )
    return Recognised(f"text (column {longest})", refusal=f"{found}. Set text_column: {longest}.")


def _ambiguous(what: str, columns: list[str], cure: str) -> Recognised:
    return Recognised(
        f"conversations in one of the columns {', '.join(columns)}",
        refusal=(
            f"has the columns {' and '.join(columns)}, which {what}, and which one is meant cannot be known. "
            f"Write columns: {cure}."
        ),
    )


def _columns_of(form: Format, types: dict[str, str]) -> str:
    here = [name for name, kind in types.items() if name in (form.read_columns or ()) and kind != "null"]
    what = "columns" if len(here) > 1 else "column"
    return f"{what} {', '.join(here)}"


def first_rows(files: list[SourceFile]) -> list[Any]:
    """Return values of the first rows of a source: of the first file that is here and can be read, else of the first
    one, which is fetched for it."""
    if files and kind_of(files[0].label) == "txt":
        return [{"text": ""}]  # it has no columns to look at
    here = [file for file in files if file.path is not None] or files[:1]
    for file in here[:LOOKED_AT_FILES]:
        try:
            rows = list(islice(_readable_rows(file), LOOKED_AT_ROWS))
        except ServiceError:  # the Hub is silent: the file is looked at when it is fetched
            return []
        if rows:
            return rows
    return []


def _readable_rows(file: SourceFile) -> Iterator[Any]:
    """Yield row values that have columns; a file that cannot be read gives what it gave so far: verify says what is
    wrong."""
    path = file.local_path()
    try:
        with open_bytes(path) as content:
            head = content.read(HEAD_BYTES)
        if check_content(head, expected=BEGINNINGS.get(path.suffix.lower(), ())) or (
            kind_of(path.name) not in ("parquet", "arrow") and b"\0" in head
        ):
            return  # An error page or UTF-16 may look like a file of other columns.
        for block in read_blocks(path):
            for _, _, value in block:
                if isinstance(value, dict | list):
                    yield value
    except Exception:
        return
