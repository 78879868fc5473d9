"""One source, found and verified, that can be read from any cursor."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.process.errors import DataError, InputMissingError, readable
from pipeline.process.network import wait_or_raise
from pipeline.sources.file_facts import FileFacts
from pipeline.sources.files import SourceFile
from pipeline.sources.formats import Format, UntrainableConversation
from pipeline.sources.holdout import is_held_out
from pipeline.sources.raw_rows import Block, Conversation, Document, RawRow, read_blocks
from pipeline.sources.verify import MOST_OF_REASON, is_blank, read_item, row_name, verify_file

LOG = logging.getLogger(__name__)


@dataclass
class OpenSource:
    """Files in the order in which they are read, and how their rows are read.

    spec: the recipe's Source. fingerprint: equal for two sources exactly when they give the same items in the same
    order. revision: the commit of a Hub dataset. recognised: what the rows are, where the recipe does not say it and
    it is not the default.
    """

    name: str
    spec: Any
    kind: Literal["text", "chat"]
    format: Format
    files: list[SourceFile] = field(default_factory=list)
    revision: str | None = None
    facts: FileFacts | None = None
    recognised: str = ""

    @property
    def column_key(self) -> str:
        """Return the recipe's key that names the column."""
        return "text_column" if self.kind == "text" else "messages_column"

    @property
    def is_built_in(self) -> bool:
        return self.spec.id is not None and self.spec.id.startswith("tandem:")

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.kind} {self.format.identity()}".encode())
        for file in self.files:
            line = f"\n{file.sha256} {file.part} {file.period}"
            if file.offset:
                line += f" from {file.offset}"
            if file.order:
                line += f" {file.order}"
            digest.update(line.encode())
        return digest.hexdigest()

    @property
    def once(self) -> "OpenSource":
        """Return the source without the further passes over its files."""
        return replace(self, files=[file for file in self.files if not file.order])

    @property
    def passes(self) -> int:
        """Return how many times the files are read in one epoch."""
        return len(self.files) // max(1, len(self.once.files))

    def describe(self) -> dict[str, Any]:
        """Return, for the manifest, what was read, so that a later start can say which file is another one now."""
        files = []
        for file in self.files:  # of each pass: an origin's number counts them all
            files.append({"label": file.label, "sha256": file.sha256, "bytes": file.bytes})
            if file.part != "all":
                files[-1]["part"] = file.part
        is_folder = not (self.revision or self.is_built_in)  # on this machine, whose path says nothing elsewhere
        return {
            "name": self.name,
            "id": None if is_folder else self.spec.id,
            "revision": self.revision,
            "format": self.format.identity(),
            "fingerprint": self.fingerprint,
            "files": files,
        }

    def headline(self) -> str:
        """Return one line for the console: what is read, and how much of it is here. The hashes are in the
        manifest."""
        have, files = len({file.label for file in self.files if file.path is not None}), len(self.once.files)
        size = sum(file.bytes for file in self.once.files)
        what = "1 file" if files == 1 else f"{files:,} files"
        if have < files:
            what = f"have {have} of {files} files"
        amount = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
        line = f"{self.name}: {what}, {amount}"
        file = self.files[0]
        if file.part == "train":
            line += f", all but one row of {file.period}"
        elif file.part == "validation":
            line += f", one row of {file.period} of it"
        if self.passes > 1:
            line += f", read {self.passes} times"
        if self.recognised:
            line += f", {self.recognised}"
        if self.revision:
            line += f", commit {self.revision[:12]}"
        if self.is_built_in:
            line += ", built in"
        return line

    def read(self, *, file: int = 0, block: int = 0) -> Iterator[Block]:
        """Yield blocks of rows from that cursor to the end of the last file.

        A block's own (file, index + 1) is the cursor behind it, also when the file has no such block. Raises DataError
        when a file is not the one that was verified.
        """
        for number in range(file, len(self.files)):
            yield from self.read_file(number, block=block)
            block = 0  # the next file is read from its beginning

    def read_file(self, number: int, *, block: int = 0) -> Iterator[Block]:
        """Yield blocks of one file from that one on. Raises as `read`."""
        path = self.path_of(number)
        read_row = self.format.reader()
        for index, rows in _blocks(path, block, self.format.read_columns):
            if order := self.files[number].order:
                rows = permuted(rows, key=f"{order} {index}")
            yield self._block(rows, read_row, path, number, index)

    def path_of(self, number: int) -> Path:
        """Return where a file is, unchanged since it was verified; one that was not there is fetched and verified
        now."""
        file = self.files[number]
        if file.path is not None:
            _must_be_unchanged(file, file.path, self.facts)
            return file.path
        assert self.facts is not None
        path = file.local_path()
        findings = verify_file(file, self.format, self.facts, column_key=self.column_key)
        if findings.problems:
            raise DataError("\n".join(findings.problems))
        have = len({f.label for f in self.files if f.path is not None})
        LOG.info("%s: have %d of %d files, fetched %s", self.name, have, len(self.once.files), file.label)
        return path

    def _block(self, rows: list[RawRow], read_row: Callable, path: Path, number: int, index: int) -> Block:
        this, made = self.files[number], Block(file=number, index=index)
        for row_group, row, value in rows:
            # Of a file that is split by rows, those of the other side.
            if this.part != "all" and is_held_out(this.offset + row, this.period) != (this.part == "validation"):
                continue
            try:
                item, reason = read_item(value, self.format, read_row)
            except UntrainableConversation:
                made.empty_rows += 1
                continue
            if reason:
                # By its label: shards are published, and the same on any machine.
                place = row_name(path, row).replace(str(path), this.label, 1)
                made.bad_rows.append(f"{place}: {readable(reason, most=MOST_OF_REASON)}")
            elif item is None or is_blank(item):
                made.empty_rows += 1
            elif isinstance(item, str):
                made.items.append(Document(item, number, row_group, row))
            else:
                made.items.append(Conversation(list(item), number, row_group, row, item.tools))
        return made


def _blocks(path: Path, block: int, columns: list[str] | None) -> Iterator[tuple[int, list[RawRow]]]:
    """Yield the file's blocks with their numbers, from one on; opened again at the same block after an error that may
    pass."""
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


def _must_be_unchanged(file: SourceFile, path: Path, facts: FileFacts | None) -> None:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise InputMissingError(
            f"{path} is gone since it was verified, so its rows cannot be read. Put it back and run the same command "
            "again."
        ) from error
    changed = (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns)
    if not changed and status.st_ctime_ns != file.ctime_ns and facts is not None:
        # Its rights or links changed, as by a backup, or it is another content with the old time: only its bytes tell.
        changed = not file.sha256.startswith("git:") and facts.of(path).sha256 != file.sha256
        file.ctime_ns = status.st_ctime_ns
    if changed:
        raise DataError(
            f"{path} was changed since it was verified, and what was prepared from it is no longer what it holds. Put "
            "the old file back, or start a new run."
        )


def permuted(items: list, *, key: str) -> list:
    """Return the items in the order of a hash: the same on every machine and under every version of every library."""
    order = sorted(range(len(items)), key=lambda index: hashlib.sha256(f"{key} {index}".encode()).digest())
    return [items[index] for index in order]
