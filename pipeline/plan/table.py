"""The plan as a table of text: a line for each number, a column for each plan."""

from pipeline.hardware.device import batch_ranks
from pipeline.plan.memory import FP32
from pipeline.plan.plan import Plan, gibibytes, gigabytes
from pipeline.recipe.batch import is_auto, micro_batch, step_rows

UNKNOWN = "n/a"


def plan_table(plans: list[Plan], headings: list[str] | None = None) -> str:
    """Return the plans side by side, under their headings."""
    columns = [plan_lines(plan) for plan in plans]
    rows = [("", headings)] if headings else []
    for name in columns[0]:
        rows.append((name, [column.get(name) or UNKNOWN for column in columns]))
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
    lines: dict[str, str | None] = {"hardware": _hardware(plan), "compute format": plan.compute_format}
    lines |= _model_lines(plan)
    lines["steps"] = _steps(plan)
    lines["tokens (row positions)"] = _tokens(plan)
    lines["FLOPs, nanochat's formula"] = None if plan.flops is None else scientific(plan.flops, digits=2)
    by_arithmetic = " (auto, by arithmetic)" if is_auto(plan.recipe) else ""
    rows = f"{batch_ranks(plan.processes)} x {micro_batch(plan.recipe)} x {plan.micro_steps}"
    lines["processes x rows x micro-steps"] = f"{rows}{by_arithmetic}"
    if plan.shards > 1:
        lines["layout"] = f"FSDP2, a model on {plan.shards} devices"
    lines["rows that only fill up micro-steps"] = f"{100 * plan.padding_share:.1f} %"
    lines |= _memory_lines(plan)
    lines["checkpoint"] = _checkpoint(plan)
    lines["disk for checkpoints and model"] = None if plan.run_disk_bytes is None else gigabytes(plan.run_disk_bytes)
    lines["disk for packed rows, at most"] = None if plan.shards_bytes is None else gigabytes(plan.shards_bytes)
    lines |= _time_lines(plan)
    return lines


def _hardware(plan: Plan) -> str:
    if plan.device.kind != "cpu":
        return f"{plan.processes} x {plan.device.name}"
    plural = "" if plan.processes == 1 else "es"
    return f"CPU ({plan.device.name}), {plan.processes} process{plural}"


def _model_lines(plan: Plan) -> dict[str, str | None]:
    sizes = plan.sizes
    if sizes is None:
        return dict.fromkeys(("model", "parameters", "FLOPs a token, nanochat's formula"))
    heads = f", {sizes.n_head} heads" if sizes.n_head else ""
    counts = sizes.parameters()
    lines: dict[str, str | None] = {
        "model": f"{sizes.model_type} {sizes.n_layer} x {sizes.n_embd}{heads}",
        "parameters": millions(counts["total"]),
        "  embeddings": millions(counts["embeddings"]),
        "  value embeddings": millions(counts["value_embeddings"]),
        "  head": millions(counts["head"]),
        "  matrices of the blocks": millions(counts["matrices"]),
        "  scalars, norms, biases": millions(counts["scalars"]),
        "scaling parameters (matrices + head)": None if sizes.scaling is None else millions(sizes.scaling),
    }
    nanochats, exact = sizes.flops_per_token("nanochat"), sizes.flops_per_token("exact_causal")
    lines["FLOPs a token, nanochat's formula"] = None if nanochats is None else scientific(nanochats, digits=3)
    lines["FLOPs a token, exact-causal"] = None if exact is None else scientific(exact, digits=3)
    return lines


def _steps(plan: Plan) -> str | None:
    if plan.steps is None:
        return None
    about = "about " if plan.steps_are_estimated else ""
    warmup = step_rows(plan.recipe).warmup_steps
    fewer = f" (fewer in the first {warmup:,})" if warmup else ""
    return f"{about}{plan.steps:,} of {plan.batch_tokens:,} tokens{fewer}"


def _tokens(plan: Plan) -> str | None:
    if plan.tokens is None:
        return None
    count = f"{plan.tokens / 1e9:,.2f}B" if plan.tokens >= 1e8 else f"{plan.tokens / 1e6:,.1f}M"
    return count if plan.tokens_per_param is None else f"{count} ({plan.tokens_per_param:.2f} a scaling parameter)"


def _memory_lines(plan: Plan) -> dict[str, str | None]:
    lines: dict[str, str | None] = {"memory a process (estimate)": None}
    if memory := plan.memory:
        if memory.total is not None:
            lines["memory a process (estimate)"] = f"about {gibibytes(memory.total)}"
        if memory.process:
            lines["  Python and libraries"] = gibibytes(memory.process)
        lines["  weights, fp32"] = gibibytes(memory.weights)
        lines["  gradients"] = gibibytes(memory.gradients)
        lines["  optimizer"] = None if memory.optimizer is None else gibibytes(memory.optimizer)
        lines["  activations"] = f"about {gibibytes(memory.activations)}"
        if memory.saved:
            lines["  copy of a checkpoint being written"] = gibibytes(memory.saved)
    if plan.probe is not None:
        lines["memory a process, as probed"] = gibibytes(plan.probe.peak_bytes)
    limit = plan.device.memory_gib
    lines["memory of the device"] = None if limit is None else f"{limit:,.1f} GiB"
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
    lines["device hours"] = None if plan.device_hours is None else f"{plan.device_hours:,.1f}"
    lines["energy at rated power, kWh"] = None if plan.energy_kwh is None else f"{plan.energy_kwh:,.1f}"
    lines["cost (run.gpu_hour_cost)"] = None if plan.cost is None else f"{plan.cost:,.2f}"
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
