"""Sections of the report of one run: what it is, what it was fed, how its losses went, and how it lived."""

import json
import shlex
from typing import Any

import numpy as np
import yaml

from pipeline.metrics import VALIDATION, is_of_machine
from pipeline.process.storage import folder_bytes
from pipeline.report.benchmarks import protocols_text
from pipeline.report.markdown import (
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
from pipeline.report.scores import Score
from pipeline.run_dir.columns import Columns

# Manifest entries that other sections show, or that only a machine reads.
SHOWN_ELSEWHERE = {
    "must_match", "results", "versions", "inputs", "shares", "forked_from", "name", "stage", "note", "wandb_id",
    "wandb_url", "plan", "model", "peak_memory_bytes", "imported", "created", "ended", "finished",
}  # fmt: skip
DATA_HEAD = ("data", "use", "id", "revision", "fingerprint")
ROWS_OF_A_TABLE = 16
NEWEST_ONLY = ("perf/total_s", "perf/eta_s", "perf/first_step_s")  # a median of these says nothing


def metadata_text(data: RunData) -> str:
    """Return the run, its hardware and its notes."""
    manifest = data.manifest
    rows: list[list[Any]] = [["run", data.name], ["stage", data.stage], ["note", manifest.get("note")]]
    rows += [[name, date(manifest[name])] for name in ("created", "ended") if manifest.get(name)]
    rows += [[name, value] for name, value in flat(manifest) if name.split(".")[0] not in SHOWN_ELSEWHERE]
    rows.append(["run directory", data.run.path])
    if parent := manifest.get("forked_from"):
        rows.append(["forked from", f"{parent.get('run')} at step {parent.get('step')}"])
        rows += [["changed in the fork", line] for line in parent.get("differences", [])]
    rows.append(["weights started from", data.setting("model.start_from")])
    return facts_table("run", rows)


def flat(value: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return every entry that has a value, as (dotted name, value)."""
    found: list[tuple[str, Any]] = []
    for name, entry in leaves(value):
        if isinstance(entry, list):
            entry = " ".join(map(str, entry))
        if name.endswith(("ended", "time")):
            entry = date(entry)
        if entry not in (None, ""):
            found.append((name, entry))
    return found


def leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted names and values of nested dicts."""
    found: list[tuple[str, Any]] = []
    for name, entry in value.items():
        if isinstance(entry, dict):
            found += leaves(entry, f"{prefix}{name}.")
        else:
            found.append((prefix + name, entry))
    return found


def links_text(data: RunData) -> str:
    """Return where else the run can be seen: the Hub, W&B, TensorBoard."""
    rows = [["Hub", data.setting("hub.id")], ["W&B", data.manifest.get("wandb_url") or data.manifest.get("wandb_id")]]
    if data.run.tensorboard.is_dir():
        rows.append(["TensorBoard", f"tensorboard --logdir {shlex.quote(str(data.run.tensorboard))}"])
    return facts_table("link", rows)


def failure_text(data: RunData) -> str:
    return code(json.dumps(data.failure, indent=2, ensure_ascii=False)) if data.failure else ""


def recipe_text(data: RunData) -> str:
    return code(yaml.safe_dump(data.recipe, sort_keys=False, allow_unicode=True), "yaml") if data.recipe else ""


def versions_text(data: RunData) -> str:
    return table(["package", "version"], list((data.manifest.get("versions") or {}).items()))


def other_results_text(data: RunData) -> str:
    """Return results of `python -m pipeline.evals` that are neither bits per byte nor benchmarks."""
    rows = [[name, step, number(value, 6), of] for name, step, value, of in data.other_results()]
    return table(["metric", "step", "value", "of"], rows)


def data_text(data: RunData) -> str:
    """Return each source by identity, as a table."""
    return filled_table(DATA_HEAD, data_rows(data))


def data_rows(data: RunData) -> list[list[Any]]:
    """Return each source of text by identity, under DATA_HEAD."""
    rows = []
    for use, source in _sources(data):
        fingerprint = str(source.get("fingerprint") or "")[:16] or None
        rows.append([source.get("name"), use, source.get("id"), source.get("revision"), fingerprint])
    return rows


def _sources(data: RunData) -> list[tuple[str, dict[str, Any]]]:
    """Return (training or validation, source) of each source in the manifest."""
    inputs = data.manifest.get("inputs") or {}
    uses = (("training", "sources"), ("validation", "validation"))
    return [(use, source) for use, key in uses for source in inputs.get(key) or []]


def data_shares_text(data: RunData) -> str:
    """Return how much each source gives, and what of it is padded or lost."""
    shares = data.manifest.get("shares") or {}
    rows: list[list[Any]] = []
    for use, source in _sources(data):
        name = source.get("name")
        share = (shares.get(name) or {}) if use == "training" else {}
        lost = ", ".join(f"{what} {percent(part)}" for what, part in (share.get("lost") or {}).items())
        row = [name, use, number(len(source.get("files", []))), percent(share.get("share"))]
        row += [number(share.get(count)) for count in ("rows", "tokens", "epochs")]
        rows.append([*row, lost or None])
    head = ["source", "use", "files", "share of rows", "rows", "tokens", "epochs", "padded or lost"]
    consumed = []
    for name in data.columns.names():
        if name.startswith("data/source/"):
            consumed.append([name.removeprefix("data/source/"), number(data.last(name))])
    batch = data.fact("inputs.batch_tokens")
    step = f"A step takes {number(batch)} row positions.\n" if batch else ""
    return joined(filled_table(head, rows), step, table(["consumed so far", "number"], consumed))


def tokenizer_text(data: RunData) -> str:
    found = data.fact("inputs.tokenizer", {})
    settings = data.recipe.get("tokenizer") or {}
    rows = [["ids", number(found.get("size"))], ["identity", str(found.get("identity") or "")[:16] or None]]
    rows += [[name, settings.get(name)] for name in ("path", "revision", "split_pattern")]
    if not settings.get("path"):
        rows.append(["characters trained on", number(settings.get("train_chars"))])
    return facts_table("tokenizer", rows)


def losses_text(data: RunData) -> str:
    """Return the first and last loss, validation, and some of the logged steps."""
    steps, losses = data.curve("train/loss")
    if not len(steps):
        return "No step was logged.\n"
    made = number(data.step())
    if planned := data.max_steps():
        made = f"{made} of {number(planned)}"
    facts: list[list[Any]] = [
        ["steps", made],
        ["tokens (row positions)", number(data.tokens())],
        ["train/loss, first and last logged", f"{losses[0]:.4f}, {losses[-1]:.4f}"],
    ]
    for name in VALIDATION:
        at, values = data.curve(name)
        if len(at):
            course = f"{values[0]:.4f}, {values.min():.4f} (step {at[values.argmin()]:,}), {values[-1]:.4f}"
            facts.append([f"{name}, first, lowest, last", course])
    return joined(table(["what", "value"], facts), _history(data))


def _history(data: RunData) -> str:
    """Return some of the logged steps, evenly spaced."""
    names = ("tokens", "train/loss", "train/loss_ema", "optim/lr", "optim/grad_norm", "perf/tok_per_s", "perf/mfu_pct")
    steps = spread(data.curve("train/loss")[0].tolist(), ROWS_OF_A_TABLE)
    columns = [steps]
    for name in names:
        values = dict(data.series(name))
        columns.append([number(values.get(step), 5) for step in steps])
    return filled_table(["step", *names], list(zip(*columns, strict=True)))


def bpb_text(data: RunData) -> str:
    """Return bits per byte while training and by command, and the parts of their protocols."""
    scores = data.scores()
    if not scores:
        return ""
    by_name: dict[tuple[str, str | None], list[Score]] = {}
    for score in scores:
        by_name.setdefault((score.name, score.of), []).append(score)
    rows: list[list[Any]] = []
    for group in by_name.values():
        for score in spread(group, ROWS_OF_A_TABLE):
            value = fixed(score.value, 6)
            rows.append([score.name, score.step, value, score.protocol, number(score.bytes), score.of])
    note = "Two figures compare only when their protocol is the same: it names what was scored and how.\n"
    shown = filled_table(["metric", "step", "value", "protocol", "bytes", "of"], rows)
    return joined(note, shown, protocols_text(scores))


def system_text(data: RunData) -> str:
    """Return median, lowest and highest of each number of the machine; of rates without the first logged interval,
    which compiles."""
    rows: list[list[Any]] = []
    for name in data.columns.names():
        values = data.curve(name)[1]
        if not len(values) or not (is_of_machine(name) or name.startswith("data/wait_")):
            continue
        last = number(values[-1].item())
        if name in NEWEST_ONLY:
            rows.append([name, None, None, None, last])
            continue
        if name.startswith("perf/") and len(values) > 1:
            values = values[1:]  # the first interval holds compilation
        shown = [np.median(values), values.min(), values.max()]
        rows.append([name, *(number(value.item()) for value in shown), last])
    return table(["number", "median", "lowest", "highest", "last"], rows)


def checkpoints_text(data: RunData) -> str:
    rows = []
    for step, size, sealed in data.checkpoints:
        rows.append([f"checkpoint-{step}", _mebibytes(size), "yes" if sealed else "no"])
    if data.run.model.is_dir():
        rows.append(["model/", _mebibytes(folder_bytes(data.run.model)), "finished model"])
    return table(["folder", "size", "whole"], rows)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def attempts_text(data: RunData) -> str:
    """Return each attempt: from which step, how far, how long, and how many of its steps the next one made again."""
    written = Columns.of(data.all_rows)
    starts = {row.get("attempt"): row.get("step") for _, row in written.events("attempt")}
    logged, _ = written.column("train/loss")
    attempts = written.beside("attempt", logged, missing=0)
    steps = written.beside("step", logged, missing=0)
    rows: list[list[Any]] = []
    for attempt, began, last in data.running:
        start = starts.get(attempt)
        if rows and start is not None and rows[-1][3] is not None:  # what the attempt before had reached
            rows[-1][5] = number(max(rows[-1][3] - start, 0))
        reached = max(steps[attempts == attempt].tolist(), default=None)
        rows.append([attempt, date(began), start, reached, f"{(last - began) / 60:.1f} min", None])
    return filled_table(["attempt", "began", "from step", "last logged step", "ran", "steps lost"], rows)
