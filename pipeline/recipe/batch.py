"""The global batch: rows of each optimizer step, micro-batches, and whether documents of a row see each other."""

import math
from bisect import bisect_right
from dataclasses import dataclass

from pipeline.recipe.schema import Recipe, Schedule

KEY, AUTO = "train.per_device_train_batch_size", "auto"


def rows_per_step(recipe: Recipe) -> int:
    """Return rows of one optimizer step over all processes. data.batch_tokens must be known."""
    assert recipe.data.batch_tokens, "data.batch_tokens is known once the number of processes is"
    return recipe.data.batch_tokens // recipe.data.row_tokens


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


def step_rows(recipe: Recipe, batch_tokens: int | None = None) -> StepRows:
    """Return the rows of the run's steps. batch_tokens: where data.batch_tokens is not known yet."""
    schedule = recipe.optimizer.schedule if recipe.optimizer.type != "trainer" else Schedule()
    full = rows_per_step(recipe) if batch_tokens is None else batch_tokens // recipe.data.row_tokens
    warmup = schedule.batch_warmup_steps
    return StepRows(full, warmup, schedule.batch_halvings if warmup else 0)


def tokens_at(recipe: Recipe, step: int) -> int:
    """Return row positions of the first `step` steps. data.batch_tokens must be known."""
    return step_rows(recipe).before(step) * recipe.data.row_tokens


def isolates_documents(recipe: Recipe) -> bool:
    """Return whether the documents of a packed row do not see each other: positions restart, and attention ends there.

    Rows of one text each have nothing to keep apart.
    """
    return (recipe.stage == "sft" or recipe.data.isolate_documents) and not recipe.data.one_text_rows


def is_auto(recipe: Recipe) -> bool:
    """Return whether the micro-batch is to be found (plan/memory.py)."""
    return recipe.train.get("per_device_train_batch_size") == AUTO


def micro_batch(recipe: Recipe) -> int:
    """Return rows of one forward pass of one process: as given, or what `auto` came to."""
    rows = recipe.micro_batch if is_auto(recipe) else recipe.train["per_device_train_batch_size"]
    assert rows is not None, "auto is a number once the plan is made"
    return rows


def micro_steps(recipe: Recipe, world_size: int) -> int:
    """Return the micro-steps of an optimizer step: its rows dealt to world_size processes, the last one filled up."""
    return math.ceil(rows_per_step(recipe) / (world_size * micro_batch(recipe)))


def with_batch_tokens(recipe: Recipe, world_size: int) -> int:
    """Return the global batch in tokens: as given, or computed from train.gradient_accumulation_steps and the
    processes."""
    if recipe.data.batch_tokens:
        return recipe.data.batch_tokens
    return world_size * micro_batch(recipe) * recipe.train["gradient_accumulation_steps"] * recipe.data.row_tokens
