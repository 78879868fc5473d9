"""How the model was trained, and what that took."""

from pathlib import Path
from typing import Any

from pipeline.hub.card.published import Published
from pipeline.report.aligned import trained_on
from pipeline.report.energy import total_kwh
from pipeline.report.tables import date, number, percent, table
from pipeline.report.worth import spent


def training_text(card: Published) -> str:
    """Facts, costs, and the run's curves where its report drew them."""
    data, manifest = card.data, card.data.manifest
    rows: list[list[Any]] = [
        ["recipe", manifest.get("recipe_name")],
        ["text", _text(card)],
        ["optimizer steps", number(card.step)],
        ["tokens (row positions)", number(data.tokens()) if data.tokens() else None],
        ["tokens of a step", number((manifest.get("inputs") or {}).get("batch_tokens"))],
        ["optimizer", card.recipe("optimizer").get("type")],
        ["precision and hardware", trained_on(data)],
        *spent(data),
        ["energy of the GPUs, kWh", _sampled_energy(card)],
        ["ended", date(manifest.get("ended")) if card.finished else None],
        ["training loss at the end, smoothed, nats per token", number(data.last("train/loss_ema"), 5)],
    ]
    picture = card.finished and (data.run.report / "curves.png").exists()
    return table(["what", "value"], [row for row in rows if row[1] is not None]) + (
        "\n![The run's curves over its steps](curves.png)\n" if picture else ""
    )


def _sampled_energy(card: Published) -> str | None:
    """Of a run on several hosts, which logs none; while it goes on, the samples are already those of later steps."""
    logged = card.data.last("perf/energy_kwh")
    return number(total_kwh(card.data)) if logged is None and card.finished else None


def _text(card: Published) -> str | None:
    """The sources, each with its share of the rows where there are several."""
    shares = card.data.manifest.get("shares") or {}
    named = [source.get("name") for source in (card.data.manifest.get("inputs") or {}).get("sources") or []]
    texts = []
    for place, source in enumerate(card.sources):
        files = source.get("files")
        listed = files if isinstance(files, list) else [files]
        text = str(source.get("id") or ", ".join(Path(str(file)).name for file in listed))
        text = Path(text).name if text.startswith((".", "/", "~")) else text  # a folder on the machine that trained
        share = (shares.get(named[place]) or {}).get("share") if place < len(named) else None
        texts.append(f"{text} ({percent(share)})" if share is not None and len(card.sources) > 1 else text)
    return ", ".join(texts) or None
