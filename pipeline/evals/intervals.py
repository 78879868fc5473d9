"""How sure an accuracy is: by drawing its items again."""

import numpy as np

DRAWS = 2000


def bootstrap_means(correct: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """(DRAWS,) accuracies of as many items drawn from these with replacement; the same for the same seed.

    Of right and wrong only their number matters, so each draw is one from a binomial distribution.
    """
    return np.random.default_rng(seed).binomial(len(correct), correct.mean(), size=DRAWS) / len(correct)


def interval(draws: np.ndarray) -> tuple[float, float]:
    """The middle 95 %."""
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)
