"""Decontamination: the search in training text for evaluation items, by their n-grams while shards are written, and
for whole validation documents."""

import hashlib
import json
import string
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from pipeline.data.preparation import open_stream
from pipeline.data.stream import read_seal, seen_path
from pipeline.data.workers import safetensors_parts
from pipeline.process.errors import DataError
from pipeline.process.storage import write_bytes
from pipeline.sources.verify import row_name
from pipeline.tokenizer.train import text_of

# Runs of words as numbers, whatever tokenizer a model has: what two texts share is found by looking up integers.

CHUNK_CHARS = 500_000  # looked at together: long enough for numpy, short enough to stay near the processor
BETWEEN_TEXTS = 0xFF  # a byte that no UTF-8 text has; as a word between two texts it keeps n-grams from spanning both
DIVIDERS = (string.whitespace + string.punctuation).encode() + bytes(range(32)) + b"\x7f"
FOLDED = bytes(0 if byte in DIVIDERS else ord(chr(byte).lower()) if byte < 128 else byte for byte in range(256))

# A polynomial modulo 2**64 with an odd base, which has an inverse: a run's hash is the difference of two prefix sums.
BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)


@dataclass(frozen=True)
class Words:
    """Folded bytes of texts (0 between words) and where each of the W words begins; BETWEEN_TEXTS is a word of its
    own."""

    folded: np.ndarray
    begins: np.ndarray

    @classmethod
    def of(cls, texts: list[bytes]) -> "Words":
        """Return the words of UTF-8 texts, or of pieces of `folded`."""
        folded = np.frombuffer(bytearray(b" \xff ".join([b"", *texts, b""]).translate(FOLDED)), np.uint8)
        _divide_at_signs(folded)
        inside = folded != 0
        return cls(folded, np.flatnonzero(inside[1:] & ~inside[:-1]) + 1)

    @cached_property
    def hashes(self) -> np.ndarray:
        """Return (W,) uint64 of each word."""
        inside = self.folded != 0
        ends = np.flatnonzero(inside[:-1] & ~inside[1:]) + 1
        return _hashes_of_runs(OF_BYTES[self.folded], self.begins, ends)

    @cached_property
    def texts(self) -> np.ndarray:
        """Return (W,) number of the text to which each word belongs; the word before a text counts as its first."""
        return np.cumsum(self.folded[self.begins] == BETWEEN_TEXTS) - 1

    def runs_within_texts(self, n: int) -> np.ndarray:
        """Return the words at which a run of n words of one text begins."""
        texts, count = self.texts, max(0, len(self.begins) - n + 1)
        first = self.folded[self.begins[:count]] == BETWEEN_TEXTS
        return np.flatnonzero((texts[:count] == texts[n - 1 :][:count]) & ~first)


def _divide_at_signs(folded: np.ndarray) -> None:
    """Set the bytes of dividing characters above ASCII to 0: E2 80 xx and C2 xx."""
    at = np.flatnonzero((folded == 0xE2) | (folded == 0xC2))
    general = at[(folded[at] == 0xE2) & (folded[at + 1] == 0x80)]
    for signs, width in ((general, 3), (at[folded[at] == 0xC2], 2)):
        for byte in range(width):
            folded[signs + byte] = 0


def ngram_hashes(words: Words, *, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (hashes, texts): the uint64 hash of each run of n words within a text, in order, and the number of that
    text.

    It depends on the n words alone: not on case, on what divides them, nor on what surrounds them.
    """
    begins = words.runs_within_texts(n)
    return _hashes_of_runs(words.hashes, begins, begins + n), words.texts[begins]


def _hashes_of_runs(values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return a hash of each values[begin:end] (uint64), the same wherever the run occurs."""
    powers, inverses = (np.cumprod(np.full(len(values), base, np.uint64)) for base in (BASE, INVERSE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * powers)])
    return _mixed((sums[ends] - sums[begins]) * inverses[begins] + (ends - begins).astype(np.uint64))


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return SplitMix64's last step: every bit of a number moves every bit of the result."""
    x = numbers.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


OF_BYTES = _mixed(np.arange(1, 257))


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


# The n-grams of evaluation items, as something that training text can be held against while it is tokenized.

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
    """Return (hashes, items): the n-grams by which the items of one task are looked for, and whose each one is."""
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
    """Return each item's n-grams once, without those that too many items share."""
    order = np.lexsort((items, hashes))
    hashes, items = hashes[order], items[order]
    once = _differs(hashes) | _differs(items)
    hashes, items = hashes[once], items[once]
    shared_by = np.diff(np.append(np.flatnonzero(_differs(hashes)), len(hashes)))
    own = np.repeat(shared_by <= max(WORDING_ITEMS, WORDING_SHARE * num_items), shared_by)
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
        self.bloom = np.zeros(1 << (bits - 3), np.uint8)
        at = numbers >> self.shift
        np.bitwise_or.at(self.bloom, at >> np.uint64(3), np.uint8(1) << (at & np.uint64(7)).astype(np.uint8))

    def places_in(self, values: np.ndarray) -> np.ndarray:
        """Return the places of those values that are in the set."""
        at = values >> self.shift
        bits = self.bloom[at >> np.uint64(3)] >> (at & np.uint64(7)).astype(np.uint8)
        places = np.flatnonzero(bits & np.uint8(1))
        nearest = np.searchsorted(self.numbers, values[places]).clip(max=max(0, len(self.numbers) - 1))
        return places[self.numbers[nearest] == values[places]] if len(places) else places


def id_of_file(path: str | Path) -> str:
    """Return the id of the watch-list that was saved there."""
    return Path(path).stem.removeprefix(FILE)


class Watchlist:
    """Index of the n-grams of evaluation items. tasks: by name, {items, digest}. found() may be called from several
    threads."""

    def __init__(self, ngrams: np.ndarray, runs: np.ndarray, tasks: dict[str, dict]):
        """ngrams: sorted hashes of the items' n-grams. runs: sorted sieve values of their runs of SIEVE_WORDS."""
        self.ngrams, self.runs, self.tasks = NumberSet(ngrams), NumberSet(runs), tasks

    @classmethod
    def of(cls, tasks: dict[str, list[str]]) -> "Watchlist":
        """Return the list for these tasks: the text of each item, question and right answer, by the name of the
        task."""
        ngrams = [item_ngrams(texts)[0] for texts in tasks.values()]
        runs = [_runs_of(chunk) for texts in tasks.values() for chunk in chunks(texts)]
        about = {name: {"items": len(texts), "digest": items_digest(texts)} for name, texts in tasks.items()}
        return cls(sorted_once(ngrams), sorted_once(runs), about)

    @cached_property
    def id(self) -> str:
        """Return an id, equal for watch-lists of the same n-grams of the same tasks."""
        return hashlib.sha256(self.content()).hexdigest()[:16]

    def content(self) -> bytes:
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
        """Return what `save` wrote. Raises DataError when the file is no longer that."""
        path = Path(path)
        try:
            with safe_open(path, framework="numpy") as file:
                tasks = json.loads(file.metadata()["tasks"])
                watchlist = cls(file.get_tensor("ngrams"), file.get_tensor("runs"), tasks)
        except (OSError, SafetensorError, LookupError, TypeError) as error:
            raise DataError(
                f"{path}: the watch-list cannot be read ({error}), so nothing can be looked for. Start the training "
                "again: it writes it anew."
            ) from error
        if id_of_file(path) != watchlist.id:
            raise DataError(
                f"{path}: this watch-list is not the one that was written, so what it finds means nothing. Start the "
                "training again: it writes it anew."
            )
        return watchlist

    def found(self, texts: list[str]) -> np.ndarray:
        """Return sorted hashes of the watched n-grams that occur within one of the texts."""
        words = Words.of([piece for chunk in chunks(texts) for piece in self._suspects(chunk)])
        hashes = [ngram_hashes(words, n=n)[0] for n in range(SHORTEST_WORDS, NGRAM_WORDS + 1)]
        return sorted_once([some[self.ngrams.places_in(some)] for some in hashes])

    def found_in(self, items: list) -> np.ndarray:
        """Return `found` of documents or conversations."""
        return self.found(texts_of(items))

    def scanner(self, folder: Path) -> "Scanner":
        """Return what looks at the blocks of a sequence while its shards are written into the folder."""
        return Scanner(folder, self)

    def look_again(self, folder: Path, number: int, *, source: Any) -> None:
        """Look at the text of a sealed shard, read once more from its source; nothing is tokenized."""
        begin = {"file": 0, "block": 0, "finishing": False}
        if number:
            begin = read_seal(folder, number - 1)["cursor"]
        end = read_seal(folder, number)["cursor"]
        found = []
        for block in source.read(file=begin["file"], block=begin["block"]) if not begin["finishing"] else ():
            found.append(self.found(texts_of(block.items)))
            if (block.file, block.index) == (end["file"], end["block"]):
                break
        write_seen(folder, number, self.id, found)

    def _suspects(self, chunk: list[bytes]) -> list[bytes]:
        """Return the pieces of folded text around runs of words that pass the sieve."""
        words = Words.of(chunk)
        values = _sieve_values(words, stride=SIEVE_STRIDE)
        passed = self.runs.places_in(values) * SIEVE_STRIDE
        if not len(passed):
            return []
        # An n-gram that holds this run, and no earlier one at which the sieve looks, begins less than a stride before
        # it.
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
    """Return (ceil((W - SIEVE_WORDS + 1) / stride),) uint64 values of the runs of SIEVE_WORDS words at every stride-th
    word."""
    letters = words.folded[:-1] + words.folded[1:] * np.uint8(37)
    of_words = np.concatenate([letters[words.begins], np.zeros(8, np.uint8)])
    count = max(0, len(words.begins) - SIEVE_WORDS + stride) // stride
    # Eight words' bytes lie under each integer; the shift drops those after the run.
    eight = np.ndarray((count,), "<u8", buffer=of_words, strides=(stride,))
    return (eight << np.uint64(64 - 8 * SIEVE_WORDS)) * np.uint64(0x9E3779B97F4A7C15)


def sorted_once(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the uint64 numbers of all the arrays, each once."""
    # np.unique builds a hash table, and is ten times slower on numbers such as these.
    values = np.sort(np.concatenate([np.zeros(0, np.uint64), *arrays]))
    return values[_differs(values)]


def _differs(values: np.ndarray) -> np.ndarray:
    """Return (N,) whether each value is another than the one before it."""
    return np.concatenate([np.ones(min(1, len(values)), bool), values[1:] != values[:-1]])


# Search the text of a sequence of shards, while it is tokenized or afterwards.


def read_seen(folder: Path, number: int, watchlist_id: str) -> np.ndarray | None:
    """Return the watched n-grams in a shard's text, or None when nobody looked."""
    path = seen_path(folder, number, watchlist_id)
    return load_file(path)["ngrams"] if path.exists() else None


def write_seen(folder: Path, number: int, watchlist_id: str, ngrams: list[np.ndarray]) -> None:
    path = seen_path(folder, number, watchlist_id)
    if not path.exists():
        write_bytes(path, *safetensors_parts({"ngrams": sorted_once(ngrams)}))


def texts_of(items: list) -> list[str]:
    """Return the text of documents, and of conversations what their messages say, as one text each."""
    return [text_of(item) for item in items]


class Scanner:
    """Beside a writer of shards, on a thread of its own: numpy and the tokenizer let each other work."""

    def __init__(self, folder: Path, watchlist: Watchlist):
        self.folder, self.watchlist = folder, watchlist
        self.thread = ThreadPoolExecutor(1)
        self.found: list[Future] = []

    def look(self, items: list) -> None:
        """Look at a block that is about to be packed; an empty one when there is no more."""
        self.found.append(self.thread.submit(self.watchlist.found_in, items))

    def add(self, found: np.ndarray) -> None:
        """Take in what another process found in a block that is about to be packed."""
        self.found.append(Future())
        self.found[-1].set_result(found)

    def take(self) -> list[Future]:
        """Return what was found up to the block that is being packed, which counts for the next shard too."""
        found, self.found = self.found, self.found[-1:]
        return found

    def seal(self, number: int, found: list[Future]) -> None:
        """Keep what was found for a shard, before its seal is written: a sealed shard was looked at whole or not at
        all."""
        write_seen(self.folder, number, self.watchlist.id, [each.result() for each in found])


# Which evaluation items are in the text that a run trains on, and the score without them.


@dataclass(frozen=True)
class Matches:
    """Matches of a watch-list in the training text of a run. ngrams: sorted hashes. unchecked: shards of `shards` at
    which nobody looked with this list, as they were sealed before."""

    watchlist: str
    ngrams: np.ndarray
    shards: int
    unchecked: int

    @classmethod
    def by_run(cls, plan: dict, watchlist_id: str) -> "Matches":
        """Return the matches in all shards that the run reads, as far as they are sealed."""
        stream = open_stream(plan, "train")
        assert stream is not None
        shards = [
            read_seen(sequence.folder, number, watchlist_id)
            for source, sequence in enumerate(stream.sequences)
            for number in range(stream.shards_needed(source))
        ]
        looked_at = [ngrams for ngrams in shards if ngrams is not None]
        return cls(watchlist_id, sorted_once(looked_at), len(shards), len(shards) - len(looked_at))

    def contaminated(self, texts: list[str]) -> list[bool | None]:
        """Return for each item of a whole task whether an n-gram of it was trained on; None for one that cannot be
        judged."""
        ngrams, items = item_ngrams(texts)
        flags: list[bool | None] = [None] * len(texts)
        found = np.zeros(len(texts), bool)
        found[items[NumberSet(self.ngrams).places_in(ngrams)]] = True
        for item in np.flatnonzero(np.bincount(items, minlength=len(texts))).tolist():
            flags[item] = bool(found[item])
        return flags

    @classmethod
    def together(cls, parts: list["Matches"]) -> "Matches":
        """Return the matches in several runs' text, searched for the same watch-list."""
        ngrams = sorted_once([seen.ngrams for seen in parts])
        return cls(parts[0].watchlist, ngrams, sum(s.shards for s in parts), sum(s.unchecked for s in parts))

    def findings(self, tasks: dict[str, list[str]], *, text_of: list[str], not_searched: list[str]) -> dict[str, Any]:
        """Return JSON for the run's folder: by task its items' digest and number, which are contaminated (positions),
        which cannot be judged, and where they were looked for.

        text_of: the runs whose text this is. not_searched: what the model comes from beside them.
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
    """Return what `findings` tell of a task's items; None when the run looked for other items, not for the task, or at
    no shard."""
    found = findings["tasks"].get(task)
    if found is None or "shards" not in found:  # as it was written before tasks recorded their own search
        return None
    if found["unchecked"] == found["shards"] or found["digest"] != items_digest(texts):
        return None
    contaminated, unjudged = set(found["contaminated"]), set(found["unjudged"])
    return [None if place in unjudged else place in contaminated for place in range(len(texts))]


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
        "score": sum(scores) / len(scores) if scores else None,
        "score_without": sum(clean) / len(clean) if clean else None,
    }


# Validation documents that are trained on, too: files of other content may still hold the same documents.

DOCUMENTS = 2_000  # of each validation source that are looked for
TRAINED_CHARS = 50_000_000  # of each training source that are looked at: a second or two
HELD_OUT_CHARS = 250_000_000  # of each validation source that are read for them; of one file also the rows between


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """documents: the first ones of validation, that were looked for. found: those of them that are trained on, too;
    place: of one of these. whole: all training text was looked through; else found is at least so many."""

    documents: int
    found: int
    place: str | None
    whole: bool

    def note(self) -> str | None:
        """Return what was found as a sentence for the user; None where nothing was found."""
        if not self.found:
            return None
        return (
            f"{self.found:,} of the first {self.documents:,} validation documents are trained on, too (such as "
            f"{self.place}): to that share validation measures memory. Take duplicates out of the files, or name "
            "other ones in data.validation."
        )


_looked: dict[tuple, Overlap] = {}


def overlap_of(train: list[Any], validation: list[Any]) -> Overlap:
    """Return how many of the first validation documents are in the training text, as far as it is here.

    Equal means equal but for white space around it. Nothing is fetched for it, and a process looks once.
    """
    asked = tuple(tuple(source.fingerprint for source in sources) for sources in (train, validation))
    if asked not in _looked:
        _looked[asked] = _look(train, validation)
    return _looked[asked]


def _look(train: list[Any], validation: list[Any]) -> Overlap:
    # Built-in data is left out: its makers hold apart what is asked, and nobody else can take duplicates out.
    train = [source.once for source in train]
    held = {digest for source in validation if not source.is_built_in for digest in _held_out(source)}
    found: dict[bytes, str] = {}
    whole = all(file.path is not None for source in train for file in source.files)
    for source in train if held else []:
        chars = 0
        for digest, place, length in _documents(source):
            if digest in held and digest not in found:
                found[digest] = place
            chars += length
            if chars > TRAINED_CHARS:
                whole = False
                break
    return Overlap(documents=len(held), found=len(found), place=next(iter(found.values()), None), whole=whole)


def _held_out(source: Any) -> Iterator[bytes]:
    """Yield digests of the first validation documents, until so many are found or so much text was read for them."""
    chars = 0
    for digest, _, read in islice(_documents(source), DOCUMENTS):
        yield digest
        chars += read
        if chars > HELD_OUT_CHARS:
            return


def _documents(source: Any) -> Iterator[tuple[bytes, str, int]]:
    """Yield (digest, place, characters read for it) of each document of the source's first files, until one is not
    here."""
    for number, file in enumerate(source.files):
        if file.path is None:
            return
        rows = file.period if file.part == "validation" else 1
        for block in source.read_file(number):
            for item in block.items:
                text = item.text if source.kind == "text" else json.dumps(item.messages, sort_keys=True)
                digest = hashlib.blake2b(text.strip().encode(), digest_size=16).digest()
                yield digest, row_name(file.label, item.row), len(text) * rows
