"""The n-grams of evaluation items, as something that training text can be held against while it is tokenized.

An item is looked for by its runs of 13 words (GPT-3, appendix C); one of 8 to 12 words by its whole text; one of fewer
words says too little and cannot be judged. Runs that many items of a task share are its wording, not an item's, and are
not looked for; an item that has no other runs cannot be judged either.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path

import numpy as np

from pipeline.artifacts.atomic import write_bytes
from pipeline.artifacts.errors import DataError
from pipeline.data.ngrams import Words, chunks, ngram_hashes

FILE = "watchlist-"
NGRAM_WORDS = 13
SHORTEST_WORDS = 8
# A run of words is a task's wording when more than so many of its items and more than this share of them have it. A
# passage that a hundred questions are asked about is none.
WORDING_ITEMS, WORDING_SHARE = 10, 0.1
# Runs of 6 words are compared at every third word first: any 8 words in a row hold one of those. A word counts there
# with 8 bits made of its first two bytes, so that a run fits into one integer.
SIEVE_WORDS, SIEVE_STRIDE = 6, SHORTEST_WORDS - 6 + 1
BITS_PER_NUMBER = 64  # of a Bloom filter with one hash: at most 1.6 % of other numbers pass it


def item_ngrams(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(hashes, items): the n-grams by which the items of one task are looked for, and whose each one is."""
    hashes, items = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    first = 0
    for chunk in chunks(texts):
        words = Words.of(chunk)
        counts = np.bincount(words.texts, minlength=len(chunk))[: len(chunk)] - 1
        for n in range(SHORTEST_WORDS, NGRAM_WORDS + 1):
            if n == NGRAM_WORDS or (counts == n).any():
                found, owners = ngram_hashes(words, n=n)
                wanted = counts[owners] >= n if n == NGRAM_WORDS else counts[owners] == n
                hashes.append(found[wanted])
                items.append(owners[wanted] + first)
        first += len(chunk)
    return _without_wording(np.concatenate(hashes), np.concatenate(items), num_items=len(texts))


def _without_wording(hashes: np.ndarray, items: np.ndarray, *, num_items: int) -> tuple[np.ndarray, np.ndarray]:
    """Each item's n-grams once, without those that too many items share."""
    order = np.lexsort((items, hashes))
    hashes, items = hashes[order], items[order]
    once = _differs(hashes) | _differs(items)
    hashes, items = hashes[once], items[once]
    shared_by = np.diff(np.append(np.flatnonzero(_differs(hashes)), len(hashes)))
    own = np.repeat(shared_by <= max(WORDING_ITEMS, WORDING_SHARE * num_items), shared_by)
    return hashes[own], items[own]


def items_digest(texts: list[str]) -> str:
    """Equal for equal items in equal order."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]


class NumberSet:
    """Hashes that others are looked up among: sorted, behind a Bloom filter that dismisses most at one look at memory."""

    def __init__(self, numbers: np.ndarray):
        """numbers: sorted uint64, their upper bits as good as random."""
        self.numbers = numbers
        bits = max(10, (len(numbers) * BITS_PER_NUMBER - 1).bit_length())
        self.shift = np.uint64(64 - bits)
        self.bloom = np.zeros(1 << (bits - 3), np.uint8)
        at = numbers >> self.shift
        np.bitwise_or.at(self.bloom, at >> np.uint64(3), np.uint8(1) << (at & np.uint64(7)).astype(np.uint8))

    def places_in(self, values: np.ndarray) -> np.ndarray:
        """The places of those values that are in the set."""
        at = values >> self.shift
        bits = self.bloom[at >> np.uint64(3)] >> (at & np.uint64(7)).astype(np.uint8)
        places = np.flatnonzero(bits & np.uint8(1))
        nearest = np.searchsorted(self.numbers, values[places]).clip(max=max(0, len(self.numbers) - 1))
        return places[self.numbers[nearest] == values[places]] if len(places) else places


def id_of_file(path: str | Path) -> str:
    """The id of the watch-list that was saved there."""
    return Path(path).stem.removeprefix(FILE)


class Watchlist:
    """What is looked for. tasks: by name, {items, digest}. found() may be called from several threads."""

    def __init__(self, ngrams: np.ndarray, runs: np.ndarray, tasks: dict[str, dict]):
        """ngrams: sorted hashes of the items' n-grams. runs: sorted sieve values of their runs of SIEVE_WORDS."""
        self.ngrams, self.runs, self.tasks = NumberSet(ngrams), NumberSet(runs), tasks

    @classmethod
    def of(cls, tasks: dict[str, list[str]]) -> "Watchlist":
        """tasks: the text of each item, question and right answer, by the name of the task."""
        ngrams = [item_ngrams(texts)[0] for texts in tasks.values()]
        runs = [_runs_of(chunk) for texts in tasks.values() for chunk in chunks(texts)]
        about = {name: {"items": len(texts), "digest": items_digest(texts)} for name, texts in tasks.items()}
        return cls(sorted_once(ngrams), sorted_once(runs), about)

    @cached_property
    def id(self) -> str:
        """Equal for watch-lists that look for the same n-grams of the same tasks."""
        return hashlib.sha256(self.content()).hexdigest()[:16]

    def content(self) -> bytes:
        from safetensors.numpy import save

        about = {"tasks": json.dumps(self.tasks, sort_keys=True)}
        return save({"ngrams": self.ngrams.numbers, "runs": self.runs.numbers}, metadata=about)

    def save(self, folder: Path) -> Path:
        """Write <folder>/watchlist-<id>.safetensors, unless it is there unharmed; returns its path."""
        path, content = Path(folder) / f"{FILE}{self.id}.safetensors", self.content()
        if not path.exists() or path.read_bytes() != content:
            write_bytes(path, content)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Watchlist":
        """What `save` wrote. Raises DataError when the file is no longer that."""
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        try:
            with safe_open(path, framework="numpy") as file:
                tasks = json.loads(file.metadata()["tasks"])
                watchlist = cls(file.get_tensor("ngrams"), file.get_tensor("runs"), tasks)
        except (OSError, SafetensorError, LookupError, TypeError) as error:
            raise DataError(
                f"{path}: the watch-list cannot be read ({error}), so nothing can be looked for. Start the training again: it writes it anew."
            ) from error
        if id_of_file(path) != watchlist.id:
            raise DataError(
                f"{path}: this watch-list is not the one that was written, so what it finds means nothing. Start the training "
                "again: it writes it anew."
            )
        return watchlist

    def found(self, texts: list[str]) -> np.ndarray:
        """Sorted hashes of the watched n-grams that stand within one of the texts."""
        words = Words.of([piece for chunk in chunks(texts) for piece in self._suspects(chunk)])
        hashes = [ngram_hashes(words, n=n)[0] for n in range(SHORTEST_WORDS, NGRAM_WORDS + 1)]
        return sorted_once([some[self.ngrams.places_in(some)] for some in hashes])

    def _suspects(self, chunk: list[bytes]) -> list[bytes]:
        """The pieces of folded text around runs of words that pass the sieve."""
        words = Words.of(chunk)
        values = _sieve_values(words, stride=SIEVE_STRIDE)
        passed = self.runs.places_in(values) * SIEVE_STRIDE
        if not len(passed):
            return []
        # An n-gram that holds this run, and no earlier one at which the sieve looks, begins less than a stride before it.
        begins = np.maximum(passed - SIEVE_STRIDE + 1, 0)
        ends = np.minimum(passed + NGRAM_WORDS, len(words.begins) - 1)  # the last word is no text's
        first = np.flatnonzero(np.concatenate([[True], begins[1:] > ends[:-1]]))
        last = np.append(first[1:], len(begins)) - 1
        whole = words.folded.tobytes()
        pieces = zip(words.begins[begins[first]].tolist(), words.begins[ends[last]].tolist(), strict=True)
        return [whole[begin:end] for begin, end in pieces]


def _runs_of(chunk: list[bytes]) -> np.ndarray:
    words = Words.of(chunk)
    return sorted_once([_sieve_values(words, stride=1)[words.runs_within_texts(SIEVE_WORDS)]])


def _sieve_values(words: Words, *, stride: int) -> np.ndarray:
    """(ceil((W - SIEVE_WORDS + 1) / stride),) uint64 values of the runs of SIEVE_WORDS words at every stride-th word."""
    letters = words.folded[:-1] + words.folded[1:] * np.uint8(37)
    of_words = np.concatenate([letters[words.begins], np.zeros(8, np.uint8)])
    count = max(0, len(words.begins) - SIEVE_WORDS + stride) // stride
    # Eight words' bytes lie under each integer; the shift drops those after the run.
    eight = np.ndarray((count,), "<u8", buffer=of_words, strides=(stride,))
    return (eight << np.uint64(64 - 8 * SIEVE_WORDS)) * np.uint64(0x9E3779B97F4A7C15)


def sorted_once(arrays: list[np.ndarray]) -> np.ndarray:
    """The uint64 numbers of all the arrays, each once."""
    # np.unique builds a hash table, and is ten times slower on numbers such as these.
    values = np.sort(np.concatenate([np.zeros(0, np.uint64), *arrays]))
    return values[_differs(values)]


def _differs(values: np.ndarray) -> np.ndarray:
    """(N,) whether each value is another than the one before it."""
    return np.concatenate([np.ones(min(1, len(values)), bool), values[1:] != values[:-1]])
