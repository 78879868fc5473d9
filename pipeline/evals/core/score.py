"""CORE: the tasks' accuracies, centred on guessing, and their mean, with how sure it is."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pipeline.artifacts.errors import DataError
from pipeline.artifacts.protocol import Protocol
from pipeline.evals.continuations import score_rows
from pipeline.evals.core.bundle import Bundle
from pipeline.evals.core.prompts import LongPrompts, Row, Tokens, in_order, rows_of
from pipeline.evals.core.tasks import TASKS, CoreTask
from pipeline.evals.intervals import bootstrap_means, interval, share_interval
from pipeline.evals.together import first_ranks_word
from pipeline.tokenizer.specials import document_start

RULE = 1  # raise it when the same items under the same window give other answers
# With a time limit, shares of every task's items that are scored one after the other while they still fit.
WAVES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(frozen=True)
class TaskScore:
    """correct: (n,) bool of the items scored, in the order of in_order; of: items that were to be scored.

    shortened: items whose prompt was longer than the model takes.
    """

    task: CoreTask
    correct: np.ndarray
    of: int
    shortened: int

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())

    def interval(self) -> tuple[float, float]:
        """Return the accuracy's 95 % interval."""
        return share_interval(int(self.correct.sum()), len(self.correct))


@dataclass(frozen=True)
class CoreScore:
    """tasks: those scored; missing: name -> why not; forwarded, given: tokens through the model, tokens in prompts."""

    tasks: list[TaskScore]
    missing: dict[str, str]
    bundle: Bundle
    protocol: Protocol
    seconds: float
    forwarded: int
    given: int
    cut_short: bool = field(default=False)

    @property
    def whole(self) -> bool:
        """Whether the mean may be called CORE: every task, every file the published one, all items that were to be scored."""
        return not self.missing and not self.cut_short and all(self.bundle.published(t.task) for t in self.tasks)

    @property
    def name(self) -> str:
        return "core" if self.whole else "core_partial"

    def mean(self, version: str) -> float:
        """The mean of the centred accuracies. version: v1, the baselines of every published CORE score, or v2, DCLM's
        corrected ones."""
        return float(np.mean([t.task.centred(t.accuracy, version) for t in self.tasks]))

    def interval(self, version: str) -> tuple[float, float]:
        """95 % bootstrap interval of the mean: items drawn again within each task."""
        draws = [t.task.centred(bootstrap_means(t.correct, seed=n), version) for n, t in enumerate(self.tasks)]
        return interval(np.mean(draws, axis=0))


def score_core(
    bundle: Bundle,
    model: Any,
    tokenizer: Any,
    *,
    device: torch.device | str,
    max_per_task: int | None = None,
    max_s: float | None = None,
    long_prompts: LongPrompts = "fewer_shots",
    rank: int = 0,
    world_size: int = 1,
    batch_tokens: int | None = None,
    watched: Callable[[Iterable], Iterable] = iter,
    report: Callable[[TaskScore], None] | None = None,
) -> CoreScore:
    """Score the bundle's tasks; every rank calls it and gets the same.

    max_per_task: the first so many items of each task. max_s: as many as are expected to fit, a like share of every task;
    the score is partial then. report: called with each task's score as soon as it is there (without max_s).
    Raises DataError for a tokenizer without BOS and EOS and for a model whose loss is no number.
    """
    started = time.monotonic()
    bos = document_start(tokenizer)
    if bos is None:
        raise DataError(
            "the tokenizer has neither a BOS nor an EOS token, so a prompt has nothing to begin with. Set bos_token in its tokenizer_config.json."
        )
    tokens = Tokens(tokenizer, bos, getattr(model.config, "max_position_embeddings", None), long_prompts)
    items = {t: in_order(bundle.items[t.file], max_per_task) for t in TASKS if t.name not in bundle.missing}
    correct: dict[CoreTask, list[bool]] = {task: [] for task in items}
    shortened = dict.fromkeys(items, 0)
    forwarded = given = 0

    def score(wanted: dict[CoreTask, range]) -> None:
        nonlocal forwarded, given
        rows: list[tuple[CoreTask, Row]] = []
        for task, some in wanted.items():
            found, long = rows_of(task, items[task], some, tokens)
            rows += [(task, row) for row in found]
            shortened[task] += long
        scores = score_rows(
            model,
            [(row.ids, row.start) for _, row in rows],
            device=device,
            rank=rank,
            world_size=world_size,
            batch_tokens=batch_tokens,
            watched=watched,
        )
        if np.isnan(scores.nats).any():
            error = DataError(
                "the model's loss is no number, so nothing was scored: its weights or its precision are broken. Score an earlier checkpoint."
            )
            error.of_all_ranks = True
            raise error
        forwarded, given = forwarded + scores.forwarded, given + scores.given
        for task, some in wanted.items():
            numbers = [n for n, (of, _) in enumerate(rows) if of is task]
            chosen = _correct(
                task, items[task], [rows[n][1] for n in numbers], scores.nats[numbers], scores.greedy[numbers]
            )
            correct[task] += [chosen[index] for index in some]

    cut_short = False
    if max_s is None:
        for task in items:
            score({task: range(len(items[task]))})
            if report is not None:
                report(TaskScore(task, np.array(correct[task]), len(items[task]), shortened[task]))
    else:
        for wave in _waves(items):
            so_far = sum(map(len, correct.values()))
            expected = (time.monotonic() - started) * sum(map(len, wave.values())) / max(so_far, 1)
            if so_far and first_ranks_word(time.monotonic() - started + expected > max_s, device):
                cut_short = True
                break
            score(wave)
    return CoreScore(
        tasks=[TaskScore(task, np.array(found), len(items[task]), shortened[task]) for task, found in correct.items()],
        missing=dict(bundle.missing),
        bundle=bundle,
        protocol=core_protocol(
            bundle,
            max_per_task=max_per_task,
            long_prompts=long_prompts,
            window=tokens.positions if any(shortened.values()) else None,
        ),
        seconds=time.monotonic() - started,
        forwarded=forwarded,
        given=given,
        cut_short=cut_short,
    )


def core_protocol(
    bundle: Bundle, *, max_per_task: int | None, long_prompts: LongPrompts, window: int | None
) -> Protocol:
    """Return the protocol of the tasks and their mean. window: the model's positions where a prompt was longer, else None:
    then they change nothing."""
    return Protocol(
        {
            "score": "core",
            "texts": bundle.id.removeprefix("core-"),
            "items": max_per_task or "all",
            "long_prompts": long_prompts,
            "window": window or "whole prompts",
            "bos": "each prompt",
            "rule": RULE,
        }
    )


def _correct(
    task: CoreTask, items: list[dict], rows: list[Row], nats: np.ndarray, greedy: np.ndarray
) -> dict[int, bool]:
    """Whether each item was answered rightly: all its tokens the likeliest, or the right option the one of least loss."""
    if task.kind == "language_modeling":
        return {row.item: bool(all_greedy) for row, all_greedy in zip(rows, greedy, strict=True)}
    losses: dict[int, list[float]] = {}
    for row, nats_of_row in sorted(zip(rows, nats.tolist(), strict=True), key=lambda pair: pair[0].option):
        targets = len(row.ids) - row.start
        # Nothing is scored of an option that is the beginning of all others: no number, as nanochat has it.
        losses.setdefault(row.item, []).append(nats_of_row / targets if targets else float("nan"))
    return {item: found.index(min(found)) == items[item]["gold"] for item, found in losses.items()}


def _waves(items: dict[CoreTask, list[dict]]) -> Iterator[dict[CoreTask, range]]:
    """Shares of every task, each twice the one before: about half the time limit at least is used."""
    done = dict.fromkeys(items, 0)
    for share in WAVES:
        ends = {task: max(1, round(share * len(some))) for task, some in items.items()}
        yield {task: range(done[task], ends[task]) for task in items if ends[task] > done[task]}
        done = ends
