"""Runs inside of a time budget: the steps of run.minutes, and the schedule of a first run on files of one's own."""

import json
import math
import time
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from pipeline.hardware.device import batch_ranks
from pipeline.plan.machine import about_tokens_of, plan_of, probed
from pipeline.plan.plan import BYTES_A_TOKEN, FORWARD, START_S, Plan
from pipeline.plan.probe import Probe
from pipeline.process.errors import RecipeError
from pipeline.recipe import Recipe, read_recipe
from pipeline.recipe.resolve import Stage
from pipeline.recipe.schema import with_values
from pipeline.recipe.start_from import resolve_start
from pipeline.run_dir.earlier_runs import EarlierRuns

SCORINGS = 5  # and one before the first step
LEAST_STEPS = 5  # between two of them: a scoring and a checkpoint cost more than some steps of a small model
LEAST_CHAT_STEPS = 100  # 60 chats in 5 steps taught nothing, in 40 smaller ones the right answers (docs/log.md)
MOST_PASSES = 10  # over few chats
PROBE_S = 5.0  # of steps, after their compilation, which the training then finds in the cache
SHARE_OF_STEPS = 0.75  # of the budget beside the start; the rest: scoring, saving, tokenizer, data
SHARE_OF_SCORING = 0.1
LEAST_SCORED = 2**13  # tokens: fewer and the score is noise


@dataclass(frozen=True)
class Schedule:
    """Keys of a recipe by their dotted names, and what is known of the run.

    steps: None where the data do not say. minutes: of the whole run; measured: by steps made here, else by arithmetic.
    """

    keys: dict[str, Any]
    steps: int | None
    passes: float
    minutes: float | None
    measured: bool


def schedule_of(words: list[str], *, stage: Stage, minutes: float | None) -> Schedule:
    """Return the schedule of the recipe of a command line. minutes: its budget, None for as long as the recipe takes.

    Raises TandemError where the data or the model to start from cannot be read.
    """
    planner, keys = _Planner(words, stage), dict[str, Any]()
    plan = planner.plan(keys)

    # 1. Few chats are read in smaller steps, then more often.
    if stage == "sft":
        row_tokens, batch, ranks = plan.recipe.data.row_tokens, plan.batch_tokens, batch_ranks(plan.processes)
        while plan.steps is not None and plan.steps < LEAST_CHAT_STEPS and batch >= 2 * ranks * row_tokens:
            batch //= 2
            rows = batch // row_tokens // ranks
            keys |= {"data.batch_tokens": batch, "train.per_device_train_batch_size": rows}
            plan = planner.plan(keys)
        if plan.steps is not None and plan.steps < LEAST_CHAT_STEPS:
            passes = plan.recipe.train["num_train_epochs"] * LEAST_CHAT_STEPS / max(1, plan.steps)
            keys["train.num_train_epochs"] = min(MOST_PASSES, math.ceil(passes))
            plan = planner.plan(keys)

    # 2. A budget: the steps that fit into it, and as much text to score as a tenth of it allows.
    if minutes is not None:
        planner.probe = probed(plan, planner.given(keys), seconds=PROBE_S).probe
        keys |= _within(planner.plan(keys), 60 * minutes)
    plan = planner.plan(keys)
    keys |= _cadences(plan)
    plan = planner.plan(keys)
    if minutes is not None and "train.max_steps" in keys and plan.duration is not None and plan.probe is not None:
        # What the plan has beside the steps (saves, the least that is worth scoring) takes its time from them.
        beyond = plan.duration.total - 60 * minutes
        if beyond > 0:
            keys["train.max_steps"] = max(LEAST_STEPS, int(keys["train.max_steps"] - beyond / plan.probe.step_s))
            keys |= _cadences(planner.plan(keys))
            plan = planner.plan(keys)
    return Schedule(
        keys,
        steps=plan.steps,
        passes=plan.recipe.train.get("num_train_epochs") or 0.0,
        minutes=None if plan.duration is None else plan.duration.total / 60,
        measured=plan.probe is not None,
    )


def steps_within(recipe: Recipe) -> tuple[int, Probe | None]:
    """Return the steps with which the run of run.minutes ends in time, and what was measured for it.

    A run that has begun keeps its steps. Where run.hardware is another machine, they follow by arithmetic.

    Raises RecipeError where steps cannot be measured or no time is left for them.
    """
    assert recipe.run.minutes is not None
    begun = EarlierRuns().previous_attempt(recipe.run.directory, recipe.run.name)
    if "train.max_steps" in begun:
        return begun["train.max_steps"], None
    began, where = time.monotonic(), recipe.where("run.minutes")
    count = cache(partial(about_tokens_of, recipe))
    plan, is_elsewhere = plan_of(recipe, count)
    probe = None if is_elsewhere else probed(plan, recipe.arguments, seconds=PROBE_S).probe
    if probe is None and not is_elsewhere:
        raise RecipeError(f"{where}: steps cannot be measured here, so their number is open. Give train.max_steps.")

    limit = 60 * recipe.run.minutes - (time.monotonic() - began)

    def seconds_of(steps: int) -> float:
        made, _ = plan_of(with_values(recipe, {"train.max_steps": steps}), count)
        duration = replace(made, probe=probe).duration
        if duration is None:
            raise RecipeError(f"{where}: the speed of {made.device.name} is not known. Give train.max_steps.")
        return duration.total

    # What a step takes with its share of scorings and saves, between a short run and a long one; then once more between
    # the short one and the guess, as cadences make the line a stair.
    least, most = seconds_of(LEAST_STEPS), 1000 * LEAST_STEPS
    if least > limit:
        needed = math.ceil((least + time.monotonic() - began) / 60)
        raise RecipeError(
            f"{where}: measuring and {LEAST_STEPS} steps with start, scoring and saves take {needed} minutes. Give "
            "more, or lower evals.bpb.tokens."
        )
    for _ in range(2):
        step_s = (seconds_of(most) - least) / (most - LEAST_STEPS)
        most = LEAST_STEPS + max(1, int((limit - least) / step_s))
    how = "by arithmetic" if is_elsewhere else "as measured here"
    print(f"{where}: {most:,} steps, about {seconds_of(most) / 60:.1f} minutes {how}", flush=True)
    return most, probe


class _Planner:
    """Makes plans of one recipe with other keys; its data are looked at once for a number of passes."""

    def __init__(self, words: list[str], stage: Stage):
        self.words, self.stage = words, stage
        self.probe: Probe | None = None
        self._tokens: dict[float, tuple[float | None, int | None]] = {}

    def given(self, keys: dict[str, Any]) -> list[str]:
        return [*self.words, *(f"{key}={json.dumps(value)}" for key, value in keys.items())]

    def plan(self, keys: dict[str, Any]) -> Plan:
        recipe = resolve_start(read_recipe(self.given(keys), stage=self.stage, earlier=EarlierRuns()))
        plan, _ = plan_of(recipe, lambda: self._about_tokens(recipe))
        return replace(plan, probe=self.probe)

    def _about_tokens(self, recipe: Recipe) -> tuple[float | None, int | None]:
        passes = recipe.train.get("num_train_epochs") or 1.0
        if passes not in self._tokens:
            self._tokens[passes] = about_tokens_of(recipe)
        return self._tokens[passes]


def _cadences(plan: Plan) -> dict[str, Any]:
    """Return how often a short run is scored and saved; nothing for one that the shipped recipe suits."""
    if plan.steps is None or plan.steps >= SCORINGS * plan.recipe.train["eval_steps"]:
        return {}
    every = max(LEAST_STEPS, plan.steps // SCORINGS)
    return {"train.eval_steps": every, "train.save_steps": every}


def _within(plan: Plan, seconds: float) -> dict[str, Any]:
    """Return the keys by which the run ends in so many seconds; none of steps where its passes fit anyway."""
    if plan.probe is None:
        return {}
    left = seconds - START_S[plan.device.kind] - plan.probe.first_step_s
    token_s = plan.probe.step_s / plan.batch_tokens
    keys: dict[str, Any] = {}
    # Scoring a token takes a third of training on it; bits per byte are scored of rows and of documents.
    scored = SHARE_OF_SCORING * left / ((SCORINGS + 1) * FORWARD * token_s) / 2
    if scored < plan.recipe.evals.bpb.tokens:
        tokens = max(LEAST_SCORED, int(scored))
        keys = {"evals.bpb.tokens": tokens, "evals.bpb.document_bytes": round(tokens * BYTES_A_TOKEN)}
    steps = max(LEAST_STEPS, int(SHARE_OF_STEPS * left / plan.probe.step_s))
    if plan.steps is None or steps < plan.steps:
        keys |= {"train.max_steps": steps, "train.num_train_epochs": None}
    return keys
