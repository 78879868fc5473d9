"""The report of one run: which sections it has and in which order; report.md, report.html and curves.png are made of them."""

from collections.abc import Callable
from pathlib import Path

from pipeline.process.storage import write_bytes, write_text
from pipeline.report.benchmarks import benchmarks_text
from pipeline.report.curves import AXES, panels_of
from pipeline.report.diagnosis import diagnosis_text
from pipeline.report.outcome import outcome_text
from pipeline.report.run_data import RunData
from pipeline.report.sections import (
    attempts_text,
    bpb_text,
    checkpoints_text,
    data_shares_text,
    data_text,
    energy_text,
    failure_text,
    gradient_norm_text,
    learning_rate_text,
    links_text,
    losses_text,
    manifest_text,
    metadata_text,
    other_results_text,
    recipe_text,
    samples_text,
    system_text,
    tokenizer_text,
    versions_text,
    worth_text,
)
from pipeline.report.summary import summary_of, summary_text

# In the order in which one asks. Each function gives Markdown, "" when there is nothing to say, under its own title if it has one.
SECTIONS: dict[str, list[tuple[str, Callable[[RunData], str]]]] = {
    "Failure": [("", failure_text)],
    "Diagnosis": [("", diagnosis_text)],
    "Curves": [
        ("Losses", losses_text),
        ("Learning rate", learning_rate_text),
        ("Gradient norm", gradient_norm_text),
    ],
    "Evaluations": [("", benchmarks_text), ("Bits per byte", bpb_text), ("Other evaluations", other_results_text)],
    "Samples": [("", samples_text)],
    "Data": [("", data_text), ("Shares", data_shares_text), ("Tokenizer", tokenizer_text)],
    "Time, cost and energy": [
        ("", worth_text),
        ("Plan against outcome", outcome_text),
        ("GPUs and energy", energy_text),
    ],
    "System": [("", system_text), ("Checkpoints", checkpoints_text), ("Attempts", attempts_text)],
    "Recipe": [("", recipe_text)],
    "Manifest": [
        ("", metadata_text),
        ("Links", links_text),
        ("Versions", versions_text),
        ("Not as documented", manifest_text),
    ],
}


def write_report(data: RunData) -> Path:
    """Write report.md, report.html and their picture into the run's report/; returns the page's path."""
    from pipeline.report.picture import picture  # these two cost a second of imports, which a comparison need not pay

    data.run.refuse_links(data.run.report)
    run, panels = data.run, panels_of(data)
    drawn = picture(panels, title=data.name) if panels else None
    if drawn:
        write_bytes(run.report / "curves.png", drawn)
    else:
        (run.report / "curves.png").unlink(missing_ok=True)
    write_text(run.report / "report.md", markdown(data, picture=drawn is not None))
    write_text(run.report / "report.html", html_page(data, picture=drawn))
    return run.report / "report.html"


def html_page(data: RunData, *, picture: bytes | None = None, version: str | None = None) -> str:
    """Return report.html. picture: for print and for browsers without scripts. version: of a page that is served, which is
    loaded anew when another one is there (live.py)."""
    from pipeline.report.page import page

    return page(
        data.name,
        sections_of(data),
        kind="report",
        summary=summary_of(data),
        panels=panels_of(data),
        axes=AXES,
        picture=picture,
        version=version,
    )


def report(data: RunData) -> str:
    """Return the whole report in Markdown. Only what the run directory holds is shown; what is missing is left out, never guessed."""
    return markdown(data, picture=bool(panels_of(data)))


def sections_of(data: RunData) -> dict[str, str]:
    """Title and Markdown of the sections that have something to say."""
    found = {title: _section(data, parts) for title, parts in SECTIONS.items()}
    return {title: text for title, text in found.items() if text}


def _section(data: RunData, parts: list[tuple[str, Callable[[RunData], str]]]) -> str:
    texts = [(title, text(data)) for title, text in parts]
    return "\n".join(f"### {title}\n\n{text}" if title else text for title, text in texts if text)


def markdown(data: RunData, *, picture: bool) -> str:
    """Return the summary and the sections under one title; picture: whether curves.png stands beside the text."""
    curves = "![the run's curves over its steps](curves.png)\n" if picture else ""
    head = f"# {data.name}\n\nStatus: {data.status()}.\n\n{summary_text(summary_of(data), picture=curves)}"
    return "\n".join([head, *(f"## {title}\n\n{text}" for title, text in sections_of(data).items())])
