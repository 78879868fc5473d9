"""Decontamination: the evaluation items that occur in training text, found by their n-grams of words.

An item of 13 words or more is looked for by each run of 13 of its words, one of 8 to 12 words by all of them, whatever
stands between the words and in whichever case. A shorter one is not judged.
"""

import hashlib
import json
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from pipeline.data.mixture import mixed
from pipeline.data.row_plan import open_stream
from pipeline.data.shards import read_seal
from pipeline.process.errors import DataError
from pipeline.process.storage import write_bytes
from pipeline.tokenizer.train import text_of

CHUNK_CHARS = 500_000  # hashed together: long enough for numpy, short enough to stay near the processor
BETWEEN_TEXTS = 0xFF  # a byte that no UTF-8 text has; as a word between two texts it keeps n-grams from spanning both
DIVIDERS = (string.whitespace + string.punctuation).encode() + bytes(range(32)) + b"\x7f"
# By byte: 0 for a divider, the lower case of a letter of ASCII, any other byte itself.
FOLDED = bytes(range(256)).lower().translate(bytes.maketrans(DIVIDERS, bytes(len(DIVIDERS))))

# A polynomial modulo 2**64 with an odd base, which has an inverse: a run's hash is the difference of two prefix sums.
BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)

FILE = "watchlist-"
NGRAM_WORDS = 13
SHORTEST_WORDS = 8
LENGTHS = range(SHORTEST_WORDS, NGRAM_WORDS + 1)
# A run of words is a task's wording when more than so many of its items and more than this share of them have it. A
# passage that a hundred questions are asked about is none.
WORDING_ITEMS, WORDING_SHARE = 10, 0.1
BITS_PER_NUMBER = 64  # of a Bloom filter with one hash: at most 1.6 % of other numbers pass it


Texts = dict[str, list[str]]  # of the items of a task, question and right answer, by the task's name
Ngrams = tuple[np.ndarray, np.ndarray]  # hashes, and the text or item of each


class Words:
    """The words of some texts. hashes: (W,) uint64 of each; texts: (W,) number of its text, which the word that divides
    it from the text before counts as its first."""

    def __init__(self, texts: list[bytes]):
        # 1. The texts one behind the other, each after a word of its own that no text has; dividers are 0.
        joined = b" \xff ".join([b"", *texts, b""]).translate(FOLDED)
        self.folded = np.frombuffer(bytearray(joined), np.uint8)
        _divide_at_signs(self.folded)
        # 2. A word begins where a 0 is followed by another byte, and ends where a 0 follows.
        inside = self.folded != 0
        self.begins = np.flatnonzero(inside[1:] & ~inside[:-1]) + 1
        ends = np.flatnonzero(inside[:-1] & ~inside[1:]) + 1
        # 3. Its hash is that of its bytes, and the number of its text that of the dividing words up to it.
        self.hashes = RunHashes(OF_BYTES[self.folded]).of(self.begins, ends)
        self.is_divider = self.folded[self.begins] == BETWEEN_TEXTS
        self.texts = np.cumsum(self.is_divider) - 1

    @cached_property
    def runs(self) -> "RunHashes":
        return RunHashes(self.hashes)

    def ngrams(self, n: int) -> Ngrams:
        """Return (hashes, texts): the uint64 hash of each run of n words within a text, in order, and its text."""
        count = max(0, len(self.begins) - n + 1)
        is_within = (self.texts[:count] == self.texts[n - 1 :][:count]) & ~self.is_divider[:count]
        begins = np.flatnonzero(is_within)
        return self.runs.of(begins, begins + n), self.texts[begins]


def _divide_at_signs(folded: np.ndarray) -> None:
    """Set the bytes of dividing characters above ASCII to 0: E2 80 xx and C2 xx."""
    at = np.flatnonzero((folded == 0xE2) | (folded == 0xC2))
    general = at[(folded[at] == 0xE2) & (folded[at + 1] == 0x80)]
    for signs, width in ((general, 3), (at[folded[at] == 0xC2], 2)):
        for byte in range(width):
            folded[signs + byte] = 0


class RunHashes:
    """Hashes of runs of (N,) uint64 values, each the same wherever its run occurs."""

    def __init__(self, values: np.ndarray):
        powers = np.cumprod(np.full(len(values), BASE, np.uint64))
        self.inverses = np.cumprod(np.full(len(values), INVERSE, np.uint64))
        self.sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * powers)])

    def of(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the hash of values[begin:end] of each pair."""
        differences = (self.sums[ends] - self.sums[begins]) * self.inverses[begins]
        return mixed(differences + (ends - begins).astype(np.uint64))


OF_BYTES = mixed(np.arange(1, 257, dtype=np.uint64))


def chunks(texts: list[str]) -> Iterator[list[bytes]]:
    """Yield the texts in order as UTF-8, in lists of CHUNK_CHARS characters or a little more; a text is never cut."""
    chunk: list[bytes] = []
    size = 0
    for text in texts:
        chunk.append(text.encode())
        size += len(text)
        if size >= CHUNK_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def item_ngrams(texts: list[str]) -> Ngrams:
    """Return (hashes, items): the n-grams by which the items of one task are looked for, and whose each one is."""
    hashes, items = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    first = 0
    for chunk in chunks(texts):
        words = Words(chunk)
        num_words = np.bincount(words.texts, minlength=len(chunk))[: len(chunk)] - 1
        for n in LENGTHS:
            found, owners = words.ngrams(n)
            wanted = num_words[owners] == n
            if n == NGRAM_WORDS:
                wanted = num_words[owners] >= n
            hashes.append(found[wanted])
            items.append(owners[wanted] + first)
        first += len(chunk)
    return _without_wording(np.concatenate(hashes), np.concatenate(items), num_items=len(texts))


def _without_wording(hashes: np.ndarray, items: np.ndarray, *, num_items: int) -> Ngrams:
    """Return each item's n-grams once, without those that too many items share."""
    order = np.lexsort((items, hashes))
    hashes, items = hashes[order], items[order]
    once = _differs(hashes) | _differs(items)
    hashes, items = hashes[once], items[once]
    _, which, shared_by = np.unique(hashes, return_inverse=True, return_counts=True)
    own = shared_by[which] <= max(WORDING_ITEMS, WORDING_SHARE * num_items)
    return hashes[own], items[own]


def items_digest(texts: list[str]) -> str:
    """Return a digest, equal for equal items in equal order."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]


class NumberSet:
    """Hashes that others are looked up among: sorted, behind a Bloom filter that dismisses most at one look at
    memory."""

    def __init__(self, numbers: np.ndarray):
        """numbers: sorted uint64, their upper bits as good as random."""
        self.numbers = numbers
        bits = max(10, (len(numbers) * BITS_PER_NUMBER - 1).bit_length())
        self.shift = np.uint64(64 - bits)
        self.bloom = np.zeros(1 << bits, bool)
        self.bloom[numbers >> self.shift] = True

    def __reduce__(self) -> tuple:
        return NumberSet, (self.numbers,)  # the filter is many times larger, and soon made

    def places_in(self, values: np.ndarray) -> np.ndarray:
        """Return the places of those values that are in the set."""
        places = np.flatnonzero(self.bloom[values >> self.shift])
        if not len(places):
            return places
        nearest = np.searchsorted(self.numbers, values[places]).clip(max=len(self.numbers) - 1)
        return places[self.numbers[nearest] == values[places]]


def id_of_file(path: str | Path) -> str:
    """Return the id of the watch-list that was saved there."""
    return Path(path).stem.removeprefix(FILE)


class Watchlist:
    """Index of the n-grams of evaluation items. ngrams: sorted hashes. tasks: by name, {items, digest}."""

    def __init__(self, ngrams: np.ndarray, tasks: dict[str, dict]):
        self.ngrams, self.tasks = NumberSet(ngrams), tasks

    @classmethod
    def of(cls, tasks: Texts) -> "Watchlist":
        """Return the list for these tasks: the text of each item, question and right answer, by the name of the
        task."""
        ngrams, about = [], {}
        for name, texts in tasks.items():
            ngrams.append(item_ngrams(texts)[0])
            about[name] = {"items": len(texts), "digest": items_digest(texts)}
        return cls(sorted_once(ngrams), about)

    @cached_property
    def id(self) -> str:
        """Return an id, equal for watch-lists of the same n-grams of the same tasks."""
        return hashlib.sha256(self.content()).hexdigest()[:16]

    def content(self) -> bytes:
        return save({"ngrams": self.ngrams.numbers}, metadata={"tasks": json.dumps(self.tasks, sort_keys=True)})

    def save(self, folder: Path) -> Path:
        """Write <folder>/watchlist-<id>.safetensors, unless it is there unharmed; return its path."""
        path, content = Path(folder) / f"{FILE}{self.id}.safetensors", self.content()
        if not path.exists() or path.read_bytes() != content:
            write_bytes(path, content)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Watchlist":
        """Return what `save` wrote. Raises DataError when the file is no longer that."""
        try:
            with safe_open(path, framework="numpy") as file:
                watchlist = cls(file.get_tensor("ngrams"), json.loads(file.metadata()["tasks"]))
        except (OSError, SafetensorError, LookupError, TypeError) as error:
            raise DataError(
                f"{path}: the watch-list cannot be read ({error}). Start the training again: it writes it anew."
            ) from error
        if id_of_file(path) != watchlist.id:
            raise DataError(
                f"{path}: this watch-list is not the one that was written. Start the training again: it writes it "
                "anew."
            )
        return watchlist

    def found(self, texts: list[str]) -> np.ndarray:
        """Return sorted hashes of the watched n-grams that occur within one of the texts."""
        found = []
        for chunk in chunks(texts):
            words = Words(chunk)
            for n in LENGTHS:
                hashes, _ = words.ngrams(n)
                found.append(hashes[self.ngrams.places_in(hashes)])
        return sorted_once(found)

    def found_in(self, items: list[Any]) -> np.ndarray:
        """Return `found` of documents or conversations."""
        return self.found([text_of(item) for item in items])

    def write_seen(self, folder: Path, number: int, found: list[np.ndarray]) -> None:
        """Keep what was found in the text of a shard."""
        write_bytes(seen_path(folder, number, self.id), save({"ngrams": sorted_once(found)}))

    def search_again(self, folder: Path, number: int, source: Any) -> bool:
        """Search the text of a sealed shard, read once more from its source; return False when that was done before."""
        if seen_path(folder, number, self.id).exists():
            return False
        begin = {"file": 0, "block": 0, "finishing": False}
        if number:
            begin = read_seal(folder, number - 1)["cursor"]
        end = read_seal(folder, number)["cursor"]
        found = []
        if not begin["finishing"]:  # else it has only rows of text that was searched with the shard before
            for block in source.read(file=begin["file"], block=begin["block"]):
                found.append(self.found_in(block.items))
                if (block.file, block.index) == (end["file"], end["block"]):
                    break
        self.write_seen(folder, number, found)
        return True


def sorted_once(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the uint64 numbers of all the arrays, each once."""
    # np.unique alone builds a hash table, and is ten times slower on numbers such as these.
    values = np.sort(np.concatenate([np.zeros(0, np.uint64), *arrays]))
    return values[_differs(values)]


def _differs(values: np.ndarray) -> np.ndarray:
    """Return (N,) whether each value is another than the one before it."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def seen_path(folder: Path, number: int, watchlist_id: str) -> Path:
    """Return where the watched n-grams of a shard's text are kept, once it was searched."""
    return folder / f"seen-{number:05d}-{watchlist_id}.safetensors"


@dataclass(frozen=True)
class Matches:
    """Matches of a watch-list in the training text of a run. ngrams: sorted hashes. unchecked: how many of its
    `shards` were not searched with this list."""

    watchlist: str
    ngrams: np.ndarray
    shards: int
    unchecked: int

    @classmethod
    def by_run(cls, plan: dict, watchlist_id: str) -> "Matches":
        """Return the matches in all shards that the run reads, as far as they are sealed."""
        stream = open_stream(plan, "train")
        paths = []
        for source, dataset in enumerate(stream.datasets):
            for number in range(stream.shards_needed(source)):
                paths.append(seen_path(dataset.folder, number, watchlist_id))
        found = [load_file(path)["ngrams"] for path in paths if path.exists()]
        return cls(watchlist_id, sorted_once(found), len(paths), len(paths) - len(found))

    def contaminated(self, texts: list[str]) -> list[bool | None]:
        """Return for each item of a whole task whether an n-gram of it was trained on; None for one that cannot be
        judged."""
        ngrams, items = item_ngrams(texts)
        flags: list[bool | None] = [None] * len(texts)
        for item in items.tolist():
            flags[item] = False
        for item in items[NumberSet(self.ngrams).places_in(ngrams)].tolist():
            flags[item] = True
        return flags

    def findings(self, tasks: Texts, *, text_of: list[str], not_searched: list[str]) -> dict[str, Any]:
        """Return JSON for the run's folder: by task its items' digest and number, the positions of the contaminated
        ones and of those that cannot be judged, and which text was searched.

        text_of: the runs whose text this is. not_searched: further runs that the model comes from.
        """
        by_task = {}
        for name, texts in tasks.items():
            flags = self.contaminated(texts)
            by_task[name] = {
                "digest": items_digest(texts),
                "items": len(texts),
                "unjudged": [place for place, flag in enumerate(flags) if flag is None],
                "contaminated": [place for place, flag in enumerate(flags) if flag],
                "shards": self.shards,
                "unchecked": self.unchecked,
                "text_of": text_of,
                "not_searched": not_searched,
            }
        return {"tasks": by_task}


def flags_of(findings: dict[str, Any], task: str, texts: list[str]) -> list[bool | None] | None:
    """Return what the findings say of a task's items; None when the run looked for other items, not for the task, or
    in no shard."""
    found = findings["tasks"].get(task)
    if found is None or "shards" not in found:  # as it was written before tasks recorded their own search
        return None
    if found["unchecked"] == found["shards"] or found["digest"] != items_digest(texts):
        return None
    flags: list[bool | None] = [False] * len(texts)
    for place in found["contaminated"]:
        flags[place] = True
    for place in found["unjudged"]:
        flags[place] = None
    return flags


def without_contaminated(scores: Sequence[float], contaminated: Sequence[bool | None]) -> dict[str, Any]:
    """Return counts, the share of contaminated items among those that can be judged, and the mean score with and
    without them.

    scores: of each item, such as whether it was answered right. Items that cannot be judged (None) stay in both means.
    A share or a mean of nothing is None.
    """
    clean = [score for score, flag in zip(scores, contaminated, strict=True) if not flag]
    judged = sum(flag is not None for flag in contaminated)
    found = len(scores) - len(clean)
    return {
        "items": len(scores),
        "unjudged": len(scores) - judged,
        "contaminated": found,
        "contaminated_share": found / judged if judged else None,
        "score": _mean(scores),
        "score_without": _mean(clean),
    }


def _mean(scores: Sequence[float]) -> float | None:
    return sum(scores) / len(scores) if scores else None
