"""Conversations as token ids: always through the tokenizer's own chat template, the one that is published with it."""

import json
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.process.errors import DataError
from pipeline.tokenizer.encode import WORD_JOINER, control_ids, control_strings, escape, tool_marks, with_texts
from pipeline.tokenizer.messages import GENERATION, learned_spans, refusal_of, shown

if TYPE_CHECKING:
    from pipeline.tokenizer.custom_template import CustomChatTemplate

# Part of the key of prepared conversations: raised when the same template and messages would give other ids or another
# mask.
RENDERING_VERSION = 1

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")

# How `transformers serve` reads an answer of the built-in template. Without it, it goes by the model_type: of a qwen3,
# as model.preset portable is, it looks for Qwen's control strings, finds none, and repeats the prompt in the answer.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close": ["<|end|>", "<|bos|>"], "content": "text", "content_args": {"strip": False}}},
}

# Tokenizers that are in use: how their template is rendered, with what that depends on.
_custom_templates: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def built_in_template(controls: list[str]) -> str:
    """Return the chat template, escaping these control strings: each tokenizer has its own list.

    Characters stand in it as themselves: llama.cpp's Jinja knows no \\u in a string and refuses the whole model.
    """
    template = TEMPLATE_FILE.read_text(encoding="utf-8").replace(r"\u2060", WORD_JOINER)
    line = "{%- set control_strings = " + json.dumps(controls, ensure_ascii=False) + " -%}"
    return re.sub(r"(?m)^\{%- set control_strings = .*$", lambda _: line, template, count=1)


def render(tokenizer: Any, messages: list[dict], *, tools: list[dict] | None = None) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation, and for each whether it is trained: what the assistant writes, its end token
    included.

    tools: definitions of what may be called, for the template. A message of weight 0 is rendered and not trained.
    Raises DataError with the reason when the template cannot render these messages; the caller knows their place.
    """
    return render_batch(tokenizer, [messages], tools=[tools])[0]


def render_batch(
    tokenizer: Any, conversations: list[list[dict]], *, tools: Sequence[list[dict] | None] | None = None
) -> list[tuple[list[int], list[bool]]]:
    """Return what `render` does for several conversations in one call of the tokenizer, which uses its threads.

    tools: those of each conversation.
    """
    if not conversations:
        return []
    if not all(conversations):
        raise DataError("the chat template refuses the conversation: it has no messages")
    tools = tools or [None] * len(conversations)
    if own := custom_template(tokenizer):
        return own.render(conversations, tools)
    if any(tools) or any(message.get("weight") == 0 for messages in conversations for message in messages):
        return [_render_alone(tokenizer, *pair) for pair in zip(conversations, tools, strict=True)]
    out = _apply(tokenizer, list(map(shown, conversations)), return_assistant_tokens_mask=True)
    masks = [[bool(bit) for bit in mask] for mask in out["assistant_masks"]]
    return list(zip(out["input_ids"], masks, strict=True))


def _render_alone(tokenizer: Any, messages: list[dict], tools: list[dict] | None) -> tuple[list[int], list[bool]]:
    """Return what `render` does, under a template that escapes messages itself and marks the answers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            [shown(messages)],
            tools=_escaped(tokenizer, tools),
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template raises whatever its expressions raise
        raise DataError(refusal_of(error)) from None
    (text,), (spans,) = rendered
    encoding = tokenizer(text, add_special_tokens=False)
    trained = [False] * len(encoding.input_ids)
    for start, end in learned_spans(messages, spans):
        # As transformers marks them: a character may be several tokens, of which its place gives the first alone.
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is not None and last is not None:
            trained[first : last + 1] = [True] * (last + 1 - first)
    return encoding.input_ids, trained


def _escaped(tokenizer: Any, tools: list[dict] | None) -> Any:
    """Return the tools for a template that escapes what messages say, which need not escape what tools say."""
    controls = control_strings(tokenizer)
    if not tools:
        return None
    return with_texts(tools, lambda text: escape(text, controls))


def rendered_talks(tokenizer: Any, talks: list) -> list:
    """Return (ids, trained) of each conversation, or the DataError of one that the chat template refuses."""
    try:
        return render_batch(tokenizer, [talk.messages for talk in talks], tools=[talk.tools for talk in talks])
    except DataError as error:
        if len(talks) == 1:
            return [error]
        half = len(talks) // 2  # find the few that are refused; the others are still rendered together
        return rendered_talks(tokenizer, talks[:half]) + rendered_talks(tokenizer, talks[half:])


def prompt_ids(
    tokenizer: Any, messages: list[dict], *, tools: list[dict] | None = None, today: bool = False
) -> list[int]:
    """Return the ids of a conversation up to where the assistant answers. Raises DataError when the template cannot
    render it.

    tools: definitions of what may be called. today: a template that writes the date writes today's; else the one of
    the training rows.
    """
    if not messages:
        raise DataError("the chat template refuses the conversation: it has no messages")
    if own := custom_template(tokenizer):
        return own.prompt_ids(messages, tools=tools, today=today)
    tools = _escaped(tokenizer, tools)
    return list(_apply(tokenizer, shown(messages), tools=tools, add_generation_prompt=True)["input_ids"])


def _apply(tokenizer, messages: list, **settings) -> dict:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **settings)
    except Exception as error:  # a template raises whatever its expressions raise
        raise DataError(refusal_of(error)) from None


def answer_messages(tokenizer, ids: list[int]) -> list[dict]:
    """Return the messages that an answer's ids are, its end token left out: what the assistant writes and calls, and
    tools' outputs."""
    python_start, python_end, output_start, output_end = tool_marks(tokenizer) or [None] * 4
    parts: list[tuple[str, list[int]]] = [("text", [])]
    for token in ids:
        if token in (python_end, output_end):
            parts.append(("text", []))
        elif token == python_start:
            parts.append(("call", []))
        elif token == output_start:
            parts.append(("output", []))
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


def custom_template(tokenizer) -> "CustomChatTemplate | None":
    """Return the template that the tokenizer came with; None for one that escapes control strings and marks answers
    itself, as ours."""
    key = (str(tokenizer.chat_template), len(tokenizer))
    known, own = _custom_templates.get(tokenizer, (None, None))
    if known != key:
        if tokenizer.chat_template != built_in_template(control_strings(tokenizer)):
            from pipeline.tokenizer.template_sandbox import bound_templates

            bound_templates()
        own = None
        if not _escapes(tokenizer):
            from pipeline.tokenizer.custom_template import CustomChatTemplate

            own = CustomChatTemplate(tokenizer)
        _custom_templates[tokenizer] = (key, own)
    return own


def template_problems(tokenizer) -> list[str]:
    """Return why the tokenizer's chat template cannot be trained with, found by rendering a probe; empty when it
    can."""
    own = custom_template(tokenizer)
    return own.problems if own else []


def unrendered(tokenizer: Any) -> dict[str, str]:
    """Return what the chat template leaves out of conversations, found by probes, with what to do, in a sentence or
    two each.

    Keys: tools (definitions), reasoning (under a key of its own), think (reasoning within a content).
    """
    custom_template(tokenizer)  # bounds what the template may cost
    # Two answers: many templates keep the reasoning of the last one alone.
    thoughts = ("thought1", "thought2")
    apart = _said(tokenizer, [{"content": "answer", "reasoning": thought} for thought in thoughts])
    kept_apart = [thought in apart for thought in thoughts]
    within = _said(tokenizer, [{"content": f"<think>\n{thought}\n</think>\n\nanswer"} for thought in thoughts])
    kept_within = [thought in within for thought in thoughts]
    another = "name a template that keeps it as tokenizer.chat_template"
    found = {}
    tool = {"name": "tool1", "description": "", "parameters": {"type": "object", "properties": {}}}
    if "tool1" not in _said(tokenizer, [{"content": "answer"}], tools=[{"type": "function", "function": tool}]):
        found["tools"] = (
            "the chat template renders no tool definitions, so the model learns calls without them. "
            "Write them into the system message, or name a template that renders them as tokenizer.chat_template."
        )
    if not all(kept_apart):
        which = "all answers but the last" if any(kept_apart) else "answers (reasoning_content, reasoning, thinking)"
        advice = f"Write it into the content, or {another}." if all(kept_within) else f"{another.capitalize()}."
        found["reasoning"] = f"the chat template leaves out the reasoning of {which}. {advice}"
    if not all(kept_within):
        which = "all answers but the last" if any(kept_within) else "answers"
        advice = f"{another.capitalize()}."
        if all(kept_apart):
            advice = f"Put the reasoning in reasoning_content, or {another}."
        found["think"] = f"the chat template takes <think>...</think> out of {which}. {advice}"
    return found


def _said(tokenizer: Any, answers: list[dict], tools: list[dict] | None = None) -> str:
    """Return the text of a conversation with these answers; nothing where the template refuses it."""
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": "question"}, {"role": "assistant", **answer}]
    try:
        return str(tokenizer.apply_chat_template(shown(messages), tools=tools, tokenize=False))
    except Exception:  # a template raises whatever its expressions raise
        return ""


def end_of_turn(tokenizer) -> int | None:
    """Return the id that ends what the assistant writes, None where the template trains no control token."""
    own = custom_template(tokenizer)
    return own.end_of_turn if own else tokenizer.eos_token_id


def _escapes(tokenizer) -> bool:
    """Return whether the template marks exactly the answers and makes no control token of a string in a message."""
    if not isinstance(tokenizer.chat_template, str) or not GENERATION.search(tokenizer.chat_template):
        return False
    answer = " an \u00e4nswer\n"
    question = {"role": "user", "content": "a question"}
    controls = control_ids(tokenizer)
    # What is trained of a plain answer; and whether control strings in messages make more control tokens than "x".
    conversations = [[question, {"role": "assistant", "content": answer}]]
    conversations += [_probe(["x"]), _probe(control_strings(tokenizer))]
    try:
        out = tokenizer.apply_chat_template(
            conversations, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception:  # a template raises whatever its expressions raise
        return False
    (ids, clean, hostile), trained = out["input_ids"], out["assistant_masks"][0]
    written = tokenizer.decode([i for i, bit in zip(ids, trained, strict=True) if bit], skip_special_tokens=True)
    exact = written.strip() == answer.strip() and not all(trained)
    return exact and sum(i in controls for i in clean) == sum(i in controls for i in hostile)


def _probe(texts: list[str]) -> list[dict]:
    text = " ".join(f"{text}{text}" for text in texts)
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
