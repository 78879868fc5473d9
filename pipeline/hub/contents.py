"""What a repository holds: the model at its root, what tells how it came to be, and what going on takes."""

import shutil
from pathlib import Path

from pipeline.artifacts.atomic import write_text
from pipeline.artifacts.checkpoints import problems, sealed_files
from pipeline.artifacts.errors import DataError
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.hub.card import model_card
from pipeline.report.run_data import RunData

STATE = "last-checkpoint"  # as transformers' hub_strategy="checkpoint" names it
CARD = "README.md"


def records(run: RunDirectory) -> list[Path]:
    """What a run writes beside its model; in the repository they lie at the root, under the same names."""
    report = [run.report / name for name in ("report.md", "report.html", "curves.png")]
    return [run.recipe, run.manifest, run.metrics, run.samples, run.evals, run.contamination, *report]


def collect(
    data: RunData, *, model: Path, step: int, repo_id: str, folder: Path, state: Path | None = None
) -> dict[str, Path]:
    """What is published, name in the repository -> file: the model, the records of the run, the card made in `folder`, and of
    `state`, a whole checkpoint, every file under last-checkpoint/."""
    for whole in (model, *([state] if state else [])):
        if found := problems(whole):
            raise DataError(
                f"{whole}: is damaged ({'; '.join(found)}) and is not pushed. Remove the folder and run the training command again: it writes it anew."
            )
    files = dict(sorted(sealed_files(model).items()))
    if state:
        files |= {f"{STATE}/{name}": path for name, path in sorted(sealed_files(state).items())}
    for path in records(data.run):
        if path.exists():
            # A copy: a row or a report written meanwhile must not change what was hashed.
            files[path.name] = Path(shutil.copy2(path, folder / path.name))
    return files | {CARD: write_card(data, model=model, step=step, repo_id=repo_id, folder=folder)}


def write_card(data: RunData, *, model: Path, step: int, repo_id: str, folder: Path) -> Path:
    """README.md in the folder."""
    write_text(folder / CARD, model_card(data, model=model, step=step, repo_id=repo_id))
    return folder / CARD


def is_of_a_run(name: str) -> bool:
    """Whether a file of the repository tells of one run only: the next push there removes it, or replaces it."""
    return name in {CARD, *(path.name for path in records(RunDirectory("")))} or name.startswith(f"{STATE}/")
