"""What a conversation must be to be trained on."""

from typing import Any

ROLES = ("system", "user", "assistant", "tool")
KEPT = ("role", "content", "tool_calls", "name", "tool_call_id")


def plain_messages(value: Any) -> list[dict]:
    """The messages with only the keys that a chat template reads. Raises ValueError with the reason when they are none.

    Keys that are None are left out: a parquet column gives every message every key. Content may be a list of text parts,
    which is joined.
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
    reason = problem(messages)
    if reason:
        raise ValueError(reason)
    return messages


def problem(messages: list[dict]) -> str | None:
    """Why these messages cannot be trained on, or None."""
    if not messages:
        return "the conversation has no messages"
    previous, can_use_tool, answers = "start", False, 0
    for place, message in enumerate(messages):
        role = message.get("role")
        where = f"message {place}"
        if role not in ROLES:
            hint = "; use format: turns" if role in ("human", "gpt", "bot") else ""
            return f"{where} has the role {role!r}, not one of {', '.join(ROLES)}{hint}"
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
            reason = _assistant_problem(message)
            if reason:
                return f"{where} {reason}"
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


def _assistant_problem(message: dict) -> str | None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            return "has tool_calls that are not a list of mappings"
        for call in calls:
            function = call.get("function", call)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return "has a tool call without a function name"
    if not calls and not (message.get("content") or "").strip():
        return "(assistant) is empty"
    return None


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
