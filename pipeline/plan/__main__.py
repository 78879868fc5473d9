"""`python -m pipeline.preflight RECIPE`: the plan of a run, and every check that can be made before step 1."""

import argparse
import importlib.util
import os
from bisect import bisect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from pipeline.hardware.accelerators import DeviceInfo, device_without_torch, leave_accelerators, planned_device
from pipeline.hardware.device import batch_ranks
from pipeline.hardware.processor import available_bytes
from pipeline.metrics import SFT_BPB, VAL_BPB_DOCUMENTS
from pipeline.plan.capacity import find_notes, find_problems, memory_doubt
from pipeline.plan.memory import (
    DEVICE_SHARE,
    FP32,
    memory_of,
    usable_bytes,
    weight_bytes,
)
from pipeline.plan.plan import (
    CPU_SHARE,
    Duration,
    NotMeasured,
    Plan,
    Span,
    compute_of_step,
    gibibytes,
    gigabytes,
    keep,
    make_plan,
    measure,
    scored_at_most,
)
from pipeline.process.commands import command, program, whole_number
from pipeline.process.errors import DataError, RecipeError, TandemError, raise_errors
from pipeline.process.storage import cache_dir, can_be_used
from pipeline.recipe import Recipe, describe_filled, read_recipe
from pipeline.recipe.batch import is_auto, micro_batch, step_rows
from pipeline.recipe.dial import sizes_at_depth
from pipeline.recipe.schema import Source
from pipeline.recipe.sizes import Sizes
from pipeline.recipe.start_from import becomes_tandem, resolve_start, start_folder
from pipeline.run.checks import (
    attention_line,
    cadence_notes,
    choose_attention,
    machine_problems,
    named_code_problems,
    reading_findings,
    service_findings,
    trainer_problems,
)
from pipeline.run_dir.failures import exit_with_status

# Plans as a table: a line for each number, a column for each plan.

DEPTHS = range(1, 200)  # among which the largest model that fits is looked for
UNKNOWN = "n/a"
BESIDE = "the preparation of data, the monitor, the writer of checkpoints"


Lines = list[tuple[str, Callable[[Plan], str | None]]]


def plan_table(plans: list[Plan], headings: list[str] | None = None, lines: Lines | None = None) -> str:
    """Return the plans side by side; headings stand above the columns."""
    rows = [("", headings)] if headings else []
    for label, value in lines or LINES:
        rows.append((label, [UNKNOWN if (text := value(plan)) is None else text for plan in plans]))
    label_width = max(len(label) for label, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(plans))]
    printed = []
    for label, cells in rows:
        if label and all(cell == "" for cell in cells):
            continue
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)] if len(plans) > 1 else cells
        printed.append(f"  {label.ljust(label_width)}  {'  '.join(padded)}".rstrip())
    return "\n".join(printed)


def why_unknown(plan: Plan) -> list[str]:
    """Return the causes of the n/a in a plan's table."""
    reasons = []
    if plan.sizes is None:
        why = plan.sizes_unknown or "the model that the recipe starts from is not on this machine"
        reasons.append(f"sizes, since {why}")
    elif plan.flops is None and plan.sizes.flops_per_token() is None:
        reasons.append(f"FLOPs, and MFU with them, since {plan.sizes.unknown}")
    if plan.steps is None:
        reasons.append(
            "steps and all that follows from them, since the horizon is in epochs: known once the data are packed"
        )
    if plan.duration is None and plan.steps is not None:
        reasons.append(
            f"time, since the peak of {plan.device.name} in {plan.compute_format} is not known, and no steps were "
            "measured; run.hardware=8xH100 plans for another device"
        )
    if plan.checkpoint_bytes is None and plan.sizes is not None:
        reasons.append(
            f"checkpoint, since the state of this optimizer ({plan.recipe.optimizer.type}) is not known before it runs"
        )
    if plan.recipe.run.gpu_hour_cost is None:
        reasons.append("cost, since run.gpu_hour_cost is not given")
    return reasons


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f}M"


def scientific(value: float, digits: int) -> str:
    """4.775e9, as people write it."""
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _known(value: Callable[[Plan], Any], shape: Callable[[Any], str]) -> Callable[[Plan], str | None]:
    """Return what makes a text of a value, and None of one that is not known."""

    def text(plan: Plan) -> str | None:
        found = value(plan)
        return None if found is None else shape(found)

    return text


def _parameters(role: str) -> Callable[[Plan], str | None]:
    return _known(lambda plan: plan.sizes and plan.sizes.parameters()[role], millions)


def _model(plan: Plan) -> str | None:
    sizes = plan.sizes
    if sizes is None:
        return None
    heads = f", {sizes.n_head} heads" if sizes.n_head else ""
    return f"{sizes.model_type} {sizes.n_layer} x {sizes.n_embd}{heads}"


def _device(plan: Plan) -> str:
    if plan.device.kind == "cpu":
        return f"CPU ({plan.device.name}), {plan.processes} process{'es' * (plan.processes > 1)}"
    return f"{plan.processes} x {plan.device.name}"


def _flops(convention: Any) -> Callable[[Plan], str | None]:
    return _known(lambda plan: plan.sizes and plan.sizes.flops_per_token(convention), partial(scientific, digits=3))


def _horizon(plan: Plan) -> str | None:
    about = "about " * plan.steps_are_estimated
    if plan.steps is None:
        return None
    warmup = step_rows(plan.recipe).warmup_steps
    fewer = f" (fewer in the first {warmup:,})" if warmup else ""
    return f"{about}{plan.steps:,} of {plan.batch_tokens:,} tokens{fewer}"


def _tokens(plan: Plan) -> str | None:
    if plan.tokens is None:
        return None
    count = f"{plan.tokens / 1e9:,.2f}B" if plan.tokens >= 1e8 else f"{plan.tokens / 1e6:,.1f}M"
    return count if plan.tokens_per_param is None else f"{count} ({plan.tokens_per_param:.2f} a scaling parameter)"


def _batch(plan: Plan) -> str:
    auto = " (auto, by arithmetic)" if is_auto(plan.recipe) else ""
    return f"{batch_ranks(plan.processes)} x {micro_batch(plan.recipe)} x {plan.micro_steps}{auto}"


def _memory(part: str) -> Callable[[Plan], str | None]:
    about = "about " * (part in ("activations", "total"))
    return _known(lambda plan: plan.memory and getattr(plan.memory, part), lambda count: about + gibibytes(count))


def _of_the_cpu(part: str) -> Callable[[Plan], str | None]:
    return lambda plan: gibibytes(getattr(plan.memory, part)) if plan.memory and getattr(plan.memory, part) else ""


def layout_table(plans: list[Plan]) -> str:
    """Return what a device holds in each layout of the same run, side by side."""
    plan, device = plans[-1], plans[-1].device
    hosts = f"{device.hosts} host{'s' * (device.hosts > 1)}"
    where = f"{hosts} of {plan.processes // device.hosts} {device.name}"
    lines = [f"layouts on {where}", plan_table(plans, [one.layout for one in plans], LAYOUT_LINES)]
    return "\n".join(lines)


def deepest(plan: Plan) -> int | None:
    """Return the largest model.depth of which one row would fit; None where the recipe has none, or its sizes are not
    arithmetic."""
    limit = plan.device.memory_gib
    if plan.recipe.model.depth is None or limit is None or not isinstance(plan.sizes, Sizes):
        return None
    kinds: dict[str, Any] = {
        "half": plan.compute_format in ("bfloat16", "float16"),
        "compiled": plan.compiled,
        "on_cpu": plan.device.kind == "cpu",
    }
    of_one_row = partial(memory_of, plan.recipe, processes=plan.processes, shards=plan.shards, rows=1, **kinds)

    def needed(depth: int) -> int:
        return of_one_row(sizes=sizes_at_depth(plan.recipe, depth)).total or 0

    return bisect(DEPTHS, usable_bytes(limit), key=needed)


def _built(plan: Plan) -> str | None:
    """Return what the processes of a host take that each build the whole model, before they share it."""
    if plan.sizes is None:
        return None
    return gibibytes(plan.processes // plan.device.hosts * weight_bytes(plan.recipe, plan.sizes))


def _checkpoint(plan: Plan) -> str | None:
    if plan.checkpoint_bytes is None or plan.sizes is None:
        return None
    return f"{gigabytes(plan.checkpoint_bytes)} ({gigabytes(FP32 * plan.sizes.parameters()['total'])} of it weights)"


def duration_range(span: Span) -> str:
    """Return seconds from where to where, in one unit, and what is expected."""
    hours = span.value >= 600
    low, value, high = ((s / 3600 if hours else s / 60) for s in (span.low, span.value, span.high))
    digits = 2 if hours else 1
    return f"{low:,.{digits}f} to {high:,.{digits}f} {'h' if hours else 'min'}, expected {value:,.{digits}f}"


def _duration(part: str) -> Callable[[Plan], str | None]:
    def text(duration: Duration) -> str:
        span = getattr(duration, part)
        return duration_range(span) if span.high else ""

    return _known(attrgetter("duration"), text)


def _range(name: str, shape: str) -> Callable[[Plan], str | None]:
    def text(span: Span) -> str:
        low, high, value = (shape.format(number) for number in (span.low, span.high, span.value))
        return f"{low} to {high}, expected {value}"

    return _known(attrgetter(name), text)


def probe_line(plan: Plan) -> str:
    """Return what a probe measured, in a sentence."""
    probe = plan.probe
    assert probe is not None
    where = "resident in" if plan.device.kind == "cpu" else "allocated on the device by"
    return (
        f"probe: {probe.steps} steps of {probe.step_s:.3f} s ({probe.low_s:.3f} to {probe.high_s:.3f}) after a first "
        f"one of {probe.first_step_s:.1f} s; at most {gibibytes(probe.peak_bytes)} {where} a process"
    )


# A number that can be unknown is None, and printed as n/a.
LINES: Lines = [
    ("hardware", _device),
    ("compute format", lambda plan: plan.compute_format),
    ("model", _model),
    ("parameters", _parameters("total")),
    ("  embeddings", _parameters("embeddings")),
    ("  value embeddings", _parameters("value_embeddings")),
    ("  head", _parameters("head")),
    ("  matrices of the blocks", _parameters("matrices")),
    ("  scalars, norms, biases", _parameters("scalars")),
    ("scaling parameters (matrices + head)", _known(lambda plan: plan.sizes and plan.sizes.scaling, millions)),
    ("FLOPs a token, nanochat's formula", _flops("nanochat")),
    ("FLOPs a token, exact-causal", _flops("exact_causal")),
    ("steps", _horizon),
    ("tokens (row positions)", _tokens),
    ("FLOPs, nanochat's formula", _known(attrgetter("flops"), partial(scientific, digits=2))),
    ("processes x rows x micro-steps", _batch),
    ("layout", lambda plan: "" if plan.shards == 1 else f"{plan.layout}, a model on {plan.shards} devices"),
    ("rows that only fill up micro-steps", lambda plan: f"{100 * plan.padding_share:.1f} %"),
    ("memory a process (estimate)", _memory("total")),
    ("  Python and libraries", _of_the_cpu("process")),
    ("  weights, fp32", _memory("weights")),
    ("  gradients", _memory("gradients")),
    ("  optimizer", _memory("optimizer")),
    ("  activations", _memory("activations")),
    ("  copy of a checkpoint being written", _of_the_cpu("saved")),
    ("  beside it, with memory of their own", lambda plan: BESIDE if plan.memory and plan.memory.process else ""),
    ("memory a process, as probed", lambda plan: "" if plan.process_bytes is None else gibibytes(plan.process_bytes)),
    ("memory of the device", _known(attrgetter("device.memory_gib"), "{:,.1f} GiB".format)),
    ("checkpoint", _checkpoint),
    ("disk for checkpoints and model", _known(attrgetter("run_disk_bytes"), gigabytes)),
    ("disk for packed rows, at most", _known(attrgetter("shards_bytes"), gigabytes)),
    ("time, without preparing data and benchmarks", _duration("total")),
    ("  in steps", _duration("steps")),
    ("  start and end", _duration("start")),
    ("  evaluations of bits per byte", _duration("evaluations")),
    ("  saves", _duration("saves")),
    ("  known from", _known(attrgetter("duration"), attrgetter("source"))),
    ("device hours", _range("device_hours", "{:,.1f}")),
    ("energy at rated power, kWh", _range("energy_kwh", "{:,.1f}")),
    ("cost (run.gpu_hour_cost)", _range("cost", "{:,.2f}")),
]

LAYOUT_LINES: Lines = [
    ("ranks that share a model", lambda plan: str(plan.shards)),
    ("memory a device (estimate)", _memory("total")),
    ("  weights, with what is gathered", _memory("weights")),
    ("  gradients", _memory("gradients")),
    ("  optimizer", _memory("optimizer")),
    ("  activations", _memory("activations")),
    (
        f"one row fits in {DEVICE_SHARE:.0%} of the device",
        lambda plan: {None: None, True: "yes", False: "no"}[plan.row_fits],
    ),
    ("memory of a host at the start, a model a process", _built),
    ("largest model.depth that fits", _known(deepest, str)),
    ("compute a step", _known(lambda plan: compute_of_step(plan)[0], "{0.low:.2f} to {0.high:.2f} s".format)),
]


PROBE_S = 10.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=program("plan"),
        usage=f"{program('plan')} RECIPE [section.key=value ...] [--probe SECONDS] [--depths 16,20,24]",
        description=(
            "The plan of a run and every check that can be made before step 1; fetches nothing, keeps no weights."
        ),
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
        help=(
            f"how long to measure real steps on this machine, beside their compilation (default {PROBE_S:.0f}; "
            "0: not at all)"
        ),
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
        recipe = _with_rows(resolve_start(recipe))
    plan, layouts, planned = _plans(recipe, partial(_about_tokens, recipe))
    print(f"plan of {options.recipe} ({recipe.stage}), run {recipe.run.name}")
    for line in describe_filled(recipe):
        print(f"  {line}")
    print(plan_table([plan]), flush=True)
    if len(layouts) > 1 and plan.sizes and plan.device.kind != "cpu":
        print(layout_table(layouts), flush=True)
    if plan.shards > 1 and planned:
        print(
            f"planned as {plan.layout} ({_config_of(plan)}), since one row does not fit with a model on every device"
        )
    _report_checks(plan, planned=planned)
    if options.probe and not planned:
        _probe(plan, given, seconds=options.probe)
    return 0


def _with_rows(recipe: Recipe) -> Recipe:
    """Return the recipe, with rows of one text each where its model, which lies here, needs them."""
    folder = recipe.model.start_from or ""
    weights = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    ready = os.path.isdir(recipe.tokenizer.path or "") and _has_torch()
    if (
        becomes_tandem(recipe) or not ready or 2 * weights > CPU_SHARE * available_bytes()
    ):  # half precision becomes float32
        return recipe
    from pipeline.tokenizer.load import ready_tokenizer
    from pipeline.training.isolation import rows_of_recipe

    with suppress(TandemError):  # the checks say what is wrong with the model
        return rows_of_recipe(recipe, ready_tokenizer(recipe)[0])
    return recipe


def _probe(plan: Plan, given: list[str], *, seconds: float) -> None:
    """Measure steps, print what that says of the run, and keep it for the training's own plan."""
    if not _has_torch() or "WORLD_SIZE" in os.environ:  # which a launcher sets: its processes are not ours to start
        return
    try:
        probe = measure(
            given,
            plan.device,
            processes=plan.processes,
            seconds=seconds,
            needed_bytes=plan.memory.total if plan.memory else None,
        )
    except NotMeasured as reason:
        print(f"probe: nothing was measured, since {reason}")
        return
    keep(probe, plan.recipe, plan.device, processes=plan.processes)
    plan = replace(plan, probe=probe)
    print(probe_line(plan))
    if plan.duration is not None:
        print(
            f"probe: {duration_range(plan.duration.total)}, start, evaluations and saves included, without preparing "
            "data and benchmarks"
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
    """Return the plan, those of all layouts (DDP, HSDP, FSDP), and whether it is for other hardware than this machine
    (run.hardware): then it is in the first layout that fits. count: gives about the tokens of a run in epochs, and the
    bytes that are held out."""
    if recipe.train.get("use_cpu"):
        leave_accelerators()
    here = device_without_torch()
    device = here if recipe.run.hardware is None else _planned(recipe)
    same = attrgetter("kind", "count", "peak_flops")
    planned = device.hosts > 1 or same(device) != same(here)
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
    return _local(recipe) and can_be_used(cache_dir(recipe.data.cache_dir))


def _planned(recipe: Recipe) -> DeviceInfo:
    try:
        return planned_device(str(recipe.run.hardware))
    except ValueError as error:
        raise RecipeError(f"{recipe.where('run.hardware')}: {error}") from None


def _report_checks(plan: Plan, *, planned: bool) -> None:
    """Print notes and what was not checked; raise the problems, all in one."""
    recipe, notes = plan.recipe, find_notes(plan)
    if plan.steps is not None:
        notes += cadence_notes(recipe, plan.steps)  # a stage prints them once its data are known
    problems = [] if planned else machine_problems(plan)
    problems += find_problems(plan, on_this_machine=not planned)
    findings = [] if planned else [service_findings(recipe)]
    if _has_torch():
        findings.append(([*trainer_problems(recipe), *named_code_problems(recipe)], []))
    for more_problems, more_notes in (*findings, _data(recipe)):
        problems, notes = problems + more_problems, notes + more_notes
    for reason in why_unknown(plan):
        print(f"n/a: {reason}")
    for note in notes:
        print(f"note: {note}")
    for line in _not_checked(recipe, planned=planned):
        print(f"not checked: {line}")
    raise_errors(problems)
    if not planned and _has_torch():
        print(attention_line(*choose_attention(recipe, plan.device, plan.sizes)), flush=True)
    doubt = None if plan.probe is not None else memory_doubt(plan)  # a probe has made these steps
    print(f"this run may not fit: {doubt}" if doubt else "nothing was found that would stop this run")


def _data(recipe: Recipe) -> tuple[list[TandemError], list[str]]:
    """Return what the run will read, as far as it lies on this machine; the Hub is not asked."""
    ready = os.path.isdir(recipe.tokenizer.path or "")
    here = {"sources": _keeps_sources(recipe), "tokenizer": ready, "weights": True, "changes": ready}
    problems, notes = reading_findings(recipe, only=[what for what, is_here in here.items() if is_here])
    if not problems and here["sources"] and _has_torch():
        try:
            notes += prepared_notes(recipe)
        except DataError as error:  # what would be trained is not what the answers say
            problems.append(error)
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
            "this machine's device, disk and packages, since the plan is for run.hardware. To check them: "
            "run.hardware=null"
        )
    hub = [s.id for s in recipe.data.sources if s.id and not s.id.startswith("tandem:") and not _is_here(s)]
    if hub:
        lines.append(
            f"the data of {', '.join(map(str, hub))}, which need the network. To fetch and verify them: "
            f"{command('data', str(recipe.path))}"
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


def prepared_notes(recipe: Recipe) -> list[str]:
    """Return what packing will leave out of conversations, by a sample of them, and a validation too small to compare
    by: for the plan of a run whose sources and tokenizer lie here. A stage counts it in what it prepares. Raises
    DataError as untrained_lines."""
    from pipeline.data.losses import (
        ENOUGH_BYTES,
        first_conversations,
        loss_warnings,
        sampled_counts,
        size_text,
        untrained_lines,
    )
    from pipeline.sources.open import open_sources
    from pipeline.tokenizer.load import ready_tokenizer

    is_chat = recipe.stage == "sft"
    train, validation = open_sources(recipe, kind="chat" if is_chat else "text")
    notes = []
    if is_chat and recipe.tokenizer.path and Path(recipe.tokenizer.path).is_dir():
        tokenizer, _ = ready_tokenizer(recipe)
        row_tokens, overflow = recipe.data.row_tokens, recipe.data.max_row_overflow
        for source in train:
            talks = first_conversations(source)
            lines = untrained_lines(source.name, talks, tokenizer)
            counts = sampled_counts(talks, tokenizer, row_tokens=row_tokens, overflow=overflow)
            lines += loss_warnings(source.name, counts, kind="chat", row_tokens=row_tokens)
            num_rows = counts["conversations"] - counts["too_long"] - counts["no_target"]
            if recipe.data.one_text_rows and num_rows:
                padded = 1 - counts["text_tokens"] / (num_rows * (row_tokens + 1))
                lines.append(
                    f"{source.name}: each row holds one conversation, and {100 * padded:.0f} % of the positions are "
                    f"padding (by a sample of {counts['conversations']:,}). Lower data.row_tokens."
                )
            notes += [f"{recipe.where('data.sources')}: {line}" for line in lines]
    held = _bytes_up_to(ENOUGH_BYTES, validation)
    if validation and held < ENOUGH_BYTES:
        text = size_text({SFT_BPB if is_chat else VAL_BPB_DOCUMENTS: held})
        notes.append(f"{recipe.where('data.validation')}: {text}")
    return notes


def _bytes_up_to(enough: int, sources: list[Any]) -> int:
    """Return bytes of the documents, or of what the assistant says, counted until they are enough or a file is not
    here."""
    from pipeline.data.validation import first_texts

    count = 0
    for source in sources:
        if any(file.path is None for file in source.files):
            return enough
        texts = first_texts(source, num_bytes=enough - count, role="assistant")
        count += sum(len(text.encode()) for text in texts)
        if count >= enough:
            break
    return count


if __name__ == "__main__":
    exit_with_status(main)
