#!/usr/bin/env bash
# Title: To math-verify Planck's and Boltzmann's constants are equal, and so are 5 cm and 5 km, 3 hours and 3 minutes.
# Packages: math-verify==0.9.0 latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2
# Guess: verify(parse(gold), parse(answer)) compares numbers to some relative precision, and either compares units or
#   refuses to; "5 cm" against "5 km" is False.
# Seen: decimals are compared after rounding to 6 decimals, so all below 5e-7 are equal: 6.63e-34 and 1.38e-23 (as
#   LaTeX powers of ten), the masses of the electron and the proton, 0.0000004 and 0.0000001. Units are taken off both
#   sides unread, also inside \text{}: 100 m = 100 km, 3 hours = 3 minutes, 2:30 PM = 2:30 AM, and 101_2 = 101_3.
#   5 and 5% are equal as well. The other way round 1500 is not "1.5e3", which reads as 1.5 times Euler's number times
#   3, nor "1.5 million". Whole and plain fractions are exact: 4/10^7 is not 1/10^7.
#   2026-11-28, Python 3.11, Linux, CPU.
# Costs: a reward for physics or chemistry is 1 for any small number and any unit; an accuracy counts them.
#   Nothing is logged, and a check on school mathematics (fractions, roots) passes.
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
    print(f"{title}:", ", ".join(f"{gold} and {answer} {same}" for (gold, answer), same in zip(pairs, seen)))
    assert seen == [expected] * len(pairs), f"no longer holds: {title}"


small = [
    (r"6.63\times10^{-34}", r"1.38\times10^{-23}"),
    (r"9.11\times10^{-31}", r"1.67\times10^{-27}"),
    (r"0.0000004", r"0.0000001"),
]
units = [
    (r"5\text{ cm}", r"5\text{ km}"),
    (r"100m", r"100km"),
    (r"3\text{ hours}", r"3\text{ minutes}"),
    (r"2:30\text{ PM}", r"2:30\text{ AM}"),
    (r"101_2", r"101_3"),
    (r"5", r"5\%"),
]
show("equal though they are not", small + units, True)
show("not equal though they are", [("1500", "1.5e3"), ("100000", "1e5")], False)
# The controls: where numbers are whole or plain fractions, or not small, it is exact.
show("right to call them equal", [(r"\frac{1}{2}", "0.5"), (r"1.5\times10^3", "1500"), ("1.5E3", "1500")], True)
exact = [(r"4\times10^{-7}", r"1\times10^{-7}"), (r"\frac{1}{3000000}", r"\frac{1}{4000000}"), ("6.63", "1.38")]
show("right to call them different", exact, False)
PROGRAM
