"""Several runs side by side: what they are, what differs, speed and memory, evaluations, curves on common axes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts.atomic import write_bytes, write_text
from pipeline.report.aligned import aligned_text, trained_on
from pipeline.report.comparison_curves import SECTION, comparison_panels, drawn_text
from pipeline.report.differences import differences_text, warning
from pipeline.report.imports.imported_run import lost_lines
from pipeline.report.ratios import ratios_text
from pipeline.report.run_data import RunData
from pipeline.report.scores import score_rows
from pipeline.report.seed_noise import seed_noise_text
from pipeline.report.tables import cell, number, table

PICTURE = "curves.png"
NOTHING_ALIGNED = "No loss of two runs has a common stretch on any axis.\n"


def write_comparison(runs: Sequence[RunData], folder: Path) -> str:
    """Write comparison.md, comparison.html and their picture into the folder; returns the Markdown."""
    from pipeline.report.comparison_pictures import comparison_picture  # these two cost a second of imports,
    from pipeline.report.page import page  # which a comparison that is only printed need not pay

    picture = comparison_picture(runs)
    if picture:
        write_bytes(folder / PICTURE, picture)
    else:
        (folder / PICTURE).unlink(missing_ok=True)
    sections = sections_of(runs)
    panels, axes = comparison_panels(runs)
    html = page(
        _title(runs),
        sections,
        kind="comparison",
        head=warning(runs),
        panels=panels,
        axes=axes,
        picture=picture,
        one_legend=True,
    )
    write_text(folder / "comparison.html", html)
    text = _markdown(runs, sections, picture=picture is not None)
    write_text(folder / "comparison.md", text)
    return text


def comparison(runs: Sequence[RunData]) -> str:
    """The whole comparison in Markdown, one column a run, with which figures are not compared and why."""
    return _markdown(runs, sections_of(runs), picture=False)


def sections_of(runs: Sequence[RunData]) -> dict[str, str]:
    """Title and Markdown of the sections that have something to say."""
    texts = {
        "Runs": _runs(runs),
        "What differs": differences_text(runs),
        "Evaluations": _evaluations(runs),
        "Against seed noise": seed_noise_text(runs),
        SECTION: drawn_text(runs) + (aligned_text(runs) or NOTHING_ALIGNED),
        "Speed and memory": ratios_text(runs),
        "Imported logs": _imports(runs),
    }
    return {title: text for title, text in texts.items() if text}


def _markdown(runs: Sequence[RunData], sections: dict[str, str], *, picture: bool) -> str:
    """The sections under one title; picture: whether it stands beside the text."""
    if picture:
        sections = sections | {SECTION: f"![{PICTURE}]({PICTURE})\n\n{sections[SECTION]}"}
    head = [f"# {cell(_title(runs))}\n", *([warning(runs)] if warning(runs) else [])]
    return "\n".join([*head, *(f"## {title}\n\n{text}" for title, text in sections.items())])


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
    for name in ("train/loss", "train/loss_ema", "val/loss", "perf/tok_per_s", "perf/mfu_pct", "perf/total_s"):
        values = [data.last(name) for data in runs]
        if (
            name == "val/loss"
            and len({data.protocol(name) for data in runs if data.last(name) is not None} - {None}) > 1
        ):
            continue  # of other text, or in other tokens: another measure
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
        lines.append(f"{cell(data.name)}: {log['program']}, {len(data.rows):,} rows, from {data.run.path}.")
        lines += [f"- {name}: {meaning}." for name, meaning in log["meanings"].items() if data.last(name) is not None]
        if log["flops_per_token"]:
            lines.append(f"- FLOPs per token: {log['flops_per_token']:.4g}, by its own formula.")
        if lost := lost_lines(data):
            lines.append(
                f"- {len(lost)} lines look like a measured step and could not be read, the first is line {lost[0][0]}."
            )
    return "".join(f"{line}\n" for line in lines)
