"""The card as a page: which sections it has and in which order."""

from collections.abc import Callable
from pathlib import Path

from pipeline.hub.card.about import about_text, license_text, limits_text
from pipeline.hub.card.benchmarks import benchmarks_text
from pipeline.hub.card.bpb import bpb_text
from pipeline.hub.card.metadata import front_matter
from pipeline.hub.card.published import Published, published
from pipeline.hub.card.reproduce import reproduce_text
from pipeline.hub.card.samples import samples_text
from pipeline.hub.card.training import training_text
from pipeline.hub.card.use import use_text
from pipeline.report.run_data import RunData
from pipeline.report.tables import cell

# Each function gives Markdown, "" when there is nothing to say.
SECTIONS: list[tuple[str, Callable[[Published], str]]] = [
    ("Use", use_text),
    ("Samples", samples_text),
    ("Training", training_text),
    ("Bits per byte", bpb_text),
    ("Benchmarks", benchmarks_text),
    ("Limits", limits_text),
    ("License", license_text),
    ("Reproduce", reproduce_text),
]


def model_card(data: RunData, *, repo_id: str, model: Path | None = None, step: int | None = None) -> str:
    """README.md of the repository: metadata for the Hub's index, then Markdown. What the run does not record is left out.

    model, step: of a checkpoint's model; default the finished one.
    """
    card = published(data, repo_id=repo_id, model=model, step=step)
    texts = {title: text(card) for title, text in SECTIONS}
    parts = [front_matter(card), f"# {cell(card.name)}\n", about_text(card)]
    return "\n".join([*parts, *(f"## {title}\n\n{text}" for title, text in texts.items() if text)])
