"""Several runs side by side: what they are, what differs, speed and memory, evaluations, curves on common axes."""

import math
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from pipeline.evals.intervals import student_t, two_sided
from pipeline.metrics import SFT_BPB, VAL_BPB, metric_of
from pipeline.process.storage import sum_of, write_text
from pipeline.report.benchmarks import score_rows
from pipeline.report.curves import (
    COMPARED_AXES,
    COMPARED_BPB,
    LOOKS,
    POINTS,
    Curve,
    Panel,
    aligned_text,
    finite,
    legends,
    one_protocol,
    positions,
    style_of,
    thin,
    trained_on,
)
from pipeline.report.run_data import Key, RunData, cell, filled_table, joined, number, table
from pipeline.report.sections import last_texts, leaves, paid, wall_s
from pipeline.report.single import duration, place_picture, share, shortened

# Speed, memory and energy of runs as ratios to the first one.

# Medians leave the first logged interval of a run out, which holds compilation; peaks are of the whole run.
HOW = {
    "perf/tok_per_s": "median",
    "perf/tok_per_s_per_gpu": "median",
    "perf/step_s": "median",
    "perf/tflops_per_gpu": "median",
    "perf/mfu_pct": "median",
    "perf/bf16_mfu_pct": "median",
    "data/wait_s": "median",
    "perf/total_s": "last",
    "mem/allocated_gib": "median",
    "mem/peak_allocated_gib": "largest",
    "mem/run_peak_allocated_gib": "largest",
    "mem/reserved_gib": "largest",
    "mem/device_used_gib": "largest",
    "mem/host_rss_gib": "largest",
    "gpu/power_w": "median",
    "perf/energy_j_per_token": "last",
    "perf/energy_kwh": "last",
}


def ratios_text(runs: Sequence[RunData]) -> str:
    """Return a table of what at least two runs tell; no ratio where the same name is not the same number. "" when
    there is none."""
    rows: list[list[Any]] = []
    for name, how in HOW.items():
        values = [summary(data, name) for data in runs]
        if sum(value is not None for value in values) < 2:
            continue
        meanings = [data.meaning_of(name) for data in runs]
        cells = [
            f"{number(v)}{' *' if m else ''}" if v is not None else None for v, m in zip(values, meanings, strict=True)
        ]
        others = zip(values[1:], meanings[1:], strict=True)
        rows.append([name, how, *cells, *(_ratio(v, values[0], same=m == meanings[0]) for v, m in others)])
    head = ["", "of the run", *(data.name for data in runs), *(f"{data.name} / {runs[0].name}" for data in runs[1:])]
    marked = any(cell.endswith(" *") for row in rows for cell in row if isinstance(cell, str))
    return table(head, rows) + ("\n\\* another number by that name: see the imported logs below.\n" if marked else "")


def summary(data: RunData, name: str) -> float | None:
    """Return the run's one figure of a metric; None where it has none."""
    _, values = data.curve(name)
    if not len(values):
        return None
    if HOW[name] == "median":
        return float(np.median(values[1:] if len(values) > 1 else values))
    return values.max().item() if HOW[name] == "largest" else values[-1].item()


def _ratio(value: float | None, first: float | None, *, same: bool) -> str | None:
    return f"{value / first:.3f}" if value is not None and first and same else None


# What differs between runs: settings, data, code, hardware, in groups; and how many of the major variables do.

# The major variables, and which keys of recipe and facts belong to each; the first group that fits has a key.
MAJOR = {
    "seed": ("train.seed",),
    "batch and horizon": (
        "data.batch_tokens",
        "data.row_tokens",
        "train.gradient_accumulation_steps",
        "train.max_steps",
        "train.num_train_epochs",
        "run.tokens",
        "run.tokens_per_param",
        "run.flops",
        "fact: steps",
        "fact: tokens of a step",
    ),
    "precision and kernels": (
        "train.bf16",
        "train.fp16",
        "train.fp8*",
        "train.tf32",
        "train.torch_compile*",
        "train.full_determinism",
        "train.gradient_checkpointing*",
        "model.attn_implementation",
        "model.embedding_dtype",
        "fact: dtype",
        "fact: compiled",
        "fact: attention",
    ),
    "hardware": ("fact: device", "fact: processes"),
    "tokenizer": ("tokenizer.*", "fact: tokenizer"),
    "data": (
        "data.sources",
        "data.validation",
        "data.packing*",
        "data.isolate_documents",
        "data.max_row_overflow",
        "fact: training files",
        "fact: validation files",
    ),
    "model shape": ("model.*", "fact: started from"),
    "optimizer and rates": (
        "optimizer.*",
        "train.learning_rate",
        "train.weight_decay",
        "train.adam_*",
        "train.lr_scheduler*",
        "train.warmup_*",
        "train.optim*",
        "train.max_grad_norm",
        "train.neftune_noise_alpha",
    ),
}
CODE = "code"
OTHER = "other settings"
# fact: the settings that it decides, where every run records it.
DECIDES = {
    "fact: training files": ("data.sources",),
    "fact: validation files": ("data.validation",),
    "fact: tokenizer": ("tokenizer.*",),
    "fact: steps": ("train.max_steps", "train.num_train_epochs", "run.tokens", "run.tokens_per_param", "run.flops"),
    "fact: tokens of a step": ("data.batch_tokens", "train.gradient_accumulation_steps"),
    "fact: dtype": ("train.bf16", "train.fp16"),
    "fact: compiled": ("train.torch_compile",),
    "fact: attention": ("model.attn_implementation",),
    "fact: started from": ("model.start_from",),
}
LONGEST, SHORT = 90, 30  # characters of a value in a table, and on the first screen
NAMES_OF_RUNS = ("run.name", "run.note", "run.tags", "run.directory", "run.code_folder")


def differences_text(runs: Sequence[RunData]) -> str:
    """Return what the figures show where one major variable differs or none, and a table for each group in which
    something does."""
    of_runs = [{**settings_of(data), **facts_of(data), **code_of(data)} for data in runs]
    parts = [_verdict(runs), _unknown(runs)]
    names = dict.fromkeys(name for values in of_runs for name in values)
    groups: dict[str, list[list[Any]]] = {}
    for name in names:
        values = [values.get(name) for values in of_runs]
        known = [v for v, data in zip(values, runs, strict=True) if v is not None or not data.is_imported]
        if len({repr(value) for value in known}) > 1:
            groups.setdefault(group_of(name), []).append([name.removeprefix("fact: "), *map(_short, values)])
    for group in (*MAJOR, CODE, OTHER):
        if group in groups:
            parts.append(f"### Differs: {group}\n\n" + table(["", *(data.name for data in runs)], groups[group]))
    return joined(*parts)


def differing_majors(one: RunData, other: RunData) -> list[str]:
    """Return the major variables in which two runs differ, as far as both tell them."""
    facts = facts_of(one), facts_of(other)
    settings = settings_of(one), settings_of(other)
    both = [name for name in facts[0] if name in facts[1]]
    decided = [pattern for name in both for pattern in DECIDES.get(name, ())]
    found = {group_of(name) for name in both if facts[0][name] != facts[1][name]}
    differing = [n for n in settings[0].keys() | settings[1].keys() if settings[0].get(n) != settings[1].get(n)]
    for name in differing:
        known = [name in values or not data.is_imported for values, data in zip(settings, (one, other), strict=True)]
        if all(known) and not any(fnmatch(name, pattern) for pattern in decided):
            found.add(group_of(name))
    is_same_setting = not any(name.startswith("tokenizer.") for name in differing)
    if {"seed", "tokenizer"} <= found and "data" not in found and is_same_setting:
        found.remove("tokenizer")  # it was trained on the same text in the order of another seed
    return [group for group in MAJOR if group in found]


def repeats(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Return the runs in groups that differ in nothing but train.seed, each seed once; order of first appearance."""
    groups: list[list[RunData]] = []
    for data in runs:
        for group in groups:
            if _repeats(group[0], data):
                if all(data.setting("train.seed") != other.setting("train.seed") for other in group):
                    group.append(data)
                break
        else:
            groups.append([data])
    return groups


def settings_of(data: RunData) -> dict[str, Any]:
    """Return the recipe's keys, flat; without the run's names."""
    return {name: value for name, value in leaves(data.recipe) if name not in NAMES_OF_RUNS}


def facts_of(data: RunData) -> dict[str, Any]:
    """Return what the manifest holds beside the recipe, of what is a major variable."""
    inputs, shape = data.fact("inputs", {}), data.fact("shape", {})
    found = {f"fact: {name}": shape.get(name) for name in ("device", "processes", "dtype", "compiled", "attention")}
    found["fact: steps"] = data.max_steps()
    found["fact: tokens of a step"] = inputs.get("batch_tokens")
    found["fact: tokenizer"] = data.fact("inputs.tokenizer.identity")
    weights = {name: value for name, value in data.fact("inputs.start_from", {}).items() if name != "from"}
    found["fact: started from"] = sum_of(weights) if weights else None  # several files of a large model; a commit
    for name, key in (("sources", "training"), ("validation", "validation")):
        if inputs.get(name):
            specs, count = data.setting(f"data.{name}"), len(inputs[name])
            specs = specs if isinstance(specs, list) and len(specs) == count else [{}] * count
            found[f"fact: {key} files"] = list(map(_source, inputs[name], specs))
    return {name: value for name, value in found.items() if value is not None}


def code_of(data: RunData) -> dict[str, Any]:
    """Commit and versions."""
    found = {f"git.{name}": value for name, value in data.fact("git", {}).items()}
    return found | {f"version.{name}": value for name, value in data.fact("versions", {}).items()}


def group_of(name: str) -> str:
    for group, patterns in MAJOR.items():
        if any(fnmatch(name, pattern) for pattern in patterns):
            return group
    return CODE if name.startswith(("git.", "version.")) else OTHER


def warning(runs: Sequence[RunData]) -> str:
    """Return the top of the page's warning that more than one major variable differs; "" where at most one does."""
    several = {name: majors for name, majors in _majors(runs).items() if len(majors) > 1}
    if not several:
        return ""
    listed = "; ".join(f"{cell(name)}: {', '.join(majors)}" for name, majors in several.items())
    return (
        f"**Warning: more than one major variable differs from {cell(runs[0].name)}** ({listed}). What the figures "
        "show cannot be laid to any one of them. Change one at a time, and say in run.note which question the run is "
        "to answer.\n"
    )


def _majors(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Return the major variables in which each run differs from the first, by its name; the seed only where it is the
    only one.

    Repeats with other seeds measure the noise against which another variable's effect is judged.
    """
    by_run = {data.name: differing_majors(runs[0], data) for data in runs[1:]}
    return {name: [major for major in majors if major != "seed"] or majors for name, majors in by_run.items()}


def _repeats(one: RunData, other: RunData) -> bool:
    if any(data.is_imported or data.setting("train.seed") is None for data in (one, other)):
        return False  # a log does not tell its seed
    same_code = code_of(one).get("git.commit") == code_of(other).get("git.commit")
    return same_code and one.stage == other.stage and not set(differing_majors(one, other)) - {"seed"}


def _verdict(runs: Sequence[RunData]) -> str:
    by_run = _majors(runs)
    if any(len(majors) > 1 for majors in by_run.values()):
        return ""
    majors = {name: found[0] for name, found in by_run.items() if found}
    if not majors:
        return (
            "No major variable differs: data, tokenizer, model shape, batch and horizon, optimizer and rates, "
            "precision and kernels, hardware and seed are the same, as far as they are known.\n"
        )
    others = {name: major for name, major in majors.items() if major != "seed"}
    listed = "; ".join(f"{cell(name)}: {major}" for name, major in (others or majors).items())
    line = f"One major variable differs from {cell(runs[0].name)} ({listed})"
    if not others:
        return f"{line}: how far the figures lie apart is what another seed does.\n"
    if all(len(group) > 1 for group in repeats(runs)):
        return f"{line}: what the figures show beyond the noise of the seed is its effect.\n"
    return (
        f"{line}. Not every recipe has repeats with other seeds here: one run of each cannot tell the variable's "
        "effect from the seed's.\n"
    )


def _unknown(runs: Sequence[RunData]) -> str:
    names = ", ".join(cell(data.name) for data in runs if data.is_imported)
    return f"Imported: {names}. What their logs do not tell stands as - and counts as equal.\n" if names else ""


def _source(source: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Return files without their order, which the seed decides, and how much of them is taken."""
    files = sorted(str(file.get("sha256") or file.get("label")) for file in source.get("files") or [])
    taken = {name: spec[name] for name in ("weight", "epochs", "at_end") if spec.get(name) is not None}
    if any(len(file) == 64 for file in files) or not source.get("fingerprint"):
        return {"files": [file[:16] for file in files], "format": source.get("format"), **taken}
    return {"fingerprint": source["fingerprint"][:16], **taken}


def _short(value: Any) -> str | None:
    return None if value is None else shortened(str(value), LONGEST)


# Whether a difference in bits per byte, or in a benchmark's mean, is more than another seed would make.

CHANCE = 0.05  # of calling noise a difference, in a whole table


Groups = list[tuple[Sequence[RunData], list[float]]]  # runs that repeat each other, and the figure of each


def judged_figures(runs: Sequence[RunData]) -> dict[Key, Groups]:
    """Return each figure that two groups of repeats, or two runs of one, have under the same protocol, in the order of
    DECIDING."""
    groups = repeats(runs)
    scores = [[data.newest_scores for data in group] for group in groups]
    keys = dict.fromkeys(key for group in scores for run in group for key in run if key[1] is not None)
    found: dict[Key, Groups] = {}
    for key in sorted(keys, key=_rank):
        values = [[run[key].value for run in group if key in run] for group in scores]
        having: Groups = [(group, own) for group, own in zip(groups, values, strict=True) if own]
        if len(having) > 1 or (having and len(having[0][1]) > 1):
            found[key] = having
    return found


# Which figure comes first: what a user of the model meets, then held-out text.
DECIDING = ("chat/", "core/", SFT_BPB, VAL_BPB)


def _rank(key: Key) -> int:
    return next((n for n, name in enumerate(DECIDING) if key[0].startswith(name)), len(DECIDING))


def count_judged(figures: dict[Key, Groups]) -> int:
    """Return how many pairs can be judged at all: by so many the chance of a false call is divided."""
    pairs = [(having[0][1], other) for having in figures.values() for _, other in having[1:]]
    return sum(max(len(first), len(other)) > 1 for first, other in pairs)


def seed_noise_text(runs: Sequence[RunData]) -> str:
    """Return every group against the first one, in each figure that both have under the same protocol. "" when there
    is none."""
    figures = judged_figures(runs)
    if not figures:
        return ""
    rows, judged = [], count_judged(figures)
    for key, having in figures.items():
        for n, (group, found) in enumerate(having):
            against = verdict(having[0][1], found, comparisons=judged) if n else "the first"
            names = ", ".join(data.name for data in group)
            deviation = f"{stdev(found):.6f}" if len(found) > 1 else None
            rows.append([_what(key), names, len(found), f"{mean(found):.6f}", deviation, against])
    text = table(["figure", "runs", "n", "mean", "standard deviation", "against the first"], rows)
    if judged > 1:
        text += (
            f"\n{judged} comparisons stand here, so each is called a difference below p = {CHANCE}/{judged} = "
            f"{CHANCE / judged:.2g} only: seed noise alone then gives one such call in {CHANCE:.0%} of tables. The p "
            "that are printed are of one comparison each.\n"
        )
    if not judged and any(len(having) > 1 for having in figures.values()):
        text += (
            "\nNone of these runs has a repeat, so whether a difference is more than seed noise is not known. "
            "Run each recipe at least three times with other seeds (train.seed=1, 2, 3) and name all of them here.\n"
        )
    return text


def verdict(first: Sequence[float], other: Sequence[float], *, comparisons: int = 1) -> str:
    """Return the difference of the means in words: more than seed noise, or what these repeats could have shown.

    By Welch's t test where both have repeats; with one value on one side by the spread of the other side's repeats,
    taken to be the same on both. comparisons: how many are made, by which the chance of a false call is divided
    (Bonferroni). The smallest difference named is the one that would just have been called; a true one of that size is
    called about every other time.
    """
    return judge(first, other, comparisons=comparisons)[1]


def judge(first: Sequence[float], other: Sequence[float], *, comparisons: int = 1) -> tuple[bool, str]:
    """Return whether the difference is more than seed noise, and verdict's words."""
    difference = mean(other) - mean(first)
    text = f"{difference:+.6f}"
    if len(first) < 2 and len(other) < 2:
        return False, f"{text}; one run each: cannot be distinguished from seed noise"
    if len(first) > 1 and len(other) > 1:
        parts = [stdev(values) ** 2 / len(values) for values in (first, other)]
        error = math.sqrt(sum(parts))
        weights = sum(part**2 / (len(v) - 1) for part, v in zip(parts, (first, other), strict=True))
        freedom = sum(parts) ** 2 / weights if weights else math.inf
        test = "Welch"
    else:
        many = first if len(first) > 1 else other
        error, freedom = stdev(many) * math.sqrt(1 + 1 / len(many)), len(many) - 1
        test = "one run against the spread of the other's repeats"
    if error == 0:
        return False, f"{text}; the repeats do not differ at all, so there is no noise to judge it by"
    t = difference / error
    chance = two_sided(t, freedom)
    least = student_t(CHANCE / comparisons, freedom) * error
    shown = chance < CHANCE / comparisons
    call = "more than seed noise" if shown else "cannot be distinguished from seed noise"
    return shown, (
        f"{text}, {abs(t):.2f} standard errors ({test}, {freedom:.1f} degrees of freedom, p = {chance:.2g}): {call}; "
        f"so many repeats tell differences from {least:.2g} on"
    )


def _what(key: Key) -> str:
    return f"{key[0]} (protocol {key[1]})"


# Which curves of several runs are drawn over each other: one panel a metric, one look a run, on the axes of
# curves.py.

SECTION = "Curves"
POINTS_OF_ALL = 20_000  # of all curves together: half a megabyte, however many runs there are
# Title, unit, name, logarithmic. The training loss stands before them, bits per byte under one protocol behind it.
METRICS = (
    ("Smoothed training loss", "nats per token", "train/loss_ema", False),
    ("Gradient norm before clipping", "L2 norm", "optim/grad_norm", True),
    ("Learning rate of the first parameter group", "", "optim/lr", False),
    ("Multiplier of all learning rates", "", "optim/lrm", False),
    ("Throughput", "tokens/s", "perf/tok_per_s", False),
)
Places = dict[str, tuple[np.ndarray, np.ndarray]]  # by axis: steps, and where each is


def drawn_text(runs: Sequence[RunData]) -> str:
    """Return which runs have no curves; "" where all have."""
    if len(runs) <= LOOKS:
        return ""
    return (
        f"Drawn are the first {LOOKS} of the {len(runs)} runs, more could not be distinguished; the tables hold "
        "all.\n\n"
    )


def loss_of_all(runs: Sequence[RunData]) -> str | None:
    """Return the training loss that all runs have; None where they have not one of the same name."""
    return next(
        (name for name in ("train/loss", "train/loss_ema") if all(data.last(name) is not None for data in runs)), None
    )


def comparison_panels(runs: Sequence[RunData]) -> tuple[list[Panel], dict[str, str]]:
    """Return the panels of what at least two runs have, or any run of the training loss; and the labels of their x
    axes."""
    runs = runs[:LOOKS]  # of more, curves could not be distinguished
    loss = loss_of_all(runs)
    title = METRICS[0][0] if loss == "train/loss_ema" else "Training loss"
    kinds: list[tuple[str, str, str | None, bool]] = [(title, "nats per token", loss, False)]
    kinds += [(name, "bits per byte", name, False) for name in COMPARED_BPB if one_protocol(runs, name)]
    kinds += [kind for kind in METRICS if kind[2] != loss]
    having = [[data for data in runs if len(finite(data, _name(data, name))[0]) > 1] for _, _, name, _ in kinds]
    kinds = [kind for n, kind in enumerate(kinds) if len(having[n]) > 1 or (n == 0 and having[n])]
    points = min(POINTS, POINTS_OF_ALL // max(len(runs) * len(kinds), 1))
    placed = [{axis: positions(data, axis) for axis in COMPARED_AXES} for data in runs]
    unit = _thousands(max((flops[-1] for at in placed if len(flops := at["flops"][1])), default=1.0))
    for at in placed:
        at["flops"] = at["flops"][0], at["flops"][1] / 10.0**unit
    panels = []
    for title, measured, name, log in kinds:
        curves = [
            _curve(data, label, _name(data, name), place, points, placed[place])
            for place, (label, data) in enumerate(zip(legends(runs), runs, strict=True))
            if len(finite(data, _name(data, name))[0])
        ]
        log = log and all((curve.y > 0).all() for curve in curves)
        panels.append(Panel(SECTION, title, measured, log, curves, note=_note(runs, name)))
    return panels, COMPARED_AXES | ({"flops": f"{COMPARED_AXES['flops']}, in 10^{unit}"} if unit else {})


def _name(data: RunData, name: str | None) -> str:
    usual = f"{name}_median"  # of an interval's norms, which compares with the one norm that earlier versions logged
    return usual if len(data.curve(usual)[0]) else name or data.loss_name()


def _curve(data: RunData, label: str, name: str, place: int, points: int, placed: Places) -> Curve:
    """Return the curve thinned. Between two steps that have a place on the axis a point is interpolated, outside of
    them it has none."""
    steps, values = thin(*finite(data, name), points)
    x = {
        axis: np.interp(steps, at, places, left=np.nan, right=np.nan)
        for axis, (at, places) in placed.items()
        if len(at)
    }
    known = {axis: places for axis, places in x.items() if np.isfinite(places).any()}
    return Curve(label, known, values, place, style_of(name, len(steps)))


def _thousands(most: float) -> int:
    """Return the exponent of ten, three by three, in which so many are a number for people."""
    return int(math.log10(max(most, 1.0)) // 3 * 3)


def _note(runs: Sequence[RunData], name: str | None) -> str:
    """Return whose number is another one by that name, and who has none."""
    names = {data.name: _name(data, name) for data in runs}
    sentences = [f"{data.name}: {names[data.name]}." for data in runs] if name is None else []
    sentences += [f"{data.name}: {meaning}." for data in runs if (meaning := data.meaning_of(names[data.name]))]
    without = [data.name for data in runs if not len(finite(data, names[data.name])[0])]
    sentences += [f"Not recorded by {', '.join(without)}."] if without else []
    return " ".join(sentences)


PICTURE = "curves.png"
NOTHING_ALIGNED = "No loss of two runs has a common stretch on any axis.\n"


def write_comparison(runs: Sequence[RunData], folder: Path) -> str:
    """Write comparison.md, comparison.html and their picture into the folder; returns the Markdown."""
    # A second of imports, which a comparison that is only printed need not pay.
    from pipeline.report.page import page, picture

    panels, axes = comparison_panels(runs)
    over = [(axis, panel) for panel in panels[:1] for axis in axes if any(axis in curve.x for curve in panel.curves)]
    over += [("tokens", panel) for panel in panels[1:] if panel.title in COMPARED_BPB]
    png = picture(over, axes, title=_title(runs), one_legend=True) if panels else None
    place_picture(png, folder / PICTURE)
    sections, head = sections_of(runs), results_text(runs)
    html = page(
        _title(runs),
        sections,
        kind="comparison",
        head=head,
        panels=panels,
        axes=axes,
        picture=png,
        unfolded=(SECTION,),
        one_legend=True,
    )
    write_text(folder / "comparison.html", html)
    text = _markdown(runs, sections, head, picture=png is not None)
    write_text(folder / "comparison.md", text)
    return text


def comparison(runs: Sequence[RunData]) -> str:
    """Return the whole comparison in Markdown, one column a run, with which figures are not compared and why."""
    return _markdown(runs, sections_of(runs), results_text(runs), picture=False)


def sections_of(runs: Sequence[RunData]) -> dict[str, str]:
    """Return title and Markdown of the sections that have something to say, below the results."""
    texts = {
        SECTION: drawn_text(runs) + (aligned_text(runs) or NOTHING_ALIGNED),
        "What differs": differences_text(runs),
        "Evaluations": _evaluations(runs),
        "Against seed noise": seed_noise_text(runs),
        "Runs": _runs(runs),
        "Speed and memory": ratios_text(runs),
        "Imported logs": _imports(runs),
    }
    return {title: text for title, text in texts.items() if text}


def _markdown(runs: Sequence[RunData], sections: dict[str, str], head: str, *, picture: bool) -> str:
    """Return results and sections under one title; picture: whether it is beside the text."""
    if picture:
        sections = sections | {SECTION: f"![{PICTURE}]({PICTURE})\n\n{sections[SECTION]}"}
    return "\n".join(
        [f"# {cell(_title(runs))}\n", head, *(f"## {title}\n\n{text}" for title, text in sections.items())]
    )


# The first screen: which run did better and whether that is shown, each run in a line, and their samples side by side.

SHOWN_FIGURES, SHOWN_CHANGES, SHOWN_PROMPTS, SHOWN_RUNS = 3, 3, 2, 4


def results_text(runs: Sequence[RunData]) -> str:
    """Return what won and whether it is shown, a table of the results, and the runs' samples."""
    figures = judged_figures(runs)
    return joined(warning(runs), _winners(figures), _results(runs, list(figures)[:SHOWN_FIGURES]), _side_by_side(runs))


def _winners(figures: dict[Key, Groups]) -> str:
    judged = count_judged(figures)
    lines = [f"- {_winner(key, having, judged)}\n" for key, having in figures.items() if len(having) > 1]
    nothing = (
        "**Nothing says which is better**: no figure was scored under one protocol in two of these runs that differ "
        "in more than the seed.\n"
    )
    return "".join(lines[:SHOWN_FIGURES]) or nothing


def _winner(key: Key, having: Groups, judged: int) -> str:
    """Return who is ahead, and whether by more than another seed would make. Judged is against the first group
    alone."""
    first, others = having[0], having[1:]
    values = {_called(group): share(key[0], mean(found)) for group, found in having}
    better = metric.better if (metric := metric_of(key[0])) else None
    if better is None:
        return f"{cell(key[0])}: {', '.join(map(' '.join, values.items()))}."
    if len({mean(found) for _, found in having}) == 1:
        return f"**No difference** in {cell(key[0])}: {share(key[0], mean(first[1]))}."
    best = max(having, key=lambda pair: mean(pair[1]) if better == "higher" else -mean(pair[1]))
    name = _called(best[0])
    value = values.pop(name)
    line = f"**{name}** has the {better} {cell(key[0])}: {value} against {', '.join(map(' '.join, values.items()))}. "
    compared = others if best is first else [best]
    calls = [judge(first[1], found, comparisons=max(judged, 1))[0] for _, found in compared]
    if all(calls):
        line += "**Shown**: more than seed noise."
    elif any(len(found) > 1 for _, found in [first, *compared]):
        line += "**Not shown**: it cannot be distinguished from seed noise."
    else:
        line += "**Not shown**: one run each, so another seed might turn it around."
    return f"{line} Judged is against {_called(first[0])}, the first." if len(having) > 2 else line


def _called(group: Sequence[RunData]) -> str:
    names = ", ".join(cell(data.name) for data in group)
    return f"{names} (mean)" if len(group) > 1 else names


def _results(runs: Sequence[RunData], keys: list[Key]) -> str:
    """Return a line for each run: what differs from the first, its scores, time and cost."""
    names = [key[0] for key in keys]
    heads = [key[0] if names.count(key[0]) == 1 else _what(key) for key in keys]
    loss = loss_of_all(runs)
    rows = []
    for data in runs:
        scores = data.newest_scores
        seconds = wall_s(data) or data.last("perf/total_s")
        cost = paid(data)
        rows.append(
            [
                data.name,
                None if data is runs[0] else "; ".join(changes(runs[0], data)) or "nothing",
                *(share(key[0], scores[key].value) if key in scores else None for key in keys),
                None if loss is None else f"{data.last(loss):.4f}",
                duration(seconds) if seconds else None,
                None if cost is None else f"{cost:,.2f}",
            ]
        )
    return filled_table(["run", f"what differs from {runs[0].name}", *heads, loss or "", "time", "cost"], rows)


def changes(first: RunData, data: RunData) -> list[str]:
    """Return what the run has where the first has something else: major variables before others, at most SHOWN_CHANGES
    of them."""
    one, other = ({**settings_of(run), **facts_of(run)} for run in (first, data))
    is_import = first.is_imported or data.is_imported
    known = one.keys() & other.keys() if is_import else one.keys() | other.keys()
    found = [name for name in known if one.get(name) != other.get(name)]
    equal = [p for fact, patterns in DECIDES.items() if fact in one and one[fact] == other.get(fact) for p in patterns]
    differing = [name for name in found if not any(fnmatch(name, pattern) for pattern in equal)]
    differing = [
        name for name in differing if not any(fnmatch(s, p) for p in DECIDES.get(name, ()) for s in differing)
    ]
    order = [*MAJOR, CODE, OTHER]
    differing.sort(key=lambda name: (order.index(group_of(name)), name))
    lines = [_change(name, one.get(name), other.get(name)) for name in differing]
    more = len(lines) - SHOWN_CHANGES
    return lines[:SHOWN_CHANGES] + ([f"{more} more"] if more > 0 else [])


def _change(name: str, *values: Any) -> str:
    """Return from what to what; that it is another one where the values are long."""
    name = name.removeprefix("fact: ")
    texts = ["absent" if value is None else str(value) for value in values]
    return f"{name} {' -> '.join(texts)}" if max(map(len, texts)) <= SHORT else f"another {name}"


def _side_by_side(runs: Sequence[RunData]) -> str:
    """Return what each of the first runs last wrote to the prompts that all of them were given."""
    texts = [last_texts(data) for data in runs[:SHOWN_RUNS]]
    prompts = [prompt for prompt in texts[0] if all(prompt in of for of in texts)][:SHOWN_PROMPTS]
    rows = [[shortened(prompt), *(shortened(of[prompt]) for of in texts)] for prompt in prompts]
    return table(["prompt", *(data.name for data in runs[:SHOWN_RUNS])], rows)


def _title(runs: Sequence[RunData]) -> str:
    names = [data.name for data in runs]
    return " and ".join(names) if len(names) <= 4 else f"{names[0]} and {len(names) - 1} other runs"


def _runs(runs: Sequence[RunData]) -> str:
    rows: list[list[Any]] = [
        ["stage", *(data.stage for data in runs)],
        ["note", *(data.manifest.get("note") for data in runs)],
        ["status", *(data.status() for data in runs)],
        ["steps", *(number(data.step()) for data in runs)],
        ["trained on", *(trained_on(data) for data in runs)],
        ["tokens (row positions)", *(number(data.tokens() or None) for data in runs)],
    ]
    names = ["train/loss", "train/loss_ema", "val/loss", "perf/tok_per_s", "perf/mfu_pct", "perf/total_s"]
    if len({data.protocol("val/loss") for data in runs if data.last("val/loss") is not None} - {None}) > 1:
        names.remove("val/loss")  # of other text, or in other tokens: another measure
    rows += [[f"{name} (last)", *(number(data.last(name), 5) for data in runs)] for name in names]
    known = [row for row in rows if any(value is not None for value in row[1:])]
    return table(["", *(data.name for data in runs)], known)


def _evaluations(runs: Sequence[RunData]) -> str:
    rows, refused = score_rows(runs)
    return table(["", *(data.name for data in runs)], rows) + "".join(f"\n{line}\n" for line in refused)


def _imports(runs: Sequence[RunData]) -> str:
    """Return whose logs they are, which of their numbers are others than ours by that name, and lines that could not
    be read."""
    lines = []
    for data in runs:
        log = data.manifest.get("imported")
        if log is None:
            continue
        lines.append(f"{cell(data.name)}: {log['program']}, {len(data.rows):,} rows, from {data.run.path}.")
        lines += [f"- {name}: {meaning}." for name, meaning in log["meanings"].items() if data.last(name) is not None]
        if log["flops_per_token"]:
            lines.append(f"- FLOPs per token: {log['flops_per_token']:.4g}, by its own formula.")
        if lost := data.lost_lines:
            lines.append(
                f"- {len(lost)} lines look like a measured step and could not be read, the first is line {lost[0][0]}."
            )
    return "".join(f"{line}\n" for line in lines)
