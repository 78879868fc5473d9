"""The plan of a recipe on this machine: its devices, a sample of the data that are here, and measured steps."""

import importlib.util
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pipeline.hardware.accelerators import device_without_torch, leave_accelerators, planned_device
from pipeline.plan.plan import Plan, make_plan, scored_at_most
from pipeline.plan.probe import NotMeasured, measure
from pipeline.process.commands import whole_number
from pipeline.process.errors import RecipeError, TandemError
from pipeline.process.storage import cache_dir, can_be_used
from pipeline.recipe import Recipe
from pipeline.recipe.schema import Data


def probed(plan: Plan, given: list[str], *, seconds: float) -> Plan:
    """Return the plan with measured steps; a sentence says why where they cannot be measured."""
    if not has_torch() or plan.processes > int(os.environ.get("LOCAL_WORLD_SIZE", plan.processes)):  # of other hosts
        return plan
    print(f"measuring steps, for about {seconds:.0f} s and their compilation", flush=True)
    needed = plan.memory.total if plan.memory else None
    on_cpu = plan.device.kind == "cpu"
    try:
        probe = measure(given, processes=plan.processes, seconds=seconds, on_cpu=on_cpu, needed_bytes=needed)
    except NotMeasured as reason:
        print(f"probe: nothing was measured, since {reason}")
        return plan
    print(f"probe: {probe.steps} steps of {probe.step_s:.3f} s after a first one of {probe.first_step_s:.1f} s")
    return replace(plan, probe=probe)


def plan_of(recipe: Recipe, count: Callable[[], tuple[float | None, int | None]]) -> tuple[Plan, bool]:
    """Return the plan, and whether it is for other hardware than this machine (run.hardware): then the model is
    sharded where one row does not fit otherwise.

    count: gives about the tokens of a run in epochs, and the bytes that are held out.
    """
    # 1. The devices, and a process for each; of this machine as many as the launcher starts.
    if recipe.train.get("use_cpu"):
        leave_accelerators()
    here = device = device_without_torch()
    if recipe.run.hardware is not None:
        try:
            device = planned_device(recipe.run.hardware)
        except ValueError as error:
            raise RecipeError(f"{recipe.where('run.hardware')}: {error}") from None
    theirs, ours = (device.kind, device.count, device.peak_flops), (here.kind, here.count, here.peak_flops)
    is_elsewhere = device.hosts > 1 or theirs != ours
    processes = device.hosts * device.count
    if not is_elsewhere:
        processes = whole_number(os.environ, "NPROC", device.count, least=1)
    processes = int(os.environ.get("WORLD_SIZE") or processes)
    make = partial(make_plan, recipe, device, processes=processes)
    plan = make()
    # 2. Steps of a horizon in epochs, by a sample of the data where they are here.
    is_local = recipe.tokenizer.path is None or os.path.isdir(recipe.tokenizer.path)
    if plan.steps is None and has_torch() and is_local and keeps_sources(recipe.data):
        tokens, held_out = count()
        scored, steps = None, None
        if held_out is not None:
            scored = scored_at_most(recipe.evals.bpb, held_out, chat=recipe.stage == "sft")
        if tokens is not None:
            steps = plan.recipe.step_rows.steps(int(tokens / recipe.data.row_tokens))
        make = partial(make, scored_bytes=scored, about_steps=steps)
        plan = make()
    # 3. Whether the devices share the model.
    if is_elsewhere and plan.row_fits is False and processes > 1:
        plan = make(shards=processes)
    return plan, is_elsewhere


def about_tokens_of(recipe: Recipe) -> tuple[float | None, int | None]:
    """Return about the tokens of a run in epochs, and the bytes that are held out; None of data that cannot be read."""
    from pipeline.data.estimate import about_tokens

    with suppress(TandemError):  # what is wrong with the data is said by their check
        return about_tokens(
            recipe.source_settings(),
            recipe.tokenizer_settings(),
            start_from=recipe.model.start_from,
            epochs=recipe.train.get("num_train_epochs") or 1.0,
        )
    return None, None


def keeps_sources(data: Data) -> bool:
    """Return whether the text is on this machine, and what is found out about its files can be kept."""
    return not absent_sources(data) and can_be_used(cache_dir(data.cache_dir))


def absent_sources(data: Data) -> list[str]:
    """Return the ids of sources that are not folders of this machine."""
    ids = [source.id for source in (*data.sources, *(data.validation or []))]
    return [name for name in ids if name is not None and not os.path.isdir(os.path.expanduser(name))]


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None
