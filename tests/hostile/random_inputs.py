"""Random inputs by the combinators of hypothesis.strategies, for runs of 100,000: nothing is remembered, mutated or shrunk.

An input costs a fifth of what hypothesis takes to draw it. A strategy makes each value anew from a random.Random.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

MOST = 8  # elements of what has no max_size
# Code points of each text come from one or two of these: ASCII, controls, Latin, Greek to Arabic, marks, CJK, symbols, private, emoji.
PLANES = [(0x20, 0x7E), (0x20, 0x7E), (0, 0x1F), (0x7F, 0x24F), (0x370, 0x6FF), (0x300, 0x36F), (0x4E00, 0x9FFF), (0x2000, 0x2BFF), (0xE000, 0xFFFF), (0x1F300, 0x1FAFF), (0x10000, 0x10FFFF)]  # fmt: skip
INTEGERS = [0, 1, -1, 2, 10, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-9, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan")]


@dataclass(frozen=True)
class Strategy:
    draw: Callable[[Random], Any]

    def map(self, change: Callable[[Any], Any]) -> "Strategy":
        return Strategy(lambda random: change(self.draw(random)))


def just(value: Any) -> Strategy:
    return Strategy(lambda random: value)


def none() -> Strategy:
    return just(None)


def booleans() -> Strategy:
    return Strategy(lambda random: random.random() < 0.5)


def sampled_from(values: Iterable[Any]) -> Strategy:
    kept = list(values)
    return Strategy(lambda random: kept[int(random.random() * len(kept))])


def one_of(*options: Any) -> Strategy:
    kept = list(options[0]) if len(options) == 1 and not isinstance(options[0], Strategy) else list(options)
    return Strategy(lambda random: kept[int(random.random() * len(kept))].draw(random))


def integers(low: int | None = None, high: int | None = None) -> Strategy:
    if low is not None and high is not None:
        edges = [low, high, *(value for value in INTEGERS if low <= value <= high)]
        return Strategy(lambda random: random.choice(edges) if random.random() < 0.1 else random.randint(low, high))
    return Strategy(lambda random: random.choice(INTEGERS) if random.random() < 0.2 else random.choice([1, -1]) * random.getrandbits(random.randint(1, 128)))  # fmt: skip


def floats(low: float | None = None, high: float | None = None) -> Strategy:
    if low is not None and high is not None:
        return Strategy(lambda random: random.choice([low, high]) if random.random() < 0.1 else random.uniform(low, high))  # fmt: skip
    of_bits = Strategy(lambda random: struct.unpack("d", random.randbytes(8))[0])
    return one_of(sampled_from(FLOATS), of_bits, floats(-1e4, 1e4))


def text(alphabet: str | None = None, *, min_size: int = 0, max_size: int = MOST) -> Strategy:
    def draw(random: Random) -> str:
        size = random.randint(min_size, max_size)
        if alphabet:
            return "".join(random.choices(alphabet, k=size))
        planes = [random.choice(PLANES), random.choice(PLANES)]
        points = (random.randint(*planes[random.random() < 0.2]) for _ in range(size))
        return "".join(map(chr, points))

    return Strategy(draw)


def lists(element: Strategy, *, min_size: int = 0, max_size: int = MOST) -> Strategy:
    return Strategy(lambda random: [element.draw(random) for _ in range(random.randint(min_size, max_size))])


def dictionaries(key: Strategy, value: Strategy, *, max_size: int = MOST) -> Strategy:
    return Strategy(lambda random: {key.draw(random): value.draw(random) for _ in range(random.randint(0, max_size))})


def fixed_dictionaries(always: dict[str, Strategy], *, optional: dict[str, Strategy] | None = None) -> Strategy:
    def draw(random: Random) -> dict[str, Any]:
        chosen = {name: value for name, value in (optional or {}).items() if random.random() < 0.5}
        return {name: value.draw(random) for name, value in {**always, **chosen}.items()}

    return Strategy(draw)


def builds(make: Callable[..., Any], *given: Strategy) -> Strategy:
    return Strategy(lambda random: make(*(one.draw(random) for one in given)))


def recursive(leaves: Strategy, inside: Callable[[Strategy], Strategy], *, depth: int = 3) -> Strategy:
    """Leaves, and trees of them at most `depth` deep."""
    tree = leaves
    for _ in range(depth):
        tree = one_of(leaves, leaves, inside(tree))
    return tree


def composite(make: Callable[..., Any]) -> Callable[..., Strategy]:
    """As hypothesis.strategies.composite: the function's first argument draws from a strategy."""

    def strategy(*given: Any, **keys: Any) -> Strategy:
        return Strategy(lambda random: make(lambda one: one.draw(random), *given, **keys))

    return strategy


def in_processes(work: Callable[..., Any], shares: Sequence[tuple]) -> list[Any]:
    """Return what the work gives of each share, in a process of its own where there are several."""
    if len(shares) == 1:
        return [work(*shares[0])]
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(len(shares)) as pool:
        return pool.starmap(work, shares)
