"""Benchmarks in words and tables: what was reached on which tasks, how sure it is, and what it takes to repeat it."""

from collections.abc import Sequence
from typing import Any

from pipeline.evals.core_bundle import why_partial
from pipeline.metrics import why_not_compared
from pipeline.report.run_data import (
    Benchmark,
    Key,
    RunData,
    Score,
    cell,
    code,
    date,
    facts_table,
    filled_table,
    joined,
    number,
    percent,
    series_of,
    spread,
    table,
    task_name,
)

SHOWN = 3  # other runs against which a figure that is not compared is named


def score_rows(runs: Sequence[RunData]) -> tuple[list[list[Any]], list[str]]:
    """Return one row per figure that at least two runs have, measured on the same; sentences on the rest."""
    newest = [data.newest_scores for data in runs]
    rows: list[list[Any]] = []
    refused = []
    for key in sorted({key for scores in newest for key in scores}, key=repr):
        name, protocol, items = key
        having = [data for data in runs if key in data.newest_scores]
        if protocol is None:
            refused += [
                f"{name} of {cell(data.name)} is not compared: the run does not say under which protocol it was scored."
                for data in having
            ]
        elif len(having) > 1:
            values = [scores[key].value if key in scores else None for scores in newest]
            on = f"protocol {protocol}" + (f"; {_amount(items)}" if items else "")
            rows.append([f"{name} (last; {on})", *(None if value is None else f"{value:.6f}" for value in values)])
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
    others = [(run, score) for run in runs if run is not data for score in run.newest_scores.values()]
    same = [(run, score) for run, score in others if score.name == name and score.protocol is not None]
    for run, other in same[:SHOWN]:
        why = f"{_amount(items)} against {_amount(other.items)}"
        if other.protocol != protocol:
            why = why_not_compared(own.parts, other.parts)
        text += f" Against {cell(run.name)} ({other.protocol}): {cell(why)}."
    return text


def protocols_text(scores: Sequence[Score]) -> str:
    """Return what each protocol of these figures is made of, and in what those of one metric differ; "" where none is
    known."""
    known = {score.protocol: score.parts for score in scores if score.parts is not None}
    lines = [f"- protocol {cell(protocol)}: {cell(str(parts))}" for protocol, parts in known.items()]
    by_name: dict[str, dict[str | None, Score]] = {}
    for score in scores:
        by_name.setdefault(score.name, {})[score.protocol] = score
    for name, (first, *others) in ((name, list(found.values())) for name, found in by_name.items()):
        lines += [
            f"- not to be compared: {cell(name)} under {cell(first.protocol)} and under {cell(other.protocol)}, "
            f"{cell(why_not_compared(first.parts, other.parts))}"
            for other in others
            if known
        ]
    return "".join(f"{line}\n" for line in lines)


def _amount(items: tuple[tuple[str, int | None], ...]) -> str:
    return f"{len(items)} tasks, {sum(count or 0 for _, count in items):,} items"


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
    whole = any(mean["name"].startswith("core/") for mean in benchmark.means)
    names = {"core": "CORE" if whole else "core_partial", "chat": "Chat tasks", "lm_eval": "lm-evaluation-harness"}
    return names[benchmark.suite]


def _of(benchmark: Benchmark) -> str:
    step = None if benchmark.step is None else f"step {number(benchmark.step)}"
    named = benchmark.subject if benchmark.subject != f"step {benchmark.step}" else None
    return ", ".join(filter(None, (named, step))) or "a model"


def scores_text(benchmark: Benchmark) -> str:
    """Return the means, what is missing in them, the tasks, and what contamination means."""
    lines = partial_lines(benchmark)
    if benchmark.first_items:
        lines.append(f"At most the first {benchmark.first_items:,} items of each task were scored.")
    lines.append("The interval of a share is mid-P, of the exact binomial tails.")
    return joined(_means(benchmark), *(f"{line}\n" for line in lines), _tasks(benchmark), _looked(benchmark))


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
    rows = [
        [
            mean["name"],
            f"{mean['value']:.6f}",
            interval(mean),
            number(len(mean["tasks"]) if isinstance(mean.get("tasks"), list) else mean.get("tasks")),
            _contaminated(mean),
            _fixed(_contamination(mean).get("score_without"), 6),
            mean["protocol"] if len(benchmark.protocols()) > 1 else None,
        ]
        for mean in benchmark.means
    ]
    return filled_table(head, rows)


def partial_lines(benchmark: Benchmark) -> list[str]:
    """Return why a mean may not be called CORE or ChatCORE, one sentence each."""
    lines = []
    for mean in benchmark.means:
        tasks = benchmark.tasks_of(mean)
        if mean["name"].startswith("core_partial/"):
            published = {task_name(task): task.get("published", True) for task in tasks}
            why = "; ".join(why_partial(mean.get("missing") or [], published)) or "the reason was not recorded"
            lines.append(f"This is not CORE: {why}.")
        elif mean["name"].endswith("_part"):
            cut = [f"{task_name(t)} ({_items(t) or 'some'} items)" for t in tasks if not t.get("complete")]
            lines.append(
                f"{mean['name']} is not {mean['name'].removesuffix('_part')}: asked were not all items of "
                f"{', '.join(cut)}."
            )
    return list(dict.fromkeys(lines))


def _tasks(benchmark: Benchmark) -> str:
    many = len(benchmark.protocols()) > 1
    what = "task, metric" if benchmark.suite == "lm_eval" else "task"
    value = "value" if benchmark.suite == "lm_eval" else "accuracy"
    centred = [("centred", None)] if benchmark.suite == "chat" else [(f"centred {v}", v) for v in ("v1", "v2")]
    head = [what, value, "95 % interval", "standard error", "items", *(name for name, _ in centred), "shots"]
    head += ["contaminated", f"{value} without them", "notes", "protocol"]
    rows = [
        [
            task_name(task),
            _fixed(task["value"]),
            interval(task),
            _fixed(task.get("stderr")),
            _items(task),
            *(_fixed(_centred(task, version)) for _, version in centred),
            number(task.get("shots", task.get("num_fewshot"))),
            _contaminated(task),
            _fixed(_contamination(task).get("score_without")),
            "; ".join(_notes(task)) or None,
            task["protocol"] if many else None,
        ]
        for task in benchmark.tasks
    ]
    return filled_table(head, rows)


def interval(row: dict[str, Any]) -> str | None:
    """Return the 95 % interval of a row that has one."""
    low, high = row.get("low"), row.get("high")
    return None if low is None or high is None else f"{low:.4f} to {high:.4f}"


def _fixed(value: float | None, digits: int = 4) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


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
    share = percent(found.get("contaminated_share"))
    return f"{number(found['contaminated'])} of {number(found.get('items'))}" + (f" ({share})" if share else "")


def _notes(task: dict[str, Any]) -> list[str]:
    unjudged, isolation = _contamination(task).get("unjudged"), task.get("isolation")
    shortened, too_long, cut = (task.get(name) for name in ("shortened", "too_long", "cut"))
    notes = (
        (shortened, f"prompts shortened: {number(shortened)}"),
        (too_long, f"questions too long, counted as wrong: {number(too_long)}"),
        (cut, f"items whose prompt was cut: {number(cut)}"),
        (unjudged, f"items too short to look for: {number(unjudged)}"),
        (task.get("published") is False, "not the published file"),
        (task.get("complete") is False, "not the whole test set"),
        (isolation, f"programs run behind {isolation}"),
    )
    return [note for holds, note in notes if holds]


def _looked(benchmark: Benchmark) -> str:
    """Return what a contaminated item is, and which text was not searched."""
    found = [_contamination(row) for row in benchmark.tasks if _contamination(row)]
    if not found:
        return ""
    line = (
        "An item is contaminated when 13 of its words in a row (all of an item of 8 to 12) are in the text trained on"
    )
    shards = max(row.get("shards") or 0 for row in found)
    unchecked = max(row.get("unchecked_shards") or 0 for row in found)
    if shards:
        line += f"; {number(shards - unchecked)} of {number(shards)} shards of that text were searched"
    missing = dict.fromkeys(name for row in found for name in row.get("not_searched") or [])
    if missing:
        line += f"; the text of {', '.join(map(cell, missing))}, which this model comes from, was not"
    return f"{line}.\n"


def _history(series: list[Benchmark]) -> str:
    names = list(dict.fromkeys(row["name"] for b in series for row in (b.means or b.tasks)))
    rows = []
    for benchmark in spread(series, STEPS_OF_A_SERIES):
        values = {row["name"]: f"{row['value']:.6f}" for row in (benchmark.means or benchmark.tasks)}
        rows.append([_of(benchmark), *(values.get(name) for name in names)])
    return table(["model", *names], rows)


def _facts(benchmark: Benchmark) -> str:
    """Return what it takes to repeat the measurement; evals.json has the files and their hashes too."""
    entry, rows = benchmark.entry, [*benchmark.means, *benchmark.tasks]
    protocols = benchmark.protocols()
    versions = ", ".join(f"{name} {version}" for name, version in (entry.get("versions") or {}).items())
    # Of CORE each mean has the sum over its tasks, of chat tasks each task has its own.
    seconds = max((mean.get("seconds") or 0 for mean in benchmark.means), default=0)
    facts = [
        ["time", date(entry.get("time"))],
        ["device", entry.get("device")],
        ["versions", versions or None],
        ["protocol", protocols[0] if len(protocols) == 1 else None],
        ["bundle", next((row["bundle"] for row in rows if row.get("bundle")), None)],
        ["seconds", number(seconds or sum(task.get("seconds") or 0 for task in benchmark.tasks) or None)],
    ]
    command = code(entry["command"], "bash") if entry.get("command") else ""
    return joined(command, facts_table("what", facts), benchmark.protocols_text())


def _failures(data: RunData) -> str:
    failures = [(row.get("step"), row.get("name"), row.get("reason")) for row in data.events("evaluation_failed")]
    rows = [list(row) for row in dict.fromkeys(failures)]  # several ranks may have met the same
    return "Not scored, and the training went on:\n\n" + table(["step", "benchmark", "reason"], rows) if rows else ""
