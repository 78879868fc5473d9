"""What a source gives: documents, conversations, and blocks of them that know their place."""

from dataclasses import dataclass, field

BLOCK_ROWS = 1024  # Rows of a block: the packing policy that is the default packs within this many documents.


@dataclass(frozen=True, slots=True)
class Document:
    """One text. file: index in the source's order; row: zero-based in the file (a line of jsonl, a piece of txt)."""

    text: str
    file: int
    row_group: int
    row: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat of checked messages: dicts with role, content and, where given, tool_calls and name."""

    messages: list[dict]
    file: int
    row_group: int
    row: int


@dataclass(slots=True)
class Block:
    """Up to BLOCK_ROWS consecutive rows of one file.

    items: what the rows gave, in order. bad_rows: one line `file:row: reason` for each row that gave nothing because it
    is damaged. empty_rows: how many held no text at all, or a conversation that nothing can be learned from, which is no damage.
    """

    items: list = field(default_factory=list)
    file: int = 0
    index: int = 0
    bad_rows: list[str] = field(default_factory=list)
    empty_rows: int = 0
