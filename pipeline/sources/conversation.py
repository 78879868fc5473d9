"""What a conversation must be to be trained on."""

import json
import math
from typing import Any

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
    """Plain messages from any of the usual forms of a conversation: {role, content}, ShareGPT's {from, value}, texts in
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
            messages.append({"role": "user", "content": turn["input"]})
            messages.append({"role": "assistant", "content": turn["output"]})
        elif role is None and turn.get("from") is not None:
            role = ROLE_NAMES.get(str(turn["from"]).lower())
            if role is None:
                raise ValueError(f"turn {place} is from {turn['from']!r}, not one of {', '.join(ROLE_NAMES)}")
            content = turn.get("value")
            messages.append(_call(content, place) if role == "function_call" else {"role": role, "content": content})
        else:
            messages.append(turn)
    return plain_messages(messages)


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
    """The assistant's message of a ShareGPT turn `function_call`: a JSON object with name and arguments, or several."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"turn {place} is a function call that is not JSON ({error})") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def plain_messages(value: Any) -> list[dict]:
    """The messages with only the keys that a chat template reads. Raises ValueError with the reason when they are none.

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
    """Return why this is no message, whatever stands around it, or None."""
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
