"""The report of one run: which sections it has and in which order; report.md, report.html and curves.png are made of them."""

from collections.abc import Callable
from pathlib import Path

from pipeline.process.storage import write_bytes, write_text
from pipeline.report.benchmarks import benchmarks_text
from pipeline.report.curves import AXES, panels_of
from pipeline.report.diagnosis import diagnosis_text
from pipeline.report.outcome import outcome_text
from pipeline.report.run_data import RunData, cell
from pipeline.report.sections import (
    attempts_text,
    checkpoints_text,
    data_shares_text,
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

# In the order in which a run is best read: what it is, then the curves from cause to effect, then the rest.
# Each function gives Markdown, "" when there is nothing to say.
SECTIONS: list[tuple[str, Callable[[RunData], str]]] = [
    ("Metadata", metadata_text),
    ("Diagnosis", diagnosis_text),
    ("Learning rate", learning_rate_text),
    ("Losses and validation", losses_text),
    ("Gradient norm", gradient_norm_text),
    ("System", system_text),
    ("GPUs and energy", energy_text),
    ("Data shares", data_shares_text),
    ("Tokenizer", tokenizer_text),
    ("Benchmarks", benchmarks_text),
    ("Other evaluations", other_results_text),
    ("Samples", samples_text),
    ("Checkpoints", checkpoints_text),
    ("Attempts", attempts_text),
    ("Plan against outcome", outcome_text),
    ("Was it worth its cost", worth_text),
    ("Failure", failure_text),
    ("Manifest", manifest_text),
    ("Links", links_text),
    ("Recipe", recipe_text),
    ("Versions", versions_text),
]


def write_report(data: RunData) -> Path:
    """Write report.md, report.html and their picture into the run's report/; returns the page's path."""
    from pipeline.report.page import page  # these two cost a second of imports, which a comparison need not pay
    from pipeline.report.picture import picture

    data.run.refuse_links(data.run.report)
    run, sections, panels = data.run, sections_of(data), panels_of(data)
    drawn = picture(panels, title=data.name) if panels else None
    if drawn:
        write_bytes(run.report / "curves.png", drawn)
    else:
        (run.report / "curves.png").unlink(missing_ok=True)
    write_text(run.report / "report.md", markdown(data, sections, picture=drawn is not None))
    status = f"Status: {cell(data.status())}.\n"
    html = page(data.name, sections, kind="report", head=status, panels=panels, axes=AXES, picture=drawn)
    write_text(run.report / "report.html", html)
    return run.report / "report.html"


def report(data: RunData) -> str:
    """Return the whole report in Markdown. Only what the run directory holds is told; what is missing is left out, never guessed."""
    return markdown(data, sections_of(data), picture=bool(panels_of(data)))


def sections_of(data: RunData) -> dict[str, str]:
    """Title and Markdown of the sections that have something to say."""
    texts = {title: text(data) for title, text in SECTIONS}
    return {title: text for title, text in texts.items() if text}


def markdown(data: RunData, sections: dict[str, str], *, picture: bool) -> str:
    """Return the sections under one title; picture: whether curves.png stands beside the text."""
    head = f"# {data.name}\n\nStatus: {data.status()}.\n"
    if picture:
        head += "\n![the run's curves over its steps](curves.png)\n"
    return "\n".join([head, *(f"## {title}\n\n{text}" for title, text in sections.items())])
