#!/usr/bin/env bash
# Title: tiktoken's cl100k pattern, converted by transformers, no longer cuts numbers into groups of three digits.
# Packages: transformers==5.23.0 tiktoken==0.14.0 tokenizers==0.23.3 blobfile==3.3.0
# Guess: convert_tiktoken_to_fast gives a tokenizer with the same ids, as it takes over pattern, ranks and specials.
# Seen: 2026 is 202, 6 in tiktoken and 20, 26 in the copy: 400 of 500 numbers of 4 to 9 digits get other ids, texts
#   with shorter ones do not, so a test on prose passes. The pattern's \p{N}{1,3}+ is "up to three digits, and give
#   none back" to tiktoken and "any number of such groups" to the regular expressions of tokenizers, so that there a
#   number is one word, merged by rank. With {1,3} in place of {1,3}+ tiktoken's ids stay and the copy's are right.
#   2026-11-28, Python 3.11, Linux, CPU.
# Costs: years, prices and sums are tokenized otherwise than the model was trained, without a word. It holds for
#   cl100k_base and for every own encoding that was made with its pattern.
# Tandem: Does not convert from tiktoken. The other way round it makes a tiktoken twin for speed, and takes it only
#   where both give the same ids for texts that engines cut differently (TiktokenTwin in pipeline/tokenizer/encode.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 tiktoken==0.14.0 tokenizers==0.23.3 blobfile==3.3.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import inspect
import random
import re

import tiktoken
import tiktoken_ext.openai_public
from tokenizers import Tokenizer
from transformers.integrations.tiktoken import convert_tiktoken_to_fast

# The pattern is read from tiktoken itself; the function would also download the ranks.
source = inspect.getsource(tiktoken_ext.openai_public.cl100k_base)
pattern = re.search(r'"pat_str": r"""(.*?)"""', source).group(1)
print("pattern of cl100k_base:", pattern)
assert r"\p{N}{1,3}+" in pattern, "no longer holds: tiktoken has another pattern"

# A small vocabulary: all bytes, merges of all numbers of two and three digits (as cl100k_base has them) and of words.
ranks = {bytes([byte]): byte for byte in range(256)}
numbers = random.Random(0)


def add(text):
    data = text.encode()
    for length in range(2, len(data) + 1):
        ranks.setdefault(data[:length], len(ranks))


three_digits = [f"{number:03}" for number in range(1000)]
numbers.shuffle(three_digits)  # a merge's rank says how common it was, not how large the number is
for text in three_digits + [" the", " price", " of", "The", " is", " dogs", "it", "'s"]:
    add(text)
special = {"<|endoftext|>": len(ranks)}


def pair(pattern, folder):
    """Return tiktoken's encoding with this pattern and the copy that transformers makes of it."""
    encoding = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    convert_tiktoken_to_fast(encoding, folder)
    return encoding, Tokenizer.from_file(f"{folder}/tokenizer.json")


def words(encoding, ids):
    return [encoding.decode([token]) for token in ids]


def differing(encoding, copy, texts):
    return sum(encoding.encode(text) != copy.encode(text, add_special_tokens=False).ids for text in texts)


encoding, copy = pair(pattern, "as_it_is")
greedy, greedy_copy = pair(pattern.replace("{1,3}+", "{1,3}"), "without_plus")
for text in ("1234567", "The price is 2026"):
    print(f"{text!r} in tiktoken:", words(encoding, encoding.encode(text)))
    print(f"{text!r} in the copy:", words(encoding, copy.encode(text, add_special_tokens=False).ids))
prose = ["The price of the dogs", "it's the price,\n\n  of 123 dogs!", "The   dogs\t is\r\n\r\n12 ", " 7 \n", "it'S"]
long_numbers = [str(numbers.randrange(10**3, 10**9)) for _ in range(500)]
in_prose, in_numbers = differing(encoding, copy, prose), differing(encoding, copy, long_numbers)
mended = differing(greedy, greedy_copy, prose + long_numbers)
unchanged = sum(encoding.encode(text) != greedy.encode(text) for text in prose + long_numbers)
print("texts of prose that differ:", in_prose, "of", len(prose))
print("numbers that differ:", in_numbers, "of", len(long_numbers))
print("that differ with {1,3} in place of {1,3}+:", mended)
print("that tiktoken itself cuts otherwise with {1,3}:", unchanged)
cut = words(encoding, copy.encode("The price is 2026", add_special_tokens=False).ids)
assert words(encoding, encoding.encode("The price is 2026"))[-2:] == ["202", "6"]
assert cut[-2:] == ["20", "26"], "no longer holds: the copy cuts a year as tiktoken does"
assert in_numbers > 100, "no longer holds: the numbers agree"
assert in_prose == 0 and mended == 0 and unchanged == 0, "the control differs"
PROGRAM
