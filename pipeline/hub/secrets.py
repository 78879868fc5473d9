"""Nothing secret and nothing executable by loading it leaves this machine: every byte is looked at before an upload."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.artifacts.secrets import kinds_in, known_secrets

_CHUNK, _OVERLAP = 16 * 2**20, 4096
_PICKLE_SUFFIXES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy"}


def secrets_in(path: Path, known: dict[str, bytes]) -> list[str]:
    """One line for each kind of secret in a file; the secret itself is never repeated."""
    found: set[str] = set()
    for block in _blocks(path):
        found |= kinds_in(block)
        found |= {f"the value of {name}" for name, value in known.items() if value in block}
    return sorted(found)


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in overlapping blocks: no secret of up to 4 KiB falls between two."""
    with open(path, "rb") as file:
        kept = b""
        while data := file.read(_CHUNK):
            yield kept + data
            kept = data[-_OVERLAP:]


def is_pickle(path: Path) -> bool:
    """Whether loading the file could run code in it: by suffix, by pickle's first bytes, by torch's zip layout."""
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
    """Why these files (name in the repository -> path) must not be uploaded; empty when all may."""
    known = known_secrets()
    lines = []
    for name, path in files.items():
        if is_pickle(path):
            lines.append(f"{name}: is a pickle, which runs code when it is loaded")
        lines += [f"{name}: contains {kind}" for kind in secrets_in(path, known)]
    return lines
