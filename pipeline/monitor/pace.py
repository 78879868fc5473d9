"""The moments at which to sample, and the rate that was reached."""

import time

HIGHEST_HZ = 100.0  # the driver itself renews most numbers less often


class Pace:
    """Every 1/hz seconds; a moment that was missed is not made up for.

    Times are seconds since 1970 that never go back, whatever is done to the system's clock.
    """

    def __init__(self, hz: float):
        self.period_s = 1 / hz
        self._offset_s = time.time() - time.monotonic()
        self._due_s = time.monotonic()
        self.samples = 0
        self._first_s = self._last_s = 0.0

    def skip(self) -> None:
        """Set the next sample to one period from now."""
        self._due_s = time.monotonic() + self.period_s

    def wait_s(self) -> float:
        """Return the seconds until the next sample is due."""
        return max(self._due_s - time.monotonic(), 0.0)

    def mark(self) -> float:
        """Return the time of the sample that is taken now, in seconds since 1970."""
        now = time.monotonic()
        self._due_s = max(self._due_s + self.period_s, now)
        self._last_s = now
        if not self.samples:
            self._first_s = now
        self.samples += 1
        return now + self._offset_s

    def summary(self) -> str:
        """Return how many samples were taken, and at which rate, in words."""
        seconds = self._last_s - self._first_s
        rate = f" at {(self.samples - 1) / seconds:.2f} Hz" if self.samples > 1 and seconds > 0 else ""
        return f"{self.samples:,} samples{rate} ({1 / self.period_s:g} Hz asked for)"
