"""Formats of rows: text, prompt and completion, messages, and a user's own function."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipeline.process.errors import RecipeError
from pipeline.process.user_code import CodeFolder, code_sum, import_attribute
from pipeline.recipe.schema import FORMATS
from pipeline.sources.raw_rows import TableRow, lone_surrogate

ROLES = ("system", "user", "assistant", "tool")
KEPT = ("role", "content", "tool_calls", "name", "tool_call_id")
REASONING = ("reasoning_content", "reasoning", "thinking")  # of an assistant's message; the first with a text is kept
# Of a message: OpenAI's, axolotl's two, ms-swift's, LLaMA-Factory's.
LEARNT = ("weight", "train", "training", "loss", "loss_weight")
LEARNT_PARTS = ("train_detail", "training_detail")  # of axolotl
# Types of the parts of a content that are read.
TEXT_PARTS = ("text", "input_text", "output_text", "summary_text")
THOUGHT_PARTS = ("thinking", "reasoning")
PARTS_ARE_MARKED = "message {} marks parts of its text as trained, and only whole messages can be"
TOOLS = ("tools", "functions")  # columns of definitions
# Other names of the roles, as ShareGPT files and those after its model have them (LLaMA-Factory, axolotl, FastChat).
ROLE_NAMES = {
    "developer": "system",  # of OpenAI
    "human": "user",
    "prompter": "user",  # of OASST
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function_call": "function_call",
    "tool_call": "function_call",  # of ms-swift, as the next
    "tool_response": "tool",
    "observation": "tool",
    "tool_output": "tool",
    "ipython": "tool",  # of Llama
    "function": "tool",  # of OpenAI, before there were tools
    **{role: role for role in ROLES},
}


class UntrainableConversation(ValueError):
    """A conversation in good form that nothing can be learned from, as every large set has some: no answer, an empty
    one, or turns in an order that no chat template renders. Training leaves it out and counts it; the row is not
    damaged."""


class Messages(list[dict]):
    """Plain messages of a conversation. tools: the definitions that its template is given, or None."""

    tools: list[dict] | None = None


def messages_of(value: Any, *, tools: list[dict] | None = None, invented: bool = False) -> Messages:
    """Return plain messages from any of the usual forms of a conversation: {role, content}, ShareGPT's {from, value},
    texts in turns with the user's first, or pairs {input, output}. Raises ValueError with the reason when it is none
    of them. tools, invented: as for plain_messages."""
    if not isinstance(value, list):
        raise ValueError(f"the messages are {_kind(value)}, not a list")
    messages: list[Any] = []
    for place, turn in enumerate(value):
        # Texts in turns; what is no turn, which plain_messages names; a pair of input and output; else a message.
        if isinstance(turn, str):
            role = "assistant" if place % 2 else "user"
            messages.append({"role": role, "content": turn})
        elif not isinstance(turn, dict):
            messages.append(turn)
        elif not isinstance(turn.get("role"), str) and "input" in turn and "output" in turn:
            messages += _turn(turn["input"], turn["output"])
        else:
            message = _usual_names(turn, place)
            before = messages[-1] if messages else None
            if message["role"] == "function_call":
                calls = _calls_in(message["content"], place)
                # Calls in turns of their own are of one message, with what the assistant says before them.
                if isinstance(before, dict) and before["role"] == "assistant":
                    if _is_learnt(message, place) != _is_learnt(before, place):
                        raise ValueError(PARTS_ARE_MARKED.format(place))
                    before["tool_calls"] = [*(before.get("tool_calls") or []), *calls]
                    continue
                message |= {"role": "assistant", "content": None, "tool_calls": calls}
            messages.append(message)
    return plain_messages(messages, tools=tools, invented=invented)


def _usual_names(turn: dict, place: int) -> dict:
    """Return the turn with its role and its content under the usual names."""
    # A key that is None is none: parquet gives each turn of a column every key that one of them has.
    role, content = turn.get("role"), turn.get("content")
    if isinstance(role, str):
        role = ROLE_NAMES.get(role.lower(), role)
    elif role is None and turn.get("from") is not None:
        role, content = ROLE_NAMES.get(str(turn["from"]).lower()), turn.get("value")
        if role is None:
            raise ValueError(f"turn {place} is from {turn['from']!r}, not one of {', '.join(ROLE_NAMES)}")
    return {**turn, "role": role, "content": content}


def _turn(question: Any, answer: Any) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _calls_in(value: Any, place: int) -> list[dict]:
    """Return the calls of a ShareGPT turn `function_call`: a JSON object with name and arguments, or several."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"turn {place} is a function call that is not JSON ({error})") from None
    if not isinstance(value, list):
        value = [value]
    return [{"type": "function", "function": call} for call in value]


def plain_messages(value: list, *, tools: list[dict] | None = None, invented: bool = False) -> Messages:
    """Return the messages with only the keys that a chat template reads. Raises ValueError with the reason when they
    are none.

    Keys that are None or an empty list are left out, also the content of a message that only calls or reasons: a
    parquet column gives every message every key. Content may be a list of text parts, which is joined. An assistant's
    message keeps its reasoning under the key that it has, and `weight: 0` where it is not to be learnt. Arguments of
    calls that are the JSON text of an object become that mapping. tools: definitions that the calls are of. invented:
    a null in a mapping may stand for a key that is not there (TableRow). Raises UntrainableConversation where only the
    order or an empty text is in the way.
    """
    messages = Messages()
    messages.tools = tools
    functions = {tool["function"]["name"]: tool["function"] for tool in tools or []}
    for place, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"message {place} is {_kind(message)}, not a mapping of role and content")
        # 1. The keys that templates read, and the content's text, with the reasoning and calls that are parts of it.
        plain = {key: message[key] for key in KEPT if message.get(key) is not None and message[key] != []}
        reasoning: dict[str, str] = {}
        if plain.get("role") == "tool" and _is_json(plain.get("content")):
            plain["content"] = json.dumps(_without_nulls(plain["content"], deep=invented), ensure_ascii=False)
        if "content" in plain:
            text, thought, calls = _parts_of(plain["content"], f"the content of message {place}", place)
            plain["content"] = text
            if thought:
                reasoning = {"reasoning_content": thought}
            if calls:
                plain["tool_calls"] = [*plain.get("tool_calls", []), *calls]
        # 2. An assistant's calls and reasoning in keys of their own, and whether the message is trained.
        if plain.get("role") == "assistant":
            call = message.get("function_call")  # OpenAI's, before there were tools
            if isinstance(call, dict) and call.get("name") and "tool_calls" not in plain:
                plain["tool_calls"] = [{"type": "function", "function": call}]
            for key in REASONING:
                if not isinstance(message.get(key), str | list):  # a switch of thinking is none
                    continue
                text = _parts_of(message[key], f"the {key} of message {place}", place)[0]
                if not reasoning and text.strip():
                    reasoning = {key: text}
            plain |= reasoning
            if not _is_learnt(message, place):
                plain["weight"] = 0
        # 3. Whether it is a message at all; only then can its calls be read.
        reason = _form_problem(plain, place)
        if reason:
            raise ValueError(reason)
        if plain["role"] == "assistant" and "tool_calls" in plain:
            plain["tool_calls"] = [_plain_call(call, functions, invented) for call in plain["tool_calls"]]
        messages.append(plain)
    # 4. Whether the messages in this order can be trained on.
    reason = problem(messages, calls_in_text=bool(tools))
    if reason:
        raise UntrainableConversation(reason)
    return messages


def _is_json(content: Any) -> bool:
    """Return whether a tool's result is a value of its own, not text or parts of text."""
    items: list[Any] = content if isinstance(content, list) else [content]
    return bool(items) and all(
        isinstance(item, dict) and not {"type", "text", "value"} & item.keys() for item in items
    )


def _parts_of(value: Any, what: str, place: int) -> tuple[str, str, list[dict]]:
    """Return the text of a message's content; and the reasoning and the calls where they are parts of it. Null parts
    are none."""
    if isinstance(value, str):
        return value, "", []
    if not isinstance(value, list):
        raise ValueError(f"{what} is {_kind(value)}, not text")
    texts, thoughts, calls = [], [], []
    for part in value:
        if part is None or isinstance(part, str):
            texts.append(part or "")
            continue
        if not isinstance(part, dict):
            raise ValueError(f"{what} is a list with {_kind(part)} in it, not text")
        if not all(part[key] for key in LEARNT if part.get(key) is not None):
            raise ValueError(PARTS_ARE_MARKED.format(place))
        # The part's text is under its own type, or a usual key; parquet gives a part the keys of all, as nulls.
        kind = str(part.get("type") or "text")
        names = [name for name in (kind, "text", "value", "content") if name in part]
        inside = next((part[name] for name in names if part[name]), "")
        if not names and kind in (*TEXT_PARTS, *THOUGHT_PARTS, "tool_call"):
            raise ValueError(f"{what} has a part of {', '.join(map(str, part))}, which is no text")
        if kind in TEXT_PARTS:
            texts.append(_parts_of(inside, what, place)[0])
        elif kind in THOUGHT_PARTS:
            thoughts.append(_parts_of(inside, what, place)[0])
        elif kind == "tool_call":
            calls += _calls_in(inside, place)
        else:
            name = kind.removeprefix("input_").removesuffix("_url")
            article = "an" if name[:1] in "aeiou" else "a"
            raise ValueError(f"message {place} holds {article} {name}; only text can be trained")
    return "".join(texts), "".join(thoughts), calls


def _is_learnt(message: dict, place: int) -> bool:
    """Return whether an assistant's message is trained, as the data mark it."""
    if any(message.get(key) for key in LEARNT_PARTS):
        raise ValueError(PARTS_ARE_MARKED.format(place))
    marks = {key: message[key] for key in LEARNT if message.get(key) is not None}
    if not isinstance(marks.get("loss"), bool):
        marks.pop("loss", None)  # a figure of another program
    for key, mark in marks.items():
        if mark not in (0, 1):
            raise ValueError(f"message {place} has {key} {mark!r}; a message is trained or it is not: 1 or 0")
    return all(marks.values())


def _plain_call(call: dict, functions: dict[str, dict], invented: bool) -> dict:
    """Return the call as transformers' templates take it: {"type": "function", "function": {"name": ..., "arguments":
    ...}}."""
    call = _without_nulls(call, deep=False)
    if "function" not in call:
        call = {"type": "function", "function": call}
    function = _without_nulls(call["function"], deep=False)
    arguments = function.get("arguments", function.pop("parameters", {}))
    known = functions.get(function["name"])
    # The built-in template writes code as it is, and a text that happens to be JSON is code as well.
    if isinstance(arguments, str) and (function["name"] != "python" or known):
        arguments = _parsed(arguments)
    if invented and isinstance(arguments, dict):
        properties: dict = {}
        if known and isinstance(known.get("parameters"), dict):
            properties = known["parameters"].get("properties") or {}
        # A null that the tool's schema allows is one of the model's; any other one stands for a key that is not there.
        arguments = {
            key: _without_nulls(item)
            for key, item in arguments.items()
            if item is not None or _allows_null(properties.get(key))
        }
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(text: str) -> Any:
    """Return the mapping that a JSON text is; any other text as it is."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _allows_null(schema: Any) -> bool:
    """Return whether a JSON schema says that its value may be null."""
    if not isinstance(schema, dict):
        return False
    if "null" in (schema.get("type") or []) or schema.get("nullable"):
        return True
    options = schema.get("anyOf") or schema.get("oneOf")
    return isinstance(options, list) and any(map(_allows_null, options))


def _without_nulls(value: Any, *, deep: bool = True) -> Any:
    """Return the value without the keys of mappings that are null. deep: also in what it holds."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(item) if deep else item for key, item in value.items() if item is not None}


def tools_of(value: Any, *, invented: bool = False) -> list[dict] | None:
    """Return definitions as apply_chat_template takes them, {"type": "function", "function": {...}}, from a list of
    them or its JSON text; None for none. Those without the outer mapping get it: most templates read `tool.function`.

    invented: as for plain_messages. Raises ValueError for what is no list of definitions.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"the tools are text that is not JSON ({error})") from None
    elif invented:
        value = _without_nulls(value)
    if isinstance(value, dict):
        value = [value]
    if not value:
        return None
    if not isinstance(value, list):
        value = [value]
    tools = []
    for tool in value:
        if isinstance(tool, str):
            tool = _parsed(tool)
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("the tools are no list of definitions, each with a name")
        if function is tool:  # without the outer mapping
            function = {key: item for key, item in tool.items() if key != "type"}
            tool = {"type": "function"}
        if "input_schema" in function:  # as Anthropic names it
            function = {**function, "parameters": function["input_schema"]}
            del function["input_schema"]
        if isinstance(function.get("parameters"), str):
            function = {**function, "parameters": _parsed(function["parameters"])}
        tools.append({**tool, "function": function})
    return tools


def _form_problem(message: dict, place: int) -> str | None:
    """Return why this is no message, whatever surrounds it, or None."""
    if message.get("role") not in ROLES:
        return f"message {place} has the role {message.get('role')!r}, not one of {', '.join(ROLES)}"
    calls = message.get("tool_calls")
    if message["role"] == "assistant" and calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            return f"message {place} has tool_calls that are not a list of mappings"
        for call in calls:
            function = call.get("function") or call
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return f"message {place} has a tool call without a function name"
    return None


def problem(messages: list[dict], *, calls_in_text: bool = False) -> str | None:
    """Return why these messages, each in good form, cannot be trained on, or None. calls_in_text: a text may call, as
    Hermes has it."""
    if not messages:
        return "the conversation has no messages"
    # Templates of chat models render a system message first, then user and assistant in turns, tools behind calls.
    previous, can_use_tool, answers, learnt = "start", False, 0, False
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
            said = [message.get(key) or "" for key in ("content", *REASONING)]
            if not message.get("tool_calls") and not "".join(said).strip():
                return f"{where} (assistant) is empty"
            can_use_tool = bool(message.get("tool_calls")) or (calls_in_text and "<tool_call>" in "".join(said))
            answers += 1
            learnt = learnt or "weight" not in message
        if role == "tool":
            if previous not in ("assistant", "tool") or not can_use_tool:
                return f"{where} is a tool message that no tool call of an assistant asked for"
            if "content" not in message:
                return f"{where} is a tool message without content"
        if role in ("system", "user") and "content" not in message:
            return f"{where} ({role}) has no content"
        previous = role
    if not answers:
        return "no assistant message: nothing to train on"
    return None if learnt else "every answer has weight 0: nothing to train on"


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


# Usual names of a column of text, and of one of messages.
TEXT_COLUMNS = (
    "text",
    "content",
    "contents",
    "document",
    "body",
    "article",
    "story",
    "page",
    "passage",
    "raw_content",
)
CHAT_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns", "chat")
# The column pairs that `format: prompt_response` looks for in each row, with a column that is put below the prompt.
PROMPT_RESPONSE = (
    ("prompt", None, "response"),
    ("prompt", None, "completion"),
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("question", None, "answer"),
)
OPTIONAL_ROLES = ("context", "system", "history", "tools")


@dataclass(frozen=True)
class Format:
    """A row's reading. column: the one column of text or messages, or None when several or the whole row are read.

    columns: (role, column) of COLUMN_ROLES beside or instead of it. recognised: found by looking at the rows, so that
    columns of OPTIONAL_ROLES need not be there. newly_read: the rows have something that older versions left out or
    wrote otherwise, so that nothing that those prepared is used. alone: the code of an own function is its file,
    without what that imports.
    """

    name: str
    kind: str
    column: str | None
    folder: CodeFolder | str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    recognised: bool = False
    newly_read: bool = False
    alone: bool = False

    @property
    def read_columns(self) -> list[str] | None:
        """Return the columns that a reader of columns need not leave out; None for all."""
        names = [self.column] if self.column else []
        names += [column for _, column in self.columns]
        if names and self.kind == "chat" and "tools" not in dict(self.columns):
            names += TOOLS
        return list(dict.fromkeys(names)) or None

    @property
    def required_columns(self) -> list[str]:
        """Return the columns without which a file is of another form."""
        optional = OPTIONAL_ROLES if self.recognised else ()
        names = [self.column] if self.column else []
        names += [column for role, column in self.columns if role not in optional]
        return list(dict.fromkeys(names))

    def reader(self) -> Callable[[Any], str | Messages | None]:
        """Return the function row -> text or messages; it raises ValueError with the reason for a row it cannot
        read."""
        read = self._reader()
        return lambda row: _whole_characters(read(row))

    def _reader(self) -> Callable[[Any], str | Messages | None]:
        if self.name == "text":
            return lambda row: _text(_column(row, self.column))
        if self.name in ("messages", "turns"):
            return self._messages
        if self.columns:
            return self._exchange
        if self.name in WHOLE_ROW:
            return lambda row: self._conversation(WHOLE_ROW[self.name](row), row)
        function, wanted = import_attribute(self.name, self.folder), self.kind

        def own(row: Any) -> str | Messages | None:
            value = function(row)
            if value is None:
                return None
            if wanted == "text":
                return _text(value)
            invented = isinstance(row, TableRow) and not row.json
            tools = getattr(value, "tools", None)
            if isinstance(value, dict) and "messages" in value:
                tools, value = tools_of(value.get("tools"), invented=invented), value["messages"]
            return messages_of(value, tools=tools, invented=invented)

        return own

    def _conversation(self, messages: Any, row: dict) -> Messages:
        """Return the messages with the tools of their row."""
        named = dict(self.columns)
        tools = None
        columns = [named["tools"]] if "tools" in named else TOOLS
        for name in columns:
            try:
                tools = tools or tools_of(row.get(name), invented=_may_invent(row, name))
            except ValueError as error:  # under a usual name there may be something else
                if "tools" in named:
                    raise ValueError(f"the column {name!r}: {error}") from None
        return messages_of(messages, tools=tools, invented=_may_invent(row, self.column or named.get("response")))

    def _messages(self, row: Any) -> Messages:
        if isinstance(row, list):
            return messages_of(row)
        # A system prompt in a column of its own, unless the messages begin with one.
        value = _column(row, self.column)
        system = self._texts(row, "system")
        if system and isinstance(value, list) and not _begins_with_system(value):
            value = [{"role": "system", "content": system[0]}, *value]
        return self._conversation(value, row)

    def _exchange(self, row: Any) -> Messages:
        """Return messages from a prompt and a response; each is a text, or messages as TRL's conversational form has
        them."""
        named = dict(self.columns)
        prompt, response = _column(row, named["prompt"]), _column(row, named["response"])
        if isinstance(prompt, str):
            prompt = "\n\n".join([prompt, *self._texts(row, "context")])
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(response, list):
            response = [{"role": "assistant", "content": response}]
        # System prompt, turns before, and the turn that the row is of.
        talk: list[dict] = []
        if not _begins_with_system(prompt):
            talk += [{"role": "system", "content": text} for text in self._texts(row, "system")[:1]]
        for question, answer in row.get(named.get("history")) or []:
            talk += _turn(question, answer)
        return self._conversation(talk + prompt + response, row)

    def _texts(self, row: dict, role: str) -> list[str]:
        """Return what the columns of an optional role hold in this row, where it is more than white space."""
        found = []
        for named, name in self.columns:
            if named != role:
                continue
            value = row.get(name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"the column {name!r} holds {type(value).__name__}, not text")
            if value and value.strip():
                found.append(value)
        return found

    def identity(self) -> str:
        """Return what must be equal for two readings to give the same: the name, the column, and the code of an own
        function."""
        if self.name in FORMATS:
            parts = list(map("=".join, self.columns))
            if self.column or not self.columns:
                parts.insert(0, str(self.column))
            inside = ", ".join(parts)
        else:
            imported_from = None if self.alone else self.folder
            inside = code_sum(import_attribute(self.name, self.folder), imported_from)
        found = f"{self.name}({inside})"
        return f"{found} 2" if self.newly_read else found

    def as_before(self) -> "Format":
        """Return the reading of runs begun before November 2026: without tools, and without what an own format
        imports."""
        columns = tuple(pair for pair in self.columns if pair[0] != "tools")
        return replace(self, columns=columns, newly_read=False, alone=True)


# Keys of messages and of their parts
NEWLY_READ = {*TOOLS, *LEARNT, *REASONING, "tool_calls", "function_call", "type"}


def is_newly_read(rows: list[Any], form: Format) -> bool:
    """Return whether the rows have something that versions before the reading 2 left out or wrote otherwise."""
    # JSON in a table; tools in a column; or keys within messages.
    for row in rows:
        if isinstance(row, TableRow) and set(form.read_columns or row) & set(row.json):
            return True
        if form.kind == "chat" and isinstance(row, dict) and any(row.get(name) for name in TOOLS):
            return True
        if form.kind == "chat" and isinstance(row, dict | list) and NEWLY_READ & set(_inner_keys(row)):
            return True
    return False


def _inner_keys(value: Any) -> Iterator[str]:
    """Yield the keys with a value of all mappings in a row's columns."""
    items = value.values() if isinstance(value, dict) else value
    for item in items:
        if isinstance(item, dict):
            yield from (key for key, inner in item.items() if inner is not None)
        if isinstance(item, dict | list):
            yield from _inner_keys(item)


def is_described(spec: Any) -> bool:
    """Return whether a recipe's Source says how its rows are read."""
    return bool(spec.format or spec.text_column or spec.messages_column or spec.columns)


def format_of(spec, *, kind: str, where: str, folder: CodeFolder | str | None) -> Format:
    """Return the format of a recipe's source, as far as the recipe says it; else the default, whose name is the
    kind's.

    Raises RecipeError when there is none of that name or it gives the other kind.
    """
    if spec.columns:
        return _format_of_columns(spec.columns, kind=kind, where=where)
    usual = "text" if kind == "text" else "messages"
    name = spec.format or usual
    if name in FORMATS:
        if FORMATS[name] != kind:
            raise _other_kind(f"{where}.format: {name}", kind)
        if name == "text":
            return Format(name, kind, spec.text_column or "text")
        if name in WHOLE_ROW:
            return Format(name, kind, None)
        usual = "messages" if name == "messages" else "conversations"
        return Format(name, kind, spec.messages_column or usual)
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
        f"{what} gives {have}, and this stage reads {need}. Use a source and a format of {need}, or run the other "
        "stage."
    )


def _column(row: Any, column: str | None) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f"the row is {type(row).__name__}, not a mapping of columns")
    if column not in row:
        raise ValueError(f"there is no column {column!r}; found: {', '.join(map(str, row)) or 'none'}")
    return row[column]


def _may_invent(row: dict, column: str | None) -> bool:
    return isinstance(row, TableRow) and row.may_invent(column)


def _text(value: Any) -> str:
    if value is None:
        raise ValueError("the text is null, not text")
    if not isinstance(value, str):
        raise ValueError(f"the text is {type(value).__name__}, not text")
    return value


def _whole_characters(item: str | Messages | None) -> str | Messages | None:
    """Return the item. Raises ValueError for half of a character, as a JSON escape can make it: no UTF-8 can hold it,
    and no tokenizer can read it."""
    text = item
    if not isinstance(text, str):
        whole = [item, getattr(item, "tools", None)]
        try:
            text = json.dumps(whole, ensure_ascii=False, default=str, skipkeys=True)
        except RecursionError:
            raise ValueError("holds values within one another without end") from None
    at = lone_surrogate(text)
    if at is not None:
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


# The formats of FORMATS that read a row as a whole, not one column of it: row -> text, or messages through
# messages_of.
WHOLE_ROW: dict[str, Callable[[Any], str | list[dict]]] = {"prompt_response": _prompt_response}
