"""The files of a repository: the model at its root, the records of its run, and the state that continues it.

Nothing secret and nothing that runs code when it is loaded leaves this machine: every byte is read before an upload.
"""

import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.hub.card import model_card
from pipeline.hub.pull import STATE
from pipeline.process.errors import DataError
from pipeline.process.secrets import kinds_in, known_secrets
from pipeline.process.storage import write_text
from pipeline.report.run_data import RunData
from pipeline.run_dir.checkpoints import problems, sealed_files
from pipeline.run_dir.run_directory import RunDirectory

CARD = "README.md"


def collect(
    data: RunData, *, model: Path, step: int, repo_id: str, folder: Path, state: Path | None = None
) -> dict[str, Path]:
    """Return what is published, name in the repository -> file: the model, the records of the run, the card made in
    `folder`, and of `state`, a whole checkpoint, every file under last-checkpoint/."""
    for whole in (model, *([state] if state else [])):
        if found := problems(whole):
            raise DataError(
                f"{whole}: is damaged ({'; '.join(found)}) and is not pushed. Remove the folder and run the training "
                "command again: it writes it anew."
            )
    files = dict(sorted(sealed_files(model).items()))
    if state:
        files |= {f"{STATE}/{name}": path for name, path in sorted(sealed_files(state).items())}
    for path in data.run.records():
        if path.exists():
            # A copy: a row or a report written meanwhile must not change what was hashed.
            files[path.name] = Path(shutil.copy2(path, folder / path.name))
    return files | {CARD: write_card(data, model=model, step=step, repo_id=repo_id, folder=folder)}


def write_card(data: RunData, *, model: Path, step: int, repo_id: str, folder: Path) -> Path:
    """Write README.md into the folder and return it."""
    write_text(folder / CARD, model_card(data, model=model, step=step, repo_id=repo_id))
    return folder / CARD


def is_of_a_run(name: str) -> bool:
    """Return whether a file of the repository tells of one run only: the next push there removes it, or replaces
    it."""
    return name in {CARD, *(path.name for path in RunDirectory("").records())} or name.startswith(f"{STATE}/")


_CHUNK, _OVERLAP = 16 * 2**20, 4096
_PICKLE_SUFFIXES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy"}


def secrets_in(path: Path, known: dict[str, bytes]) -> list[str]:
    """Return one line for each kind of secret in a file; the secret itself is never repeated."""
    found: set[str] = set()
    for block in _blocks(path):
        found |= kinds_in(block)
        found |= {f"the value of {name}" for name, value in known.items() if value in block}
    return sorted(found)


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the file in overlapping blocks: no secret of up to 4 KiB falls between two."""
    with open(path, "rb") as file:
        kept = b""
        while data := file.read(_CHUNK):
            yield kept + data
            kept = data[-_OVERLAP:]


def is_pickle(path: Path) -> bool:
    """Return whether loading the file could run code in it: by suffix, by pickle's first bytes, by torch's zip
    layout."""
    if path.suffix in _PICKLE_SUFFIXES:
        return True
    with open(path, "rb") as file:
        head = file.read(4)
    if len(head) > 1 and head[0] == 0x80 and head[1] in (2, 3, 4, 5):
        return True
    if head == b"PK\x03\x04" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    return False


def refusals(files: dict[str, Path]) -> list[str]:
    """Return why these files (name in the repository -> path) must not be uploaded; empty when all may."""
    known = known_secrets()
    lines = []
    for name, path in files.items():
        if is_pickle(path):
            lines.append(f"{name}: is a pickle, which runs code when it is loaded")
        lines += [f"{name}: contains {kind}" for kind in secrets_in(path, known)]
    return lines
