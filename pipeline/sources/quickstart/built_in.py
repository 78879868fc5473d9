"""The built-in sources `tandem:...`: made once on this machine, the same bytes on any, then files like any other."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.process.errors import RecipeError
from pipeline.process.progress import waiting
from pipeline.process.storage import file_lock, new_folder
from pipeline.sources.files import SourceFile
from pipeline.sources.quickstart import world
from pipeline.sources.quickstart.spelling import spelling_conversations, spelling_words

KINDS = {"tandem:quickstart_text": "text", "tandem:quickstart_chat": "chat", "tandem:spelling": "chat"}
SPLITS = {
    "tandem:quickstart_text": ("train", "validation"),
    "tandem:quickstart_chat": ("train", "validation", "test"),
    "tandem:spelling": ("train", "validation"),
}


def built_in_files(spec: Any, *, kind: str, where: str, cache: Path) -> list[SourceFile]:
    """Return the one file of a built-in source's split. Raises RecipeError for an id, split or key that it does not have."""
    if spec.id not in KINDS:
        raise RecipeError(f"{where}.id: there is no built-in source {spec.id}. Write one of {', '.join(KINDS)}.")
    if KINDS[spec.id] != kind:
        holds, reads = ("conversations", "documents") if kind == "text" else ("documents", "conversations")
        raise RecipeError(
            f"{where}.id: {spec.id} holds {holds}, and this stage reads {reads}. Use {next(i for i, k in KINDS.items() if k == kind)}, or run the other stage."
        )
    if spec.split not in SPLITS[spec.id]:
        *most, last = SPLITS[spec.id]
        raise RecipeError(
            f"{where}.split is {spec.split!r}; {spec.id} has {', '.join(most)} and {last}. Write one of them."
        )
    keys = ("files", "config", "revision", "text_column", "messages_column", "columns", "format")
    own = [key for key in keys if getattr(spec, key)]
    if own:
        raise RecipeError(
            f"{where}: {', '.join(own)} cannot be chosen for {spec.id}, which is made here. Leave {'it' if len(own) == 1 else 'them'} out."
        )
    name = f"{spec.id.split(':')[1]}-{spec.split}.jsonl"
    return [SourceFile(label=name, path=corpus_folder(cache) / name)]


def corpus_folder(cache: Path) -> Path:
    """Return the folder with the built-in sources, made when it is not there yet; a second process waits for the first."""
    folder = cache / "quickstart" / _key()
    if not folder.exists():
        with file_lock(cache / "quickstart" / "lock"):
            if not folder.exists():
                with waiting("quickstart texts: writing the small world, once"), new_folder(folder) as new:
                    for name, rows in _files().items():
                        _write(new / name, rows)
    return folder


def _key() -> str:
    """Return a hash of the code that makes the files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


def _files() -> dict[str, Iterable[dict]]:
    made: dict[str, dict[str, Any]] = {
        "quickstart_text": {"train": world.documents("train"), "validation": world.documents("validation")},
        "quickstart_chat": {split: world.conversations(split) for split in ("train", "validation", "test")},
        "spelling": spelling_conversations(spelling_words()),
    }
    return {f"{name}-{split}.jsonl": rows for name, splits in made.items() for split, rows in splits.items()}


def _write(path: Path, rows: Iterable[dict]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
