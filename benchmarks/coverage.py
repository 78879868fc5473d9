"""How often the 95 % intervals hold the truth: of tasks' shares, means over tasks, seed verdicts and the ladder's power law.

    python benchmarks/coverage.py [--draws 1000] [shares means seeds ladders]

The shares' coverage is summed exactly, the rest drawn with a fixed seed. Prints Markdown tables: docs/log.md has the last ones.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ladder import fit_power_law
from pipeline.evals.intervals import interval, mean_interval, share_interval
from pipeline.report.comparison import difference

FLOORS, EXPONENTS, NOISES = (0.0, 0.3, 0.6, 1.0, 1.5), (0.05, 0.12, 0.2, 0.3), (0.001, 0.002, 0.004)
SIZES, TIMES, DECADES = (3, 4, 5, 6), (3, 10, 30), 1.5
NAMED = (0.6, 0.12)  # floor and exponent of the law that a table of its own is made for
CHAT = (0.25, 0.25, 0.25, 0.0, 0.0)  # baselines of ChatCORE's tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    tables = {"shares": shares, "means": means, "seeds": seeds, "ladders": ladders}
    parser.add_argument("tables", nargs="*", choices=[[], *tables], metavar="shares means seeds ladders")
    arguments = parser.parse_args()
    for name in arguments.tables or tables:
        print_table(*tables[name](arguments.draws))


def shares(_: int) -> tuple[list[str], list[list[str]]]:
    """Shares from 0.002 to 0.5, 200 of them evenly by their logarithm."""
    rows = []
    for n in (24, 32, 50, 100, 200, 500):
        ends = np.array([share_interval(right, n) for right in range(n + 1)])
        ways = np.array([math.log(math.comb(n, right)) for right in range(n + 1)])
        right, covered, width = np.arange(n + 1), [], []
        truths = np.geomspace(0.002, 0.5, 200)
        for truth in truths:
            chances = np.exp(ways + right * math.log(truth) + (n - right) * math.log1p(-truth))
            covered.append(chances[(ends[:, 0] <= truth) & (truth <= ends[:, 1])].sum())
            width.append((chances * (ends[:, 1] - ends[:, 0])).sum())
        worst = int(np.argmin(covered))
        rows.append([f"{n}", of_100(np.mean(covered)), f"{of_100(covered[worst])} at {truths[worst]:.3f}", f"{np.mean(np.array(covered) >= 0.93):.0%}", f"{np.mean(width):.3f}"])  # fmt: skip
    return ["items", "covered, mean", "covered, worst share", "shares covered 93 % or more", "mean width"], rows


def means(draws: int) -> tuple[list[str], list[list[str]]]:
    """Means over tasks of one number of items; CORE's too, which draws its items again."""
    rows = []
    cases = {
        "ChatCORE, a small model": ([0.3, 0.25, 0.27, 0.02, 0.01], CHAT),
        "ChatCORE, a good model": ([0.8, 0.6, 0.5, 0.4, 0.2], CHAT),
        "ChatCORE, nearly all right": ([0.95, 0.98, 0.9, 0.9, 0.8], CHAT),
        "five tasks, 1 % right": ([0.01] * 5, [0.0] * 5),
        "five tasks, 0.2 % right": ([0.002] * 5, [0.0] * 5),
    }
    for (name, (truths, baselines)), n in itertools.product(cases.items(), (24, 100, 500)):
        slopes = 1 / (1 - np.array(baselines))
        truth = float(np.mean((np.array(truths) - baselines) * slopes))
        held, width = 0, 0.0
        for right in np.random.default_rng(0).binomial(n, truths, size=(draws, len(truths))):
            value = float(np.mean((right / n - baselines) * slopes))
            low, high = mean_interval([(int(r), n) for r in right], slopes=slopes.tolist(), value=value)
            held, width = held + (low <= truth <= high), width + high - low
        rows.append([name, f"{n}", of_100(held / draws), f"{width / draws:.4f}"])
    truths, baselines = np.array([0.25] * 12 + [0.01] * 10), np.array([0.25] * 12 + [0.0] * 10)
    for n in (24, 100, 500):
        rng, held, width = np.random.default_rng(0), 0, 0.0
        truth = float(np.mean((truths - baselines) / (1 - baselines)))
        for right in rng.binomial(n, truths, size=(draws, len(truths))):
            again = rng.binomial(n, right / n, size=(2000, len(truths))) / n
            low, high = interval(np.mean((again - baselines) / (1 - baselines), axis=1))
            held, width = held + (low <= truth <= high), width + high - low
        rows.append(["CORE of a small model", f"{n}", of_100(held / draws), f"{width / draws:.4f}"])
    return ["mean", "items a task", "covered", "mean width"], rows


def seeds(draws: int) -> tuple[list[str], list[list[str]]]:
    """Runs of one recipe against runs of another that is as good: how often no difference is called."""
    rows = []
    for (one, other), comparisons in itertools.product(
        ((2, 2), (2, 3), (3, 3), (3, 5), (5, 5), (3, 1), (5, 1)), (1, 5)
    ):
        found = []
        for spread in (1.0, 2.0) if other > 1 and comparisons == 1 else (1.0,):
            rng, quiet = np.random.default_rng(0), 0
            for _ in range(draws):
                tables = [difference(rng.normal(1, 0.002, one), rng.normal(1, 0.002 * spread, other), comparisons=comparisons) for _ in range(comparisons)]  # fmt: skip
                quiet += not any(said == "more than seed noise" for _, said in tables)
            found.append(of_100(quiet / draws))
        rows.append([f"{one} and {other}", f"{comparisons}", found[0], found[1] if len(found) > 1 else "-"])
    return ["runs", "comparisons in the table", "no false call", "no false call, second spread twice the first"], rows


def ladders(draws: int) -> tuple[list[str], list[list[str]]]:
    """Laws of five floors, four exponents and three noises; one more run at some times the largest size."""
    rows = []
    for sizes in SIZES:
        found = {
            truth: ladder(*truth, sizes=sizes, draws=draws) for truth in itertools.product(FLOORS, EXPONENTS, NOISES)
        }
        for n, times in enumerate(TIMES):
            at = {truth: (held[n], width[n]) for truth, (held, width) in found.items()}
            of_all = [held for held, _ in at.values()]
            worst = min(at, key=lambda truth: at[truth][0])
            named = [f"{of_100(at[(*NAMED, noise)][0])}, +-{at[(*NAMED, noise)][1]:.1%}" for noise in (NOISES[0], NOISES[-1])]  # fmt: skip
            by_noise = [np.mean([held for truth, (held, _) in at.items() if truth[2] == noise]) for noise in NOISES]
            rows.append([f"{sizes}", f"{times}", of_100(np.mean(of_all)), " / ".join(map(of_100, by_noise)), f"{of_100(at[worst][0])} ({worst[0]} + 1.8 C^-{worst[1]}, {worst[2]:.1%})",
                         f"{np.mean(np.array(of_all) >= 0.93):.0%}", f"+-{np.mean([width for _, width in at.values()]):.1%}", *named])  # fmt: skip
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ["sizes", "times the largest", "covered, mean", "by noise 0.1 / 0.2 / 0.4 %", "worst law", "laws covered 93 % or more", "mean half width"]  # fmt: skip
    return [*head, *(f"0.6 + 1.8 C^-0.12, noise {noise:.1%}" for noise in (NOISES[0], NOISES[-1]))], rows


def ladder(floor: float, exponent: float, noise: float, *, sizes: int, draws: int) -> tuple[list[float], list[float]]:
    """Return the share of further runs inside their interval, and its mean half width, at each of TIMES."""
    # Draws of its own for each law: the same ones for all move all of them together, and the mean is no better known than one law.
    rng = np.random.default_rng([sizes, *(round(10_000 * value) for value in (floor, exponent, noise))])
    x = np.geomspace(1, 10**DECADES, sizes)
    held, widths = [0] * len(TIMES), [0.0] * len(TIMES)
    measured = min(draws, 8)  # a width takes a hundred times as long as a hit
    for draw in range(draws):
        law = fit_power_law(x.tolist(), (law_at(x, floor, exponent) * np.exp(rng.normal(0, noise, sizes))).tolist())
        for n, times in enumerate(TIMES):
            further = x[-1] * times
            y = law_at(further, floor, exponent) * math.exp(rng.normal(0, noise))
            held[n] += 0.025 <= law._chance_below(math.log(y), *law._further_run(further)) <= 0.975
            if draw < measured:
                middle, low, high = law.predict(further)
                widths[n] += (high - low) / 2 / middle / measured
    return [count / draws for count in held], widths


def law_at(x, floor: float, exponent: float):
    return floor + 1.8 * x**-exponent


def of_100(share: float) -> str:
    return f"{100 * share:.1f} %"


def print_table(head: list[str], rows: Iterable[list[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")
    print(flush=True)


if __name__ == "__main__":
    main()
