"""Sealed shards and the order of their rows: shards of a source, a mixture of sources, the position in it, and what
packing left out."""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.process.commands import program
from pipeline.process.errors import DamagedFileError, DataError
from pipeline.process.network import read_again
from pipeline.process.storage import read_sealed_json, sha256_file


def documents_begun(input_ids: np.ndarray, used: np.ndarray, starts: np.ndarray | None, *, bos: int) -> np.ndarray:
    """(n,) how many conversations (starts, (n, T + 1) bool) or pieces of text (each begins with BOS) begin in each
    row.

    A document that packing cut in two or more counts with every piece. A row's last token is the next row's first
    under `concat`, so what begins there begins in the next row.
    """
    begins = input_ids == bos if starts is None else starts
    row, at = np.divmod(np.flatnonzero(begins), begins.shape[1])
    counts = at < np.minimum(used[row], begins.shape[1] - 1)  # padding may have the id of BOS, or a start
    return np.bincount(row[counts], minlength=len(begins))


# A sealed shard: a safetensors file of rows, and a JSON seal that is written last.
#
# <folder>/shard-00000.safetensors   input_ids (rows, T+1) uint16|uint32, origins (rows, 3) int32 = pq, rg, row;
# used (rows,) int32 positions before the padding, targets (rows,) int32 trained ones; conversations also trained and
# starts, (rows, ceil((T+1)/8)) uint8 of bits; validation under a tokenizer without fixed bytes also target_bytes
# (rows, T+1) int32 <folder>/shard-00000.json          the seal: counts, bytes, sha256, bad rows; a shard without it
# does not exist <folder>/state-00000.safetensors   the packer where preparation goes on after this shard (the newest
# and every 16th are kept) <folder>/end.json                  the source is used up: rows and shards in all

NO_TEXT = -1  # the bytes of a control token, in rows that carry the bytes of their tokens
FORMAT = 1  # part of every key: raise it when the same inputs give other bytes


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def seal_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


def seen_path(folder: Path, number: int, watchlist_id: str) -> Path:
    """Return where the matches of a watch-list (data/decontamination.py) in a shard's text lie, once it was
    searched."""
    return folder / f"seen-{number:05d}-{watchlist_id}.safetensors"


def end_path(folder: Path) -> Path:
    return folder / "end.json"


def state_path(folder: Path, number: int) -> Path:
    return folder / f"state-{number:05d}.safetensors"


# What every seal holds, those of earlier versions too, which have no checksum of their own.
COUNTS = ("rows", "positions", "targets", "padded", "bytes")


SEAL = {**dict.fromkeys(COUNTS, int), "sha256": str, "bad_rows": list, "cursor": dict, "read": dict}
END = {"shards": int, "bad_rows": list, "read": dict}


def read_seal(folder: Path, number: int) -> dict[str, Any]:
    """Return the seal of a shard. Raises DamagedFileError when it is not as it was written, FileNotFoundError without
    one."""
    return _read(seal_path(folder, number), SEAL, "seal of a shard")


def read_end(folder: Path) -> dict[str, Any]:
    """Return end.json. Raises what read_seal does."""
    return _read(end_path(folder), END, "end of shards")


def _read(path: Path, kinds: dict[str, type], what: str) -> dict[str, Any]:
    found = read_sealed_json(path)
    if any(type(found.get(name)) is not kind for name, kind in kinds.items()):
        raise DamagedFileError(f"{path}: is no {what}. Run the same command again: it is made anew.")
    return found


def damaged_seals(folder: Path) -> list[Path]:
    """Return the seals and the end of a folder that are not as they were written."""
    damaged = []
    for path in [*sorted(folder.glob("shard-*.json")), end_path(folder)]:
        try:
            _read(path, END if path == end_path(folder) else SEAL, "seal")
        except FileNotFoundError:
            continue
        except DamagedFileError:
            damaged.append(path)
    return damaged


@dataclass
class Shard:
    """Memory-mapped tensors of a sealed shard; reading a row is a copy out of the page cache."""

    input_ids: np.ndarray
    origins: np.ndarray
    used: np.ndarray
    targets: np.ndarray
    trained: np.ndarray | None = None
    starts: np.ndarray | None = None
    target_bytes: np.ndarray | None = None


# Of safetensors, in the order in which its files hold them, last first.
NUMPY_TYPES = {"U8": "u1", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}


def is_damaged(folder: Path, number: int, *, verify: bool) -> bool:
    """Return whether a sealed shard's file is missing or of another size than its seal says; with verify, of other
    content."""
    path, seal = shard_path(folder, number), read_seal(folder, number)
    if not path.exists() or path.stat().st_size != seal["bytes"]:
        return True
    return verify and sha256_file(path) != seal["sha256"]


def open_shard(folder: Path, number: int) -> Shard:
    """Return the shard, its content checked against its seal. Raises DataError when they differ."""
    path = shard_path(folder, number)
    if read_again(lambda: is_damaged(folder, number, verify=True), path=path):
        raise DataError(
            f"{path}: this prepared shard is missing or differs from its seal, so the rows in it are not those that "
            f"were prepared. Run `{program('data')} RECIPE`, which makes it again, then this command again."
        )
    return Shard(**map_tensors(path))


def map_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a safetensors file as a read-only memory map."""
    return tensors_in(np.memmap(path, dtype=np.uint8, mode="r"))


def tensors_in(whole: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors in the bytes of a safetensors file, on the same memory."""
    size = int.from_bytes(whole[:8].tobytes(), "little")
    header = json.loads(whole[8 : 8 + size].tobytes())
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in about["data_offsets"])
            # A plain ndarray on the same memory: indexing a np.memmap costs microseconds a row.
            tensors[name] = np.asarray(whole[begin:end]).view(NUMPY_TYPES[about["dtype"]]).reshape(about["shape"])
    return tensors


# A source's sealed shards as readers see them: they only ever grow at the end, until the source is used up.

OPEN_SHARDS = 8  # kept mapped; the rows of a step lie in one or two shards of a source


class Sequence:
    """Shards of one cache key. `rows` counts what is sealed so far, `end` is None until all there is is sealed.

    sums: for each n up to the number of seals, targets, padding and documents of the first n shards; without documents
    where not counts_documents, as of shards sealed by an earlier version.
    """

    def __init__(self, folder: str | Path, *, shard_rows: int):
        self.folder, self.shard_rows = Path(folder), shard_rows
        self.seals: list[dict] = []
        self.rows = 0
        self.sums = [np.zeros(3, np.int64)]
        self.counts_documents = True
        self.end: dict | None = None
        self._open: dict[int, Shard] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Look for new seals; whether there were any."""
        before = len(self.seals), self.end
        if self.end is not None:
            return False
        # The end first: shards sealed between the two looks are then counted, never missed.
        end = read_end(self.folder) if end_path(self.folder).exists() else None
        while seal_path(self.folder, len(self.seals)).exists():
            seal = read_seal(self.folder, len(self.seals))
            self.seals.append(seal)
            self.rows += seal["rows"]
            self.sums.append(self.sums[-1] + [seal["targets"], seal["padded"], seal.get("documents", 0)])
            self.counts_documents &= "documents" in seal
        # A seal that is missing before the end is to be made again: without it rows would be left out in silence.
        self.end = end if end and len(self.seals) >= end["shards"] else None
        return before != (len(self.seals), self.end)

    def shard(self, number: int) -> Shard:
        """Return the shard, verified against its seal when it is opened."""
        if number not in self._open:
            while len(self._open) >= OPEN_SHARDS:
                del self._open[next(iter(self._open))]
            self._open[number] = open_shard(self.folder, number)
        return self._open[number]

    def bad_rows(self, shards: int) -> list[str]:
        """Return the unreadable rows named in the first `shards` seals."""
        seals = [*self.seals[:shards], *([self.end] if self.end and shards >= len(self.seals) else [])]
        return [line for seal in seals for line in seal["bad_rows"]]

    def totals(self, shards: int | None = None) -> dict[str, Any]:
        """Sums over the first `shards` seals (all sealed): shards rows positions targets padded bytes bad_rows, and
        what was read of the source by then: documents text_tokens text_bytes cropped_tokens split_documents ..."""
        seals = self.seals[:shards]
        sums = {
            name: sum(seal[name] for seal in seals) for name in ("rows", "positions", "targets", "padded", "bytes")
        }
        last = self.end if self.end and len(seals) == len(self.seals) else (seals or [{"read": {}}])[-1]
        return {"shards": len(seals), **sums, "bad_rows": len(self.bad_rows(len(seals))), **last["read"]}


# Which row of which source is global row i: arithmetic alone, so a resume is a seek and every rank agrees.

PATTERN_SLOTS = 4096  # shares are exact to 1/8192 of the rows
LARGEST_PATTERN = 1 << 20


@dataclass(frozen=True)
class Part:
    """A source's place in a mixture: a weight or a number of epochs."""

    weight: float | None = 1.0
    epochs: float | None = None
    at_end: str = "repeat"


def apportion(weights: list[float], slots: int) -> list[int]:
    """Whole slots by weight that sum to `slots`: largest remainder, the first of equals."""
    total = sum(weights)
    exact = [weight * slots / total for weight in weights]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(weights)), key=lambda s: (counts[s] - exact[s], s))
    for s in by_remainder[: slots - sum(counts)]:
        counts[s] += 1
    return counts


def spread(counts: list[int]) -> np.ndarray:
    """(sum of counts,) source of each slot: the j-th of n slots of a source lies nearest (j + 1/2) / n of the way."""
    sources = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    times = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n] or [np.zeros(0)])
    return sources[np.argsort(times, kind="stable")]


class Segment:
    """Global rows from `start` on, by one pattern; bases: rows that each source had given before."""

    def __init__(self, start: int, bases: list[int], counts: list[int]):
        self.start, self.bases, self.counts = start, np.array(bases, np.int64), np.array(counts, np.int64)
        self.order = spread(counts)
        self.slots = [np.flatnonzero(self.order == s) for s in range(len(counts))]
        self.rank = np.empty(len(self.order), np.int64)
        for slots in self.slots:
            self.rank[slots] = np.arange(len(slots))

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) sources and (n,) their row numbers k (which run on over epochs)."""
        block, slot = np.divmod(rows - self.start, len(self.order))
        sources = self.order[slot]
        return sources, self.bases[sources] + block * self.counts[sources] + self.rank[slot]

    def used(self, row: int) -> list[int]:
        """Return rows of each source among the global rows before `row`."""
        block, slot = divmod(row - self.start, len(self.order))
        return [
            int(base + block * count + np.searchsorted(slots, slot))
            for base, count, slots in zip(self.bases, self.counts, self.slots, strict=True)
        ]

    def first_use(self, source: int, k: int) -> int | None:
        """Return the global row at which a source's row k stands; None when the source has no slot."""
        if not self.counts[source]:
            return None
        block, rank = divmod(max(0, k - int(self.bases[source])), int(self.counts[source]))
        return self.start + block * len(self.order) + int(self.slots[source][rank])


class Mixture:
    """The order of the rows of a run, as far as it is known.

    total_rows: length of the run, None when `epochs` (of all sources) sets it. `learn` takes in which sources are
    fully prepared; until `ready`, nothing is known, because some source's length decides the order or the end.
    """

    def __init__(self, parts: list[Part], *, total_rows: int | None = None, epochs: float | None = None):
        assert (total_rows is None) != (epochs is None)
        self.parts, self.horizon, self.epochs = parts, total_rows, epochs
        self.ends: list[int | None] = [None] * len(parts)
        self.segments: list[Segment] = []
        self.total_rows: int | None = None
        self._build()

    def must_be_counted(self, source: int) -> bool:
        """Return whether the source must be prepared to its end before the first row is known."""
        return self.epochs is not None or self.parts[source].epochs is not None

    @property
    def ready(self) -> bool:
        return self.total_rows is not None

    def learn(self, ends: list[int | None]) -> None:
        """ends: rows of each source that is fully prepared, else None."""
        if ends != self.ends:
            self.ends = list(ends)
            self._build()

    def _build(self) -> None:
        self.segments, self.total_rows = [], None
        if any(self.must_be_counted(s) and end is None for s, end in enumerate(self.ends)):
            return
        fixed = [None if p.epochs is None else round(p.epochs * (self.ends[s] or 0)) for s, p in enumerate(self.parts)]
        if self.horizon is not None:
            total = self.horizon
        else:
            assert self.epochs is not None
            rows = [self.ends[s] or 0 if n is None else n for s, n in enumerate(fixed)]
            total = round(self.epochs * sum(rows))
            fixed = [None if n is None else round(self.epochs * n) for n in fixed]
        alive = [s for s in range(len(self.parts)) if self.ends[s] != 0]
        segment = self._segment(0, [0] * len(self.parts), fixed, alive, total)
        while segment is not None:
            self.segments.append(segment)
            cut, gone = total, None
            for s in alive:
                end, part = self.ends[s], self.parts[s]
                if part.epochs is None and end is not None and part.at_end != "repeat":
                    at = segment.first_use(s, end)
                    if at is not None and at < cut:
                        cut, gone = at, s
            if gone is None or self.parts[gone].at_end == "stop":
                total = cut
                break
            alive = [s for s in alive if s != gone]
            bases = segment.used(cut)
            segment = self._segment(cut, bases, fixed, alive, total)
            if segment is None:
                total = cut
        self.total_rows = total if self.segments else 0

    def _segment(
        self, start: int, bases: list[int], fixed: list[int | None], alive: list[int], total: int
    ) -> Segment | None:
        """Return the pattern from `start` on; None when no source is left to fill it."""
        weights = [
            (self.parts[s].weight or 0.0) if s in alive and fixed[s] is None else 0.0 for s in range(len(fixed))
        ]
        if not any(n is not None for n in fixed):
            if not any(weights):
                return None
            slots = 1 if sum(w > 0 for w in weights) == 1 else PATTERN_SLOTS
            counts = apportion(weights, slots)
            while any(w > 0 and not n for w, n in zip(weights, counts, strict=True)) and slots < LARGEST_PATTERN:
                slots *= 2
                counts = apportion(weights, slots)
            return Segment(start, bases, counts)
        counts = [0 if n is None else n - base for n, base in zip(fixed, bases, strict=True)]
        room = total - start - sum(counts)
        if any(weights) and room > 0:
            shares = apportion(weights, room)
            counts = [a + b for a, b in zip(counts, shares, strict=True)]
        return Segment(start, bases, counts) if sum(counts) else None

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(count,) sources and (count,) row numbers k of the global rows first ... first + count - 1."""
        rows = np.arange(first, first + count, dtype=np.int64)
        sources, ks = np.empty(count, np.int64), np.empty(count, np.int64)
        starts = [segment.start for segment in self.segments] + [first + count]
        for segment, end in zip(self.segments, starts[1:], strict=True):
            here = (rows >= segment.start) & (rows < end)
            if here.any():
                sources[here], ks[here] = segment.locate(rows[here])
        return sources, ks

    def used(self, row: int) -> list[int]:
        """Return rows of each source among the global rows before `row`."""
        if not self.segments:  # No source has a row.
            return [0] * len(self.parts)
        return next(s for s in reversed(self.segments) if s.start <= row).used(row)

    def first_use(self, source: int, k: int) -> int | None:
        """Return the global row at which row k of a source is first needed; None when that lies after the run."""
        if self.total_rows is None:
            return None
        for segment, end in zip(self.segments, [s.start for s in self.segments[1:]] + [self.total_rows], strict=True):
            at = segment.first_use(source, k)
            if at is not None and at < end:
                return at
        return None


# Sealed shards of several sources and the mixture of their rows: what is there, what is missing next, what row is
# where.


@dataclass(frozen=True)
class RowPlace:
    """Where a global row lies."""

    source: int
    k: int  # running row number of the source, over epochs
    epoch: int
    shard: int
    row: int  # in the shard


class Stream:
    """One order of rows over several sequences. keys: each sequence's cache key; seed None: rows stay as they were
    packed."""

    def __init__(self, sequences: list[Sequence], mixture: Mixture, *, keys: list[str], seed: int | None):
        self.sequences, self.mixture, self.keys, self.seed = sequences, mixture, keys, seed
        self.refresh()

    def refresh(self) -> None:
        for sequence in self.sequences:
            sequence.refresh()
        self.mixture.learn([s.rows if s.end is not None else None for s in self.sequences])

    def undecided(self) -> int | None:
        """Return a source of which more must be sealed before the run's order or length is known."""
        open_ones = [s for s, sequence in enumerate(self.sequences) if sequence.end is None]
        counted = [s for s in open_ones if self.mixture.must_be_counted(s)]
        stopping = (
            s for s in open_ones if self.mixture.parts[s].at_end == "stop" and self._first_unsealed_use(s) is not None
        )
        return counted[0] if counted else next(stopping, None)

    def _first_unsealed_use(self, source: int) -> int | None:
        """Return the first global row of the run that is not sealed yet because of this source."""
        sequence = self.sequences[source]
        return None if sequence.end is not None else self.mixture.first_use(source, sequence.rows)

    def missing(self, rows: int | None = None) -> int | None:
        """Return the source whose next shard is needed first, for the first `rows` global rows (None: the whole run);
        None when all of it is sealed. What decides the order or the length comes before everything."""
        if rows is None or not self.mixture.ready:
            source = self.undecided()
            if source is not None:
                return source
        uses = [(at, s) for s in range(len(self.sequences)) if (at := self._first_unsealed_use(s)) is not None]
        needed = [(at, s) for at, s in uses if rows is None or at < rows]
        return min(needed)[1] if needed else None

    def is_decided(self) -> bool:
        """Look for new seals, and return whether the run's order and length are known."""
        self.refresh()
        return self.undecided() is None

    def is_sealed(self, rows: int | None = None) -> bool:
        """Look for new seals, and return whether nothing is missing for so many rows."""
        self.refresh()
        return self.missing(rows) is None

    def shards_needed(self, source: int) -> int:
        """Shards of a source that the run reads, as far as they are sealed."""
        sequence = self.sequences[source]
        if self.mixture.total_rows is None:
            return len(sequence.seals)
        used = self.mixture.used(self.mixture.total_rows)[source]
        return min(len(sequence.seals), -(-used // sequence.shard_rows))

    def places(self, first: int, count: int) -> list[RowPlace]:
        """Return where the global rows first ... first + count - 1 lie; they must be sealed."""
        sources, ks = self.mixture.locate(first, count)
        return [self._place(int(s), int(k)) for s, k in zip(sources, ks, strict=True)]

    def _place(self, source: int, k: int) -> RowPlace:
        sequence = self.sequences[source]
        epoch, row = (0, k) if k < sequence.rows else divmod(k, sequence.rows)
        shard, row = divmod(row, sequence.shard_rows)
        if self.seed is not None:
            row = int(self.order(source, epoch, shard)[row])
        return RowPlace(source, k, epoch, shard, row)

    def order(self, source: int, epoch: int, shard: int) -> np.ndarray:
        """(rows,) in which the rows of a shard are read in an epoch; only where there is a seed."""
        rows, start = self.sequences[source].seals[shard]["rows"], int(self.keys[source][:16], 16)
        return permutation(rows, self.seed or 0, start, epoch, shard)

    def shard(self, place: RowPlace) -> Shard:
        return self.sequences[place.source].shard(place.shard)


@lru_cache(maxsize=192)  # orders of a process: 64 for each of its three streams
def permutation(n: int, *numbers: int) -> np.ndarray:
    """(n,) permutation of 0 ... n-1 that is a pure function of the numbers, on every version of every library.

    numpy does not promise its generators' streams, so the sort keys are SplitMix64's, spelt out.
    """
    mask = (1 << 64) - 1

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = 0
    for number in numbers:
        state = mixed((state + number + 0x9E3779B97F4A7C15) & mask)
    with np.errstate(over="ignore"):
        x = np.uint64(state) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.argsort(x, kind="stable")


# What packing pads, crops, cuts or leaves out of each source: shares of what the seals count up to a shard, which is
# all that was read by then.

HELD = 0.99  # Of the conversations, by the row length that is advised.
SAMPLE_FILE = "sampled_lengths.json"  # In a sequence's folder.
# By the kind of rows, what may be lost, as its count and what that is a share of.
LOST = {
    "text": {"cropped": ("cropped_tokens", "text_tokens"), "split": ("split_documents", "documents")},
    "chat": {name: (name.replace(" ", "_"), "conversations") for name in ("cut", "too long", "no target")},
}


def shares_lost(totals: dict[str, Any], *, kind: str) -> dict[str, float]:
    """Shares by name from the sums of a sequence's shards (sequence.totals); without what nothing was read of.

    padded: of the positions. Those of LOST. empty, bad: of the rows of the files.
    """
    # Which hold the padding
    shares = {"padded": totals["padded"] / totals["positions"]} if totals["positions"] else {}
    for name, (part, whole) in LOST[kind].items():
        if totals.get(whole):
            shares[name] = totals.get(part, 0) / totals[whole]
    if seen := rows_seen(totals):
        shares |= {name: totals.get(f"{name}_rows", 0) / seen for name in ("empty", "bad")}
    return shares


def rows_seen(totals: dict[str, Any]) -> int:
    """Return rows of the files that were read, empty and unreadable ones included."""
    items = totals.get("conversations", totals.get("documents", 0))
    return items + totals.get("empty_rows", 0) + totals.get("bad_rows", 0)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Counts of how the conversations of a source fit its rows.

    read: those looked at. too_long: left out, cut: without their last turns, no_target: left out since no assistant
    speaks. tokens_lost: share of the tokens that went with the too long and the cut ones. longer: of `of`
    conversations, those too long or cut by the row length that holds them (count_conversation). Both None where no
    length is known. sampled: of how many conversations these two are, where not of those read. characters: of a
    sample, those to be learnt and those that are not trained (missing_text). untrained: the share of these.
    """

    read: int
    too_long: int
    cut: int
    no_target: int
    row_tokens: int
    tokens_lost: float | None = None
    longer: dict[int, int] | None = None
    of: int = 0
    sampled: int | None = None
    characters: dict[str, int] | None = None
    untrained: float | None = None

    @classmethod
    def counted(cls, counts: dict[str, Any], *, row_tokens: int, sample: dict[str, Any] | None = None) -> "Fit":
        """From the counts of what was read; the lengths are the sample's where the counts have none."""
        lengths = counts if "longer" in counts else sample
        known: dict[str, Any] = {name: (sample or counts).get(name) for name in ("characters", "untrained")}
        if lengths is not None:
            gone = lengths["too_long_tokens"] + lengths["cut_tokens"]
            known["tokens_lost"] = gone / max(1, lengths["text_tokens"] + gone)
            known["longer"] = {int(row): n for row, n in lengths["longer"].items()}
            known["of"] = lengths["conversations"] - lengths["no_target"]
            known["sampled"] = lengths["conversations"] if lengths is sample else None
        outcomes = {name: counts[name] for name in ("too_long", "cut", "no_target")}
        return cls(read=counts["conversations"], row_tokens=row_tokens, **outcomes, **known)

    def row_tokens_for(self, share: float = HELD) -> int | None:
        """Return the shortest rows that hold this share of the conversations whole; None where that is not known."""
        if self.longer is None or not self.of:
            return None
        beyond = 0
        for row in sorted(self.longer, reverse=True):
            beyond += self.longer[row]
            if beyond > (1 - share) * self.of:
                return row
        return self.row_tokens

    def share_beyond(self, row_tokens: int) -> float | None:
        """Return the share of the conversations that rows of this length would not hold whole."""
        if self.longer is None or not self.of:
            return None
        return sum(n for row, n in self.longer.items() if row > row_tokens) / self.of

    def facts(self) -> dict[str, Any]:
        """For the manifest; what is not known is left out."""
        facts = {
            name: getattr(self, name)
            for name in ("read", "too_long", "cut", "no_target", "tokens_lost", "sampled", "untrained")
        }
        facts["row_tokens_99"] = self.row_tokens_for()
        return {name: value for name, value in facts.items() if value is not None}


class Loss(NamedTuple):
    """Counts of what was read of a source, as sequence.totals gives them, and of how its conversations fit."""

    name: str
    counts: dict[str, Any]
    fit: Fit | None


def losses_of(plan: dict, role: str, stream: Stream) -> list[Loss]:
    """Return the losses of each source of a plan's stream, of what the run reads as far as it is sealed."""
    found = []
    for number, (about, sequence) in enumerate(zip(plan[role]["sequences"], stream.sequences, strict=True)):
        counts, fit = sequence.totals(stream.shards_needed(number)), None
        if plan["kind"] == "chat" and "conversations" in counts:
            sample = None
            with suppress(FileNotFoundError, DamagedFileError):  # a damaged one is taken again
                sample = read_sealed_json(sequence.folder / SAMPLE_FILE)
            fit = Fit.counted(counts, row_tokens=plan["row_tokens"], sample=sample)
        found.append(Loss(about["name"], counts, fit))
    return found


def epochs_of(about: dict, sequence: Sequence, rows: int) -> float | None:
    """Return how often a source is seen when so many of its rows are; None while its length is not known."""
    return rows * about.get("passes", 1) / sequence.rows if sequence.end is not None and sequence.rows else None
