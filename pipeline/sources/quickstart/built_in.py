"""The built-in sources `tandem:...`: made once from the installed documentation, then files like any other."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pipeline
from pipeline.hardware.cpu import usable_cores
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.process.storage import file_lock, new_folder
from pipeline.sources.files import SourceFile
from pipeline.sources.quickstart.conversations import conversations
from pipeline.sources.quickstart.corpus import is_held_out, split_and_deduplicate, text_of
from pipeline.sources.quickstart.harvest import DISTRIBUTIONS, Described, SourceDocument
from pipeline.sources.quickstart.spelling import spelling_conversations

KINDS = {"tandem:quickstart_text": "text", "tandem:quickstart_chat": "chat", "tandem:spelling": "chat"}
SPLITS = ("train", "validation")


def built_in_files(spec: Any, *, kind: str, where: str, cache: Path) -> list[SourceFile]:
    """The one file of a built-in source's split. Raises RecipeError for an id, split or key that it does not have."""
    if spec.id not in KINDS:
        raise RecipeError(f"{where}.id: there is no built-in source {spec.id}. Write one of {', '.join(KINDS)}.")
    if KINDS[spec.id] != kind:
        holds, reads = ("conversations", "documents") if kind == "text" else ("documents", "conversations")
        raise RecipeError(
            f"{where}.id: {spec.id} holds {holds}, and this stage reads {reads}. Use {next(i for i, k in KINDS.items() if k == kind)}, or run the other stage."
        )
    if spec.split not in SPLITS:
        raise RecipeError(f"{where}.split is {spec.split!r}; {spec.id} has {' and '.join(SPLITS)}. Write one of them.")
    keys = ("files", "config", "revision", "text_column", "messages_column", "columns", "format")
    own = [key for key in keys if getattr(spec, key)]
    if own:
        raise RecipeError(
            f"{where}: {', '.join(own)} cannot be chosen for {spec.id}, which is made here. Leave {'it' if len(own) == 1 else 'them'} out."
        )
    name = f"{spec.id.split(':')[1]}-{spec.split}.jsonl"
    return [SourceFile(label=name, path=corpus_folder(cache) / name)]


def corpus_folder(cache: Path) -> Path:
    """The folder with the built-in sources, made when it is not there yet; a second process waits for the first."""
    folder = cache / "quickstart" / _key()
    if not folder.exists():
        with file_lock(cache / "quickstart" / "lock"):
            if not folder.exists():
                _make(folder)
    return folder


def _key() -> str:
    """Of the installed versions and of the code that makes the corpora."""
    digest = hashlib.sha256()
    missing = []
    for name in DISTRIBUTIONS:
        try:
            digest.update(f"{name}=={importlib.metadata.version(name)}\n".encode())
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise InputMissingError(
            f"tandem:quickstart: the corpus is the documentation of the installed packages, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed. Run pip install -c constraints.txt -e . in the repository."
        )
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name != "pinned.py":  # It holds what came out, which decides nothing.
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _make(folder: Path) -> None:
    documents = harvested(processes=usable_cores())
    training, held_out = split_and_deduplicate(documents)
    if not training or not held_out:
        raise InputMissingError(
            "tandem:quickstart: the installed packages name no files with documentation, so there is no corpus to make. "
            "Install them with pip from the package index: pip install --force-reinstall -c constraints.txt -e ."
        )
    with new_folder(folder) as new:
        for split, chosen in zip(SPLITS, (training, held_out), strict=True):
            _write(
                new / f"quickstart_text-{split}.jsonl",
                ({"text": text_of(d), "path": d.path} for d in in_hash_order(chosen)),
            )
        chats = conversations(
            [d for d in documents if not is_held_out(d.path)], [d for d in documents if is_held_out(d.path)]
        )
        spellings = spelling_conversations(text_of(d) for d in training)
        for split in SPLITS:
            _write(new / f"quickstart_chat-{split}.jsonl", chats[split])
            _write(new / f"spelling-{split}.jsonl", spellings[split])


def harvested(*, processes: int) -> list[SourceDocument]:
    """All documentation, in the order of the files, read by that many processes."""
    root = str(Path(pipeline.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{part}.jsonl") for part in range(processes)]
        command = [sys.executable, "-m", "pipeline.sources.quickstart.harvest"]
        running = [
            subprocess.Popen([*command, str(out), str(part), str(processes)], env=environment)
            for part, out in enumerate(outs)
        ]
        codes = [process.wait() for process in running]
        if any(codes):
            raise RuntimeError(f"reading the documentation ended with {codes}")
        rows = [json.loads(line) for out in outs for line in out.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row["number"])
    return [SourceDocument(row["path"], [Described(**thing) for thing in row["things"]]) for row in rows]


def in_hash_order(documents: list[SourceDocument]) -> list[SourceDocument]:
    """Mixed, so that no part of the corpus is one package's alone; the same everywhere."""
    return sorted(documents, key=lambda document: hashlib.sha256(b"order " + document.path.encode()).digest())


def _write(path: Path, rows: Iterable[dict]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
