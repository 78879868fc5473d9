"""The report of one run, in Markdown: what it was, how it went, what it reached."""

import json
from pathlib import Path
from typing import Any

import yaml

from pipeline.artifacts.atomic import folder_bytes, write_text
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.report.benchmark_rows import suite_of
from pipeline.report.benchmarks import benchmarks_text
from pipeline.report.manifest_lines import manifest_text
from pipeline.report.outcome import outcome_text
from pipeline.report.run_data import RunData, read_run
from pipeline.report.samples import samples_text
from pipeline.report.tables import code, date, number, percent, spread, svg_curves, table

ROWS_OF_A_TABLE = 16
# Manifest entries that have a place of their own in the report, or that only a machine reads.
TOLD_ELSEWHERE = {
    "must_match",
    "results",
    "versions",
    "inputs",
    "shares",
    "forked_from",
    "wandb_id",
    "name",
    "plan",
    "model",
    "peak_memory_bytes",
}


def write_report(run: RunDirectory) -> Path:
    """Write report/report.md and its picture into the run directory; returns the report's path."""
    data = read_run(str(run.path))
    picture = curves(data)
    if picture:
        write_text(run.report / "loss.svg", picture)
    write_text(run.report / "report.md", report(data))
    return run.report / "report.md"


def report(data: RunData) -> str:
    """The whole report. Only what the run directory holds is told; what is missing is left out, never guessed."""
    sections = [
        f"# {data.name}\n\nStatus: {data.status()}.\n",
        _section("Metadata", table(["what", "value"], _metadata(data))),
        _section("Results", _results(data)),
        _section("Data", _data(data)),
        _section("Training", _training(data)),
        _section("Plan against outcome", outcome_text(data)),
        _section("Bits per byte", _bpb(data)),
        _section("Benchmarks", benchmarks_text(data)),
        _section("Other evaluations", _other_results(data)),
        _section("Samples", samples_text(data)),
        _section("Checkpoints", _checkpoints(data)),
        _section("Attempts", _attempts(data)),
        _section("Manifest", manifest_text(data)),
        _section("Failure", code(json.dumps(data.failure, indent=2, ensure_ascii=False)) if data.failure else ""),
        _section(
            "Recipe",
            code(yaml.safe_dump(data.recipe, sort_keys=False, allow_unicode=True), "yaml") if data.recipe else "",
        ),
        _section("Versions", table(["package", "version"], list((data.manifest.get("versions") or {}).items()))),
    ]
    return "\n".join(section for section in sections if section)


def curves(data: RunData) -> str | None:
    """Losses over steps as an SVG picture; None when fewer than two steps were logged."""
    found = {name: data.series(name) for name in ("train/loss", "train/loss_ema", "val/loss", "val/bpb")}
    found = {name: points for name, points in found.items() if len(points) > 1}
    return svg_curves(found, title=data.name, x_name="optimizer step") if found else None


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _metadata(data: RunData) -> list[list[Any]]:
    rows: list[list[Any]] = [["run directory", data.run.path], ["stage", data.stage]]
    rows += [
        [name, value] for name, value in _flat(data.manifest) if name.split(".")[0] not in {*TOLD_ELSEWHERE, "stage"}
    ]
    parent = data.manifest.get("forked_from")
    if parent:
        rows.append(["forked from", f"{parent.get('run')} at step {parent.get('step')}"])
        rows += [["changed against it", line] for line in parent.get("differences", [])]
    start = (data.recipe.get("model") or {}).get("start_from")
    return rows + ([["weights started from", start]] if start else [])


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, entry in value.items():
        if isinstance(entry, dict):
            found += _flat(entry, f"{prefix}{name}.")
        elif entry not in (None, [], ""):
            text = " ".join(map(str, entry)) if isinstance(entry, list) else entry
            found.append((prefix + name, date(text) if name in ("ended", "time") else text))
    return found


def _results(data: RunData) -> str:
    results = _flat(data.manifest.get("results") or {})
    if data.benchmarks():  # which have a section of their own
        results = [(name, value) for name, value in results if suite_of(name) is None]
    return table(["what", "value"], [[name, number(value)] for name, value in results]) if results else ""


def _lost(share: dict[str, Any]) -> str | None:
    return ", ".join(f"{name} {percent(part)}" for name, part in (share.get("lost") or {}).items()) or None


def _data(data: RunData) -> str:
    """Where the text came from, by the hashes it was recorded with, and each source's share of the rows."""
    inputs, shares = data.manifest.get("inputs") or {}, data.manifest.get("shares") or {}
    rows = [
        [
            source.get("name"),
            use,
            source.get("id"),
            source.get("revision"),
            number(len(source.get("files", []))),
            str(source.get("fingerprint"))[:16],
            percent((shares.get(source.get("name")) or {}).get("share")) if use == "training" else None,
            _lost(shares.get(source.get("name")) or {}) if use == "training" else None,
        ]
        for use, key in (("training", "sources"), ("validation", "validation"))
        for source in inputs.get(key) or []
    ]
    tokenizer = inputs.get("tokenizer") or {}
    facts = [
        [
            "tokenizer",
            f"{number(tokenizer.get('size'))} ids, {str(tokenizer.get('identity'))[:16]}" if tokenizer else None,
        ],
        ["tokens of a step", number(inputs.get("batch_tokens"))],
    ]
    facts = [fact for fact in facts if fact[1] is not None]
    head = ["source", "use", "Hub id", "revision", "files", "fingerprint", "share of rows", "padded or lost"]
    return "\n".join(
        part for part in (table(head, rows) if rows else "", table(["what", "value"], facts) if facts else "") if part
    )


def _training(data: RunData) -> str:
    logged = [row for row in data.rows if "train/loss" in row]
    if not logged:
        return "No step was logged.\n"
    rates = [row["perf/tok_per_s"] for row in logged[1:] if "perf/tok_per_s" in row]
    norms = [row["optim/grad_norm"] for row in logged if "optim/grad_norm" in row]
    learning = [row["optim/lr"] for row in logged if "optim/lr" in row]
    mfu = [row["perf/mfu_pct"] for row in logged[1:] if "perf/mfu_pct" in row]
    last = logged[-1]
    facts: list[list[Any]] = [
        ["steps", f"{number(data.step())}" + (f" of {number(data.max_steps())}" if data.max_steps() else "")],
        ["tokens (row positions)", number(data.tokens())],
        ["train/loss, first and last logged", f"{logged[0]['train/loss']:.4f}, {last['train/loss']:.4f}"],
    ]
    if learning:
        facts.append(["learning rate of the first group: peak, last", f"{max(learning):.3g}, {learning[-1]:.3g}"])
    if norms:
        facts.append(["gradient norm before clipping: median, largest", f"{_median(norms):.3g}, {max(norms):.3g}"])
    if rates:
        facts.append(["tokens per second, median (first logged interval left out)", number(round(_median(rates)))])
    if mfu:
        facts.append(["MFU, median", f"{_median(mfu):.2f} %"])
    if "perf/total_s" in last:
        facts.append(["time in steps over all attempts", f"{last['perf/total_s'] / 60:.2f} min"])
    names = ["train/loss", "train/loss_ema", "optim/lr", "optim/grad_norm", "perf/tok_per_s", "perf/mfu_pct"]
    names = [name for name in names if any(name in row for row in logged)]
    history = [
        [row["step"], number(row.get("tokens")), *(number(row.get(name), 5) for name in names)]
        for row in spread(logged, ROWS_OF_A_TABLE)
    ]
    picture = "\n![losses](loss.svg)\n" if curves(data) else ""
    return table(["what", "value"], facts) + picture + "\n" + table(["step", "tokens", *names], history)


def _median(values: list[float]) -> float:
    values = sorted(values)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _bpb(data: RunData) -> str:
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
    note = "Two figures compare only when their protocol is the same: it names the text that was scored.\n\n"
    return note + table(["metric", "step", "value", "protocol", "bytes", "of"], rows)


def _other_results(data: RunData) -> str:
    rows = [[name, step, number(value, 6), of] for name, step, value, of in data.other_results()]
    return table(["metric", "step", "value", "of"], rows) if rows else ""


def _checkpoints(data: RunData) -> str:
    rows = [
        [f"checkpoint-{step}", f"{size / 2**20:,.1f} MiB", "yes" if sealed else "no"]
        for step, size, sealed in data.checkpoints
    ]
    if data.run.model.is_dir():
        size = folder_bytes(data.run.model)
        rows.append(["model/", f"{size / 2**20:,.1f} MiB", "finished model"])
    return table(["folder", "size", "sealed"], rows) if rows else ""


def _attempts(data: RunData) -> str:
    starts = {row.get("attempt"): row for row in data.all_rows if row.get("event") == "attempt"}
    numbers = sorted({row["attempt"] for row in data.all_rows if "attempt" in row})
    rows = []
    for attempt in numbers:
        steps = [row["step"] for row in data.all_rows if row.get("attempt") == attempt and "train/loss" in row]
        start = starts.get(attempt, {})
        rows.append([attempt, date(start.get("time")), start.get("step"), max(steps, default=None)])
    return table(["attempt", "began", "from step", "last logged step"], rows) if rows else ""
