"""`python -m pipeline.plan RECIPE`: the plan of a run, and every check that can be made before step 1."""

import argparse
import os
from dataclasses import replace
from functools import cache, partial

from pipeline.plan.budget import steps_within
from pipeline.plan.capacity import find_notes, find_problems, headline, memory_doubt
from pipeline.plan.machine import about_tokens_of, absent_sources, has_torch, keeps_sources, plan_of, probed
from pipeline.plan.plan import Plan
from pipeline.plan.table import plan_table, why_unknown
from pipeline.process.commands import command, program
from pipeline.process.errors import InputMissingError, TandemError, raise_errors
from pipeline.recipe import Recipe, describe_filled, read_recipe
from pipeline.recipe.schema import with_values
from pipeline.recipe.start_from import resolve_start, start_folder
from pipeline.run.attention import attention_line, choose_attention
from pipeline.run.checks import (
    attention_needs,
    cadence_notes,
    machine_problems,
    named_code_problems,
    reading_findings,
    service_findings,
    trainer_problems,
)
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.failures import exit_with_status


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=program("plan"),
        usage=(
            f"{program('plan')} RECIPE [section.key=value ...] [--probe SECONDS] [--depths 16,20,24]"
            " | [MODEL] --fit 8GB"
        ),
        description=(
            "The plan of a run and every check that can be made before step 1; fetches nothing, keeps no weights."
        ),
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe's YAML file")
    parser.add_argument(
        "overrides", metavar="section.key=value", nargs="*", default=[], help="values that replace the recipe's"
    )
    parser.add_argument(
        "--depths", metavar="D,D,...", type=_depths, help="only plans, side by side, with model.depth at these values"
    )
    parser.add_argument(
        "--probe",
        metavar="SECONDS",
        type=_seconds,
        default=0.0,
        help="measure real steps on this machine for so long, after their compilation: hours instead of an assumption",
    )
    parser.add_argument(
        "--fit",
        metavar="8GB",
        type=_card_gigabytes,
        help="what fits a card of that size; RECIPE is then a model (a folder, a Hub id, a known name) or left out",
    )
    options = parser.parse_intermixed_args(argv)
    if options.fit is not None:
        return _print_fit(options.recipe, gigabytes=options.fit)
    if options.recipe is None:
        parser.error("the following arguments are required: RECIPE")
    given = [options.recipe, *options.overrides]
    if options.depths:
        recipes = [read_recipe([*given, f"model.depth={depth}"], earlier=EarlierRuns()) for depth in options.depths]
        count = cache(partial(about_tokens_of, recipes[0]))  # the text is the same at every depth
        plans = [plan_of(recipe, count)[0] for recipe in recipes]
        print(f"plans of {options.recipe}")
        print(plan_table(plans, [f"depth {depth}" for depth in options.depths]))
        return 0
    recipe = read_recipe(given, earlier=EarlierRuns())
    if start_folder(recipe) is not None:
        recipe = resolve_start(recipe)
    probe = None
    if recipe.run.minutes is not None:
        steps, probe = steps_within(recipe)
        recipe = with_values(recipe, {"train.max_steps": steps})
    plan, is_elsewhere = plan_of(recipe, partial(about_tokens_of, recipe))
    plan = replace(plan, probe=probe)
    if options.probe and not is_elsewhere:
        plan = probed(plan, given, seconds=options.probe)
    print(headline(plan))
    print(f"plan of {options.recipe} ({recipe.stage}), run {recipe.run.name}")
    for line in describe_filled(recipe):
        print(f"  {line}")
    print(plan_table([plan]), flush=True)
    _report_checks(plan, is_elsewhere=is_elsewhere)
    return 0


def _card_gigabytes(text: str) -> float:
    gigabytes = float(text.upper().removesuffix("GB"))
    if gigabytes <= 0:
        raise ValueError
    return gigabytes


def _print_fit(model: str | None, *, gigabytes: float) -> int:
    """Print what fits the card of a model, or the largest models of the table."""
    if not has_torch():
        raise InputMissingError(
            "--fit: torch is not installed, and steps are tried with it. Install it: pip install torch"
        )
    from pipeline.plan.fit import WAYS, card_rows, config_of, fit_table, heading

    if model is not None:
        config = config_of(model)
        print(heading(model, config, gigabytes=gigabytes))
        print(fit_table(config, gigabytes=gigabytes))
        return 0
    print(f"the largest known models for a card of {gigabytes:g} GB, rows x tokens; not yet measured on a GPU")
    for way, cell in zip(WAYS, card_rows(gigabytes), strict=True):
        print(f"  {way.ljust(16)}  {cell}")
    return 0


def _seconds(text: str) -> float:
    seconds = float(text)
    if seconds < 0:
        raise ValueError
    return seconds


def _depths(text: str) -> list[int]:
    depths = [int(part) for part in text.split(",")]
    if min(depths) < 1:
        raise ValueError
    return depths


def _report_checks(plan: Plan, *, is_elsewhere: bool) -> None:
    """Print notes and what was not checked; raise the problems, all in one."""
    recipe, notes = plan.recipe, find_notes(plan)
    if plan.steps is not None:
        notes += cadence_notes(recipe, plan.steps)  # a stage prints them once its data are known
    problems: list[TandemError] = []
    findings = [reading_findings(recipe, only=_readable(recipe))]
    if not is_elsewhere:
        problems += machine_problems(plan)
        findings.insert(0, service_findings(recipe))
    problems += find_problems(plan, on_this_machine=not is_elsewhere)
    if has_torch():
        problems += [*trainer_problems(recipe), *named_code_problems(recipe)]
    for more_problems, more_notes in findings:
        problems += more_problems
        notes += more_notes
    for reason in why_unknown(plan):
        print(f"n/a: {reason}")
    for note in notes:
        print(f"note: {note}")
    for line in _not_checked(recipe, is_elsewhere=is_elsewhere):
        print(f"not checked: {line}")
    raise_errors(problems)
    if not is_elsewhere and has_torch():
        print(attention_line(*choose_attention(attention_needs(recipe), plan.device, plan.sizes)), flush=True)
    doubt = memory_doubt(plan)
    if doubt and plan.probe is None:  # a probe has made these steps
        print(f"this run may not fit: {doubt}")
    else:
        print("nothing was found that would stop this run")


def _readable(recipe: Recipe) -> list[str]:
    """Return what of the data is on this machine, to be looked into without the Hub."""
    only = ["weights"]
    if keeps_sources(recipe.data):
        only.append("sources")
    if os.path.isdir(recipe.tokenizer.path or ""):
        only += ["tokenizer", "changes"]
    return only


def _not_checked(recipe: Recipe, *, is_elsewhere: bool) -> list[str]:
    lines = []
    if not has_torch():
        lines.append("callbacks, tasks and the options of the model, which need torch. Install it: pip install torch")
    if is_elsewhere:
        lines.append(
            "this machine's device, disk and packages, since the plan is for run.hardware. To check them: "
            "run.hardware=null"
        )
    absent = absent_sources(recipe.data)
    hub = [name for name in absent if not name.startswith("tandem:")]
    if hub:
        lines.append(
            f"the data of {', '.join(hub)}, which need the network. To fetch and verify them: "
            f"{command('data', str(recipe.path))}"
        )
    elif absent:
        lines.append("the built-in data, which are made when they are first needed")
    if recipe.tokenizer.path and not os.path.isdir(recipe.tokenizer.path):
        lines.append(f"the tokenizer {recipe.tokenizer.path}, which is not on this machine")
    if recipe.model.start_from and not os.path.isdir(recipe.model.start_from):
        lines.append(f"the weights of model.start_from: {recipe.model.start_from}")
    if recipe.hub.id and is_elsewhere:
        lines.append(f"write access to {recipe.hub.id} on the Hub")
    return lines


if __name__ == "__main__":
    exit_with_status(main)
