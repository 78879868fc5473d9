"""The same byte-level BPE run by tiktoken: identical ids at several times the speed, where that can be proved."""

import json
import re

import numpy as np

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Its regex engine keeps a way back for every character of a run and panics at a million: such runs go the other way.
LONG_RUN = re.compile(r"\s{100000}")
# Where two regex engines or two BPEs could differ: spaces, digits, case, joined and astral characters, broken rows.
AWKWARD = (
    "I'll WE'RE it'S don\u2019t '\u017f  a\u00a0b\u3000c\u2028d\u0085e",
    "\n\n \t\r\n  x\r  \n y   \n",
    "1 12 123 1234 12345 \u0663\u0664\u0665 \u00bd \u2167 x1y22z333",
    "\u0915\u094d\u0937 e\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u4e2d\u6587\u5b57 \ud55c\uad6d\uc5b4 \u0000\ufffd\ue000",
    "<|bos|> def f(x):\n\treturn {'a': [1, 2]} # ...!!!???\n\n\n",
    "a" * 300 + " " * 300 + "!" * 300 + "\n" * 300,
)


class TiktokenTwin:
    """A tiktoken encoding made from a `tokenizers` backend."""

    def __init__(self, encoding):
        self.encoding = encoding

    @classmethod
    def of(cls, backend) -> "TiktokenTwin | None":
        """The twin, or None when the tokenizer is of a kind that tiktoken cannot run."""
        import tiktoken

        state = json.loads(backend.to_str())
        model, pattern = state["model"], split_pattern(state.get("pre_tokenizer"))
        plain = not state.get("normalizer") and not any(not token["special"] for token in state["added_tokens"])
        # ignore_merges takes a whole word that is in the vocabulary as it is, as tiktoken does.
        known = model["type"] == "BPE" and not model.get("dropout") and not model.get("byte_fallback")
        if pattern is None or not plain or not known:
            return None
        specials = {token["content"] for token in state["added_tokens"]}
        byte_of = byte_alphabet()
        ranks = {}
        for token, i in model["vocab"].items():
            if token not in specials:
                if not all(character in byte_of for character in token):
                    return None
                ranks[bytes(byte_of[character] for character in token)] = i
        if len({bytes([b]) for b in range(256)} - ranks.keys()):
            return None
        return cls(tiktoken.Encoding("twin", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}))

    def encode(self, text: str) -> np.ndarray | None:
        """The ids (uint32), or None when this text is none for tiktoken."""
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
        """Whether both give the same ids for these texts, for those where engines could differ, and for every id's own
        text, where that is whole characters: ids that tiktoken takes at once and merging would never reach."""
        pieces = (piece.decode(errors="replace") for piece in self.encoding.token_byte_values())
        texts = [*AWKWARD, *texts, *(piece for piece in pieces if "\ufffd" not in piece)]
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            ids = self.encode(text)
            if ids is not None and ids.tolist() != encoding.ids:
                return False
        return True


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for: printable ones for themselves, the other bytes
    in order from U+0100 on (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + n): b for n, b in enumerate(others)}}


def split_pattern(step: dict | None) -> str | None:
    """The one regular expression that cuts the text, when the pre-tokenizer is that and the byte-level alphabet."""
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
