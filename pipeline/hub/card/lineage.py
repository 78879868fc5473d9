"""What a model began as, and where on the Hub that stands: a base model and those made from it link to each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.parents import forked_run, name_of_model
from pipeline.report.run_data import RunData, read_run
from pipeline.report.samples import parent_of
from pipeline.report.tables import cell

HUB = "https://huggingface.co"


@dataclass(frozen=True, kw_only=True)
class Parent:
    """name: of its run, or its Hub id. repo_id, commit: where it is published, as far as that is known."""

    name: str
    repo_id: str | None = None
    commit: str | None = None


def parent_of_model(data: RunData) -> Parent | None:
    """The run or Hub model whose weights this one began with; None for one trained from scratch."""
    found = [parent for parent in (_forked(data), _started(data)) if parent is not None]
    return next((parent for parent in found if parent.repo_id), found[0] if found else None)


def link(repo_id: str) -> str:
    return f"[{cell(repo_id)}]({HUB}/{repo_id})"


def descendants_link(repo_id: str) -> str:
    """The Hub's own list of what names the model as its base: it is right also for what is published later."""
    return f"[the Hub's list]({HUB}/models?other=base_model:finetune:{repo_id})"


def is_repo_id(name: Any) -> bool:
    """Whether the Hub would take it for a model's or data set's id; it refuses a card that names another."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not isinstance(name, str) or not name.isascii():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _started(data: RunData) -> Parent | None:
    begun = (data.manifest.get("inputs") or {}).get("start_from") or {}
    if not (start := begun.get("from")):
        return None
    if run := parent_of(data):
        return _published(run)
    if set(begun) <= {"from", "commit"} and is_repo_id(start) and not Path(start).exists():
        return Parent(name=start, repo_id=start)  # of a folder the weights' hashes are recorded
    return Parent(name=name_of_model(Path(start)))


def _forked(data: RunData) -> Parent | None:
    if not (name := (data.manifest.get("forked_from") or {}).get("run")):
        return None
    parent = forked_run(data.run.path, data.manifest)
    return Parent(name=Path(name).name) if parent is None else _published(read_run(str(parent.path)))


def _published(run: RunData) -> Parent:
    at = run.manifest.get("hub") or run.manifest.get("pulled_from") or {}
    return Parent(name=run.name, repo_id=at.get("id"), commit=at.get("commit"))
