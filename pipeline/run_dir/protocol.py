"""The protocol of a score: the parts that say on what and how it was measured, and the id that is their hash.

Two scores compare only when their ids are equal. The parts stand beside the id wherever a score is kept (evals.json,
run_manifest.json), so that a reader can say which of them differs.

| part | what it says |
| --- | --- |
| score | what is measured: rows, documents, assistant, core, chat, lm_eval |
| texts | hash of what is scored |
| bytes, items | how much of it |
| window | most tokens that the model sees at once; "whole prompts" where none was longer than its positions |
| stride | from the start of one window to the next: "window" where they do not overlap |
| bos | before what the model gets a BOS token |
| dtype | in which the model computes |
| tokenizer, template | where the scored targets depend on them |
| coverage | share of the text's bytes that the tokenizer's ids restore; of tasks, of their items' text |
| rule | version of our code's rule for this score, raised when the same parts would give another figure |
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LENGTH = 12  # hex digits of an id


@dataclass(frozen=True)
class Protocol:
    """parts: JSON values by name, in the order in which people read them; `score` is the first word of the id."""

    parts: Mapping[str, Any]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Protocol | None":
        """Return the protocol that a row of evals.json holds; None for a row of an earlier version, which has the id alone."""
        parts = row.get("protocol_parts")
        return cls(parts) if isinstance(parts, Mapping) and parts else None

    @property
    def id(self) -> str:
        return f"{self.parts['score']}-{digest(self.parts, LENGTH)}"

    def having(self, **parts: Any) -> "Protocol":
        """Return the protocol with these parts added or replaced."""
        return Protocol({**self.parts, **parts})

    def row(self) -> dict[str, Any]:
        """Return what a row of evals.json keeps of it."""
        return {"protocol": self.id, "protocol_parts": dict(self.parts)}

    def difference(self, other: "Protocol") -> str:
        """Return each part that differs, as `window 64 against 1024`; "" when the two are equal."""
        return "; ".join(_differences(self.parts, other.parts))

    def __str__(self) -> str:
        return ", ".join(f"{_words(name)} {_value(value)}" for name, value in self.parts.items() if name != "score")


def digest(value: Any, length: int = 16) -> str:
    """Return the first hex digits of the hash of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:length]


def why_not_compared(one: Protocol | None, other: Protocol | None) -> str:
    """Return which parts of two protocols of unequal ids differ, as far as both are recorded."""
    if one is None or other is None:
        return "an earlier version measured one of them and did not record the parts of its protocol"
    return one.difference(other)


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name), other.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += [f"{_words(name)} {line}" for line in _differences(a, b)]
        elif a != b:
            lines.append(f"{_words(name)} {_value(a)} against {_value(b)}")
    return lines


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + "; ".join(f"{_words(name)} {_value(inner)}" for name, inner in value.items()) + ")"
    return "none" if value is None else str(value)
