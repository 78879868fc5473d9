"""The built-in sources `tandem:...`: files of the package, unpacked once into the cache.

`python -m benchmarks.quickstart_corpora` makes the packed files.
"""

import hashlib
import lzma
from pathlib import Path
from typing import Any

from pipeline.process.errors import RecipeError
from pipeline.process.storage import file_lock, new_folder
from pipeline.sources.files import SourceFile

CORPORA = Path(__file__).with_name("quickstart")  # jsonl.xz
# What each built-in source holds, and its splits.
SOURCES = {
    "tandem:quickstart_text": ("text", ("train", "validation")),
    "tandem:quickstart_chat": ("chat", ("train", "validation", "test")),
    "tandem:spelling": ("chat", ("train", "validation")),
}


def built_in_files(spec: Any, *, kind: str, where: str, cache: Path) -> list[SourceFile]:
    """Return the one file of a built-in source's split. Raises RecipeError for an id, split or key that it does not
    have."""
    if spec.id not in SOURCES:
        raise RecipeError(f"{where}.id: there is no built-in source {spec.id}. Write one of {', '.join(SOURCES)}.")
    own_kind, splits = SOURCES[spec.id]
    if own_kind != kind:
        holds, reads = ("conversations", "documents") if kind == "text" else ("documents", "conversations")
        fits = next(name for name, (other, _) in SOURCES.items() if other == kind)
        raise RecipeError(
            f"{where}.id: {spec.id} holds {holds}, and this stage reads {reads}. Use {fits}, or run the other stage."
        )
    if spec.split not in splits:
        *most, last = splits
        raise RecipeError(
            f"{where}.split is {spec.split!r}; {spec.id} has {', '.join(most)} and {last}. Write one of them."
        )
    keys = ("files", "config", "revision", "text_column", "messages_column", "columns", "format")
    own = [key for key in keys if getattr(spec, key)]
    if own:
        those = "it" if len(own) == 1 else "them"
        raise RecipeError(
            f"{where}: {', '.join(own)} cannot be chosen for {spec.id}, which is built in. Leave {those} out."
        )
    name = f"{spec.id.split(':')[1]}-{spec.split}.jsonl"
    return [SourceFile(label=name, path=corpus_folder(cache) / name)]


def corpus_folder(cache: Path) -> Path:
    """Return the folder with the unpacked files, made when it is not there yet; other processes wait for the first."""
    # Under the hash of the packed files: another version of the package unpacks into another folder.
    packed = {path.stem: path.read_bytes() for path in sorted(CORPORA.glob("*.xz"))}
    key = hashlib.sha256(b"".join(packed.values())).hexdigest()[:16]
    folder = cache / "quickstart" / key
    if not folder.exists():
        with file_lock(cache / "quickstart" / "lock"):
            if not folder.exists():
                with new_folder(folder) as new:
                    for name, content in packed.items():
                        (new / name).write_bytes(lzma.decompress(content))
    return folder
