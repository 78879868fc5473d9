"""Characters of what the assistant thinks, says and calls, as the data have it, and those of them that no trained id
spells.

Templates, masks and tokenizers are measured together, by the text that the trained ids decode to.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unicodedata import normalize

from pipeline.sources.formats import REASONING
from pipeline.tokenizer.chat import unrendered
from pipeline.tokenizer.encode import WORD_JOINER, plain_backend

KINDS = {
    "content": "text of answers",
    "reasoning": "reasoning",
    "think": "reasoning in answers",
    "calls": "tool calls",
}
REASONS = {
    "template": "the chat template leaves out {}. Name another one as tokenizer.chat_template.",
    "outside": (
        "the chat template writes {} outside of what is trained. Put it between the template's generation marks."
    ),
    "tokenizer": "the tokenizer has no ids for {}. Name the tokenizer of the model as tokenizer.path.",
}
TAKEN = "\0"
UNIT = re.compile(r"[A-Za-z0-9]+|\S")  # What is counted of a text that is not found in one piece.
ROOM = 4_000  # Characters, at most, that a template writes into the trained text of one message.
ESCAPED = 6  # Characters of \u00e9


class Spelling:
    """Text of ids, unknown tokens left out, in the form in which texts are compared here."""

    def __init__(self, tokenizer: Any):
        self.backend = plain_backend(tokenizer)
        self.unknown = {tokenizer.unk_token_id}
        unknown = getattr(self.backend.model, "unk_token", None)
        if unknown:
            self.unknown.add(self.backend.token_to_id(unknown))

    def of(self, ids: list[int], *, controls: bool = False) -> str:
        """Return what the ids decode to. controls: with the names of control tokens, as a call of python is one."""
        known = [i for i in ids if i not in self.unknown]
        return composed(self.backend.decode(known, skip_special_tokens=not controls))

    def again(self, text: str) -> str:
        """Return what is left of a text after encoding: a tokenizer may lower, compose or drop some of it."""
        return self.of(self.backend.encode(text, add_special_tokens=False).ids)


def composed(text: str) -> str:
    """Return the text in one Unicode form and case, without the U+2060 that the built-in template puts into control
    strings."""
    return normalize("NFKC", text.casefold()).replace(WORD_JOINER, "")


def squeezed(text: str) -> str:
    """Return the text without white space, which templates trim and indent."""
    return "".join(composed(text).split())


def marked_texts(message: dict) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of what an assistant's message says; of calls the names and the values of arguments.

    Kinds: content, reasoning (under its own key), think (within the content), calls.
    """
    yield "reasoning", next((message[key] for key in REASONING if message.get(key)), "")
    thought, _, said = (message.get("content") or "").rpartition("</think>")
    for text in thought.split("<think>"):
        yield "think", text
    yield "content", said
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield "calls", function["name"]
        for value in _values(function.get("arguments")):
            if not isinstance(value, str):
                value = json.dumps(value)
            yield "calls", value


def _values(value: Any) -> Iterator[Any]:
    """Yield what nested arguments hold; null is no value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _values(item)
    elif value is not None:
        yield value


def _forms(text: str, spelling: Spelling) -> Iterator[str]:
    """Yield the text as templates write it (as it is, as JSON, as Python), and what the tokenizer keeps of these."""
    json_text, ascii_text = json.dumps(text, ensure_ascii=False), json.dumps(text)
    forms = dict.fromkeys([text, json_text[1:-1], ascii_text[1:-1], repr(text)[1:-1]])  # without their quotes
    yield from forms
    for form in forms:
        yield spelling.again(form)


def missing_text(
    tokenizer: Any, messages: list[dict], ids: list[int], trained: list[bool], *, tools: list[dict] | None = None
) -> Counter[str]:
    """Return numbers of characters by kind: "content marked" of all that are to be learnt, "content template" of those
    not trained.

    ids, trained: the conversation as it is rendered. Kinds: of marked_texts. Reasons: the tokenizer has no ids for
    them, they are rendered outside of what is trained, the template leaves them out. White space and case count
    nowhere. "tools given" and "tools template" count definitions, and those whose name is nowhere in the conversation.
    """
    # 1. What is learnt of each message, looked for in the trained text from behind the message before.
    spelling = Spelling(tokenizer)
    learnt = [i for i, bit in zip(ids, trained, strict=True) if bit]
    text, at = squeezed(spelling.of(learnt, controls=True)), 0
    counts = Counter[str]()
    found, not_found = list[str](), list[tuple[str, str]]()
    for message in messages:
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        # The longest first, so that "4" is not found in a longer text of the message.
        parts = sorted(marked_texts(message), key=lambda part: -len(part[1]))
        room, end = text[at : at + ROOM + ESCAPED * sum(len(part) for _, part in parts)], 0
        for kind, part in parts:
            marked = len(squeezed(part))
            counts[f"{kind} marked"] += marked
            if not marked:
                continue
            for form in _forms(part, spelling):
                wanted = squeezed(form)
                start = room.find(wanted) if wanted else -1
                if start >= 0:
                    stop = start + len(wanted)
                    room, end = room[:start] + TAKEN * len(wanted) + room[stop:], max(end, stop)
                    found.append(form)
                    counts[f"{kind} tokenizer"] += max(0, marked - len(wanted))
                    break
            else:
                not_found.append((kind, part))
        at += end
    # 2. Of what is not there in one piece, the words that are there, each as often as no other part has it.
    if not_found:
        left = Counter(UNIT.findall(spelling.of(learnt)))
        for form in found:
            left.subtract(UNIT.findall(composed(form)))
        untrained = squeezed(spelling.of([i for i, bit in zip(ids, trained, strict=True) if not bit]))
        others = squeezed(" ".join(str(m.get("content") or "") for m in messages if m["role"] != "assistant"))
        for kind, part in not_found:
            kept = spelling.again(part)
            wanted, missing = squeezed(kept), len(squeezed(part))
            dropped = max(0, missing - len(wanted))
            for unit in UNIT.findall(kept):
                if left[unit] > 0:
                    left[unit] -= 1
                    missing -= len(unit)
            is_outside = wanted in untrained and wanted not in others
            reason = "outside" if is_outside else "template"
            counts[f"{kind} tokenizer"] += min(missing, dropped)
            counts[f"{kind} {reason}"] += max(0, missing - dropped)
    # 3. Definitions of tools, by their names.
    if tools:
        whole = squeezed(spelling.of(ids))
        counts["tools given"] = len(tools)
        counts["tools template"] = sum(squeezed(tool["function"]["name"]) not in whole for tool in tools)
    return +counts


def untrained_shares(characters: Mapping[str, int]) -> dict[str, float]:
    """Return by kind and reason the share of all marked characters that is not trained, from sums of missing_text."""
    marked = sum(n for key, n in characters.items() if key.endswith(" marked"))
    missing = [key for key in characters if not key.startswith("tools") and not key.endswith(" marked")]
    return {key: characters[key] / marked for key in missing}


def missing_lines(tokenizer: Any, characters: Mapping[str, int], *, least: float) -> list[str]:
    """Return what is not trained and why, with what to do, the most first; nothing up to a share of `least`."""
    lines: list[str] = []
    shares = untrained_shares(characters)
    for key in sorted(shares, key=shares.__getitem__, reverse=True):
        if sum(shares.values()) > least and (shares[key] > least or not lines):
            kind, reason = key.split()
            why = unrendered(tokenizer).get(kind) if reason == "template" else None
            why = why or REASONS[reason].format(KINDS[kind])
            lines.append(f"{100 * shares[key]:.1f} % of the answers' characters are not trained: {why}")
    if characters.get("tools template", 0) > least * characters.get("tools given", 0):
        lines.append(unrendered(tokenizer).get("tools") or REASONS["template"].format("definitions of tools"))
    return lines
