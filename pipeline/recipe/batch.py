"""The global batch in rows, step by step: it may begin smaller and grow (optimizer.schedule.batch_warmup_steps)."""

from bisect import bisect_right
from dataclasses import dataclass

KEY = "train.per_device_train_batch_size"


@dataclass(frozen=True)
class StepRows:
    """Rows of each optimizer step, zero-based, over all processes: `full`, and in the first warmup_steps fewer. They
    begin halved `halvings` times, and are doubled after every warmup_steps / halvings steps. Arithmetic alone: a
    resume needs only the step.

    Source: batch size warmup, arXiv 2505.23971 (OLMo); modded-nanogpt PR 163.
    """

    full: int
    warmup_steps: int = 0
    halvings: int = 0

    def at(self, step: int) -> int:
        return self.full >> halvings_at(step, warmup_steps=self.warmup_steps, halvings=self.halvings)

    def before(self, step: int) -> int:
        """Return rows of the first `step` steps."""
        rows = max(0, step - self.warmup_steps) * self.full
        for part in range(self.halvings):
            first, end = (min(step, -(-n * self.warmup_steps // self.halvings)) for n in (part, part + 1))
            rows += (end - first) * (self.full >> (self.halvings - part))
        return rows

    def steps(self, rows: int) -> int:
        """Return how many whole steps so many rows make."""
        beyond = rows - self.before(self.warmup_steps)
        if beyond >= 0:
            return self.warmup_steps + beyond // self.full
        return bisect_right(range(self.warmup_steps + 1), rows, key=self.before) - 1


def halvings_at(step: int, *, warmup_steps: int, halvings: int) -> int:
    """Return how many times the batch of a step is halved."""
    return halvings - step * halvings // warmup_steps if step < warmup_steps else 0
