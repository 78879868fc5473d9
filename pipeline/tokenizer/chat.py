"""Conversations as token ids: always through the tokenizer's own chat template, the one that is published with it."""

import json
import re
from functools import cache
from pathlib import Path

from pipeline.artifacts.errors import DataError
from pipeline.tokenizer.specials import WORD_JOINER, control_ids, control_strings, tool_marks

MOST_REPEATED = 10_000_000
TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


def built_in_template(controls: list[str]) -> str:
    """The chat template, escaping these control strings: each tokenizer has its own list.

    Characters stand in it as themselves: llama.cpp's Jinja knows no \\u in a string and refuses the whole model.
    """
    template = TEMPLATE_FILE.read_text(encoding="utf-8").replace(r"\u2060", WORD_JOINER)
    line = "{%- set control_strings = " + json.dumps(controls, ensure_ascii=False) + " -%}"
    return re.sub(r"(?m)^\{%- set control_strings = .*$", lambda _: line, template, count=1)


def render(tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and for each whether it is trained: what the assistant writes, its end token included.

    Raises DataError with the reason when the template cannot render these messages; the caller knows their place.
    """
    return render_batch(tokenizer, [messages])[0]


def render_batch(tokenizer, conversations: list[list[dict]]) -> list[tuple[list[int], list[bool]]]:
    """`render` for several conversations in one call of the tokenizer, which uses its threads."""
    if not conversations:
        return []
    if not all(conversations):
        raise DataError("the chat template refuses the conversation: it has no messages")
    out = _apply(tokenizer, conversations, return_assistant_tokens_mask=True)
    masks = [[bool(bit) for bit in mask] for mask in out["assistant_masks"]]
    return list(zip(out["input_ids"], masks, strict=True))


def prompt_ids(tokenizer, messages: list[dict]) -> list[int]:
    """The ids of a conversation up to where the assistant answers. Raises DataError when the template cannot render it."""
    if not messages:
        raise DataError("the chat template refuses the conversation: it has no messages")
    return list(_apply(tokenizer, messages, add_generation_prompt=True)["input_ids"])


def _apply(tokenizer, messages: list, **settings) -> dict:
    """The template may be somebody else's. It is rendered in transformers' sandbox; here it cannot make texts without end, either."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = _bounded_sandbox()  # type: ignore[assignment,misc]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **settings)
    except Exception as error:  # a template raises whatever its expressions raise
        reason = str(error) or type(error).__name__
        raise DataError(f"the chat template refuses the conversation: {reason}") from None


@cache
def _bounded_sandbox() -> type:
    """Return the sandbox class with a bound on `*`, `**` and `%`, by which three words of a template would fill the memory.

    range() has one in jinja2 itself (100,000).
    """
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedSandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**", "%"])

        def call_binop(self, context, operator, left, right):
            plain = isinstance(left, int | float) and isinstance(right, int | float)
            small = plain and abs(left) <= MOST_REPEATED and abs(right) <= MOST_REPEATED
            if operator == "**" and not (small and abs(right) <= 64):
                raise SecurityError("it raises to a power that is too large")
            if operator == "*" and not plain:
                times, repeated = (left, right) if isinstance(left, int) else (right, left)
                if isinstance(times, int) and hasattr(repeated, "__len__") and times * len(repeated) > MOST_REPEATED:
                    raise SecurityError(f"it repeats a text to more than {MOST_REPEATED:,} characters")
            if operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{7,}|\*)", left):
                raise SecurityError("it formats to a width that is too large")
            return super().call_binop(context, operator, left, right)

    return BoundedSandbox


def answer_messages(tokenizer, ids: list[int]) -> list[dict]:
    """The messages that an answer's ids are, its end token left out: what the assistant writes and calls, and tools' outputs."""
    python_start, python_end, output_start, output_end = tool_marks(tokenizer) or [None] * 4
    parts: list[tuple[str, list[int]]] = [("text", [])]
    for token in ids:
        if token in (python_end, output_end):
            parts.append(("text", []))
        elif token in (python_start, output_start):
            parts.append(("call" if token == python_start else "output", []))
        else:
            parts[-1][1].append(token)
    messages: list[dict] = [{"role": "assistant", "content": ""}]
    for kind, part in parts:
        text = tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        called = messages[-1]["role"] == "tool" or "tool_calls" in messages[-1]
        if kind == "output" and called:
            messages.append({"role": "tool", "content": text})
        elif kind == "call":
            if messages[-1]["role"] == "tool":
                messages.append({"role": "assistant", "content": ""})
            call = {"function": {"name": "python", "arguments": text}}
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", []), call]
        elif text and called:
            messages.append({"role": "assistant", "content": text})
        else:
            messages[-1]["content"] += text
    return messages


def template_problems(tokenizer) -> list[str]:
    """What a chat template or tokenizer that is not ours gets wrong, found by rendering a probe; empty when nothing.

    Looked at: assistant spans that hold exactly the answers, and control strings inside messages that stay text.
    """
    if not re.search(r"\{%-?\s*generation", tokenizer.chat_template or ""):
        return ["marks no assistant span ({% generation %}), so that nothing would be trained"]
    problems = []
    answer = " an \u00e4nswer\n"
    ids, trained = render(
        tokenizer, [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    )
    written = tokenizer.decode([i for i, bit in zip(ids, trained, strict=True) if bit], skip_special_tokens=True)
    if written.strip() != answer.strip() or all(trained):
        problems.append(f"marks {written!r} as written by the assistant, where it wrote {answer!r}")
    controls = control_ids(tokenizer)
    clean, _ = render(tokenizer, _probe(["x"]))
    hostile, _ = render(tokenizer, _probe(control_strings(tokenizer)))
    if sum(i in controls for i in clean) != sum(i in controls for i in hostile):
        problems.append("lets control strings inside a message become control tokens")
    return problems


def _probe(texts: list[str]) -> list[dict]:
    text = " ".join(f"{text}{text}" for text in texts)
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
