"""CORE: prompts, continuations compared, scores and their table."""

import inspect
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from pipeline.evals.bpb import TARGETS_AT_ONCE, evaluating
from pipeline.evals.contamination import (
    Findings,
    clean_mean,
    clean_scores,
    contamination_of,
    core_texts,
    watched_bundle,
)
from pipeline.evals.core_bundle import TASKS, Bundle, CoreTask, open_bundle, why_partial
from pipeline.evals.intervals import bootstrap_means, interval, share_interval
from pipeline.evals.tasks import broadcast_bool, summed_over_ranks
from pipeline.generation.texts import cache_argument, cache_of
from pipeline.metrics import Protocol
from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import DataError
from pipeline.recipe.schema import Recipe
from pipeline.tokenizer.coverage import coverage
from pipeline.tokenizer.encode import document_start, encode_documents

# An item of a CORE task as token rows: the examples before it, the question, and the span whose loss counts.

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
    """Return the items, or what is known of each, in the order of every evaluation, of which a capped one takes the
    first."""
    items = list(items)
    random.Random(SHUFFLE_SEED).shuffle(items)
    return items[:max_items]


def shots_of(task: CoreTask, index: int, num_items: int) -> list[int]:
    """Return which items are the examples before item `index`: drawn from the others, as many as there are when too
    few."""
    k = min(task.shots, num_items - 1)
    # Of the others' places rather than of a list of the others: the same draw, without a list of all items for each.
    drawn = random.Random(SHOTS_SEED + index).sample(range(num_items - 1), k) if k else []
    return [place + (place >= index) for place in drawn]


def prompts_of(task: CoreTask, item: dict, shots: list[dict]) -> list[str]:
    """Return the texts of an item's rows; of language modelling the prompt alone, then the prompt with its
    continuation."""
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
    """Tokenizer and limits that make rows of texts. bos: what a row begins with; positions: the longest row the model
    takes, None for any.

    long_prompts says what happens to a longer one. `fewer_shots`: as few whole examples as needed are left out from
    the front, the same for all options, and BOS stays; a question that is too long by itself loses its beginning.
    `crop`: each row keeps its last tokens, without BOS and perhaps from inside an example: nanochat's rule, under
    which GPT-2 has its published scores.
    """

    tokenizer: Any
    bos: int
    positions: int | None = None
    long_prompts: LongPrompts = "fewer_shots"

    def of(self, texts: list[str]) -> list[np.ndarray]:
        ids = encode_documents(self.tokenizer, texts)
        return [np.insert(some.astype(np.int64), 0, self.bos) for some in ids]


def rows_of(task: CoreTask, items: list[dict], wanted: Iterable[int], tokens: Tokens) -> tuple[list[Row], int]:
    """Return the rows of the wanted items, and how many of these were too long for the model.

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
    """Return (ids, start) of each item's rows, with so many of its examples, the last ones."""
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
    """Return (ids, start) of the rows to score."""
    if task.kind == "schema":
        suffix = common_length([ids[::-1] for ids in rows])
        return [(ids, len(ids) - suffix) for ids in rows]
    # Of language modelling the two rows are one: the prompt is the beginning of the whole.
    start = common_length(rows)
    return [(ids, start) for ids in (rows if task.kind == "multiple_choice" else rows[1:])]


def common_length(rows: list[np.ndarray]) -> int:
    """Return how many first tokens all rows share."""
    shortest = min(map(len, rows))
    differ = np.zeros(shortest, bool)
    for ids in rows[1:]:
        differ |= ids[:shortest] != rows[0][:shortest]
    return int(differ.argmax()) if differ.any() else shortest


def _cropped(ids: np.ndarray, start: int, positions: int | None, *, keep_bos: bool) -> tuple[np.ndarray, int]:
    """Return the row's last tokens, so that at least one stands before what is scored."""
    cut = 0 if positions is None else max(len(ids) - positions, 0)
    kept = ids[cut:]
    if cut and keep_bos:
        kept = np.concatenate([ids[:1], kept[1:]])
    return kept, max(start - cut, 1)


# The loss of given continuations under a causal LM, in batches: each prefix that rows share is forwarded once.

# Positions of one forward pass; more is faster on a GPU, less stays in a CPU's caches.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
# What another forward pass costs beside its positions, counted in positions.
PASS_TOKENS = 128
# Rows that go on from one kept prefix, and the memory of all of a batch's copies of kept keys and values.
ROWS_OF_A_PREFIX = 16
CACHE_BYTES = 2**30


@dataclass
class Sequence:
    """Token ids, and the spans in them that are scored: (row, first target, end)."""

    ids: np.ndarray
    spans: list[tuple[int, int, int]]
    key: bytes = field(repr=False)

    @property
    def start(self) -> int:
        return min(first for _, first, _ in self.spans)


@dataclass
class Group:
    """Sequences whose first `shared` tokens are the same and are forwarded once; 0: a single one."""

    sequences: list[Sequence]
    shared: int = 0


@dataclass(frozen=True)
class Scores:
    """Summed nats of each row's targets, and whether each target is the likeliest token.

    forwarded: token positions that went through the model, padding included, over all ranks; given: tokens of all
    rows.
    """

    nats: np.ndarray
    greedy: np.ndarray
    forwarded: int
    given: int


def score_rows(
    model,
    rows: list[tuple[np.ndarray, int]],
    *,
    device: torch.device | str,
    rank: int = 0,
    world_size: int = 1,
    batch_tokens: int | None = None,
    watched: Callable[[Iterable], Iterable] = iter,
) -> Scores:
    """Return scores of rows (ids (T,), start): targets ids[start:] given what comes before them; start is at least 1.

    Every rank calls this with all rows and takes its share of the batches; an error on one rank is raised on all of
    them. The model is left in the mode it was in. watched: what this rank's batches go through; it may raise
    EvaluationInterrupted.
    """
    device = torch.device(device)
    nats_R, misses_R = (torch.zeros(len(rows), dtype=torch.float64) for _ in range(2))
    forwarded, error = 0, None
    try:
        with evaluating(model):
            cached = _bytes_of_a_position(model)
            batches = batches_of(
                groups_of(rows, share=cached > 0),
                batch_tokens=batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"]),
                cached_tokens=CACHE_BYTES / cached if cached else 0,
            )
            for batch in watched(batches[rank::world_size]):
                beat()
                forwarded += _score_batch(model, batch, device, nats_R, misses_R)
    except Exception as problem:  # raised below, on every rank
        error = problem
    own = [nats_R, misses_R, torch.tensor([forwarded], dtype=torch.float64)]
    nats_R, misses_R, counts = summed_over_ranks(own, world_size=world_size, device=device, error=error)
    given = sum(len(ids) for ids, _ in rows)
    return Scores(nats=nats_R.numpy(), greedy=(misses_R == 0).numpy(), forwarded=int(counts[0]), given=given)


def groups_of(rows: list[tuple[np.ndarray, int]], *, share: bool = True) -> list[Group]:
    """Return the rows as groups: a row that is another's beginning is scored within it, and rows that share at least
    half of their tokens go on from one prefix (not without share)."""
    # In the order of their ids, beginnings and likenesses are neighbours.
    found: list[Sequence] = []
    keyed = sorted(((ids.astype(">u4").tobytes(), number) for number, (ids, _) in enumerate(rows)), reverse=True)
    for key, number in keyed:
        ids, start = rows[number]
        span = (number, start, len(ids))
        if found and found[-1].key.startswith(key):
            found[-1].spans.append(span)
        else:
            found.append(Sequence(ids, [span], key))
    groups: list[Group] = []
    for sequence in found:
        shared = _shared_with(groups[-1], sequence) if share and groups else 0
        if shared:
            groups[-1].sequences.append(sequence)
            groups[-1].shared = shared
        else:
            groups.append(Group([sequence]))
    return groups


def _shared_with(group: Group, sequence: Sequence) -> int:
    """Return the tokens that the group would share with this sequence in it; 0 when it should not go in."""
    if len(group.sequences) == ROWS_OF_A_PREFIX:
        return 0
    last = group.sequences[-1]
    # One token less than all before the first target: the logits of a target are those of the position before it.
    shared = min(common_length([last.ids, sequence.ids]), last.start - 1, sequence.start - 1)
    if len(group.sequences) > 1:
        shared = min(shared, group.shared)
    kept, saved = group.shared * (len(group.sequences) - 1), shared * len(group.sequences)
    return shared if saved > kept and 2 * shared >= len(sequence.ids) else 0


def batches_of(groups: list[Group], *, batch_tokens: int, cached_tokens: float) -> list[list[Group]]:
    """Return groups of about equal length, as long as that wastes less than another forward pass costs; the dearest
    batches first, so that ranks end at about the same time. cached_tokens: of all rows that go on from kept
    prefixes."""
    priced: list[tuple[int, list[Group]]] = []
    batch: list[Group] = []
    now = Price()
    for group in sorted(groups, key=lambda g: (g.shared, max(len(s.ids) for s in g.sequences)), reverse=True):
        alone, together = Price().with_group(group), now.with_group(group)
        fits = together.largest_pass <= batch_tokens and together.cached <= cached_tokens
        if batch and not (fits and together.tokens <= now.tokens + alone.tokens + PASS_TOKENS):
            priced.append((now.tokens, batch))
            batch, together = [], alone
        batch.append(group)
        now = together
    if batch:
        priced.append((now.tokens, batch))
    return [batch for _, batch in sorted(priced, key=lambda pair: -pair[0])]


@dataclass(frozen=True)
class Price:
    """Cost of a batch: its groups, its rows, what all groups can keep, and the longest row."""

    groups: int = 0
    rows: int = 0
    kept: int = 0
    longest: int = 0

    def with_group(self, group: Group) -> "Price":
        kept = min(self.kept, group.shared) if self.groups else group.shared
        longest = max(self.longest, *(len(s.ids) for s in group.sequences))
        return Price(self.groups + 1, self.rows + len(group.sequences), kept, longest)

    @property
    def tokens(self) -> int:
        return self.groups * self.kept + self.rows * (self.longest - self.kept)

    @property
    def largest_pass(self) -> int:
        return max(self.groups * self.kept, self.rows * (self.longest - self.kept))

    @property
    def cached(self) -> int:
        return self.rows * self.longest if self.kept else 0


def _score_batch(model, batch: list[Group], device: torch.device, nats_R, misses_R) -> int:
    """Add the batch's sums to those of its rows; the token positions forwarded."""
    sequences = [sequence for group in batch for sequence in group.sequences]
    # What all groups of the batch can keep; the rest of a longer prefix goes with its rows.
    kept = min(group.shared for group in batch)
    cache = None
    if kept:
        prefix_BT = torch.from_numpy(np.stack([group.sequences[0].ids[:kept] for group in batch])).to(device)
        cache = cache_of(forward_at(model, prefix_BT, torch.tensor([kept - 1], device=device), use_cache=True))
        numbers = [n for n, group in enumerate(batch) for _ in group.sequences]
        # reorder_cache, not batch_select_indices: the latter forgets the states of layers that keep more than keys.
        cache.reorder_cache(torch.tensor(numbers, device=device))
    width = max(len(sequence.ids) for sequence in sequences) - kept
    rows_BT = np.zeros((len(sequences), width), np.int64)
    places, targets, owners = [], [], []
    for number, sequence in enumerate(sequences):
        rows_BT[number, : len(sequence.ids) - kept] = sequence.ids[kept:]
        for row, first, end in sequence.spans:
            places += [(number, position - 1 - kept) for position in range(first, end)]
            targets.append(sequence.ids[first:end])
            owners += [row] * (end - first)
    row_N, position_N = torch.tensor(places, dtype=torch.int64, device=device).reshape(-1, 2).T
    wanted, position_N = position_N.unique(return_inverse=True)
    rest_BT = torch.from_numpy(rows_BT).to(device)
    output = forward_at(model, rest_BT, wanted, cache=cache, use_cache=cache is not None)
    target_N, owner_N = torch.from_numpy(np.concatenate(targets)).to(device), torch.tensor(owners)
    for some in torch.arange(len(owner_N)).split(TARGETS_AT_ONCE):
        logits_NV = output.logits[row_N[some], position_N[some]].float()
        nats_N = torch.nn.functional.cross_entropy(logits_NV, target_N[some], reduction="none")
        nats_R.index_add_(0, owner_N[some], nats_N.cpu().double())
        misses_R.index_add_(0, owner_N[some], (logits_NV.argmax(-1) != target_N[some]).cpu().double())
    return rows_BT.size + kept * len(batch)


def forward_at(model, input_ids_BT: torch.Tensor, wanted_N: torch.Tensor, *, cache=None, use_cache=False) -> Any:
    """Return the model's output with the logits of these positions alone: the head for all others is most of a small
    model."""
    known = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"use_cache": use_cache} if "use_cache" in known else {}
    if cache is not None:
        inputs[cache_argument(model)] = cache
    if "logits_to_keep" in known:
        return model(input_ids=input_ids_BT, logits_to_keep=wanted_N, **inputs)
    output = model(input_ids=input_ids_BT, **inputs)
    output.logits = output.logits[:, wanted_N]
    return output


def _bytes_of_a_position(model) -> int:
    """Return the bytes that the model caches for one position; 0 when a prefix's states cannot be kept and dealt out
    to rows."""
    if not {cache_argument(model), "use_cache"} <= set(inspect.signature(model.forward).parameters):
        return 0
    output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True)
    cache = cache_of(output)
    if not hasattr(cache, "reorder_cache"):
        return 0
    kept = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(states.numel() * states.element_size() for states in kept if torch.is_tensor(states))


# CORE: the tasks' accuracies, centred on guessing, and their mean, with how sure it is.

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
    cut_short: bool = False

    @property
    def whole(self) -> bool:
        """Return whether the mean may be called CORE: every task, every file the published one, all items that were to
        be scored."""
        return not self.missing and not self.cut_short and all(self.bundle.published(t.task) for t in self.tasks)

    @property
    def name(self) -> str:
        return "core" if self.whole else "core_partial"

    def mean(self, version: str) -> float:
        """Return the mean of the centred accuracies. version: v1, the baselines of every published CORE score, or v2,
        DCLM's corrected ones."""
        return float(np.mean([t.task.centred(t.accuracy, version) for t in self.tasks]))

    def interval(self, version: str) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of the mean: items drawn again within each task."""
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
    watched: Callable[[Iterable], Iterable] = iter,
    report: Callable[[TaskScore], None] | None = None,
) -> CoreScore:
    """Score the bundle's tasks; every rank calls it and gets the same.

    max_per_task: the first so many items of each task. max_s: as many as are expected to fit, a like share of every
    task; the score is partial then. report: called with each task's score as soon as it is there (without max_s).
    Raises DataError for a tokenizer without BOS and EOS and for a model whose loss is no number.
    """
    started = time.monotonic()
    bos = document_start(tokenizer)
    if bos is None:
        raise DataError(
            "the tokenizer has neither a BOS nor an EOS token, so a prompt has nothing to begin with. Set bos_token "
            "in its tokenizer_config.json."
        )
    tokens = Tokens(
        tokenizer, bos, getattr(model.config.get_text_config(), "max_position_embeddings", None), long_prompts
    )
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
            watched=watched,
        )
        if np.isnan(scores.nats).any():
            error = DataError(
                "the model's loss is no number, so nothing was scored: its weights or its precision are broken. Score "
                "an earlier checkpoint."
            )
            error.of_all_ranks = True
            raise error
        forwarded, given = forwarded + scores.forwarded, given + scores.given
        for task, some in wanted.items():
            numbers = [n for n, (of, _) in enumerate(rows) if of is task]
            own = [rows[n][1] for n in numbers]
            chosen = _correct(task, items[task], own, scores.nats[numbers], scores.greedy[numbers])
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
            if so_far and broadcast_bool(time.monotonic() - started + expected > max_s, device):
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
            coverage=coverage(tokenizer, (text for some in items.values() for item in some for text in _texts(item))),
        ),
        seconds=time.monotonic() - started,
        forwarded=forwarded,
        given=given,
        cut_short=cut_short,
    )


def core_protocol(
    bundle: Bundle, *, max_per_task: int | None, long_prompts: LongPrompts, window: int | None, coverage: float
) -> Protocol:
    """Return the protocol of the tasks and their mean. window: the model's positions where a prompt was longer, else
    None: then they change nothing. coverage: of the items' text, by this tokenizer."""
    return Protocol(
        {
            "score": "core",
            "texts": bundle.id.removeprefix("core-"),
            "items": max_per_task or "all",
            "long_prompts": long_prompts,
            "window": window or "whole prompts",
            "bos": "each prompt",
            "coverage": coverage,
            "rule": RULE,
        }
    )


def _texts(item: dict) -> Iterator[str]:
    """Yield all that a prompt takes from an item: question or context, options and continuation."""
    for value in item.values():
        yield from (text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str))


def _correct(
    task: CoreTask, items: list[dict], rows: list[Row], nats: np.ndarray, greedy: np.ndarray
) -> dict[int, bool]:
    """Return whether each item was answered rightly: all its tokens the likeliest, or the right option the one of
    least loss."""
    if task.kind == "language_modeling":
        return {row.item: bool(all_greedy) for row, all_greedy in zip(rows, greedy, strict=True)}
    losses: dict[int, list[float]] = {}
    for row, nats_of_row in sorted(zip(rows, nats.tolist(), strict=True), key=lambda pair: pair[0].option):
        targets = len(row.ids) - row.start
        # Nothing is scored of an option that is the beginning of all others: no number, as nanochat has it.
        losses.setdefault(row.item, []).append(nats_of_row / targets if targets else float("nan"))
    return {item: found.index(min(found)) == items[item]["gold"] for item, found in losses.items()}


def _waves(items: dict[CoreTask, list[dict]]) -> Iterator[dict[CoreTask, range]]:
    """Yield shares of every task, each twice the one before: about half the time limit at least is used."""
    done = dict.fromkeys(items, 0)
    for share in WAVES:
        ends = {task: max(1, round(share * len(some))) for task, some in items.items()}
        yield {task: range(done[task], ends[task]) for task in items if ends[task] > done[task]}
        done = ends


# A CORE score as rows for evals.json, as metrics by name, and as a table for the terminal.

VERSIONS = ("v1", "v2")


def core_results(score: CoreScore, findings: Findings | None = None) -> list[dict[str, Any]]:
    """Return a row for each version of the mean, then one for each task: its accuracy, and what it was measured on.

    findings: of the training text of the run that is scored; rows then tell of contaminated items too.
    """
    rows = []
    items = score.bundle.items
    scored = ((f"core/{s.task.name}", core_texts(s.task, items[s.task.file]), s.correct.tolist()) for s in score.tasks)
    cleaned = clean_scores(findings, scored, in_order=lambda flags: in_order(flags, None))
    for version in VERSIONS:
        low, high = score.interval(version)
        rows.append(
            {
                "name": f"{score.name}/{version}",
                "value": score.mean(version),
                "low": low,
                "high": high,
                **score.protocol.row(),
                "tasks": len(score.tasks),
                "missing": score.missing,
                "bundle": score.bundle.id,
                "seconds": score.seconds,
                "tokens_forwarded": score.forwarded,
                "tokens_in_prompts": score.given,
                **contamination_of(_clean_mean(score, cleaned, version)),
            }
        )
    for found in score.tasks:
        task, (low, high) = found.task, found.interval()
        rows.append(
            {
                "name": f"core/{task.name}",
                "value": found.accuracy,
                "low": low,
                "high": high,
                **score.protocol.row(),
                "centred": {version: task.centred(found.accuracy, version) for version in VERSIONS},
                "items": len(found.correct),
                "of": found.of,
                "shots": task.shots,
                "shortened": found.shortened,
                "sha256": score.bundle.sha256[task.file],
                "published": score.bundle.published(task),
                **contamination_of(cleaned.get(task.name)),
            }
        )
    return rows


def _clean_mean(score: CoreScore, cleaned: dict[str, dict[str, Any]], version: str) -> dict[str, Any] | None:
    tasks = {scored.task.name: scored.task for scored in score.tasks}
    accuracies = {scored.task.name: scored.accuracy for scored in score.tasks}
    return clean_mean(accuracies, cleaned, lambda name, accuracy: tasks[name].centred(accuracy, version))


def task_line(scored: TaskScore) -> str:
    low, high = scored.interval()
    centred = "  ".join(f"{scored.task.centred(scored.accuracy, version):>8.4f}" for version in VERSIONS)
    note = f"  {scored.shortened:,} prompts shortened" if scored.shortened else ""
    return (
        f"{scored.task.name:<34} {scored.task.shots:>5} {len(scored.correct):>7,} {scored.accuracy:>9.4f}  "
        f"{low:.3f}-{high:.3f}  {centred}{note}"
    )


def heading() -> str:
    return f"{'task':<34} {'shots':>5} {'items':>7} {'accuracy':>9}  {'95 %':<11}  {'centr v1':>8}  {'centr v2':>8}"


def closing_lines(score: CoreScore) -> list[str]:
    """Return the means, and what has to be known to compare them."""
    lines = []
    for version in VERSIONS:
        low, high = score.interval(version)
        meaning = "baselines of published scores" if version == "v1" else "DCLM's corrected baselines"
        lines.append(
            f"{score.name}_{version}: {score.mean(version):.6f}  (95 % {low:.4f} to {high:.4f}; {meaning}; "
            f"{len(score.tasks)} of {len(TASKS)} tasks)"
        )
    if not score.whole:
        tasks = [(t.task.name, len(t.correct), t.of, score.bundle.published(t.task)) for t in score.tasks]
        lines.append(f"This is not CORE: {'; '.join(why_partial(score.missing, tasks))}.")
    lines.append(
        f"bundle {score.bundle.id}, protocol {score.protocol.id} ({score.protocol}); {score.forwarded:,} tokens "
        f"forwarded of {score.given:,} in prompts, {score.seconds:.1f} s"
    )
    return lines


class CoreBenchmark:
    """CORE as evals.core says."""

    name, generates = "core", False

    def __init__(self, recipe: Recipe):
        self.settings = recipe.evals.core
        self.every_steps, self.at_start = self.settings.every_steps, False
        self.bundle = open_bundle(self.settings.bundle, cache=recipe.data.cache_dir)

    def require_ready(self, tokenizer: Any) -> None:
        """Do nothing: every run's tokenizer will do."""

    def watched_texts(self) -> dict[str, list[str]]:
        """Return what the training text is searched for."""
        return watched_bundle(self.bundle)

    def score(
        self, model: Any, tokenizer: Any, *, findings: Findings | None = None, **where: Any
    ) -> list[dict[str, Any]]:
        """Return rows for evals.json; their values are the same on every rank. findings: of the run's training text,
        on the rank that writes. where: device, rank ... as score_core takes them."""
        limits = {name: getattr(self.settings, name) for name in ("max_per_task", "max_s", "long_prompts")}
        return core_results(score_core(self.bundle, model, tokenizer, **limits, **where), findings)
