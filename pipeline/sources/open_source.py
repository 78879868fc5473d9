"""One source, found and verified, that can be read from any cursor."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.artifacts.errors import DataError, InputMissingError
from pipeline.sources.documents import Block, Conversation, Document
from pipeline.sources.files import SourceFile
from pipeline.sources.formats import Format
from pipeline.sources.held_out import is_held_out
from pipeline.sources.raw_rows import BadRow, RawRow, read_blocks
from pipeline.sources.verify import row_name


@dataclass
class OpenSource:
    """Files in the order in which they are read, and how their rows are read.

    spec: the recipe's Source. fingerprint: equal for two sources exactly when they give the same items in the same order.
    revision: the commit of a Hub dataset.
    """

    name: str
    spec: Any
    kind: Literal["text", "chat"]
    format: Format
    files: list[SourceFile] = field(default_factory=list)
    revision: str | None = None

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.kind} {self.format.identity()}".encode())
        for file in self.files:
            digest.update(f"\n{file.sha256} {file.part} {file.period}".encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """For the manifest: what was read, so that a later start can say which file is another one now."""
        files = [
            {"label": file.label, "sha256": file.sha256, "bytes": file.bytes}
            | ({"part": file.part} if file.part != "all" else {})
            for file in self.files
        ]
        return {
            "name": self.name,
            "id": self.spec.id,
            "revision": self.revision,
            "format": self.format.identity(),
            "fingerprint": self.fingerprint,
            "files": files,
        }

    def read(self, *, file: int = 0, block: int = 0) -> Iterator[Block]:
        """Blocks of rows from that cursor to the end of the last file.

        A block's own (file, index + 1) is the cursor behind it, also when the file has no such block. Raises DataError
        when a file is not the one that was verified.
        """
        read_row = self.format.reader()
        columns = [self.format.column] if self.format.column else None
        for number in range(file, len(self.files)):
            this = self.files[number]
            path = this.local_path()
            _must_be_unchanged(this, path)
            first = block if number == file else 0
            for index, rows in enumerate(read_blocks(path, block=first, columns=columns), start=first):
                yield self._block(rows, read_row, path, number, index)

    def _block(self, rows: list[RawRow], read_row: Callable, path: Path, number: int, index: int) -> Block:
        this, made = self.files[number], Block(file=number, index=index)
        for row_group, row, value in rows:
            if this.part != "all" and is_held_out(row, this.period) != (this.part == "validation"):
                continue
            try:
                if isinstance(value, BadRow):
                    raise ValueError(value.reason)
                item = read_row(value)
                reason = _not_utf8(item)
            except (
                Exception
            ) as error:  # An own format may raise anything; the row is named and the recipe's limit decides.
                reason = (
                    str(error)
                    if isinstance(error, ValueError)
                    else f"{self.format.name} raised {type(error).__name__}: {error}"
                )
                item = None
            if reason:
                made.bad_rows.append(f"{row_name(path, row)}: {reason}")
            elif item is None or (isinstance(item, str) and not item.strip()):
                made.empty_rows += 1
            elif isinstance(item, str):
                made.items.append(Document(item, number, row_group, row))
            else:
                made.items.append(Conversation(item, number, row_group, row))
        return made


def _not_utf8(item: str | list[dict] | None) -> str | None:
    """A JSON escape can make half of a character, which no UTF-8 can hold and no tokenizer can read."""
    texts = [item] if isinstance(item, str) else [message.get("content") or "" for message in item or ()]
    for text in texts:
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                return f"holds half of a surrogate pair (U+{ord(text[error.start]):04X}), which is no character"
    return None


def _must_be_unchanged(file: SourceFile, path: Path) -> None:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise InputMissingError(
            f"{path} is gone since it was verified, so its rows cannot be read. Put it back and run the same command again."
        ) from error
    if (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise DataError(
            f"{path} was changed since it was verified, and what was prepared from it is no longer what it holds. Put the old file back, or start a new run."
        )
