"""The report of one run: which sections it has and in which order; report.md, report.html and curves.png are made of
them."""

from collections.abc import Callable
from pathlib import Path

from pipeline.process.errors import CannotWriteError
from pipeline.process.storage import NOT_WRITABLE, write_bytes, write_text
from pipeline.report.benchmarks import benchmarks_text
from pipeline.report.cost import cost_text, energy_text, plan_vs_actual_text
from pipeline.report.curves import AXES, panels_of
from pipeline.report.diagnosis import diagnosis_text
from pipeline.report.markdown import joined, titled
from pipeline.report.run_data import RunData
from pipeline.report.samples import samples_text
from pipeline.report.sections import (
    attempts_text,
    bpb_text,
    checkpoints_text,
    data_shares_text,
    data_text,
    failure_text,
    links_text,
    losses_text,
    metadata_text,
    other_results_text,
    recipe_text,
    system_text,
    tokenizer_text,
    versions_text,
)
from pipeline.report.summary import summary_of, summary_text

# In the order in which one asks. Each function gives Markdown, "" when there is nothing to say, under its own title if
# it has one.
SECTIONS: dict[str, list[tuple[str, Callable[[RunData], str]]]] = {
    "Failure": [("", failure_text)],
    "Diagnosis": [("", diagnosis_text)],
    "Curves": [("", losses_text)],
    "Evaluations": [("", benchmarks_text), ("Bits per byte", bpb_text), ("Other evaluations", other_results_text)],
    "Samples": [("", samples_text)],
    "Data": [("", data_text), ("Shares", data_shares_text), ("Tokenizer", tokenizer_text)],
    "Time, cost and energy": [
        ("", cost_text),
        ("Plan against outcome", plan_vs_actual_text),
        ("GPUs and energy", energy_text),
    ],
    "System": [("", system_text), ("Checkpoints", checkpoints_text), ("Attempts", attempts_text)],
    "Recipe": [("", recipe_text)],
    "Manifest": [
        ("", metadata_text),
        ("Links", links_text),
        ("Versions", versions_text),
    ],
}


def write_report(data: RunData, folder: Path | None = None) -> Path:
    """Write report.md, report.html and their picture into the folder, default the run's report/; returns the page's
    path."""
    from pipeline.report.page import picture  # these two cost a second of imports, which a comparison need not pay

    if folder is None:
        folder = data.run.report
    panels = panels_of(data)
    drawn = None
    if panels:
        drawn = picture([("step", panel) for panel in panels], AXES, title=data.name)
    try:
        place_picture(drawn, folder / "curves.png")
        write_text(folder / "report.md", markdown(data, picture=drawn is not None))
        write_text(folder / "report.html", html_page(data, picture=drawn))
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        raise CannotWriteError(
            f"{folder}: the report cannot be written there ({error.strerror}). Name a folder that can with --output."
        ) from None
    return folder / "report.html"


def place_picture(picture: bytes | None, path: Path) -> None:
    """Write the picture; None removes the one before, which shows other curves."""
    if picture:
        write_bytes(path, picture)
    else:
        path.unlink(missing_ok=True)


def html_page(data: RunData, *, picture: bytes | None = None, version: str | None = None) -> str:
    """Return report.html. picture: for print and for browsers without scripts. version: of a page that is served,
    which is loaded anew when another one is there."""
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
    """Return the whole report in Markdown. Only what the run directory holds is shown; what is missing is left out,
    never guessed."""
    return markdown(data, picture=bool(panels_of(data)))


def sections_of(data: RunData) -> dict[str, str]:
    """Return title and Markdown of the sections that have something to say."""
    found = {}
    for title, parts in SECTIONS.items():
        texts = [titled(part, text(data)) if part else text(data) for part, text in parts]
        if any(texts):
            found[title] = joined(*texts)
    return found


def markdown(data: RunData, *, picture: bool) -> str:
    """Return the summary and the sections under one title; picture: whether curves.png is beside the text."""
    curves = "![the run's curves over its steps](curves.png)\n" if picture else ""
    head = f"# {data.name}\n\nStatus: {data.status()}.\n\n{summary_text(summary_of(data), picture=curves)}"
    return "\n".join([head, *(f"## {title}\n\n{text}" for title, text in sections_of(data).items())])
