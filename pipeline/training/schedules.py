"""Rates over the run: every value is a pure function of the zero-based step, so a resume needs nothing but the
step."""

import math
from typing import Any

from pipeline.metrics import Numbers
from pipeline.recipe.batch import halvings_at
from pipeline.recipe.schema import Schedule

# nanochat's, tuned with its rates: Muon's momentum starts here, and falls to here while the rates fall.
FIRST_MOMENTUM = 0.85
LAST_MOMENTUM = 0.90


def decay_progress(schedule: Schedule, step: int, max_steps: int) -> float:
    """Return how far the fall of the rates is: 0 up to its first step, 1 at `max_steps`, which is after the last
    step."""
    # The last decay_fraction of the steps: 0 at step max_steps - decay_steps, 1 at max_steps.
    decay_steps = round(schedule.decay_fraction * max_steps)
    if decay_steps == 0:
        return 0.0
    return min(1.0, max(0.0, (step - (max_steps - decay_steps)) / decay_steps))


def learning_rate_multiplier(schedule: Schedule, step: int, max_steps: int) -> float:
    """Return lrm(step): linear warm-up, 1, then the fall to final_fraction; the lower of the two where they overlap.
    Smaller batches at the beginning make it smaller.
    """
    # 1. The fall at the end, from 1 to final_fraction.
    p = decay_progress(schedule, step, max_steps)
    if schedule.decay == "linear":
        falling = 1 - p
    elif schedule.decay == "cosine":
        falling = 0.5 * (1 + math.cos(math.pi * p))
    else:
        falling = 1 - math.sqrt(p)
    multiplier = falling + (1 - falling) * schedule.final_fraction
    # 2. The warm-up: the first step makes an update already.
    if step < schedule.warmup_steps:
        multiplier = min(multiplier, (step + 1) / schedule.warmup_steps)
    # 3. Batches that are 2^halvings smaller: rates follow the root of the batch, as those of the depth dial do.
    halvings = halvings_at(step, warmup_steps=schedule.batch_warmup_steps, halvings=schedule.batch_halvings)
    return multiplier * 0.5 ** (halvings / 2)


def muon_momentum(schedule: Schedule, step: int, max_steps: int, *, peak: float) -> float:
    """Return 0.85 rising to `peak` over momentum_warmup_steps, falling to 0.90 with the rates; never above `peak`."""
    # 1. From the peak to 0.90, as the rates fall.
    p = decay_progress(schedule, step, max_steps)
    momentum = (1 - p) * peak + p * min(LAST_MOMENTUM, peak)
    # 2. At the beginning from 0.85 to the peak.
    if step < schedule.momentum_warmup_steps:
        p = step / schedule.momentum_warmup_steps
        momentum = min(momentum, (1 - p) * min(FIRST_MOMENTUM, peak) + p * peak)
    return momentum


def weight_decay_multiplier(schedule: Schedule, step: int, max_steps: int) -> float:
    """Return what Muon's weight decay is multiplied with: 1, or half a cosine from 1 to 0 over the whole run."""
    if schedule.weight_decay == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / max_steps)))


def apply_schedule(optimizer: Any, schedule: Schedule, step: int, max_steps: int) -> None:
    """Set lr, and for Muon's groups momentum and weight_decay, to what the update of `step` (zero-based) uses.

    Reads only settings that no schedule changes: initial_lr of every group, peak_momentum and initial_weight_decay of
    Muon's.
    """
    multiplier = learning_rate_multiplier(schedule, step, max_steps)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * multiplier
        if group.get("kind") == "muon":
            peak = group["peak_momentum"]
            group["momentum"] = muon_momentum(schedule, step, max_steps, peak=peak)
            decay = weight_decay_multiplier(schedule, step, max_steps)
            group["weight_decay"] = group["initial_weight_decay"] * decay


class StepSchedule:
    """apply_schedule in the shape that Trainer expects of a scheduler: stepped once after every optimizer step.

    It counts the updates that were made: Trainer leaves out the call when the fp16 scaler skipped the update.
    """

    def __init__(self, optimizer: Any, schedule: Schedule, max_steps: int):
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_steps = max_steps
        self.next_step = 0
        apply_schedule(optimizer, schedule, 0, max_steps)

    def step(self) -> None:
        self.next_step += 1
        apply_schedule(self.optimizer, self.schedule, self.next_step, self.max_steps)

    def multiplier(self, step: int) -> float:
        """Return lrm of the update of `step` (zero-based)."""
        return learning_rate_multiplier(self.schedule, step, self.max_steps)

    def get_last_lr(self) -> list[float]:
        """Return the rate of every group for the coming update."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_step = state["next_step"]
        apply_schedule(self.optimizer, self.schedule, self.next_step, self.max_steps)


def logged_rates(scheduler: Any, *, trainer_rate: float, peak: float, skipped: bool) -> Numbers:
    """Return optim/lr, the first group's rate, and the multiplier lrm of the step just made.

    trainer_rate, peak: of transformers' own schedulers. skipped: whether the fp16 scaler skipped the update.
    """
    if not isinstance(scheduler, StepSchedule):
        return {"optim/lr": trainer_rate, "optim/lrm": trainer_rate / peak if peak else 0.0}
    # The schedule counts updates: fewer than steps once the fp16 scaler has skipped some.
    last = scheduler.next_step if skipped else scheduler.next_step - 1
    multiplier = scheduler.multiplier(last)
    groups = scheduler.optimizer.param_groups
    rates = {f"optim/lr/{group['name']}": group["initial_lr"] * multiplier for group in groups}
    return {"optim/lr": next(iter(rates.values())), "optim/lrm": multiplier, **rates}
