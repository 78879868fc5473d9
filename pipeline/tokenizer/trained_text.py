"""Characters of what the assistant thinks, says and calls, as the data have it, and those of them that no trained id spells.

Templates, masks and tokenizers are measured together, by the text that the trained ids decode to.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unicodedata import normalize

from pipeline.tokenizer.encode import WORD_JOINER, plain_backend

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TAKEN = "\0"
UNIT = re.compile(r"[A-Za-z0-9]+|\S")  # What is counted of a text that is not found in one piece.
ROOM = 4_000  # Characters, at most, that a template writes into the trained text of one message.
ESCAPED = 6  # Characters of \u00e9


class Spelling:
    """Text of ids, unknown tokens left out, in the form in which texts are compared here."""

    def __init__(self, tokenizer: Any):
        self.backend = plain_backend(tokenizer)
        unknown = getattr(self.backend.model, "unk_token", None)
        self.unknown = {tokenizer.unk_token_id, self.backend.token_to_id(unknown) if unknown else None}

    def of(self, ids: list[int]) -> str:
        """Return what the ids decode to, control tokens by their names."""
        known = [i for i in ids if i not in self.unknown]
        return composed(self.backend.decode(known, skip_special_tokens=False))

    def again(self, text: str) -> str:
        """Return what is left of a text after encoding: a tokenizer may lower, compose or drop some of it."""
        return self.of(self.backend.encode(text, add_special_tokens=False).ids)


def composed(text: str) -> str:
    """Return the text in one Unicode form and case, without the U+2060 that the built-in template puts into control strings."""
    return normalize("NFKC", text.casefold()).replace(WORD_JOINER, "")


def squeezed(text: str) -> str:
    """Return the text without white space, which templates trim and indent."""
    return "".join(composed(text).split())


def marked_texts(message: dict) -> Iterator[tuple[str, str]]:
    """Yield (content | reasoning | calls, text) of an assistant's message; of calls the names and the values of arguments."""
    for key in REASONING_KEYS:
        if message.get(key):
            yield "reasoning", str(message[key])
    thought, _, said = str(message.get("content") or "").rpartition("</think>")
    for text in thought.split("<think>"):
        yield "reasoning", text
    yield "content", said
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield "calls", function["name"]
        for value in _values(function.get("arguments")):
            yield "calls", value if isinstance(value, str) else json.dumps(value)


def _values(value: Any) -> Iterator[Any]:
    """Yield what nested arguments hold; null is no value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _values(item)
    elif value is not None:
        yield value


def _forms(text: str, spelling: Spelling) -> Iterator[str]:
    """Yield the text as templates write it (as it is, as JSON, as Python), and what the tokenizer keeps of these."""
    json_text, ascii_text = (json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
    forms = dict.fromkeys([text, json_text, ascii_text, repr(text)[1:-1]])
    yield from forms
    for form in forms:
        yield spelling.again(form)


def missing_text(tokenizer: Any, messages: list[dict], ids: list[int], trained: list[bool]) -> Counter[tuple[str, str]]:
    """Return numbers of characters by (kind, "marked") for all that are to be learnt, and (kind, reason) for those not trained.

    ids, trained: the conversation as it is rendered. Kinds: of marked_texts. Reasons: the "tokenizer" has no ids for them, they
    are rendered "outside" of what is trained, the "template" leaves them out. White space and case count nowhere.
    """
    spelling = Spelling(tokenizer)
    written = spelling.of([i for i, bit in zip(ids, trained, strict=True) if bit])
    text, at = squeezed(written), 0
    counts = Counter[tuple[str, str]]()
    found, not_found = list[str](), list[tuple[str, str]]()
    for message in messages:
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        parts = sorted(marked_texts(message), key=lambda part: -len(part[1]))  # "4" is none of a longer text's characters
        room, end = text[at : at + ROOM + ESCAPED * sum(len(part) for _, part in parts)], 0
        for kind, part in parts:
            marked = len(squeezed(part))
            counts[kind, "marked"] += marked
            if not marked:
                continue
            for form in _forms(part, spelling):
                wanted = squeezed(form)
                start = room.find(wanted) if wanted else -1
                if start >= 0:
                    stop = start + len(wanted)
                    room, end = room[:start] + TAKEN * len(wanted) + room[stop:], max(end, stop)
                    found.append(form)
                    counts[kind, "tokenizer"] += max(0, marked - len(wanted))
                    break
            else:
                not_found.append((kind, part))
        at += end
    if not_found:
        left = Counter(UNIT.findall(written))
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
            counts[kind, "tokenizer"] += min(missing, dropped)
            counts[kind, "outside" if is_outside else "template"] += max(0, missing - dropped)
    return +counts
