"""`python -m pipeline.preflight RECIPE`: the plan of a run, and every check that can be made before step 1."""

import argparse
import importlib.util
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from pipeline.hardware.device import DeviceInfo, device_without_torch, leave_accelerators, planned_device
from pipeline.preflight.checks import cadence_notes
from pipeline.preflight.plan import Plan, make_plan, scored_at_most
from pipeline.preflight.plan_table import duration_range, layout_table, plan_table, probe_line, why_unknown
from pipeline.preflight.probe import NotMeasured, keep, measure
from pipeline.process.commands import command, program, whole_number
from pipeline.process.errors import RecipeError, TandemError, refuse
from pipeline.process.storage import cache_dir, can_be_made
from pipeline.recipe import Recipe, describe_filled, read_recipe
from pipeline.recipe.schema import Source
from pipeline.recipe.start_from import resolve_start, start_folder
from pipeline.run_dir.failures import exit_with_status

PROBE_S = 10.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=program("plan"),
        usage=f"{program('plan')} RECIPE [section.key=value ...] [--probe SECONDS] [--depths 16,20,24]",
        description="The plan of a run and every check that can be made before step 1; fetches nothing, keeps no weights.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's YAML file")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="values that replace the recipe's")
    parser.add_argument(
        "--depths", metavar="D,D,...", type=_depths, help="only plans, side by side, with model.depth at these values"
    )
    parser.add_argument(
        "--probe",
        metavar="SECONDS",
        type=_seconds,
        default=PROBE_S,
        help=f"how long to measure real steps on this machine, beside their compilation (default {PROBE_S:.0f}; 0: not at all)",
    )
    options = parser.parse_intermixed_args(argv)
    given = [options.recipe, *options.overrides]
    if options.depths:
        recipes = [read_recipe([*given, f"model.depth={depth}"]) for depth in options.depths]
        count = cache(partial(_about_tokens, recipes[0]))  # the text is the same at every depth
        plans = [_plans(recipe, count)[0] for recipe in recipes]
        print(f"plans of {options.recipe}")
        print(plan_table(plans, [f"depth {depth}" for depth in options.depths]))
        return 0
    recipe = read_recipe(given)
    if start_folder(recipe) is not None:
        recipe = resolve_start(recipe)
    plan, layouts, planned = _plans(recipe, partial(_about_tokens, recipe))
    print(f"plan of {options.recipe} ({recipe.stage}), run {recipe.run.name}")
    for line in describe_filled(recipe):
        print(f"  {line}")
    print(plan_table([plan]), flush=True)
    if len(layouts) > 1 and plan.sizes and plan.device.kind != "cpu":
        print(layout_table(layouts), flush=True)
    if plan.shards > 1 and planned:
        print(f"planned as {plan.layout} ({_config_of(plan)}), since one row does not fit with a model on every device")
    _report_checks(plan, planned=planned)
    if options.probe and not planned:
        _probe(plan, given, seconds=options.probe)
    return 0


def _probe(plan: Plan, given: list[str], *, seconds: float) -> None:
    """Measure steps, print what that says of the run, and keep it for the training's own plan."""
    if not _has_torch() or "WORLD_SIZE" in os.environ:  # which a launcher sets: its processes are not ours to start
        return
    try:
        probe = measure(given, plan.device, processes=plan.processes, seconds=seconds, needed_bytes=plan.memory.total if plan.memory else None)  # fmt: skip
    except NotMeasured as reason:
        print(f"probe: nothing was measured, since {reason}")
        return
    keep(probe, plan.recipe, plan.device, processes=plan.processes)
    plan = replace(plan, probe=probe)
    print(probe_line(plan))
    if plan.duration is not None:
        print(
            f"probe: {duration_range(plan.duration.total)}, start, evaluations and saves included, without preparing data"
        )


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


def _plans(recipe: Recipe, count: Callable[[], tuple[float | None, int | None]]) -> tuple[Plan, list[Plan], bool]:
    """Return the plan, those of all layouts (DDP, HSDP, FSDP), and whether it is for other hardware than this machine (run.hardware): then it is in
    the first layout that fits. count: gives about the tokens of a run in epochs, and the bytes that are held out."""
    if recipe.train.get("use_cpu"):
        leave_accelerators()
    here = device_without_torch()
    device = here if recipe.run.hardware is None else _planned(recipe)
    planned = device.hosts > 1 or (device.kind, device.count, device.peak_flops) != (
        here.kind,
        here.count,
        here.peak_flops,
    )
    nproc = device.hosts * device.count if planned else whole_number(os.environ, "NPROC", device.count, least=1)
    processes = int(os.environ.get("WORLD_SIZE") or nproc)
    make = partial(make_plan, recipe, device, processes=processes)
    plan = make()
    if plan.steps is None and _has_torch() and _can_count(recipe):
        from pipeline.data.preview import about_steps

        tokens, held_out = count()
        scored = None if held_out is None else scored_at_most(recipe, held_out)
        make = partial(make, scored_bytes=scored, about_steps=about_steps(tokens, plan.recipe))
        plan = make()
    shards = sorted({1, processes // device.hosts, processes})
    layouts = [plan if n == plan.shards else make(shards=n) for n in shards]
    if planned and plan.sizes:
        plan = next((one for one in layouts if one.row_fits), layouts[-1] if plan.row_fits is False else plan)
    return plan, layouts, planned


def _config_of(plan: Plan) -> str:
    return f"accelerate_configs/{'fsdp2' if plan.layout == 'FSDP' else 'hsdp'}.yaml"


def _about_tokens(recipe: Recipe) -> tuple[float | None, int | None]:
    from pipeline.data.preview import about_tokens

    with suppress(TandemError):  # what is wrong with the data is said by their check
        return about_tokens(recipe)
    return None, None


def _can_count(recipe: Recipe) -> bool:
    """Return whether text and tokenizer lie here, and what is found out about files can be kept."""
    tokenizer = recipe.tokenizer.path is None or os.path.isdir(recipe.tokenizer.path)
    return tokenizer and _keeps_sources(recipe)


def _keeps_sources(recipe: Recipe) -> bool:
    return _local(recipe) and can_be_made(cache_dir(recipe.data.cache_dir))


def _planned(recipe: Recipe) -> DeviceInfo:
    try:
        return planned_device(str(recipe.run.hardware))
    except ValueError as error:
        raise RecipeError(f"{recipe.where('run.hardware')}: {error}") from None


def _report_checks(plan: Plan, *, planned: bool) -> None:
    """Print notes and what was not checked; raise the problems, all in one."""
    from pipeline.preflight.checks import find_notes, find_problems, memory_doubt

    recipe, notes = plan.recipe, find_notes(plan)
    notes += (
        [] if plan.steps is None else cadence_notes(recipe, plan.steps)
    )  # a stage prints them once its data are known
    problems = find_problems(plan, on_this_machine=not planned)
    if not planned:
        from pipeline.preflight.inputs import service_findings

        refused, of_services = service_findings(recipe)
        problems, notes = problems + refused, notes + of_services
    for more_problems, more_notes in (_code(recipe), _data(recipe)):
        problems, notes = problems + more_problems, notes + more_notes
    for reason in why_unknown(plan):
        print(f"n/a: {reason}")
    for note in notes:
        print(f"note: {note}")
    for line in _not_checked(recipe, planned=planned):
        print(f"not checked: {line}")
    refuse(problems)
    if not planned and _has_torch():
        from pipeline.preflight.attention import attention_line, choose_attention

        print(attention_line(*choose_attention(recipe, plan.device, plan.sizes)), flush=True)
    doubt = None if plan.probe is not None else memory_doubt(plan)  # a probe has made these steps
    print(f"this run may not fit: {doubt}" if doubt else "nothing was found that would stop this run")


def _code(recipe: Recipe) -> tuple[list[TandemError], list[str]]:
    if not _has_torch():
        return [], []
    from pipeline.preflight.checks import trainer_problems
    from pipeline.preflight.inputs import named_code_problems

    return [*trainer_problems(recipe), *named_code_problems(recipe)], []


def _data(recipe: Recipe) -> tuple[list[TandemError], list[str]]:
    """Return what the run will read, as far as it lies on this machine; the Hub is not asked."""
    from pipeline.preflight.inputs import prepared_notes, reading_findings

    ready = os.path.isdir(recipe.tokenizer.path or "")
    here = {
        "sources": _keeps_sources(recipe),
        "tokenizer": ready,
        "weights": True,
        "changes": ready,
    }
    problems, notes = reading_findings(recipe, only=[what for what, is_here in here.items() if is_here])
    if not problems and here["sources"] and _has_torch():
        notes += prepared_notes(recipe)
    return problems, notes


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _local(recipe: Recipe) -> bool:
    return all(_is_here(source) for source in [*recipe.data.sources, *(recipe.data.validation or [])])


def _is_here(source: Source) -> bool:
    return source.id is None or os.path.isdir(os.path.expanduser(source.id))


def _not_checked(recipe: Recipe, *, planned: bool) -> list[str]:
    lines = []
    if not _has_torch():
        lines.append("callbacks, tasks and the options of the model, which need torch. Install it: pip install torch")
    if planned:
        lines.append(
            "this machine's device, disk and packages, since the plan is for run.hardware. To check them: run.hardware=null"
        )
    hub = [s.id for s in recipe.data.sources if s.id and not s.id.startswith("tandem:") and not _is_here(s)]
    if hub:
        lines.append(
            f"the data of {', '.join(map(str, hub))}, which need the network. To fetch and verify them: {command('data', str(recipe.path))}"
        )
    elif not _local(recipe):
        lines.append("the built-in data, which are made when they are first needed")
    if recipe.tokenizer.path and not os.path.isdir(recipe.tokenizer.path):
        lines.append(f"the tokenizer {recipe.tokenizer.path}, which is not on this machine")
    if recipe.model.start_from and not os.path.isdir(recipe.model.start_from):
        lines.append(f"the weights of model.start_from: {recipe.model.start_from}")
    if recipe.hub.id and planned:
        lines.append(f"write access to {recipe.hub.id} on the Hub")
    return lines


if __name__ == "__main__":
    exit_with_status(main)
