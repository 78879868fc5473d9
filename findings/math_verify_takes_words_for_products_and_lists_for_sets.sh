#!/usr/bin/env bash
# Title: math-verify calls XIV and VIX equal, east and seat, the lists 3, 1, 2 and 1, 2, 3, and a date a difference.
# Packages: math-verify==0.9.0 latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2
# Guess: an answer that is no formula (a word, a name, a sequence of moves, a date) is compared as a text, and a list
#   by its order.
# Seen: the letters of a box are factors, in lower case, and may change places: XIV = VIX, ABCD = DCBA, RRL = LRR,
#   silent = listen. A list without brackets is a set: 3, 1, 2 = 1, 2, 3 and 1, 1, 2 = 1, 2, 2 = 1, 2. A
#   date is subtracted and a time divided: 2024-05-17 = 2002 and 1:30 = 2:60. In \text{} a word is a text, and lists in
#   round brackets keep their order. 2026-11-28, Python 3.11, Linux, CPU.
# Costs: a reward or accuracy over puzzles (orders, sequences of moves, Roman numbers, anagrams, dates) counts
#   wrong answers as right; a model trained on it learns that order is of no matter.
# Tandem: Does not use math-verify; its gsm8k compares the number after #### as a text (docs/evals.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 \
    antlr4-python3-runtime==4.13.2 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
venv/bin/python - <<'PROGRAM'
from math_verify import parse, verify


def equal(gold, answer):
    """Return what math-verify says of a gold answer and a model's, both in a box as such data sets have them."""
    return verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}"))


def show(title, pairs, expected):
    seen = [equal(gold, answer) for gold, answer in pairs]
    print(f"{title}:", "; ".join(f"{gold} and {answer} {same}" for (gold, answer), same in zip(pairs, seen)))
    assert seen == [expected] * len(pairs), f"no longer holds: {title}"


show("letters", [("XIV", "VIX"), ("ABCD", "DCBA"), ("RRL", "LRR"), ("silent", "listen"), ("east", "seat")], True)
lists = [("3, 1, 2", "1, 2, 3"), ("A, B, C", "C, B, A"), ("1, 1, 2", "1, 2, 2"), ("1, 1, 2", "1, 2")]
show("lists", lists, True)
show("dates and times", [("2024-05-17", "2002"), ("1:30", "2:60")], True)
print("a box with a word is read as:", parse(r"\boxed{silent}")[0], "and a date as:", parse(r"\boxed{2024-05-17}")[0])
# The controls: in \text{} a word is a text, two tuples have an order, and other letters are another product.
words = [(r"\text{listen}", r"\text{silent}"), (r"\text{XIV}", r"\text{VIX}"), ("XIV", "XVII")]
show("right to call them different", words + [("(3, 1, 2)", "(1, 2, 3)"), ("1, 2", "1, 2, 3")], False)
PROGRAM
