"""Benchmarks in words and tables: what was reached on which tasks, how sure it is, and what it takes to repeat it."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from pipeline.evals.core_bundle import why_partial
from pipeline.metrics import why_not_compared
from pipeline.report.markdown import (
    cell,
    code,
    date,
    facts_table,
    filled_table,
    fixed,
    joined,
    number,
    percent,
    spread,
    table,
)
from pipeline.report.run_data import RunData
from pipeline.report.scores import Benchmark, Key, Score, protocol_line, series_of, task_name

SHOWN = 3  # other runs against which a figure that is not compared is named


def score_rows(runs: Sequence[RunData]) -> tuple[list[list[Any]], list[str]]:
    """Return one row per figure that at least two runs have, measured on the same; sentences on the rest."""
    newest = [data.newest_scores for data in runs]
    rows: list[list[Any]] = []
    refused = []
    for key in sorted(set().union(*newest), key=repr):
        name, protocol, items = key
        having = [data for data in runs if key in data.newest_scores]
        if protocol is None:
            why = "the run does not say under which protocol it was scored."
            refused += [f"{name} of {cell(data.name)} is not compared: {why}" for data in having]
        elif len(having) > 1:
            on = f"protocol {protocol}; {_amount(items)}" if items else f"protocol {protocol}"
            row: list[Any] = [f"{name} (last; {on})"]
            for scores in newest:
                row.append(fixed(scores[key].value, 6) if key in scores else None)
            rows.append(row)
        else:
            refused.append(_not_compared(key, having[0], runs))
    return rows, refused


def _not_compared(key: Key, data: RunData, runs: Sequence[RunData]) -> str:
    """Return why a run's figure has no counterpart: in what the same figure of others was measured differently."""
    name, protocol, items = key
    own = data.newest_scores[key]
    on_these = f" on the same {_amount(items)}" if items else ""
    text = f"{name} of {cell(data.name)} is not compared: no other of these runs was scored{on_these} under its "
    text += f"protocol {protocol}."
    shown = 0
    for run in runs:
        for other in run.newest_scores.values():
            if run is data or other.name != name or other.protocol is None or shown == SHOWN:
                continue
            shown += 1
            why = f"{_amount(items)} against {_amount(other.items)}"
            if other.protocol != protocol:
                why = why_not_compared(own.parts, other.parts)
            text += f" Against {cell(run.name)} ({other.protocol}): {cell(why)}."
    return text


def protocols_text(scores: Sequence[Score]) -> str:
    """Return what each protocol of these figures is made of, and in what those of one metric differ; "" where none is
    known."""
    known = {score.protocol: score.parts for score in scores if score.parts is not None}
    if not known:
        return ""
    lines = [protocol_line(protocol, parts) for protocol, parts in known.items()]
    by_name: dict[str, dict[str | None, Score]] = {}
    for score in scores:
        by_name.setdefault(score.name, {})[score.protocol] = score
    for name, by_protocol in by_name.items():
        first, *others = by_protocol.values()
        for other in others:
            why = cell(why_not_compared(first.parts, other.parts))
            both = f"under {cell(first.protocol)} and under {cell(other.protocol)}"
            lines.append(f"- not to be compared: {cell(name)} {both}, {why}\n")
    return "".join(lines)


def _amount(items: tuple[tuple[str, int | None], ...]) -> str:
    return f"{len(items)} tasks, {sum(count or 0 for _, count in items):,} items"


COLUMNS = 6  # of a table that a page has room for
STEPS_OF_A_SERIES = 16


def benchmarks_text(data: RunData) -> str:
    """Return each series of equal measurements by its newest entry, and its means over steps; then what could not be
    scored."""
    return joined(*map(_series, series_of(data.benchmarks())), _failures(data))


def _series(series: list[Benchmark]) -> str:
    newest = series[-1]
    history = _history(series) if len(series) > 1 else ""
    title = f"### {suite_name(newest)}: {_of(newest)}\n"
    return joined(title, scores_text(newest), history, _facts(newest))


def suite_name(benchmark: Benchmark) -> str:
    """Return the suite's name for people: what is not CORE is not called so."""
    if benchmark.suite == "core":
        is_whole = any(mean["name"].startswith("core/") for mean in benchmark.means)
        return "CORE" if is_whole else "core_partial"
    return {"chat": "Chat tasks", "lm_eval": "lm-evaluation-harness"}[benchmark.suite]


def _of(benchmark: Benchmark) -> str:
    parts = []
    if benchmark.subject and benchmark.subject != f"step {benchmark.step}":
        parts.append(benchmark.subject)
    if benchmark.step is not None:
        parts.append(f"step {number(benchmark.step)}")
    return ", ".join(parts) or "a model"


def scores_text(benchmark: Benchmark) -> str:
    """Return the means, what is missing in them, the tasks, and what contamination means."""
    lines = partial_lines(benchmark)
    if benchmark.first_items:
        lines.append(f"At most the first {benchmark.first_items:,} items of each task were scored.")
    lines.append("The interval of a share is mid-P, of the exact binomial tails.")
    lines = [f"{line}\n" for line in lines]
    return joined(_means(benchmark), *lines, _tasks(benchmark), _looked(benchmark))


def _means(benchmark: Benchmark) -> str:
    head = [
        "mean of centred scores",
        "value",
        "95 % interval",
        "tasks",
        "contaminated",
        "value without them",
        "protocol",
    ]
    many = len(benchmark.protocols()) > 1
    rows: list[list[Any]] = []
    for mean in benchmark.means:
        tasks = mean.get("tasks")
        rows.append(
            [
                mean["name"],
                fixed(mean["value"], 6),
                interval(mean),
                number(len(tasks) if isinstance(tasks, list) else tasks),
                _contaminated(mean),
                fixed(_contamination(mean).get("score_without"), 6),
                mean["protocol"] if many else None,
            ]
        )
    return filled_table(head, rows)


def partial_lines(benchmark: Benchmark) -> list[str]:
    """Return why a mean may not be called CORE or ChatCORE, one sentence each."""
    lines = []
    for mean in benchmark.means:
        tasks = benchmark.tasks_of(mean)
        whole = mean["name"].removesuffix("_part")
        if mean["name"].startswith("core_partial/"):
            published = {task_name(task): task.get("published", True) for task in tasks}
            why = "; ".join(why_partial(mean.get("missing") or [], published)) or "the reason was not recorded"
            lines.append(f"This is not CORE: {why}.")
        elif mean["name"] != whole:
            cut = [f"{task_name(t)} ({_items(t) or 'some'} items)" for t in tasks if not t.get("complete")]
            lines.append(f"{mean['name']} is not {whole}: asked were not all items of {', '.join(cut)}.")
    return list(dict.fromkeys(lines))


def _tasks(benchmark: Benchmark) -> str:
    many = len(benchmark.protocols()) > 1
    is_lm_eval = benchmark.suite == "lm_eval"
    value = "value" if is_lm_eval else "accuracy"
    # Of a chat task there is one baseline, of CORE's two: the published one and DCLM's corrected one.
    versions = [None] if benchmark.suite == "chat" else ["v1", "v2"]
    head = ["task, metric" if is_lm_eval else "task", value, "95 % interval", "standard error", "items"]
    head += [f"centred {version}" if version else "centred" for version in versions]
    head += ["shots", "contaminated", f"{value} without them", "notes", "protocol"]
    rows: list[list[Any]] = []
    for task in benchmark.tasks:
        row = [task_name(task), fixed(task["value"]), interval(task), fixed(task.get("stderr")), _items(task)]
        row += [fixed(_centred(task, version)) for version in versions]
        row += [number(task.get("shots", task.get("num_fewshot"))), _contaminated(task)]
        row += [fixed(_contamination(task).get("score_without")), "; ".join(_notes(task)) or None]
        rows.append([*row, task["protocol"] if many else None])
    return filled_table(head, rows)


def interval(row: dict[str, Any]) -> str | None:
    """Return the 95 % interval of a row that has one."""
    low, high = row.get("low"), row.get("high")
    return None if low is None or high is None else f"{low:.4f} to {high:.4f}"


def _items(row: dict[str, Any]) -> str | None:
    items, of = row.get("items", row.get("n")), row.get("of")
    return number(items) if of in (None, items) else f"{number(items)} of {number(of)}"


def _centred(task: dict[str, Any], version: str | None) -> float | None:
    centred = task.get("centred")
    return centred.get(version) if isinstance(centred, dict) else centred


def _contamination(row: dict[str, Any]) -> dict[str, Any]:
    return row.get("contamination") or {}


def _contaminated(row: dict[str, Any]) -> str | None:
    found = _contamination(row)
    if found.get("contaminated") is None:
        return None
    text = f"{number(found['contaminated'])} of {number(found.get('items'))}"
    share = percent(found.get("contaminated_share"))
    return f"{text} ({share})" if share else text


def _notes(task: dict[str, Any]) -> list[str]:
    counts = {
        "prompts shortened": task.get("shortened"),
        "questions too long, counted as wrong": task.get("too_long"),
        "items whose prompt was cut": task.get("cut"),
        "items too short to look for": _contamination(task).get("unjudged"),
    }
    notes = [f"{what}: {number(count)}" for what, count in counts.items() if count]
    if task.get("published") is False:
        notes.append("not the published file")
    if task.get("complete") is False:
        notes.append("not the whole test set")
    if isolation := task.get("isolation"):
        notes.append(f"programs run behind {isolation}")
    return notes


def _looked(benchmark: Benchmark) -> str:
    """Return what a contaminated item is, and which text was not searched."""
    found = [row["contamination"] for row in benchmark.tasks if _contamination(row)]
    if not found:
        return ""
    line = (
        "An item is contaminated when 13 of its words in a row (all of an item of 8 to 12) are in the text trained on"
    )
    shards = max(_numbers(found, "shards"))
    if shards:
        searched = shards - max(_numbers(found, "unchecked_shards"))
        line += f"; {number(searched)} of {number(shards)} shards of that text were searched"
    missing = dict.fromkeys(chain.from_iterable(row.get("not_searched") or [] for row in found))
    if missing:
        line += f"; the text of {', '.join(map(cell, missing))}, which this model comes from, was not"
    return f"{line}.\n"


def _numbers(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Return the number of that name of each row, 0 where it has none; [0] without rows."""
    return [row.get(name) or 0 for row in rows] or [0]


def _history(series: list[Benchmark]) -> str:
    by_model = []
    for benchmark in spread(series, STEPS_OF_A_SERIES):
        values: dict[str, str | None] = {"model": _of(benchmark)}
        for row in benchmark.means or benchmark.tasks:
            values[row["name"]] = fixed(row["value"], 6)
        by_model.append(values)
    names = list(dict.fromkeys(chain.from_iterable(by_model)))
    rows = [[values.get(name) for name in names] for values in by_model]
    if len(names) > max(len(rows), COLUMNS):  # the longer of the two downwards
        head, *lines = zip(["metric", *names[1:]], *rows, strict=True)
        return table(head, lines)
    return table(names, rows)


def _facts(benchmark: Benchmark) -> str:
    """Return what it takes to repeat the measurement; evals.json has the files and their hashes too."""
    entry, protocols = benchmark.entry, benchmark.protocols()
    versions = ", ".join(f"{name} {version}" for name, version in (entry.get("versions") or {}).items())
    bundles = [row["bundle"] for row in benchmark.rows if row.get("bundle")]
    # Of CORE each mean has the sum over its tasks, of chat tasks each task has its own.
    seconds = max(_numbers(benchmark.means, "seconds")) or sum(_numbers(benchmark.tasks, "seconds"))
    facts = [
        ["time", date(entry.get("time"))],
        ["device", entry.get("device")],
        ["versions", versions or None],
        ["protocol", protocols[0] if len(protocols) == 1 else None],
        ["bundle", bundles[0] if bundles else None],
        ["seconds", number(seconds or None)],
    ]
    command = code(entry["command"], "bash") if entry.get("command") else ""
    return joined(command, facts_table("what", facts), benchmark.protocols_text())


def _failures(data: RunData) -> str:
    names = ("step", "name", "reason")
    # Several ranks may have met the same.
    rows = dict.fromkeys(tuple(map(row.get, names)) for row in data.events("evaluation_failed"))
    if not rows:
        return ""
    return "Not scored, and the training went on:\n\n" + table(["step", "benchmark", "reason"], list(rows))
