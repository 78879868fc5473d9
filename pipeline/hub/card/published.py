"""The model that a card is about."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.atomic import read_json
from pipeline.artifacts.checkpoints import SEAL, read_seal
from pipeline.hub.card.lineage import Parent, is_repo_id, parent_of_model
from pipeline.recipe.presets import LLAMA_NAMES
from pipeline.report.run_data import RunData


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model of a run. data: the run as it was at `step`; finished: the run's last model, not a checkpoint's."""

    data: RunData
    repo_id: str
    config: dict[str, Any]
    step: int
    finished: bool
    parent: Parent | None

    @property
    def name(self) -> str:
        return self.repo_id.split("/")[-1]

    @property
    def is_chat(self) -> bool:
        return self.data.stage == "sft"

    @property
    def own_code(self) -> bool:
        """Whether the repository carries the model's code, because transformers does not have it."""
        return bool(self.config.get("auto_map"))

    @property
    def parameters(self) -> int | None:
        return (self.data.manifest.get("model") or {}).get("parameters")

    @property
    def sources(self) -> list[dict[str, Any]]:
        return self.recipe("data").get("sources") or []

    @property
    def datasets(self) -> list[str]:
        """Those of the sources that the Hub has."""
        return list(dict.fromkeys(source["id"] for source in self.sources if is_repo_id(source.get("id"))))

    @property
    def branch(self) -> str | None:
        """Where it is published, None on main."""
        named = self.recipe("hub").get("revision")
        return named.replace("{run}", self.data.name) if named else None

    def recipe(self, section: str) -> dict[str, Any]:
        return self.data.recipe.get(section) or {}

    def size(self, name: str) -> int | None:
        """A size of the model by GPT-2's name for it."""
        return self.config.get(name, self.config.get(LLAMA_NAMES.get(name, name)))

    def is_scored(self, *, subject: str | None, step: int | None) -> bool:
        """Whether a figure of that subject and step is one of this model."""
        if subject == "model/":
            return self.finished and step in (None, self.step)
        return step == self.step


def published(data: RunData, *, repo_id: str, model: Path | None, step: int | None) -> Published:
    """model: a folder with config.json, default the run's model/. step: default as the folder's seal has it."""
    folder = model or data.run.model
    finished = folder == data.run.model
    if step is None:
        step = read_seal(folder)["step"] if (folder / SEAL).exists() else data.step()
    return Published(
        data=data if finished else data.up_to(step),
        repo_id=repo_id,
        config=read_json(folder / "config.json"),
        step=step,
        finished=finished,
        parent=parent_of_model(data),
    )
