"""The plan as a table of text: a line for each number, a column for each plan."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pipeline.hardware.device import batch_ranks
from pipeline.plan.memory import FP32
from pipeline.plan.plan import Plan, gibibytes, gigabytes
from pipeline.recipe.sizes import Sizes

UNKNOWN = "n/a"


def plan_table(plans: list[Plan], headings: list[str] | None = None) -> str:
    """Return the plans side by side, under their headings."""
    columns = [plan_lines(plan) for plan in plans]
    rows = [("", headings)] if headings else []
    for name in columns[0]:
        rows.append((name, [column.get(name) or UNKNOWN for column in columns]))
    # Names to the left; numbers of several plans to the right, digits under digits.
    name_width = max(len(name) for name, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(plans))]
    printed = []
    for name, cells in rows:
        if len(plans) > 1:
            cells = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        printed.append(f"  {name.ljust(name_width)}  {'  '.join(cells)}")
    return "\n".join(printed)


def plan_lines(plan: Plan) -> dict[str, str | None]:
    """Return the numbers of a plan by their names in the table; None for one that is not known."""
    recipe = plan.recipe
    lines: dict[str, str | None] = {"hardware": _hardware(plan), "compute format": plan.compute_format}
    lines |= _model_lines(plan.sizes)
    lines["steps"] = _steps(plan)
    lines["tokens (row positions)"] = _tokens(plan)
    lines["FLOPs, nanochat's formula"] = _shown(plan.flops, partial(scientific, digits=2))
    rows = f"{batch_ranks(plan.processes)} x {recipe.micro_batch_rows} x {plan.micro_steps}"
    if recipe.is_auto:
        rows += " (auto, by arithmetic)"
    lines["processes x rows x micro-steps"] = rows
    if plan.shards > 1:
        lines["layout"] = f"FSDP2, a model on {plan.shards} devices"
    lines["rows that only fill up micro-steps"] = f"{100 * plan.padding_share:.1f} %"
    lines |= _memory_lines(plan)
    lines["checkpoint"] = _checkpoint(plan)
    lines["disk for checkpoints and model"] = _shown(plan.run_disk_bytes, gigabytes)
    lines["disk for packed rows, at most"] = _shown(plan.shards_bytes, gigabytes)
    lines |= _time_lines(plan)
    return lines


def _shown(value: float | None, form: Callable[[Any], str]) -> str | None:
    """Return the value in this form; None where it is not known."""
    return None if value is None else form(value)


def _hardware(plan: Plan) -> str:
    if plan.device.kind != "cpu":
        return f"{plan.processes} x {plan.device.name}"
    plural = "" if plan.processes == 1 else "es"
    return f"CPU ({plan.device.name}), {plan.processes} process{plural}"


def _model_lines(sizes: Sizes | None) -> dict[str, str | None]:
    if sizes is None:
        return dict.fromkeys(("model", "parameters", "FLOPs a token, nanochat's formula"))
    model = f"{sizes.model_type} {sizes.n_layer} x {sizes.n_embd}"
    if sizes.n_head:
        model += f", {sizes.n_head} heads"
    counts = sizes.parameters()
    flops = partial(scientific, digits=3)
    return {
        "model": model,
        "parameters": millions(counts["total"]),
        "  embeddings": millions(counts["embeddings"]),
        "  value embeddings": millions(counts["value_embeddings"]),
        "  head": millions(counts["head"]),
        "  matrices of the blocks": millions(counts["matrices"]),
        "  scalars, norms, biases": millions(counts["scalars"]),
        "scaling parameters (matrices + head)": _shown(sizes.scaling, millions),
        "FLOPs a token, nanochat's formula": _shown(sizes.flops_per_token("nanochat"), flops),
        "FLOPs a token, exact-causal": _shown(sizes.flops_per_token("exact_causal"), flops),
    }


def _steps(plan: Plan) -> str | None:
    if plan.steps is None:
        return None
    steps = f"{plan.steps:,} of {plan.batch_tokens:,} tokens"
    if plan.steps_are_estimated:
        steps = f"about {steps}"
    warmup = plan.recipe.step_rows.warmup_steps
    return f"{steps} (fewer in the first {warmup:,})" if warmup else steps


def _tokens(plan: Plan) -> str | None:
    if plan.tokens is None:
        return None
    count = f"{plan.tokens / 1e6:,.1f}M"
    if plan.tokens >= 1e8:
        count = f"{plan.tokens / 1e9:,.2f}B"
    if plan.tokens_per_param is not None:
        count += f" ({plan.tokens_per_param:.2f} a scaling parameter)"
    return count


def _memory_lines(plan: Plan) -> dict[str, str | None]:
    lines: dict[str, str | None] = {"memory a process (estimate)": None}
    if memory := plan.memory:
        if memory.total is not None:
            lines["memory a process (estimate)"] = f"about {gibibytes(memory.total)}"
        if memory.process:
            lines["  Python and libraries"] = gibibytes(memory.process)
        lines["  weights, fp32"] = gibibytes(memory.weights)
        lines["  gradients"] = gibibytes(memory.gradients)
        lines["  optimizer"] = _shown(memory.optimizer, gibibytes)
        lines["  activations"] = f"about {gibibytes(memory.activations)}"
        if memory.saved:
            lines["  copy of a checkpoint being written"] = gibibytes(memory.saved)
    if plan.probe is not None:
        lines["memory a process, as probed"] = gibibytes(plan.probe.peak_bytes)
    lines["memory of the device"] = _shown(plan.device.memory_gib, "{:,.1f} GiB".format)
    return lines


def _checkpoint(plan: Plan) -> str | None:
    if plan.checkpoint_bytes is None or plan.sizes is None:
        return None
    weights = gigabytes(FP32 * plan.sizes.parameters()["total"])
    return f"{gigabytes(plan.checkpoint_bytes)} ({weights} of it weights)"


def _time_lines(plan: Plan) -> dict[str, str | None]:
    duration = plan.duration
    lines: dict[str, str | None] = {"time, without preparing data and benchmarks": None}
    if duration is not None:
        lines["time, without preparing data and benchmarks"] = f"{time_text(duration.total)}, {duration.source}"
        lines["  in steps"] = time_text(duration.steps)
        lines["  start and end"] = time_text(duration.start)
        lines["  evaluations of bits per byte"] = time_text(duration.evaluations)
        lines["  saves"] = time_text(duration.saves)
    lines["device hours"] = _shown(plan.device_hours, "{:,.1f}".format)
    lines["energy at rated power, kWh"] = _shown(plan.energy_kwh, "{:,.1f}".format)
    lines["cost (run.gpu_hour_cost)"] = _shown(plan.cost, "{:,.2f}".format)
    return lines


def time_text(seconds: float) -> str:
    """Return seconds in minutes, or in hours from 10 minutes on."""
    return f"{seconds / 3600:,.2f} h" if seconds >= 600 else f"{seconds / 60:,.1f} min"


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f}M"


def scientific(value: float, *, digits: int) -> str:
    """Return a number as people write it: 4.775e9."""
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


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
    elif plan.duration is None:
        reasons.append(
            f"time, since the peak of {plan.device.name} in {plan.compute_format} is not known. Measure steps here by "
            "--probe 10, or plan for another device by run.hardware=8xH100"
        )
    if plan.checkpoint_bytes is None and plan.sizes is not None:
        reasons.append(
            f"checkpoint, since the state of this optimizer ({plan.recipe.optimizer.type}) is not known before it runs"
        )
    if plan.recipe.run.gpu_hour_cost is None:
        reasons.append("cost, since run.gpu_hour_cost is not given")
    return reasons
