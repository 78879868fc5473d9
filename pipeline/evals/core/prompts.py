"""An item of a CORE task as token rows: the examples before it, the question, and the span whose loss counts.

A row is BOS and the prompt. Multiple choice: one row an option, scored where the options' rows begin to differ. Schema: one
row a context, scored over the tokens that all of them end in. Language modelling: one row, scored after the prompt.
The rules, and with them the scores, are those of nanochat's core_eval.py.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.evals.core.tasks import CoreTask
from pipeline.tokenizer.encode import encode_documents

LongPrompts = Literal["crop", "fewer_shots"]
SHUFFLE_SEED, SHOTS_SEED = 1337, 1234  # of the items' order and, plus an item's place in it, of its examples
ITEMS_AT_ONCE = 1024


@dataclass(frozen=True)
class Row:
    """ids: (T,) tokens with BOS; targets from `start` on are scored."""

    item: int
    option: int
    ids: np.ndarray
    start: int


def in_order(items: list[Any], max_items: int | None) -> list[Any]:
    """The items, or what is known of each, in the order of every evaluation, of which a capped one takes the first."""
    items = list(items)
    random.Random(SHUFFLE_SEED).shuffle(items)
    return items[:max_items]


def shots_of(task: CoreTask, index: int, num_items: int) -> list[int]:
    """Which items stand as examples before item `index`: drawn from the others, as many as there are when too few."""
    k = min(task.shots, num_items - 1)
    # Of the others' places rather than of a list of the others: the same draw, without a list of all items for each.
    drawn = random.Random(SHOTS_SEED + index).sample(range(num_items - 1), k) if k else []
    return [place + (place >= index) for place in drawn]


def prompts_of(task: CoreTask, item: dict, shots: list[dict]) -> list[str]:
    """The texts of an item's rows; of language modelling the prompt alone, then the prompt with what is to be said."""
    if task.kind == "multiple_choice":
        before = "".join(f"{s['query']}{task.delimiter}{s['choices'][s['gold']]}\n\n" for s in shots)
        return [f"{before}{item['query']}{task.delimiter}{choice}" for choice in item["choices"]]
    if task.kind == "schema":
        before = "".join(f"{s['context_options'][s['gold']]}{task.delimiter}{s['continuation']}\n\n" for s in shots)
        return [f"{before}{context}{task.delimiter}{item['continuation']}" for context in item["context_options"]]
    before = "".join(f"{s['context'].strip()}{task.delimiter}{s['continuation']}\n\n" for s in shots)
    prompt = f"{before}{item['context'].strip()}{task.delimiter}"
    # A trailing blank would be a token of its own in the prompt, and part of the first word in the whole.
    return [prompt.strip(), prompt + item["continuation"]]


@dataclass(frozen=True)
class Tokens:
    """How texts become rows. bos: what a row begins with; positions: the longest row the model takes, None for any.

    long_prompts says what happens to a longer one. `fewer_shots`: as few whole examples as needed are left out from the
    front, the same for all options, and BOS stays; a question that is too long by itself loses its beginning. `crop`: each
    row keeps its last tokens, without BOS and perhaps from inside an example: nanochat's rule, under which GPT-2 has its
    published scores.
    """

    tokenizer: Any
    bos: int
    positions: int | None = None
    long_prompts: LongPrompts = "fewer_shots"

    def of(self, texts: list[str]) -> list[np.ndarray]:
        ids = encode_documents(self.tokenizer, texts)
        return [np.insert(some.astype(np.int64), 0, self.bos) for some in ids]


def rows_of(task: CoreTask, items: list[dict], wanted: Iterable[int], tokens: Tokens) -> tuple[list[Row], int]:
    """The rows of the wanted items, and how many of these were too long for the model.

    items: all of them, in order: the examples are drawn from these.
    """
    rows: list[Row] = []
    fits = dict.fromkeys(wanted, min(task.shots, len(items) - 1))
    spans = _encoded(task, items, fits, tokens)
    long = [index for index, found in spans.items() if not _fit(found, tokens)]
    if tokens.long_prompts == "fewer_shots":
        # For each the most examples with which it fits: the number is halved in between, all items at once.
        least, most = dict.fromkeys(long, -1), {index: fits[index] for index in long}
        while trial := {i: (least[i] + most[i]) // 2 for i in long if most[i] - least[i] > 1}:
            for index, found in _encoded(task, items, trial, tokens).items():
                if _fit(found, tokens) or trial[index] == 0:
                    least[index], spans[index] = trial[index], found
                else:
                    most[index] = trial[index]
    keep_bos = tokens.long_prompts == "fewer_shots"
    for index, found in spans.items():
        rows += [
            Row(index, option, *_cropped(ids, start, tokens.positions, keep_bos=keep_bos))
            for option, (ids, start) in enumerate(found)
        ]
    return rows, len(long)


def _encoded(task: CoreTask, items: list[dict], shots: dict[int, int], tokens: Tokens) -> dict[int, list[tuple]]:
    """(ids, start) of each item's rows, with so many of its examples, the last ones."""
    found = {}
    indices = list(shots)
    for first in range(0, len(indices), ITEMS_AT_ONCE):
        some = indices[first : first + ITEMS_AT_ONCE]
        texts = []
        for index in some:
            drawn = shots_of(task, index, len(items))
            texts.append(prompts_of(task, items[index], [items[i] for i in drawn[len(drawn) - shots[index] :]]))
        encoded = iter(tokens.of([text for group in texts for text in group]))
        for index, group in zip(some, texts, strict=True):
            found[index] = _spans(task, [next(encoded) for _ in group])
    return found


def _fit(spans: list[tuple[np.ndarray, int]], tokens: Tokens) -> bool:
    return tokens.positions is None or max(len(ids) for ids, _ in spans) <= tokens.positions


def _spans(task: CoreTask, rows: list[np.ndarray]) -> list[tuple[np.ndarray, int]]:
    """(ids, start) of the rows to score."""
    if task.kind == "schema":
        suffix = common_length([ids[::-1] for ids in rows])
        return [(ids, len(ids) - suffix) for ids in rows]
    # Of language modelling the two rows are one: the prompt is the beginning of the whole.
    start = common_length(rows)
    return [(ids, start) for ids in (rows if task.kind == "multiple_choice" else rows[1:])]


def common_length(rows: list[np.ndarray]) -> int:
    """How many first tokens all rows share."""
    shortest = min(map(len, rows))
    differ = np.zeros(shortest, bool)
    for ids in rows[1:]:
        differ |= ids[:shortest] != rows[0][:shortest]
    return int(differ.argmax()) if differ.any() else shortest


def _cropped(ids: np.ndarray, start: int, positions: int | None, *, keep_bos: bool) -> tuple[np.ndarray, int]:
    """The row's last tokens, so that at least one stands before what is scored."""
    cut = 0 if positions is None else max(len(ids) - positions, 0)
    kept = ids[cut:]
    if cut and keep_bos:
        kept = np.concatenate([ids[:1], kept[1:]])
    return kept, max(start - cut, 1)
