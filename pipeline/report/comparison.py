"""Several runs side by side: what they are, what differs, speed and memory, evaluations, curves on common axes."""

from collections.abc import Sequence
from typing import Any

from pipeline.report.aligned import aligned_text, trained_on
from pipeline.report.differences import differences_text
from pipeline.report.imports.imported_run import lost_lines
from pipeline.report.ratios import ratios_text
from pipeline.report.run_data import RunData
from pipeline.report.scores import score_rows
from pipeline.report.seed_noise import seed_noise_text
from pipeline.report.tables import number, table


def comparison(runs: Sequence[RunData], *, pictures: Sequence[str] = ()) -> str:
    """The page in Markdown, one column a run, with which figures are not compared and why. pictures: their file names."""
    sections = [
        ("Runs", _runs(runs)),
        ("What differs", differences_text(runs)),
        ("Evaluations", _evaluations(runs)),
        ("Against seed noise", seed_noise_text(runs)),
        ("Curves", "".join(f"![{name}]({name})\n\n" for name in pictures) + aligned_text(runs)),
        ("Speed and memory", ratios_text(runs)),
        ("Imported logs", _imports(runs)),
    ]
    head = f"# {' and '.join(data.name for data in runs)}\n\n"
    return head + "\n".join(f"## {title}\n\n{text}" for title, text in sections if text)


def _runs(runs: Sequence[RunData]) -> str:
    rows: list[list[Any]] = [
        ["stage", *(data.stage for data in runs)],
        ["note", *(data.manifest.get("note") for data in runs)],
        ["status", *(data.status() for data in runs)],
        ["steps", *(number(data.step()) for data in runs)],
        ["trained on", *(trained_on(data) for data in runs)],
        ["tokens (row positions)", *(number(data.tokens() or None) for data in runs)],
    ]
    for name in ("train/loss", "train/loss_ema", "val/loss", "perf/tok_per_s", "perf/mfu_pct", "perf/total_s"):
        values = [data.last(name) for data in runs]
        if any(value is not None for value in values):
            rows.append([f"{name} (last)", *(number(value, 5) for value in values)])
    return table(
        ["", *(data.name for data in runs)], [row for row in rows if any(cell is not None for cell in row[1:])]
    )


def _evaluations(runs: Sequence[RunData]) -> str:
    rows, refused = score_rows(runs)
    return (table(["", *(data.name for data in runs)], rows) if rows else "") + "".join(
        f"\n{line}\n" for line in refused
    )


def _imports(runs: Sequence[RunData]) -> str:
    """Whose logs they are, which of their numbers are others than ours by that name, and lines that could not be read."""
    lines = []
    for data in runs:
        log = data.manifest.get("imported")
        if log is None:
            continue
        lines.append(f"{data.name}: {log['program']}, {len(data.rows):,} rows, from {data.run.path}.")
        lines += [f"- {name}: {meaning}." for name, meaning in log["meanings"].items() if data.series(name)]
        if log["flops_per_token"]:
            lines.append(f"- FLOPs per token: {log['flops_per_token']:.4g}, by its own formula.")
        if lost := lost_lines(data):
            lines.append(
                f"- {len(lost)} lines look like a measured step and could not be read, the first is line {lost[0][0]}."
            )
    return "".join(f"{line}\n" for line in lines)
