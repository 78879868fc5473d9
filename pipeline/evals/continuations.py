"""The loss of given continuations under a causal LM, in batches: each prefix that rows share is forwarded once.

Exact to one row at a time up to the rounding of sums: rows are padded on the right only, where a causal model does not look,
so that no mask is needed and windows, positions and whatever else looks back see what they see in a row alone.

Letters: B rows, T positions, N scored targets, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pipeline.evals.together import summed_over_ranks
from pipeline.monitor.heartbeat import beat

# Positions of one forward pass; more is faster on a GPU, less stays in a CPU's caches.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
# What another forward pass costs beside its positions, told in positions.
PASS_TOKENS = 128
# Targets whose logits are turned to fp32 together, so that bf16 logits are never copied whole.
TARGETS_AT_ONCE = 2048
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
    """Of each row: summed nats of its targets, and whether each target is the likeliest token.

    forwarded: token positions that went through the model, padding included, over all ranks; given: tokens of all rows.
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
    """Scores of rows (ids (T,), start): targets ids[start:] given what stands before them; start is at least 1.

    Every rank calls this with all rows and takes its share of the batches; an error on one rank is raised on all of them.
    The model is left in the mode it was in. watched: what this rank's batches go through; it may raise LeftEarly.
    """
    device = torch.device(device)
    nats_R = torch.zeros(len(rows), dtype=torch.float64)
    misses_R = torch.zeros(len(rows), dtype=torch.float64)
    forwarded = 0
    error: Exception | None = None
    training = model.training
    model.eval()
    try:
        batches = _planned(model, rows, batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"]))
        for batch in watched(batches[rank::world_size]):
            beat()
            with torch.no_grad():
                forwarded += _score_batch(model, batch, device, nats_R, misses_R)
    except Exception as problem:  # told below, on every rank
        error = problem
    finally:
        model.train(training)
    counts = torch.tensor([forwarded], dtype=torch.float64)
    nats_R, misses_R, counts = summed_over_ranks(
        [nats_R, misses_R, counts], world_size=world_size, device=device, error=error
    )
    return Scores(
        nats=nats_R.numpy(),
        greedy=(misses_R == 0).numpy(),
        forwarded=int(counts[0]),
        given=sum(len(ids) for ids, _ in rows),
    )


def _planned(model, rows: list[tuple[np.ndarray, int]], batch_tokens: int) -> list[list[Group]]:
    cached = _bytes_of_a_position(model)
    return batches_of(
        groups_of(rows, share=cached > 0),
        batch_tokens=batch_tokens,
        cached_tokens=CACHE_BYTES / cached if cached else 0,
    )


def groups_of(rows: list[tuple[np.ndarray, int]], *, share: bool = True) -> list[Group]:
    """The rows as groups: a row that is another's beginning is scored within it, and rows that share at least half of
    their tokens go on from one prefix (not without share)."""
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
    """Tokens that the group would share with this sequence in it; 0 when it should not go in."""
    if len(group.sequences) == ROWS_OF_A_PREFIX:
        return 0
    last = group.sequences[-1]
    length = min(len(last.ids), len(sequence.ids))
    differ = last.ids[:length] != sequence.ids[:length]
    # One token less than all before the first target: the logits of a target are those of the position before it.
    shared = min(int(differ.argmax()) if differ.any() else length, last.start - 1, sequence.start - 1)
    if len(group.sequences) > 1:
        shared = min(shared, group.shared)
    kept, saved = group.shared * (len(group.sequences) - 1), shared * len(group.sequences)
    return shared if saved > kept and 2 * shared >= len(sequence.ids) else 0


def batches_of(groups: list[Group], *, batch_tokens: int, cached_tokens: float) -> list[list[Group]]:
    """Groups of about equal length together, as long as that wastes less than another forward pass costs; the dearest
    batches first, so that ranks end at about the same time. cached_tokens: of all rows that go on from kept prefixes."""
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
    """What a batch costs: its groups, its rows, what all groups can keep, and the longest row."""

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
        cache = _forward(model, prefix_BT, torch.tensor([kept - 1], device=device), use_cache=True).past_key_values
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
    output = _forward(
        model,
        torch.from_numpy(rows_BT).to(device),
        wanted,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    target_N, owner_N = torch.from_numpy(np.concatenate(targets)).to(device), torch.tensor(owners)
    for some in torch.arange(len(owner_N)).split(TARGETS_AT_ONCE):
        logits_NV = output.logits[row_N[some], position_N[some]].float()
        nats_N = torch.nn.functional.cross_entropy(logits_NV, target_N[some], reduction="none")
        nats_R.index_add_(0, owner_N[some], nats_N.cpu().double())
        misses_R.index_add_(0, owner_N[some], (logits_NV.argmax(-1) != target_N[some]).cpu().double())
    return rows_BT.size + kept * len(batch)


def _forward(
    model, input_ids_BT: torch.Tensor, wanted_N: torch.Tensor, *, past_key_values=None, use_cache=False
) -> Any:
    """The model's output with the logits of these positions alone: the head for all others is most of a small model."""
    known = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"use_cache": use_cache} if "use_cache" in known else {}
    if past_key_values is not None:
        inputs["past_key_values"] = past_key_values
    if "logits_to_keep" in known:
        return model(input_ids=input_ids_BT, logits_to_keep=wanted_N, **inputs)
    output = model(input_ids=input_ids_BT, **inputs)
    output.logits = output.logits[:, wanted_N]
    return output


def _bytes_of_a_position(model) -> int:
    """Memory of what the model keeps of one position; 0 when a prefix's states cannot be kept and dealt out to rows."""
    if not {"past_key_values", "use_cache"} <= set(inspect.signature(model.forward).parameters):
        return 0
    with torch.no_grad():
        output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True)
    cache: Any = getattr(output, "past_key_values", None)
    if not hasattr(cache, "reorder_cache"):
        return 0
    kept = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(states.numel() * states.element_size() for states in kept if torch.is_tensor(states))
