"""CORE: prompts, continuations compared, scores and their table.

Letters: B rows, T positions, N scored targets, V vocabulary.
"""

import inspect
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
import torch

from pipeline.evals.bpb import TARGETS_AT_ONCE, Watched, evaluating
from pipeline.evals.core_bundle import TASKS, Bundle, CoreTask, open_bundle, why_partial
from pipeline.evals.intervals import bootstrap_means, interval, share_interval
from pipeline.evals.tasks import gathered_over_ranks
from pipeline.generation.texts import cache_argument, cache_of
from pipeline.metrics import Protocol, Results
from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import DataError
from pipeline.recipe.schema import Core
from pipeline.tokenizer.coverage import coverage
from pipeline.tokenizer.encode import document_start, encode_documents

LongPrompts = Literal["crop", "fewer_shots"]
SHUFFLE_SEED, SHOTS_SEED = 1337, 1234  # of the items' order and, plus an item's place in it, of its examples
ITEMS_AT_ONCE = 1024
Span = tuple[np.ndarray, int]  # ids (T,), and where those that are scored begin: at 1 or later


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
    drawn = random.Random(SHOTS_SEED + index).sample(range(num_items - 1), k)
    return [place if place < index else place + 1 for place in drawn]


def prompts_of(task: CoreTask, item: dict, shots: list[dict]) -> list[str]:
    """Return the texts of an item's rows; of language modelling the prompt alone, then the prompt with its
    continuation."""
    before = "".join(_example(task, shot) for shot in shots)
    if task.kind == "multiple_choice":
        question = f"{before}{item['query']}{task.delimiter}"
        return [question + choice for choice in item["choices"]]
    if task.kind == "schema":
        answer = f"{task.delimiter}{item['continuation']}"
        return [before + context + answer for context in item["context_options"]]
    prompt = f"{before}{item['context'].strip()}{task.delimiter}"
    # A trailing blank would be a token of its own in the prompt, and part of the first word in the whole.
    return [prompt.strip(), prompt + item["continuation"]]


def _example(task: CoreTask, item: dict) -> str:
    """Return an item with its right answer, as it comes before the question."""
    if task.kind == "multiple_choice":
        question, answer = item["query"], item["choices"][item["gold"]]
    elif task.kind == "schema":
        question, answer = item["context_options"][item["gold"]], item["continuation"]
    else:
        question, answer = item["context"].strip(), item["continuation"]
    return f"{question}{task.delimiter}{answer}\n\n"


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


def rows_of(task: CoreTask, items: list[dict], tokens: Tokens) -> tuple[list[Row], int]:
    """Return the rows of all items, and how many items were too long for the model."""
    # 1. Each item with all of its examples.
    shots = dict.fromkeys(range(len(items)), min(task.shots, len(items) - 1))
    spans = _encoded(task, items, shots, tokens)
    long = [index for index, found in spans.items() if not _fit(found, tokens)]
    num_long = len(long)

    # 2. Those that are too long lose an example at a time, until they fit or have none.
    keep_bos = tokens.long_prompts == "fewer_shots"
    while keep_bos and long:
        fewer = {index: shots[index] - 1 for index in long if shots[index]}
        shots |= fewer
        spans |= _encoded(task, items, fewer, tokens)
        long = [index for index in fewer if not _fit(spans[index], tokens)]

    # 3. What is still too long is cut.
    rows: list[Row] = []
    for index, found in spans.items():
        for option, (ids, start) in enumerate(found):
            rows.append(Row(index, option, *_cropped(ids, start, tokens.positions, keep_bos=keep_bos)))
    return rows, num_long


def _encoded(task: CoreTask, items: list[dict], shots: dict[int, int], tokens: Tokens) -> dict[int, list[Span]]:
    """Return (ids, start) of each item's rows, with so many of its examples, the last ones."""
    found = {}
    indices = list(shots)
    for first in range(0, len(indices), ITEMS_AT_ONCE):
        some = indices[first : first + ITEMS_AT_ONCE]
        texts = []
        for index in some:
            drawn = shots_of(task, index, len(items))
            texts.append(prompts_of(task, items[index], [items[i] for i in drawn[len(drawn) - shots[index] :]]))
        encoded = iter(tokens.of(list(chain.from_iterable(texts))))  # all at once: the tokenizer has threads
        for index, group in zip(some, texts, strict=True):
            found[index] = _spans(task, list(islice(encoded, len(group))))
    return found


def _fit(spans: list[Span], tokens: Tokens) -> bool:
    return tokens.positions is None or max(len(ids) for ids, _ in spans) <= tokens.positions


def _spans(task: CoreTask, rows: list[np.ndarray]) -> list[Span]:
    """Return (ids, start) of the rows to score."""
    if task.kind == "schema":
        suffix = common_length([ids[::-1] for ids in rows])
        return [(ids, len(ids) - suffix) for ids in rows]
    start = common_length(rows)
    if task.kind == "language_modeling":  # whose two rows are one: the prompt is the beginning of the whole
        rows = rows[1:]
    return [(ids, start) for ids in rows]


def common_length(rows: list[np.ndarray]) -> int:
    """Return how many first tokens all rows share."""
    shortest = min(map(len, rows))
    differ = np.zeros(shortest, bool)
    for ids in rows[1:]:
        differ |= ids[:shortest] != rows[0][:shortest]
    return int(differ.argmax()) if differ.any() else shortest


def _cropped(ids: np.ndarray, start: int, positions: int | None, *, keep_bos: bool) -> Span:
    """Return the row's last tokens, so that at least one stands before what is scored."""
    cut = 0 if positions is None else max(len(ids) - positions, 0)
    kept = ids[cut:]
    if cut and keep_bos:
        kept = np.concatenate([ids[:1], kept[1:]])
    return kept, max(start - cut, 1)


# Positions of one forward pass; more is faster on a GPU, less stays in a CPU's caches.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
ROWS_OF_A_PREFIX = 16
CACHE_BYTES = 2**30  # of the keys and values of all rows of a batch


@dataclass
class Group:
    """Numbers of rows whose first `shared` tokens are equal and forwarded once; 0: a single row."""

    numbers: list[int]
    longest: int
    shared: int = 0


@dataclass(frozen=True)
class Scores:
    """Summed nats of each row's targets, and whether each target is the likeliest token."""

    nats: np.ndarray
    greedy: np.ndarray


def score_rows(
    model,
    rows: list[Span],
    *,
    device: torch.device | str,
    rank: int = 0,
    world_size: int = 1,
    batch_tokens: int | None = None,
    watched: Watched = iter,
) -> Scores:
    """Return scores of rows (ids (T,), start): targets ids[start:] given what comes before them; start is at least 1.

    Every rank calls this with all rows and takes its share of the batches; an error on one rank is raised on all of
    them. The model is left in the mode it was in. watched: wraps this rank's batches; it may raise
    EvaluationInterrupted.
    """
    device = torch.device(device)
    nats_R, misses_R = np.zeros(len(rows)), np.zeros(len(rows))
    error = None
    try:
        with evaluating(model):
            # Rows that begin alike are forwarded once up to there, as far as their cache has room.
            position_bytes = _bytes_of_a_position(model)
            batches = batches_of(
                groups_of(rows, share=position_bytes > 0),
                batch_tokens=batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"]),
                cached_tokens=CACHE_BYTES // max(position_bytes, 1),
            )
            for batch in watched(batches[rank::world_size]):
                beat()
                _score_batch(model, rows, batch, device, nats_R, misses_R)
    except Exception as problem:  # raised below, on every rank
        error = problem
    # A row is scored on one rank: the others have zeros there.
    of_ranks = gathered_over_ranks((nats_R, misses_R), world_size=world_size, error=error)
    return Scores(nats=sum(nats for nats, _ in of_ranks), greedy=sum(misses for _, misses in of_ranks) == 0)


def groups_of(rows: list[Span], *, share: bool = True) -> list[Group]:
    """Return the rows as groups that share at least half of their tokens (without `share` one row each)."""
    groups: list[Group] = []
    # In the order of their ids, rows that begin alike are neighbours.
    for number in sorted(range(len(rows)), key=lambda n: rows[n][0].astype(">u4").tobytes(), reverse=True):
        length = len(rows[number][0])
        shared = _shared_with(groups[-1], number, rows) if share and groups else 0
        if not shared:
            groups.append(Group([number], length))
            continue
        last = groups[-1]
        last.numbers.append(number)
        last.shared = shared
        last.longest = max(last.longest, length)
    return groups


def _shared_with(group: Group, number: int, rows: list[Span]) -> int:
    """Return the tokens that the group would share with this row in it; 0 when it should not go in."""
    if len(group.numbers) == ROWS_OF_A_PREFIX:
        return 0
    (before, before_start), (ids, start) = rows[group.numbers[-1]], rows[number]
    # One token less than all before the first target: the logits of a target are those of the position before it.
    shared = min(common_length([before, ids]), before_start - 1, start - 1)
    if len(group.numbers) > 1:
        shared = min(shared, group.shared)
    kept, saved = group.shared * (len(group.numbers) - 1), shared * len(group.numbers)
    return shared if saved > kept and 2 * shared >= len(ids) else 0


def batches_of(groups: list[Group], *, batch_tokens: int, cached_tokens: int) -> list[list[Group]]:
    """Return groups of about equal length and shared prefix, the longest first.

    batch_tokens: most positions of one pass. cached_tokens: most positions whose keys and values are kept.
    """
    batches: list[list[Group]] = []
    for group in sorted(groups, key=lambda g: (g.shared, g.longest), reverse=True):
        # With the group in it: prefixes take (groups x shared) positions, then the rows theirs behind the prefix.
        batch = [*batches[-1], group] if batches else [group]
        num_rows = sum(len(one.numbers) for one in batch)
        longest, kept = max(one.longest for one in batch), group.shared
        fits = max(len(batch) * kept, num_rows * (longest - kept)) <= batch_tokens
        fits &= not kept or num_rows * longest <= cached_tokens
        if batches and fits and 2 * kept >= batch[0].shared and 2 * group.longest >= longest:
            batches[-1].append(group)
        else:
            batches.append([group])
    return batches


def _score_batch(model, rows: list[Span], batch: list[Group], device: torch.device, nats_R, misses_R) -> None:
    """Add the nats and misses of the batch's targets to those of their rows."""
    numbers: list[int] = []
    groups_B: list[int] = []
    for place, group in enumerate(batch):
        numbers += group.numbers
        groups_B += [place] * len(group.numbers)

    # 1. The prefixes, one row a group: as much as all groups can keep. The rest of a longer one goes with its rows.
    kept = min(group.shared for group in batch)
    cache = None
    if kept:
        prefixes = np.stack([rows[group.numbers[0]][0][:kept] for group in batch])
        prefix_BT = torch.from_numpy(prefixes).to(device)
        cache = cache_of(forward_at(model, prefix_BT, torch.tensor([kept - 1], device=device), use_cache=True))
        # reorder_cache, not batch_select_indices: the latter forgets the states of layers that keep more than keys.
        cache.reorder_cache(torch.tensor(groups_B, device=device))

    # 2. The rows behind their prefixes: each target's logits are at the position before it.
    width = max(group.longest for group in batch) - kept
    ids_BT = np.zeros((len(numbers), width), np.int64)
    places: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for place, number in enumerate(numbers):
        ids, start = rows[number]
        ids_BT[place, : len(ids) - kept] = ids[kept:]
        places += [place] * (len(ids) - start)
        positions += range(start - 1 - kept, len(ids) - 1 - kept)
        targets += ids[start:].tolist()
    row_N, target_N = torch.tensor(places, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    wanted, position_N = torch.tensor(positions, dtype=torch.int64).unique(return_inverse=True)
    output = forward_at(
        model, torch.from_numpy(ids_BT).to(device), wanted.to(device), cache=cache, use_cache=cache is not None
    )

    # 3. Nats and misses, of some targets at a time, added to their rows.
    owner_N = torch.tensor(numbers)[row_N].numpy()
    for some in torch.arange(len(owner_N)).split(TARGETS_AT_ONCE):
        logits_NV = output.logits[row_N[some].to(device), position_N[some].to(device)].float()
        target = target_N[some].to(device)
        nats_N = torch.nn.functional.cross_entropy(logits_NV, target, reduction="none")
        np.add.at(nats_R, owner_N[some.numpy()], nats_N.cpu().double().numpy())
        np.add.at(misses_R, owner_N[some.numpy()], (logits_NV.argmax(-1) != target).cpu().numpy())


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


RULE = 1  # raise it when the same items under the same window give other answers


@dataclass(frozen=True)
class TaskScore:
    """correct: (n,) bool of the items scored, in the order of in_order.

    shortened: items whose prompt was longer than the model takes.
    """

    task: CoreTask
    correct: np.ndarray
    shortened: int

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())

    def interval(self) -> tuple[float, float]:
        """Return the accuracy's 95 % interval."""
        return share_interval(int(self.correct.sum()), len(self.correct))


@dataclass(frozen=True)
class CoreScore:
    """tasks: those scored; missing: name -> why not."""

    tasks: list[TaskScore]
    missing: dict[str, str]
    bundle: Bundle
    protocol: Protocol
    seconds: float

    @property
    def whole(self) -> bool:
        """Return whether the mean may be called CORE: every task, every file the published one."""
        return not self.missing and all(self.bundle.published(score.task) for score in self.tasks)

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
    long_prompts: LongPrompts = "fewer_shots",
    rank: int = 0,
    world_size: int = 1,
    watched: Watched = iter,
    report: Callable[[TaskScore], None] | None = None,
) -> CoreScore:
    """Score the bundle's tasks; every rank calls it and gets the same.

    max_per_task: the first so many items of each task. report: called with each task's score as soon as it is there.
    Raises DataError for a tokenizer without BOS and EOS and for a model whose loss is no number.
    """
    # 1. What a prompt begins with, and how long it may be.
    started = time.monotonic()
    bos = document_start(tokenizer)
    if bos is None:
        raise DataError(
            "the tokenizer has neither a BOS nor an EOS token, so a prompt has nothing to begin with. Set bos_token "
            "in its tokenizer_config.json."
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = Tokens(tokenizer, bos, positions, long_prompts)
    # 2. Each task's items as rows, scored by all ranks together.
    scores = []
    texts: list[str] = []
    for task in TASKS:
        if task.name in bundle.missing:
            continue
        of_task = in_order(bundle.items[task.file], max_per_task)
        texts += chain.from_iterable(map(_texts, of_task))
        rows, shortened = rows_of(task, of_task, tokens)
        given = [(row.ids, row.start) for row in rows]
        found = score_rows(model, given, device=device, rank=rank, world_size=world_size, watched=watched)
        if np.isnan(found.nats).any():
            error = DataError(
                "the model's loss is no number, so nothing was scored: its weights or its precision are broken. Score "
                "an earlier checkpoint."
            )
            error.of_all_ranks = True
            raise error
        scores.append(TaskScore(task, _correct(task, of_task, rows, found), shortened))
        if report is not None:
            report(scores[-1])
    # 3. What the figures are of. A window changes them only where a prompt was longer.
    was_long = any(score.shortened for score in scores)
    protocol = core_protocol(
        bundle,
        max_per_task=max_per_task,
        long_prompts=long_prompts,
        window=positions if was_long else None,
        coverage=coverage(tokenizer, texts),
    )
    seconds = time.monotonic() - started
    return CoreScore(tasks=scores, missing=dict(bundle.missing), bundle=bundle, protocol=protocol, seconds=seconds)


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
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                yield text


def _correct(task: CoreTask, items: list[dict], rows: list[Row], scores: Scores) -> np.ndarray:
    """Return whether each item was answered rightly: all its tokens the likeliest, or the right option the one of
    least loss per token."""
    if task.kind == "language_modeling":
        return scores.greedy  # one row an item
    # Nats per token of each option; the lowest is the model's answer.
    losses: list[list[float]] = [[] for _ in items]
    for row, nats in zip(rows, scores.nats.tolist(), strict=True):
        targets = len(row.ids) - row.start
        # Nothing is scored of an option that is the beginning of all others: no number, as nanochat has it.
        losses[row.item].append(nats / targets if targets else math.nan)
    correct = []
    for found, item in zip(losses, items, strict=True):
        correct.append(found.index(min(found)) == item["gold"])
    return np.array(correct)


VERSIONS = ("v1", "v2")


def core_results(score: CoreScore, findings: dict[str, Any] | None = None) -> Results:
    """Return rows for evals.json: one for each version of the mean, then one for each task.

    findings: of the training text of the run that is scored; rows then have the contaminated items too.
    """
    rows = []
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
                "shots": task.shots,
                "shortened": found.shortened,
                "sha256": score.bundle.sha256[task.file],
                "published": score.bundle.published(task),
            }
        )
    if findings:
        from pipeline.contrib.contaminated_items import add_clean_scores, texts_of_bundle

        correct = {f"core/{scored.task.name}": scored.correct.tolist() for scored in score.tasks}
        add_clean_scores(
            rows, findings, texts_of_bundle(score.bundle), correct, in_order=lambda flags: in_order(flags, None)
        )
    return rows


def task_line(scored: TaskScore) -> str:
    low, high = scored.interval()
    centred = "  ".join(f"{scored.task.centred(scored.accuracy, version):>8.4f}" for version in VERSIONS)
    line = (
        f"{scored.task.name:<34} {scored.task.shots:>5} {len(scored.correct):>7,} {scored.accuracy:>9.4f}  "
        f"{low:.3f}-{high:.3f}  {centred}"
    )
    if scored.shortened:
        line += f"  {scored.shortened:,} prompts shortened"
    return line


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
        published = {scored.task.name: score.bundle.published(scored.task) for scored in score.tasks}
        lines.append(f"This is not CORE: {'; '.join(why_partial(score.missing, published))}.")
    lines.append(f"bundle {score.bundle.id}, protocol {score.protocol.id} ({score.protocol}); {score.seconds:.1f} s")
    return lines


class CoreBenchmark:
    """CORE at the cadence of evals.core. cache: data.cache_dir."""

    name, generates, at_start = "core", False, False

    def __init__(self, settings: Core, *, cache: str | None):
        self.settings, self.every_steps = settings, settings.every_steps
        self.bundle = open_bundle(settings.bundle, cache=cache)

    def require_ready(self, tokenizer: Any) -> None:
        """Do nothing: every run's tokenizer will do."""

    def watched_texts(self) -> dict[str, list[str]]:
        """Return the texts of all items, by metric, that the training text is searched for."""
        from pipeline.contrib.contaminated_items import texts_of_bundle

        return texts_of_bundle(self.bundle)

    def score(self, model: Any, tokenizer: Any, *, findings: dict[str, Any] | None = None, **where: Any) -> Results:
        """Return rows for evals.json; their values are the same on every rank.

        findings: of the run's training text, on the rank that writes. where: device, rank ... as score_core takes them.
        """
        settings = self.settings
        score = score_core(
            self.bundle,
            model,
            tokenizer,
            max_per_task=settings.max_per_task,
            long_prompts=settings.long_prompts,
            **where,
        )
        return core_results(score, findings)
