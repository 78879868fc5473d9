"""The schedule of a first run on files of one's own: steps, batch and cadences, inside of a time budget."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from pipeline.hardware.device import batch_ranks
from pipeline.plan.__main__ import about_tokens_of, plan_of, probed
from pipeline.plan.plan import BYTES_A_TOKEN, FORWARD, START_S, Plan
from pipeline.plan.probe import Probe
from pipeline.recipe import Recipe, read_recipe
from pipeline.recipe.resolve import Stage
from pipeline.recipe.start_from import resolve_start
from pipeline.run_dir.earlier_runs import EarlierRuns

SCORINGS = 5  # and one before the first step
LEAST_STEPS = 5  # between two of them: a scoring and a checkpoint cost more than some steps of a small model
# 60 chats in 5 steps taught nothing, in 40 smaller ones the right answers; so with 50 kB of text (docs/log.md)
LEAST_FIRST_STEPS = 100
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

    # 1. Little is read in smaller steps; few chats then more often, which text does not bear (docs/epochs.md).
    row_tokens, batch, ranks = plan.recipe.data.row_tokens, plan.batch_tokens, batch_ranks(plan.processes)
    while plan.steps is not None and plan.steps < LEAST_FIRST_STEPS and batch >= 2 * ranks * row_tokens:
        batch //= 2
        rows = batch // row_tokens // ranks
        keys |= {"data.batch_tokens": batch, "train.per_device_train_batch_size": rows}
        plan = planner.plan(keys)
    if stage == "sft" and plan.steps is not None and plan.steps < LEAST_FIRST_STEPS:
        passes = plan.recipe.train["num_train_epochs"] * LEAST_FIRST_STEPS / max(1, plan.steps)
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
