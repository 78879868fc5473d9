"""Several runs compared: figures with intervals, settings that differ, speed and memory, curves on common axes."""

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, stdev, variance
from typing import Any

import numpy as np

from pipeline.evals.intervals import student_t
from pipeline.process.storage import write_text
from pipeline.report.benchmarks import score_rows
from pipeline.report.compared_curves import (
    COMPARED_BPB,
    SECTION,
    aligned_text,
    comparison_panels,
    loss_of_all,
    one_protocol,
)
from pipeline.report.cost import paid, wall_s
from pipeline.report.curves import LOOKS
from pipeline.report.markdown import cell, filled_table, fixed, joined, lines_of, number, table, titled
from pipeline.report.run_data import RunData
from pipeline.report.samples import last_texts
from pipeline.report.scores import Key
from pipeline.report.sections import leaves
from pipeline.report.single import place_picture
from pipeline.report.summary import duration, share, shortened

PICTURE = "curves.png"
CHANCE = 0.05  # of calling seed noise a difference, in a whole table
# Names of a run, and its seed: runs that differ in nothing else repeat each other.
NAMES_OF_RUNS = ("run.name", "run.note", "run.tags", "run.directory", "run.code_folder")
SEED = "train.seed"
SHOWN_CHANGES, SHOWN_PROMPTS, SHOWN_RUNS = 3, 2, 4
LONGEST = 90  # characters of a setting in a table


def write_comparison(runs: Sequence[RunData], folder: Path) -> str:
    """Write comparison.md, comparison.html and their picture into the folder; return the Markdown."""
    from pipeline.report.page import page, picture  # a second of imports

    panels, axes = comparison_panels(runs)
    png = None
    if panels:
        loss, *others = panels
        known = set(chain.from_iterable(curve.x for curve in loss.curves))
        drawn = [(axis, loss) for axis in axes if axis in known]
        drawn += [("tokens", panel) for panel in others if panel.title in COMPARED_BPB]
        png = picture(drawn, axes, title=_title(runs), one_legend=True)
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
    if png is not None:
        sections[SECTION] = f"![{PICTURE}]({PICTURE})\n\n{sections[SECTION]}"
    text = _markdown(runs, sections, head)
    write_text(folder / "comparison.md", text)
    return text


def comparison(runs: Sequence[RunData]) -> str:
    """Return the whole comparison in Markdown, one column a run."""
    return _markdown(runs, sections_of(runs), results_text(runs))


def _markdown(runs: Sequence[RunData], sections: dict[str, str], head: str) -> str:
    parts = [f"## {title}\n\n{text}" for title, text in sections.items()]
    return "\n".join([f"# {cell(_title(runs))}\n", head, *parts])


def _title(runs: Sequence[RunData]) -> str:
    names = names_of(runs)
    return " and ".join(names) if len(names) <= 4 else f"{names[0]} and {len(names) - 1} other runs"


def sections_of(runs: Sequence[RunData]) -> dict[str, str]:
    """Return title and Markdown of the sections that have something to say, below the results."""
    # Tables before pictures: the Markdown is read without them too.
    curves = aligned_text(runs) or "No loss of two runs has a common stretch on any axis.\n"
    if len(runs) > LOOKS:
        curves = f"Drawn are the first {LOOKS} of the {len(runs)} runs; the tables hold all.\n\n{curves}"
    texts = {
        SECTION: curves,
        "What differs": differences_text(runs),
        "Evaluations": _evaluations(runs),
        "Runs": _runs(runs),
        "Speed and memory": ratios_text(runs),
        "Imported logs": _imports(runs),
    }
    return {title: text for title, text in texts.items() if text}


# ---- the first screen ----


def results_text(runs: Sequence[RunData]) -> str:
    """Return the figures with intervals, a line for each run, and the runs' samples."""
    return joined(figures_text(runs), _results(runs), _side_by_side(runs))


Groups = list[tuple[list[RunData], list[float]]]  # runs that repeat each other, and the figure of each


def repeats(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Return the runs in groups that differ in the seed alone, in order of first appearance. A log has no repeats."""
    groups: dict[str, list[RunData]] = {}
    for place, data in enumerate(runs):
        same = settings_of(data) | facts_of(data)
        seed = same.pop(SEED, None)
        # A tokenizer that was trained on the same text in the order of another seed is another one.
        same.pop("tokenizer", None)
        is_known = seed is not None and not data.is_imported
        key = repr((data.stage, data.fact("git.commit"), same)) if is_known else str(place)
        group = groups.setdefault(key, [])
        if seed not in [other.setting(SEED) for other in group]:
            group.append(data)
    return list(groups.values())


def compared_figures(runs: Sequence[RunData]) -> dict[Key, Groups]:
    """Return each figure that two groups of repeats have under the same protocol."""
    found: dict[Key, Groups] = {}
    groups = repeats(runs)
    for key in dict.fromkeys(chain.from_iterable(data.newest_scores for data in runs)):
        _, protocol, _ = key
        having: Groups = []
        for group in groups:
            values = [data.newest_scores[key].value for data in group if key in data.newest_scores]
            if values:
                having.append((group, values))
        if protocol is not None and len(having) > 1:
            found[key] = having
    return found


def figures_text(runs: Sequence[RunData]) -> str:
    """Return each group of repeats in each figure, and its difference from the first group with an interval."""
    figures = compared_figures(runs)
    if not figures:
        return (
            "**Nothing says which is better**: no figure was scored under one protocol in two of these runs that "
            "differ in more than the seed.\n"
        )
    # Differences from the first group of which one side has a repeat: by their number the chance of a false call is
    # divided (Bonferroni).
    judged = 0
    for (_, first), *others in figures.values():
        judged += sum(max(len(first), len(values)) > 1 for _, values in others)
    rows: list[list[Any]] = []
    for (name, protocol, _), having in figures.items():
        first = having[0][1]
        for group, values in having:
            against: tuple[str, str | None] = ("the first", None)
            if values is not first:
                against = difference(first, values, comparisons=max(judged, 1))
            spread = share(name, stdev(values)) if len(values) > 1 else None
            names = ", ".join(names_of(group))
            rows.append([f"{name} ({protocol})", names, len(values), share(name, mean(values)), spread, *against])
    head = ["figure (protocol)", "runs", "n", "mean", "standard deviation", "difference [95 %]", "seed noise?"]
    # What the reader is to do with these figures, or how to make them say more.
    if not judged:
        advice = "No run has a repeat, so whether a difference is seed noise is not known: train each recipe with "
        advice += f"three seeds ({SEED}=1, 2, 3) and name all of them here.\n"
    else:
        advice = "An interval without 0 is more than another seed would make: in a table without true differences, "
        advice += f"one such call in {CHANCE:.0%} of tables ({judged} differences, Bonferroni).\n"
    return joined(filled_table(head, rows), advice)


def difference(first: Sequence[float], other: Sequence[float], *, comparisons: int = 1) -> tuple[str, str | None]:
    """Return the difference of the means with its interval, and whether that is more than seed noise.

    By Welch's t test where both have repeats; with one value on one side by the spread of the other side's repeats.
    comparisons: how many are made, by which the chance of a false call is divided.
    """
    value = mean(other) - mean(first)
    sides = [values for values in (first, other) if len(values) > 1]
    if len(sides) == 2:
        # Welch: each mean's own variance, and as many degrees of freedom as the two together give.
        parts = [variance(values) / len(values) for values in sides]
        error = math.sqrt(sum(parts))
        weights = sum(part**2 / (len(values) - 1) for part, values in zip(parts, sides, strict=True))
        freedom = sum(parts) ** 2 / weights if weights else math.inf
    elif sides:
        count = len(sides[0])
        error, freedom = stdev(sides[0]) * math.sqrt(1 + 1 / count), count - 1
    else:
        error = 0.0
    if error == 0:  # repeats that do not differ at all tell nothing of the seed's noise
        return f"{value:+.6f}", "not known"
    reach = student_t(CHANCE / comparisons, freedom) * error
    verdict = "more than seed noise" if abs(value) > reach else "within seed noise"
    return f"{value:+.6f} [{value - reach:+.6f}, {value + reach:+.6f}]", verdict


def _results(runs: Sequence[RunData]) -> str:
    """Return a line for each run: the settings that differ, its loss, time and cost."""
    loss = loss_of_all(runs)
    rows: list[list[Any]] = []
    for data in runs:
        differs = None
        if data is not runs[0]:
            differs = "; ".join(changes(runs[0], data)) or "nothing"
        seconds = wall_s(data) or data.last("perf/total_s")
        time = duration(seconds) if seconds else None
        last = fixed(data.last(loss)) if loss else None
        cost = paid(data)
        rows.append([data.name, differs, last, time, None if cost is None else f"{cost:,.2f}"])
    return filled_table(["run", f"what differs from {runs[0].name}", loss or "", "time", "cost"], rows)


def _side_by_side(runs: Sequence[RunData]) -> str:
    """Return what each of the first runs last wrote to the prompts that all of them have."""
    texts = [last_texts(data) for data in runs[:SHOWN_RUNS]]
    rows = []
    for prompt in texts[0]:
        answers = [of.get(prompt) for of in texts]
        if None not in answers:
            rows.append([shortened(text or "") for text in (prompt, *answers)])
    return table(["prompt", *names_of(runs[:SHOWN_RUNS])], rows[:SHOWN_PROMPTS])


# ---- settings that differ ----


def settings_of(data: RunData) -> dict[str, Any]:
    """Return the recipe's keys, flat; without the run's names."""
    found = dict(leaves(data.recipe))
    for name in NAMES_OF_RUNS:
        found.pop(name, None)
    # Files and weights are compared by content (facts_of), not by the folder that they were in.
    for key in ("sources", "validation"):
        specs = found.get(f"data.{key}")
        if data.fact(f"inputs.{key}") and isinstance(specs, list):
            found[f"data.{key}"] = [_without("files", spec) for spec in specs]
    if data.fact("inputs.start_from"):
        found.pop("model.start_from", None)
    return found


def facts_of(data: RunData) -> dict[str, Any]:
    """Return what the manifest records beyond the recipe: hardware, batch, data and tokenizer by content."""
    shape, inputs = data.fact("shape", {}), data.fact("inputs", {})
    found = {name: shape.get(name) for name in ("device", "processes", "dtype", "compiled", "attention")}
    found["steps"] = data.max_steps()
    found["tokens of a step"] = inputs.get("batch_tokens")
    found["tokenizer"] = data.fact("inputs.tokenizer.identity")
    found["weights started from"] = _without("from", data.fact("inputs.start_from", {})) or None
    for key in ("sources", "validation"):
        # Their order is the seed's.
        files = [sorted(map(_file, source.get("files") or [])) for source in inputs.get(key) or []]
        found[f"files of {key}"] = files or None
    return found


def _without(name: str, values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _file(file: dict[str, Any]) -> str:
    return str(file.get("sha256") or file.get("label"))[:16]


def by_name(of_runs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return each entry with every run's value, None where it has none."""
    return {name: [of.get(name) for of in of_runs] for name in dict.fromkeys(chain(*of_runs))}


def differing(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Return the settings and facts that differ, with each run's value. A log that has none counts as equal."""
    found = {}
    for name, values in by_name([settings_of(data) | facts_of(data) for data in runs]).items():
        pairs = zip(values, runs, strict=True)
        known = {repr(value) for value, data in pairs if value is not None or not data.is_imported}
        if len(known) > 1:
            found[name] = values
    return found


def changes(first: RunData, data: RunData) -> list[str]:
    """Return what differs from the first run, from what to what; at most SHOWN_CHANGES of them."""
    lines = []
    for name, values in differing([first, data]).items():
        before, after = ("absent" if value is None else str(value) for value in values)
        if max(len(before), len(after)) <= 30:
            lines.append(f"{name} {before} -> {after}")
        else:
            lines.append(f"another {name}")
    more = len(lines) - SHOWN_CHANGES
    return lines if more <= 0 else [*lines[:SHOWN_CHANGES], f"{more} more"]


def differences_text(runs: Sequence[RunData]) -> str:
    """Return a table of the settings that differ, then of code and versions."""
    found = differing(runs)
    settings = _by_run(runs, found) or "No setting differs, as far as the runs record it.\n"
    if len(found.keys() - {SEED, "tokenizer"}) > 1:
        settings += "\nMore than one setting differs: no difference of the figures belongs to one of them alone.\n"
    of_code = [dict(leaves({"git": data.fact("git", {}), "version": data.fact("versions", {})})) for data in runs]
    code = {name: values for name, values in by_name(of_code).items() if len(set(map(repr, values))) > 1}
    return joined(settings, titled("Code", _by_run(runs, code)))


def _by_run(runs: Sequence[RunData], found: dict[str, list[Any]]) -> str:
    """Return the table of these values, a column for each run."""
    return table(["", *names_of(runs)], [[name, *map(_short, values)] for name, values in found.items()])


def names_of(runs: Sequence[RunData]) -> list[str]:
    return [data.name for data in runs]


def _short(value: Any) -> str | None:
    return None if value is None else shortened(str(value), LONGEST)


# ---- the runs, their evaluations, speed and memory ----

# Medians leave out the first logged interval, which holds compilation; peaks are of the whole run.
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
    "mem/host_rss_gib": "largest",
    "gpu/power_w": "median",
    "perf/energy_kwh": "last",
}


def ratios_text(runs: Sequence[RunData]) -> str:
    """Return a table of what at least two runs have, with ratios to the first; "" when there is none."""
    first, *others = runs
    rows: list[list[Any]] = []
    for name, how in HOW.items():
        values = [summary(data, name) for data in runs]
        if len(runs) - values.count(None) > 1:
            rows.append([name, how, *map(number, values), *(_ratio(first, data, name) for data in others)])
    head = ["", "of the run", *names_of(runs), *(f"{name} / {first.name}" for name in names_of(others))]
    return table(head, rows)


def _ratio(first: RunData, data: RunData, name: str) -> str | None:
    """Return the ratio to the first run's figure; None where the two mean different numbers by that name."""
    of, value = summary(first, name), summary(data, name)
    if not of or value is None or data.meaning_of(name) != first.meaning_of(name):
        return None
    return f"{value / of:.3f}"


def summary(data: RunData, name: str) -> float | None:
    """Return the run's one figure of a metric; None where it has none."""
    values = data.curve(name)[1]
    if not len(values):
        return None
    if HOW[name] == "largest":
        return values.max().item()
    if HOW[name] == "last":
        return values[-1].item()
    if len(values) > 1:
        values = values[1:]
    return float(np.median(values))


def _runs(runs: Sequence[RunData]) -> str:
    names = ["train/loss", "train/loss_ema", "perf/total_s"]
    if one_protocol(runs, "val/loss"):
        names.append("val/loss")
    rows = []
    for name, values in by_name([_facts(data, names) for data in runs]).items():
        if any(value is not None for value in values):
            rows.append([name, *values])
    return table(["", *names_of(runs)], rows)


def _facts(data: RunData, names: Sequence[str]) -> dict[str, Any]:
    """Return what the run is, how far it is, and the last values of the metrics `names`."""
    facts = {
        "stage": data.stage,
        "note": data.manifest.get("note"),
        "status": data.status(),
        "steps": number(data.step()),
        "trained on": data.trained_on,
        "tokens (row positions)": number(data.tokens() or None),
    }
    return facts | {f"{name} (last)": number(data.last(name), 5) for name in names}


def _evaluations(runs: Sequence[RunData]) -> str:
    rows, refused = score_rows(runs)
    return table(["", *names_of(runs)], rows) + "".join(f"\n{line}\n" for line in refused)


def _imports(runs: Sequence[RunData]) -> str:
    """Return which runs are logs of other programs, which of their numbers differ from ours by that name, and lines
    that could not be read."""
    lines = []
    for data in runs:
        log = data.manifest.get("imported")
        if log is None:
            continue
        lines.append(f"{cell(data.name)}: {log['program']}, {len(data.rows):,} rows, from {data.run.path}.")
        for name, meaning in log["meanings"].items():
            if data.last(name) is not None:
                lines.append(f"- {name}: {meaning}.")
        if data.lost_lines:
            first = data.lost_lines[0][0]
            lines.append(f"- {len(data.lost_lines)} lines could not be read, the first is line {first}.")
    return lines_of(lines)
