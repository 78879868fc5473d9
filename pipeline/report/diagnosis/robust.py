"""Statistics that a few wild values do not move."""

import numpy as np

SD_OF_MAD = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
SE_OF_MEDIAN = 1.2533  # standard error of a median / that of a mean, of normal values


def median(values: np.ndarray) -> float:
    return float(np.median(values))


def noise(values: np.ndarray) -> float:
    """Robust standard deviation of the values around their own trend: from the differences of neighbours."""
    differences = np.diff(values)
    return SD_OF_MAD * median(np.abs(differences - np.median(differences))) / np.sqrt(2) if differences.size else 0.0


def windows(values: np.ndarray, count: int) -> np.ndarray:
    """Medians of `count` windows of (nearly) equal length, in order."""
    return np.array([np.median(part) for part in np.array_split(values, count)])


def error_of_difference(values: np.ndarray, length: int) -> float:
    """Standard error of the difference of the medians of two windows of that length."""
    return SE_OF_MEDIAN * noise(values) * float(np.sqrt(2 / length))
