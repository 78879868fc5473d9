"""One source, found and verified, that can be read from any cursor."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.artifacts.errors import DataError, InputMissingError, readable
from pipeline.artifacts.retries import wait_or_raise
from pipeline.sources.bad_rows import MOST_OF_REASON, row_name
from pipeline.sources.conversation import UntrainableConversation
from pipeline.sources.documents import Block, Conversation, Document
from pipeline.sources.facts import FactsOfFiles
from pipeline.sources.files import SourceFile
from pipeline.sources.formats import Format
from pipeline.sources.held_out import is_held_out
from pipeline.sources.quickstart.pinned import PINNED_SHA256
from pipeline.sources.raw_rows import BadRow, RawRow, read_blocks
from pipeline.sources.verify import verified

LOG = logging.getLogger(__name__)


@dataclass
class OpenSource:
    """Files in the order in which they are read, and how their rows are read.

    spec: the recipe's Source. fingerprint: equal for two sources exactly when they give the same items in the same order.
    revision: the commit of a Hub dataset. recognised: what the rows are, where the recipe does not say it and it is not
    the default.
    """

    name: str
    spec: Any
    kind: Literal["text", "chat"]
    format: Format
    files: list[SourceFile] = field(default_factory=list)
    revision: str | None = None
    facts: FactsOfFiles | None = None
    recognised: str = ""

    @property
    def column_key(self) -> str:
        """The recipe's key that names the column."""
        return "text_column" if self.kind == "text" else "messages_column"

    @property
    def is_built_in(self) -> bool:
        return self.spec.id is not None and self.spec.id.startswith("tandem:")

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
            "id": self.spec.id if self.revision or self.is_built_in else None,  # none of a folder on this machine
            "revision": self.revision,
            "format": self.format.identity(),
            "fingerprint": self.fingerprint,
            "files": files,
        }

    def headline(self) -> str:
        """One line for the console: what is read, how much of it is here, and of a built-in source its sha256."""
        have = sum(file.path is not None for file in self.files)
        size = sum(file.bytes for file in self.files) / 1e6
        line = f"{self.name}: have {have} of {len(self.files)} files, {size:,.1f} MB"
        if self.recognised:
            line += f", {self.recognised}"
        if self.revision:
            line += f", commit {self.revision[:12]}"
        if self.is_built_in:
            known = PINNED_SHA256.get(self.files[0].label) == self.files[0].sha256
            line += (
                f", sha256 {self.files[0].sha256} ({'as' if known else 'not as'} the pinned package versions give it)"
            )
        return line

    def read(self, *, file: int = 0, block: int = 0) -> Iterator[Block]:
        """Blocks of rows from that cursor to the end of the last file.

        A block's own (file, index + 1) is the cursor behind it, also when the file has no such block. Raises DataError
        when a file is not the one that was verified.
        """
        read_row = self.format.reader()
        columns = self.format.read_columns
        for number in range(file, len(self.files)):
            this = self.files[number]
            path = self._path(this)
            first = block if number == file else 0
            for index, rows in _blocks(path, first, columns):
                yield self._block(rows, read_row, path, number, index)

    def _path(self, file: SourceFile) -> Path:
        """Where the file lies, unchanged since it was verified; one that was not there is fetched and verified now."""
        if file.path is not None:
            _must_be_unchanged(file, file.path, self.facts)
            return file.path
        assert self.facts is not None
        path = file.local_path()
        findings = verified(file, self.format, self.facts, column_key=self.column_key)
        if findings.problems:
            raise DataError("\n".join(findings.problems))
        have = sum(f.path is not None for f in self.files)
        LOG.info("%s: have %d of %d files, fetched %s", self.name, have, len(self.files), file.label)
        return path

    def _block(self, rows: list[RawRow], read_row: Callable, path: Path, number: int, index: int) -> Block:
        this, made = self.files[number], Block(file=number, index=index)
        for row_group, row, value in rows:
            if this.part != "all" and is_held_out(row, this.period) != (this.part == "validation"):
                continue
            try:
                if isinstance(value, BadRow):
                    raise ValueError(value.reason)
                item = read_row(value)
                reason = None
            except UntrainableConversation:
                made.empty_rows += 1
                continue
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
                made.bad_rows.append(f"{row_name(path, row)}: {readable(reason, most=MOST_OF_REASON)}")
            elif item is None or (isinstance(item, str) and not item.strip()):
                made.empty_rows += 1
            elif isinstance(item, str):
                made.items.append(Document(item, number, row_group, row))
            else:
                made.items.append(Conversation(item, number, row_group, row))
        return made


def _blocks(path: Path, block: int, columns: list[str] | None) -> Iterator[tuple[int, list[RawRow]]]:
    """The file's blocks with their numbers, from one on; opened again at the same block after an error that may pass."""
    attempt = 1
    while True:
        try:
            for rows in read_blocks(path, block=block, columns=columns):
                yield block, rows
                block, attempt = block + 1, 1
            return
        except OSError as error:
            wait_or_raise(error, attempt=attempt, path=path)
            attempt += 1


def _must_be_unchanged(file: SourceFile, path: Path, facts: FactsOfFiles | None) -> None:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise InputMissingError(
            f"{path} is gone since it was verified, so its rows cannot be read. Put it back and run the same command again."
        ) from error
    changed = (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns)
    if not changed and status.st_ctime_ns != file.ctime_ns and facts is not None:
        # Its rights or links changed, as by a backup, or it is another content with the old time: only its bytes tell.
        changed = not file.sha256.startswith("git:") and facts.of(path).sha256 != file.sha256
        file.ctime_ns = status.st_ctime_ns
    if changed:
        raise DataError(
            f"{path} was changed since it was verified, and what was prepared from it is no longer what it holds. Put the old file back, or start a new run."
        )
