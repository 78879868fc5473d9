"""Sections of the report of one run."""

import json
import re
import shlex
import statistics
from collections import Counter
from typing import Any

import numpy as np
import yaml

from pipeline.metrics import GIB, VAL_BPB, VALIDATION, is_of_machine
from pipeline.monitor.energy import EnergyMeter, energy_of, kwh, usual_period_s
from pipeline.monitor.gpus import is_throttled
from pipeline.monitor.samples_file import GpuSeries, read_gpus
from pipeline.process.storage import folder_bytes
from pipeline.report.benchmarks import protocols_text
from pipeline.report.diagnosis_finding import Figures
from pipeline.report.run_data import (
    RunData,
    code,
    date,
    facts_table,
    filled_table,
    joined,
    number,
    percent,
    spread,
    suite_of,
    table,
)
from pipeline.run_dir.columns import Columns, mean_step_s

# Evaluations by command that are neither bits per byte nor benchmarks.


def other_results_text(data: RunData) -> str:
    rows = [[name, step, number(value, 6), of] for name, step, value, of in data.other_results()]
    return table(["metric", "step", "value", "of"], rows)


# How a run lived: its checkpoints, its attempts and what each lost.


def checkpoints_text(data: RunData) -> str:
    rows = [
        [f"checkpoint-{step}", f"{size / 2**20:,.1f} MiB", "yes" if sealed else "no"]
        for step, size, sealed in data.checkpoints
    ]
    if data.run.model.is_dir():
        size = folder_bytes(data.run.model)
        rows.append(["model/", f"{size / 2**20:,.1f} MiB", "finished model"])
    return table(["folder", "size", "sealed"], rows)


def attempts_text(data: RunData) -> str:
    """Return each attempt: from where, how far, how long, and how many of its logged steps the next one had to make
    again."""
    written = Columns.of(data.all_rows)
    starts = {row.get("attempt"): row for _, row in written.events("attempt")}
    at, _ = written.column("train/loss")
    of = written.beside("attempt", at, missing=0)
    steps = written.beside("step", at, missing=0)
    rows: list[list[Any]] = []
    numbers = [attempt for attempt, _, _ in data.running]
    for n, (attempt, began, last) in enumerate(data.running):
        own = steps[of == attempt]
        reached = own.max().item() if len(own) else None
        start = starts.get(attempt, {})
        following = starts.get(numbers[n + 1], {}).get("step") if n + 1 < len(numbers) else None
        lost = None if reached is None or following is None else max(reached - following, 0)
        rows.append([attempt, date(began), start.get("step"), reached, f"{(last - began) / 60:.1f} min", number(lost)])
    head = ["attempt", "began", "from step", "last logged step", "ran", "steps lost"]
    return filled_table(head, rows)


# What a run was fed: each source's share of the rows, and the tokenizer.


def data_shares_text(data: RunData) -> str:
    """Return where the text came from, and what of it became rows."""
    shares, rows = data.manifest.get("shares") or {}, []
    for use, source in _sources(data):
        share = (shares.get(source.get("name")) or {}) if use == "training" else {}
        counts = [number(share.get(name)) for name in ("rows", "tokens", "epochs")]
        files = number(len(source.get("files", [])))
        rows.append([source.get("name"), use, files, percent(share.get("share")), *counts, _lost(share)])
    consumed = [
        [name.split("/", 2)[2], number(data.last(name))]
        for name in data.columns.names()
        if name.startswith("data/source/")
    ]
    head = ["source", "use", "files", "share of rows", "rows", "tokens", "epochs", "padded or lost"]
    batch = data.fact("inputs.batch_tokens")
    step = f"A step takes {number(batch)} row positions.\n" if batch else ""
    return joined(filled_table(head, rows), step, table(["consumed so far", "number"], consumed))


def _sources(data: RunData) -> list[tuple[str, dict[str, Any]]]:
    """Return (training or validation, source) of each source in the manifest."""
    inputs = data.manifest.get("inputs") or {}
    uses = (("training", "sources"), ("validation", "validation"))
    return [(use, source) for use, key in uses for source in inputs.get(key) or []]


def _lost(share: dict[str, Any]) -> str | None:
    return ", ".join(f"{name} {percent(part)}" for name, part in (share.get("lost") or {}).items()) or None


def tokenizer_text(data: RunData) -> str:
    found = data.fact("inputs.tokenizer", {})
    asked = data.recipe.get("tokenizer") or {}
    rows = [
        ["ids", number(found.get("size"))],
        ["identity", str(found["identity"])[:16] if found.get("identity") else None],
        *([name, asked.get(name)] for name in ("path", "revision", "split_pattern")),
        ["characters trained on", None if asked.get("path") else number(asked.get("train_chars"))],
    ]
    return facts_table("tokenizer", rows)


# What a run is, before any curve: name, hardware, hyperparameters, data by identity, notes; and where else it is
# shown.

HARDWARE = ("shape", "host", "world_size", "hardware", "devices")
# Manifest entries that have a place of their own in the report, or that only a machine reads.
SHOWN_ELSEWHERE = {
    "must_match",
    "results",
    "versions",
    "inputs",
    "shares",
    "forked_from",
    "name",
    "stage",
    "note",
    "wandb_id",
    "wandb_url",
    "plan",
    "model",
    "peak_memory_bytes",
    "imported",
    "created",
    "ended",
    "finished",
    *HARDWARE,
}
DATA_HEAD = ("data", "use", "id", "revision", "fingerprint")
# Keys of the recipe that make a run what it is; all keys are in the section on the recipe.
HYPERPARAMETERS = re.compile(
    r"model\.(?!.*attn_implementation)|data\.(row_tokens|batch_tokens|packing)$"
    r"|optimizer\.(type|rate_scale|schedule\.|groups\.\w+\.(learning_rate|weight_decay)$)"
    r"|train\.(learning_rate|weight_decay|lr_scheduler|warmup|max_|seed$|per_device_train_batch_size$|bf16$|fp16$|fp8$)"
)


def metadata_text(data: RunData) -> str:
    """Return two tables: the run and its hardware, and its hyperparameters."""
    manifest = data.manifest
    rows: list[list[Any]] = [["run", data.name], ["stage", data.stage], ["note", manifest.get("note")]]
    rows += [[name, date(manifest[name])] for name in ("created", "ended") if manifest.get(name)]
    rows += [[name, value] for key in HARDWARE for name, value in flat({key: manifest.get(key)})]
    rows += [[name, value] for name, value in flat(manifest) if name.split(".")[0] not in SHOWN_ELSEWHERE]
    rows.append(["run directory", data.run.path])
    if parent := manifest.get("forked_from"):
        rows.append(["forked from", f"{parent.get('run')} at step {parent.get('step')}"])
        rows += [["changed against it", line] for line in parent.get("differences", [])]
    if start := data.setting("model.start_from"):
        rows.append(["weights started from", start])
    chosen = [[name, value] for name, value in flat(data.recipe) if HYPERPARAMETERS.match(name)]
    return joined(facts_table("what", rows), facts_table("hyperparameter", chosen))


def data_text(data: RunData) -> str:
    """Return each source by identity, as a table."""
    return table(DATA_HEAD, data_rows(data))


def data_rows(data: RunData) -> list[list[Any]]:
    """Return each source of text by identity, under DATA_HEAD."""
    rows = []
    for use, source in _sources(data):
        fingerprint = str(source.get("fingerprint") or "")[:16] or None
        rows.append([source.get("name"), use, source.get("id"), source.get("revision"), fingerprint])
    return rows


def flat(value: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return every entry that says something, as (dotted name, value)."""
    found: list[tuple[str, Any]] = []
    for name, entry in leaves(value):
        if entry not in (None, [], ""):
            text = " ".join(map(str, entry)) if isinstance(entry, list) else entry
            found.append((name, date(text) if name.rpartition(".")[2] in ("ended", "time") else text))
    return found


def leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted names and values of nested dicts."""
    found: list[tuple[str, Any]] = []
    for name, entry in value.items():
        found += leaves(entry, f"{prefix}{name}.") if isinstance(entry, dict) else [(prefix + name, entry)]
    return found


def links_text(data: RunData) -> str:
    """Return where else the run can be looked at: the Hub, W&B, TensorBoard."""
    places = {
        "Hub": data.setting("hub.id"),
        "W&B id": data.manifest.get("wandb_id"),
        "W&B url": data.manifest.get("wandb_url"),
    }
    if data.run.tensorboard.is_dir():
        places["TensorBoard"] = f"tensorboard --logdir {shlex.quote(str(data.run.tensorboard))}"
    return table(["where", "what"], [[name, place] for name, place in places.items() if place])


def failure_text(data: RunData) -> str:
    return code(json.dumps(data.failure, indent=2, ensure_ascii=False)) if data.failure else ""


def recipe_text(data: RunData) -> str:
    return code(yaml.safe_dump(data.recipe, sort_keys=False, allow_unicode=True), "yaml") if data.recipe else ""


def versions_text(data: RunData) -> str:
    return table(["package", "version"], list((data.manifest.get("versions") or {}).items()))


def results_text(data: RunData) -> str:
    """Return the final numbers, but for the benchmarks, which have a section of their own."""
    results = flat(data.manifest.get("results") or {})
    if data.benchmarks():
        results = [(name, value) for name, value in results if suite_of(name) is None]
    return table(["what", "value"], [[name, number(value)] for name, value in results])


# How the training went, in numbers beside the plots: learning rate, losses, gradient norm, system.

ROWS_OF_A_TABLE = 16


def learning_rate_text(data: RunData) -> str:
    """Return peak and last rate of each group, and where the peak was reached."""
    names = [name for name in data.columns.names() if name.startswith("optim/lr/")] or ["optim/lr"]
    rows = []
    for name in names:
        steps, rates = data.curve(name)
        if not len(steps):
            continue
        highest = int(rates.argmax())
        group = name.removeprefix("optim/lr").strip("/") or "all parameters"
        rows.append([group, f"{rates[highest]:.3g}", number(steps[highest].item()), f"{rates[-1]:.3g}"])
    return table(["learning rate of", "peak", "first at step", "last"], rows)


def losses_text(data: RunData) -> str:
    """Return what the loss began and ended with, and its course."""
    steps, losses = data.curve("train/loss")
    if not len(steps):
        return "No step was logged.\n"
    of = f" of {number(data.max_steps())}" if data.max_steps() else ""
    facts: list[list[Any]] = [
        ["steps", f"{number(data.step())}{of}"],
        ["tokens (row positions)", number(data.tokens())],
        ["train/loss, first and last logged", f"{losses[0]:.4f}, {losses[-1]:.4f}"],
    ]
    for name in VALIDATION:
        at, values = data.curve(name)
        if len(at):
            course = f"{values[0]:.4f}, {values.min():.4f} (step {at[values.argmin()]:,}), {values[-1]:.4f}"
            facts.append([f"{name}, first, lowest, last", course])
    return joined(table(["what", "value"], facts), _history(data))


def _history(data: RunData) -> str:
    """Return some of the logged steps, evenly spaced."""
    names = ("tokens", "train/loss", "train/loss_ema", "optim/lr", "optim/grad_norm", "perf/tok_per_s", "perf/mfu_pct")
    steps = spread(data.curve("train/loss")[0].tolist(), ROWS_OF_A_TABLE)
    rows = [[step, *(number(_at(step, *data.curve(name)), 5) for name in names)] for step in steps]
    return filled_table(["step", *names], rows)


def _at(step: int, steps: np.ndarray, values: np.ndarray) -> float | None:
    place = np.searchsorted(steps, step)
    return values[place].item() if place < len(steps) and steps[place] == step else None


def bpb_text(data: RunData) -> str:
    """Return bits per byte while training and by command, and what their protocols are made of."""
    scores = data.scores()
    if not scores:
        return ""
    by_name: dict[tuple[str, str | None], list[Any]] = {}
    for score in scores:
        by_name.setdefault((score.name, score.of), []).append(score)
    rows = [
        [score.name, score.step, f"{score.value:.6f}", score.protocol, number(score.bytes), score.of]
        for group in by_name.values()
        for score in spread(group, ROWS_OF_A_TABLE)
    ]
    note = "Two figures compare only when their protocol is the same: it names what was scored and how.\n\n"
    table_of_scores = filled_table(["metric", "step", "value", "protocol", "bytes", "of"], rows)
    return joined(note + table_of_scores, protocols_text(scores))


def gradient_norm_text(data: RunData) -> str:
    """Return the norm before clipping, and what was clipped or left out."""
    steps, norms = data.curve("optim/grad_norm")
    if not len(steps):
        return ""
    highest = int(norms.argmax())
    usual, share = Figures(data).usual_norm().values, Figures(data).clipped()
    figures = f"{np.median(usual):.3g}, {norms[highest]:.3g} (logged at step {steps[highest]:,})"
    rows: list[list[Any]] = [["gradient norm before clipping: median, largest", figures]]
    limit = data.setting("train.max_grad_norm")
    if limit:
        rows.append(["clipped to (train.max_grad_norm)", number(limit)])
        clipped, made = share.values @ share.intervals(), share.intervals().sum()
        rows.append(["steps above it", f"{number(round(clipped))} of {number(round(made))}"])
    counts = ("optim/skipped_steps", "optim/nonfinite_steps")
    return facts_table("what", [*rows, *([name, number(data.last(name))] for name in counts)])


def system_text(data: RunData) -> str:
    """Return median, lowest and highest of each number of the machine. The first logged interval, which compiles, is
    left out of rates."""
    rows = []
    for name in data.columns.names():
        if not (is_of_machine(name) or name.startswith("data/wait_")):
            continue
        _, values = data.curve(name)
        if name in ("perf/total_s", "perf/eta_s", "perf/first_step_s"):  # one of each says all
            rows.append([name, None, None, None, number(values[-1].item())])
            continue
        of_rates = values[1:] if name.startswith("perf/") and len(values) > 1 else values
        if len(of_rates):
            figures = (float(np.median(of_rates)), of_rates.min().item(), of_rates.max().item(), values[-1].item())
            rows.append([name, *map(number, figures)])
    return table(["number", "median", "lowest", "highest", "last"], rows)


# Texts that the model wrote: before its fine-tuning where there was one, while training, and by command.

SHOWN_CHARS = 2000  # of a text; samples.jsonl has the whole


def samples_text(data: RunData) -> str:
    """Return each prompt with its first and its last text of the training; then the newest texts by command of each
    model."""
    return joined(_while_training(data), *_by_command(data.evals))


def _while_training(data: RunData) -> str:
    if not data.samples:
        return ""
    first, last = data.samples[0]["step"], data.samples[-1]["step"]
    texts = texts_of(data.samples)
    steps = [first] if first == last else [first, last]
    parent = data.parent
    before = {} if parent is None else last_texts(parent)
    head = f"{parent.name}, before this run" if parent else "before"
    rows = [
        [prompt, _shown(before.get(prompt)), *(_shown(by_step.get(step)) for step in steps)]
        for prompt, by_step in texts.items()
    ]
    return filled_table(["prompt", head, *(f"step {step}" for step in steps)], rows)


def texts_of(samples: list[dict[str, Any]]) -> dict[str, dict[int, str]]:
    """Return the text of each prompt by step, in the order of the rows."""
    texts: dict[str, dict[int, str]] = {}
    for row in samples:
        texts.setdefault(row["prompt"], {})[row["step"]] = row["text"]
    return texts


def last_texts(data: RunData) -> dict[str, str]:
    """Return the newest text of each prompt, while training or by command."""
    by_command = [row for entry in data.evals for row in entry.get("samples") or []]
    return {row["prompt"]: row["text"] for row in [*data.samples, *by_command] if "prompt" in row and "text" in row}


def _by_command(entries: list[dict[str, Any]]) -> list[str]:
    newest = {entry.get("subject"): entry for entry in entries if entry.get("samples")}
    parts = []
    for subject, entry in newest.items():
        step = "" if entry.get("step") is None else f", step {number(entry['step'])}"
        rows = [[row.get("prompt"), _how(row), _shown(row.get("text"))] for row in entry["samples"]]
        parts.append(f"By command, {subject}{step}:\n\n" + table(["prompt", "chosen", "text"], rows))
    return parts


def _shown(text: str | None) -> str | None:
    if text is None or len(text) <= SHOWN_CHARS:
        return text
    return f"{text[:SHOWN_CHARS]} [... {len(text) - SHOWN_CHARS:,} characters more]"


def _how(row: dict[str, Any]) -> str | None:
    temperature = row.get("temperature")
    if temperature is None:
        return None
    chosen = "the likeliest" if temperature == 0 else f"sampled, temperature {temperature:g}"
    return (
        chosen + (f", top_k {row['top_k']}" if row.get("top_k") else "") + (", as a chat" if row.get("chat") else "")
    )


# What the GPUs did and drew, from gpu-<host>.csv: load, heat, what held their clocks back, energy and its price.


def energy_text(data: RunData) -> str:
    """Return tables; "" for a run whose GPUs nobody sampled."""
    rows: list[list[Any]] = []
    sampled: list[tuple[GpuSeries, EnergyMeter]] = []
    for path in data.run.all_gpu_samples():
        host = path.stem.removeprefix("gpu-")
        found = read_gpus(path)
        sampled += [(gpu, energy_of(gpu)) for gpu in found]
        for index in sorted({gpu.index for gpu in found}):
            rows.append([host, index, *_of_gpu([gpu for gpu in found if gpu.index == index])])
    if not sampled:
        return ""
    head = [
        "host", "GPU", "name", "power, mean and highest, W", "of its limit", "deg C, mean and highest", "busy",
        "memory, highest, GiB", "SM clock, mean, MHz", "throttled samples", "why",
    ]  # fmt: skip
    return joined(filled_table(head, rows), facts_table("what", _facts(data, sampled)))


def total_kwh(data: RunData) -> float | None:
    """Return the energy of all GPUs, hosts and attempts; None where nobody sampled, or one of them has none."""
    joules = [energy_of(gpu).best_j() for path in data.run.all_gpu_samples() for gpu in read_gpus(path)]
    known = [value for value in joules if value is not None]
    return kwh(sum(known)) if known and len(known) == len(joules) else None


def _of_gpu(attempts: list[GpuSeries]) -> list[Any]:
    of_gpus = {name: [v for gpu in attempts for v in gpu.values(name)] for name in attempts[0].numbers}
    reasons = sum((gpu.reasons for gpu in attempts), Counter[str]())
    held = Counter({words: count for words, count in reasons.items() if is_throttled(words)})
    return [
        attempts[-1].name,
        _mean_and_highest(of_gpus["power_w"]),
        _mean(of_gpus["power_pct"], " %"),
        _mean_and_highest(of_gpus["temp_c"]),
        _mean(of_gpus["util_pct"], " %"),
        number(max(of_gpus["mem_used_gib"], default=None)),
        _mean(of_gpus["sm_clock_mhz"]),
        percent(held.total() / reasons.total()) if reasons else None,
        ", ".join(f"{words} {percent(count / reasons.total())}" for words, count in held.most_common()) or None,
    ]


def _mean(values: list[float], unit: str = "") -> str | None:
    return f"{statistics.fmean(values):,.1f}{unit}" if values else None


def _mean_and_highest(values: list[float]) -> str | None:
    return f"{statistics.fmean(values):,.1f}, {max(values):,.1f}" if values else None


def _facts(data: RunData, sampled: list[tuple[GpuSeries, EnergyMeter]]) -> list[list[Any]]:
    rates = sorted({f"{rate:.3g}" for gpu, _ in sampled if (rate := _rate_hz(gpu)) is not None}, key=float)
    wanted, price = data.setting("monitor.gpu_hz"), data.setting("run.gpu_hour_cost")
    reached = " to ".join(dict.fromkeys([*rates[:1], *rates[-1:]])) + (f", {wanted:g} asked for" if wanted else "")
    hours = sum(gpu.times[-1] - gpu.times[0] for gpu, _ in sampled) / 3600
    known = [(meter, joules) for _, meter in sampled if (joules := meter.best_j()) is not None]
    if len(known) < len(sampled):
        missing = f"not known: {len(sampled) - len(known)} of {len(sampled)} records have no power"
        energy: list[list[Any]] = [["energy", missing]]
    else:
        energy = _energy(data, [meter for meter, _ in known], sum(joules for _, joules in known))
    return [
        ["samples of a GPU per second, reached", reached if rates else None],
        ["GPU hours between first and last sample, all attempts", f"{hours:.4g}"],
        *energy,
        ["cost at run.gpu_hour_cost", None if price is None else f"{price * hours:,.2f}"],
    ]


def _energy(data: RunData, meters: list[EnergyMeter], joules: float) -> list[list[Any]]:
    counted = sum(meter.counted_j is not None for meter in meters)
    how = {0: "trapezoids over the sampled power", len(meters): "the GPUs' own counters"}.get(
        counted, "counters where there are, else trapezoids"
    )
    both = [(meter.joules, meter.counted_j) for meter in meters if meter.counted_j and meter.covered_s]
    integral, of_counters = (sum(column) for column in zip(*both, strict=True)) if both else (0.0, 0.0)
    gaps, seconds = sum(meter.gaps for meter in meters), sum(meter.gap_s for meter in meters)
    tokens, while_training = data.tokens(), data.curve("perf/energy_j_per_token")[1].tolist()
    against = f"{100 * (integral / of_counters - 1):+.2f} %" if both else None
    of_a_step = f"{number(statistics.median(while_training))} J" if while_training else None
    return [
        ["energy of the GPUs, all attempts", f"{kwh(joules):.4g} kWh, from {how}"],
        ["trapezoids over the sampled power, against the counters", against],
        ["gaps in the sampling, not bridged by trapezoids", f"{gaps}, {seconds:,.0f} s in all" if gaps else None],
        [
            "energy per token, start-up, evaluations and lost steps included",
            f"{number(joules / tokens)} J" if tokens else None,
        ],
        ["energy per token in steps, median", of_a_step],
    ]


def _rate_hz(gpu: GpuSeries) -> float | None:
    """Mean, in one attempt; the usual distance says nothing of samples that came late."""
    if usual_period_s(gpu.times) is None:
        return None
    return (len(gpu.times) - 1) / max(gpu.times[-1] - gpu.times[0], 1e-9)


# Was it worth its cost: what the run took and what it reached. Facts only; the judgement is the reader's.


def worth_text(data: RunData) -> str:
    """Return runtime, device hours, cost, energy, tokens, goodput, and the final numbers."""
    facts = [
        *spent(data),
        ["goodput, %", number(data.last("perf/goodput_pct"))],
        ["steps lost", number(data.last("perf/lost_steps"))],
        ["tokens (row positions)", number(data.tokens() or None)],
    ]
    reached = results_text(data)
    return joined(facts_table("what it took", facts), f"Final numbers:\n\n{reached}" if reached else "")


def spent(data: RunData) -> list[list[Any]]:
    """Return (what, value) of time, device hours, cost and energy; None for what is not known."""
    running_s, devices = wall_s(data), data.fact("world_size")
    hours = devices * running_s / 3600 if devices and running_s else None
    return [
        ["time running, all attempts", _hours(running_s)],
        ["time in steps that count", _hours(data.last("perf/total_s"))],
        ["processes", None if hours is None else number(devices)],
        ["device hours (time running x processes)", number(hours)],
        ["cost (device hours x run.gpu_hour_cost)", number(paid(data))],
        ["energy of the GPUs, kWh", number(data.last("perf/energy_kwh"))],
    ]


def paid(data: RunData) -> float | None:
    """Return run.gpu_hour_cost times the device hours of all attempts; None where either is not known."""
    price, devices, running_s = data.setting("run.gpu_hour_cost"), data.fact("world_size"), wall_s(data)
    return price * devices * running_s / 3600 if price and devices and running_s else None


def _hours(seconds: float | None) -> str | None:
    if not seconds:
        return None
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.2f} min"


# Plan against outcome: what the run promised at its start, what became of it, and the ratio of the two.


def outcome_text(data: RunData) -> str:
    """Return a table of what was planned and found, found / planned where both are known; "" for a run without a
    plan."""
    plan = data.manifest.get("plan") or {}
    if not plan:
        return ""
    rows = [
        [name, _cell(planned, unit), _cell(found, unit), _ratio(planned, found)]
        for name, unit, planned, found in _rows(data, plan)
        if planned is not None or found is not None
    ]
    return _planned_how(data, plan) + table(["", "planned", "found", "found / planned"], rows)


def _rows(data: RunData, plan: dict[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """Return (name, unit, planned, found); None where a side is not known."""
    step_s, (device_b, host_b) = mean_step_s(data.columns), _peaks(data)
    in_steps = None if step_s is None else step_s * data.step()
    flops = data.fact("model.flops_per_token")
    sealed = [size for _, size, whole in data.checkpoints if whole]
    disk = sum(size for _, size, _ in data.checkpoints)
    disk += folder_bytes(data.run.model) if data.run.model.is_dir() else 0
    bpb = data.fact("plan.val_bpb.value")
    rows: list[tuple[str, str, Any, Any]] = [
        ("parameters", "", plan.get("parameters"), data.fact("model.parameters")),
        ("steps", "", plan.get("steps"), data.step() or None),
        ("tokens (row positions)", "", plan.get("tokens"), data.tokens() or None),
        (
            "FLOPs, nanochat's formula",
            "",
            plan.get("flops"),
            flops * data.tokens() if flops and data.tokens() else None,
        ),
        ("a step", "s", data.fact("plan.probe.step_s"), step_s),
        ("time in steps, without first intervals' compilation", "s", plan.get("training_s"), in_steps),
        ("time in steps, all of it", "s", None, data.last("perf/total_s")),
        (
            "wall time of all attempts, planned without preparing data and benchmarks",
            "s",
            data.fact("plan.duration_s.total.value"),
            wall_s(data),
        ),
        ("memory of a process, as probed", "GiB", plan.get("process_bytes"), host_b if device_b is None else device_b),
        (
            "memory of a process, by arithmetic",
            "GiB",
            data.fact("plan.memory_bytes.total"),
            host_b if device_b is None and "process" in data.fact("plan.memory_bytes", {}) else device_b,
        ),
        ("a checkpoint", "GiB", plan.get("checkpoint_bytes"), max(sealed, default=None)),
        (
            "disk of checkpoints and model: planned at the fullest, found now",
            "GiB",
            plan.get("run_disk_bytes"),
            disk or None,
        ),
        ("cost, by the wall", "", plan.get("cost"), paid(data)),
        ("energy", "kWh", plan.get("energy_kwh"), data.last("perf/energy_kwh")),
        (f"final {VAL_BPB}", "", bpb, None if bpb is None else data.last(VAL_BPB)),
    ]
    return rows


def _planned_how(data: RunData, plan: dict[str, Any]) -> str:
    """Return what the plan's hours and BPB depend on, and what the comparison leaves out."""
    sentences = []
    if probe := plan.get("probe"):
        sentences.append(
            f"Hours and memory were planned from a probe of {probe['steps']} steps on this machine "
            f"({probe['low_s']:.3f} to {probe['high_s']:.3f} s each)."
        )
    elif "duration_source" in plan:
        sentences.append(f"Hours were planned {plan['duration_source']}.")
    if "low" in (span := data.fact("plan.duration_s.total", {})):  # of an earlier version
        sentences.append(f"The whole was to take from {_cell(span['low'], 's')} to {_cell(span['high'], 's')}.")
    if bpb := plan.get("val_bpb"):
        sentences.append(
            f"By earlier runs ({bpb['fit']}) val/bpb was to lie from {bpb['low']:.4f} to {bpb['high']:.4f} (95 %)."
        )
    if data.step() < (plan.get("steps") or 0):
        sentences.append("The run is not at its end: time and totals are those so far.")
    if (shape := data.manifest.get("shape") or {}) and shape.get("device", plan.get("device")) != plan.get("device"):
        sentences.append(f"It was planned for {plan.get('device')} and last ran on {shape['device']}.")
    return " ".join(sentences) + "\n\n" if sentences else ""


def wall_s(data: RunData) -> float | None:
    """Return the seconds from each attempt's start to the last sign of it, over all attempts, evaluations and saves
    included."""
    return sum(last - began for _, began, last in data.running) or None


def _peaks(data: RunData) -> tuple[float | None, float | None]:
    """Return the most memory of the device and of the host, in bytes: as the end recorded it, else the most that was
    logged."""
    found = data.manifest.get("peak_memory_bytes") or {}

    def logged(name: str) -> float | None:
        return max((value * GIB for _, value in data.series(name)), default=None)

    return (
        found.get("device") or logged("mem/run_peak_allocated_gib") or logged("mem/peak_allocated_gib"),
        found.get("host") or logged("mem/host_rss_gib"),
    )


def _cell(value: Any, unit: str) -> str | None:
    if value is None:
        return None
    if unit == "GiB":
        return f"{value / GIB:,.3f} GiB"
    if unit == "s":
        return f"{value:,.3f} s" if value < 600 else f"{value / 3600:,.3f} h"
    text = number(value, 6) if isinstance(value, int) or value < 1e9 else f"{value:.6e}"
    return f"{text} {unit}".strip()


def _ratio(planned: Any, found: Any) -> str | None:
    if not planned or found is None:
        return None
    return "exact" if planned == found else f"{found / planned:.3f}"
