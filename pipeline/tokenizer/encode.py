"""Text to ids: the control tokens and how text that spells one does not become one, batches, tiktoken's twin of a BPE,
and raw bytes per id."""

import json
import os
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

BOS = "<|bos|>"  # Before every document, conversation and packed piece.
END = "<|end|>"  # Ends every turn; eos_token, so that `generate` stops there.
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
PYTHON_START = "<|python_start|>"  # Around a tool call, which the assistant writes ...
PYTHON_END = "<|python_end|>"
OUTPUT_START = "<|output_start|>"  # ... and around what the tool answered, which it only reads.
OUTPUT_END = "<|output_end|>"
PAD = "<|pad|>"

SPECIALS = (BOS, END, SYSTEM, USER, ASSISTANT, PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END, PAD)
# What the chat template itself writes; bos and pad have their own place in any tokenizer.
TEMPLATE_MARKS = (END, SYSTEM, USER, ASSISTANT, PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END)

# Of tokenizers without a bos token: what their models' texts were separated by, or began with.
DOCUMENT_STARTS = ("<|endoftext|>", "<|begin_of_text|>", "<s>")

# What others' models end a text with, where it is not what they begin one with.
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
DOCUMENT_ENDS = ("<|end_of_text|>", "</s>", "<eos>", "<EOS_TOKEN>", DEEPSEEK_END, "<|endoftext|>")

WORD_JOINER = "\u2060"  # Has no width and no meaning: the text looks the same and is no control string any more.


def control_strings(tokenizer) -> list[str]:
    """Return every string that the tokenizer reads as a control token, in the order of ids."""
    added = tokenizer.added_tokens_decoder
    return [added[i].content for i in sorted(added) if added[i].special]


def control_ids(tokenizer) -> set[int]:
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def _ids_of_controls(tokenizer) -> dict[str, int]:
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def document_start(tokenizer) -> int | None:
    """Return the id that a text begins with: bos, else the control token of that use; never the end of a chat's
    turn."""
    if tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id)
    known = _ids_of_controls(tokenizer)
    for name in DOCUMENT_STARTS:
        if name in known:
            return known[name]
    return tokenizer.eos_token_id


def document_end(tokenizer) -> int | None:
    """Return the id that a text ends with; None for a tokenizer of ours, and where no other token than the beginning's
    does so.

    The tokenizer's eos is taken where it is known as one: else it may be the end of a chat's turn.
    """
    begin = document_start(tokenizer)
    if begin is None or tokenizer.convert_ids_to_tokens(begin) == BOS:
        return None
    controls = control_strings(tokenizer)
    known = [name for name in DOCUMENT_ENDS if name in controls and tokenizer.convert_tokens_to_ids(name) != begin]
    own = getattr(tokenizer, "former_eos", None) or tokenizer.eos_token  # that of its file: load.py replaces it
    if known:
        return tokenizer.convert_tokens_to_ids(own if own in known else known[0])
    if tokenizer.bos_token is None or own in (None, END, tokenizer.bos_token):
        return None
    return tokenizer.convert_tokens_to_ids(own)


def tool_marks(tokenizer) -> tuple[int, ...] | None:
    """Return the ids of python_start, python_end, output_start and output_end; None when one of them is no control
    token."""
    known = _ids_of_controls(tokenizer)
    try:
        return tuple(known[mark] for mark in (PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END))
    except KeyError:
        return None


def escape(text: str, controls: list[str] | tuple[str, ...] = SPECIALS) -> str:
    """Return the text with U+2060 after the first character of every control string; the chat template does the same.

    Nothing is ever deleted, so no new control string can arise from the pieces of old ones.
    """
    for control in controls:
        if control in text:
            text = text.replace(control, control[0] + WORD_JOINER + control[1:])
    return text


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with each of its texts changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {with_texts(key, change): with_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    return value


GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Its regex engine keeps a way back for every character of a run and panics at a million: such runs go the other way.
LONG_RUN = re.compile(r"\s{100000}")
# Where two regex engines or two BPEs could differ: spaces, digits, case, joined and astral characters, broken rows.
AWKWARD = (
    "I'll WE'RE it'S don\u2019t '\u017f  a\u00a0b\u3000c\u2028d\u0085e",
    "\n\n \t\r\n  x\r  \n y   \n",
    "1 12 123 1234 12345 \u0663\u0664\u0665 \u00bd \u2167 x1y22z333",
    (
        "\u0915\u094d\u0937 e\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u4e2d\u6587\u5b57 \ud55c\uad6d\uc5b4 "
        "\u0000\ufffd\ue000"
    ),
    "<|bos|> def f(x):\n\treturn {'a': [1, 2]} # ...!!!???\n\n\n",
    "a" * 300 + " " * 300 + "!" * 300 + "\n" * 300,
)


class TiktokenTwin:
    """A tiktoken encoding made from a `tokenizers` backend."""

    def __init__(self, encoding):
        self.encoding = encoding

    @classmethod
    def of(cls, backend) -> "TiktokenTwin | None":
        """Return the twin, or None when the tokenizer is of a kind that tiktoken cannot run."""
        import tiktoken

        state = json.loads(backend.to_str())
        model, pattern = state["model"], split_pattern(state.get("pre_tokenizer"))
        plain = not state.get("normalizer") and all(token["special"] for token in state["added_tokens"])
        # ignore_merges takes a whole word that is in the vocabulary as it is, as tiktoken does.
        known = model["type"] == "BPE" and not model.get("dropout") and not model.get("byte_fallback")
        if pattern is None or not plain or not known:
            return None
        specials = {token["content"] for token in state["added_tokens"]}
        byte_of = byte_alphabet()
        try:
            ranks = {bytes(map(byte_of.__getitem__, t)): i for t, i in model["vocab"].items() if t not in specials}
        except KeyError:  # a character that stands for no byte
            return None
        if {bytes([b]) for b in range(256)} - ranks.keys():
            return None
        return cls(tiktoken.Encoding("twin", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}))

    def encode(self, text: str) -> np.ndarray | None:
        """Return the ids (uint32), or None when this text is none for tiktoken."""
        if len(text) > 100_000 and LONG_RUN.search(text):
            return None
        try:
            return self.encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        except BaseException as error:
            # A panic in Rust is no Exception and its class cannot be imported; everything else goes on up.
            if type(error).__name__ != "PanicException":
                raise
            return None

    def agrees(self, backend, texts: list[str]) -> bool:
        """Return whether both give the same ids for these texts, for those where engines could differ, and for every
        id's own text, where that is whole characters: ids that tiktoken takes at once and merging would never
        reach."""
        texts = [*AWKWARD, *texts]
        for piece in self.encoding.token_byte_values():
            text = piece.decode(errors="replace")
            if "\ufffd" not in text:
                texts.append(text)
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            ids = self.encode(text)
            if ids is not None and ids.tolist() != encoding.ids:
                return False
        return True


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for: printable ones for themselves, the
    other bytes in order from U+0100 on (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = map(chr, [*printable, *range(0x100, 0x100 + len(others))])
    return dict(zip(characters, [*printable, *others], strict=True))


def split_pattern(step: dict | None) -> str | None:
    """Return the one regular expression that cuts the text, when the pre-tokenizer is that and the byte-level
    alphabet."""
    if not step:
        return None
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if steps[0]["use_regex"] else None
    split = steps[0]
    isolated = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    if len(steps) != 2 or not isolated or steps[-1]["use_regex"]:
        return None
    return split["pattern"].get("Regex")


SAMPLE_TEXTS, SAMPLE_CHARS = 64, 4_000  # Of the given texts, for the proof that tiktoken gives the same ids.


# Tokenizers that are in use: their plain backend and encoder, with their size when these were made.
_backends: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_encoders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def plain_backend(tokenizer):
    """Return a copy of the tokenizer's backend that reads control strings as the text they are; not to be changed."""
    from tokenizers import Tokenizer

    backend, known_size = _backends.get(tokenizer, (None, None))
    if known_size != len(tokenizer):  # One that has got new tokens since is another tokenizer.
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        _backends[tokenizer] = (backend, len(tokenizer))
    return backend


class Encoder:
    """Encodes lists of texts with one tokenizer, by tiktoken when that proves to give the same ids.

    num_proc: threads; default all cores. (For `tokenizers` it can only be set before its first use in a process.)
    """

    def __init__(self, tokenizer, *, num_proc: int | None = None):
        self.threads = num_proc or os.cpu_count() or 1
        if num_proc:
            os.environ.setdefault("RAYON_NUM_THREADS", str(num_proc))
        self.backend = plain_backend(tokenizer)
        self.dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32
        self.twin = TiktokenTwin.of(self.backend)
        self.proved = False

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return one array of ids per text: uint16, or uint32 for vocabularies above 65,536."""
        if self.twin is None:
            return self._encode_slowly(texts)
        if not self.proved:
            # Once, on what is about to be encoded: any difference, and tiktoken is out for good.
            sample = [text[:SAMPLE_CHARS] for text in texts[:: max(1, len(texts) // SAMPLE_TEXTS)]]
            self.proved = bool(sample)
            if not self.twin.agrees(self.backend, sample):
                self.twin = None
                return self._encode_slowly(texts)
        return self._encode_by_twin(texts)

    def _encode_slowly(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def _encode_by_twin(self, texts: list[str]) -> list[np.ndarray]:
        assert self.twin is not None
        if self.threads == 1 or len(texts) < 2:
            found = [self.twin.encode(text) for text in texts]
        else:
            with ThreadPoolExecutor(self.threads) as pool:  # tiktoken works without the interpreter's lock.
                found = list(pool.map(self.twin.encode, texts, chunksize=16))
        made: list[np.ndarray] = []
        for text, ids in zip(texts, found, strict=True):
            if ids is None:
                made += self._encode_slowly([text])
            else:
                made.append(ids.astype(self.dtype))
        return made


def encode_documents(tokenizer, texts: list[str], *, num_proc: int | None = None) -> list[np.ndarray]:
    """Return the ids of each text, without BOS or any other control token. Texts must be encodable as UTF-8."""
    size = (len(tokenizer), num_proc)
    encoder, known_size = _encoders.get(tokenizer, (None, None))
    if encoder is None or known_size != size:
        encoder = Encoder(tokenizer, num_proc=num_proc)
        _encoders[tokenizer] = (encoder, size)
    return encoder.encode(texts)


def is_byte_level(tokenizer) -> bool:
    """Return whether every id of text stands for fixed bytes, whatever surrounds it."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return backend["model"]["type"] == "BPE" and _contains_byte_level(backend.get("pre_tokenizer"))


def _contains_byte_level(step: dict | None) -> bool:
    if not step:
        return False
    return step["type"] == "ByteLevel" or any(map(_contains_byte_level, step.get("pretokenizers", [])))


def byte_lengths(tokenizer) -> np.ndarray:
    """Return (V,) int32 raw bytes per id, V = highest id + 1; 0 for control tokens and for ids that do not exist.

    Their sum over the ids of a text is its UTF-8 length (of the text as normalized, for the few tokenizers that change
    it first). Raises ValueError for a tokenizer that is not byte-level: its ids have no fixed bytes, see
    `span_byte_lengths` (coverage.py).
    """
    if not is_byte_level(tokenizer):
        raise ValueError("the tokenizer is not byte-level: its ids have no fixed bytes; use span_byte_lengths")
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    lengths_V = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)
    for token, i in vocabulary.items():
        if i not in added:
            lengths_V[i] = len(token)  # One character of the byte-level alphabet is one byte.
        elif not added[i].special:
            lengths_V[i] = len(added[i].content.encode())
    return lengths_V


# Below this share there are no bits per byte. Were every byte that is left out to cost 8 bits, the figure would be at
# most 0.008 higher.
LEAST_COVERAGE = 0.999


def keeps_every_text(tokenizer) -> bool:
    """Return whether the ids of any text restore it: all 256 bytes have an id, and nothing is normalized before."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    whole = backend["normalizer"] is None and _only_cuts(backend["pre_tokenizer"])
    return is_byte_level(tokenizer) and whole and byte_alphabet().keys() <= backend["model"]["vocab"].keys()


def _only_cuts(step: dict | None) -> bool:
    """Return whether a pre-tokenizer is known to leave nothing of the text out."""
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(map(_only_cuts, step["pretokenizers"]))
    return step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")
