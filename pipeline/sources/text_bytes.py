"""How much text a source holds, without reading it."""

from typing import Any

from pipeline.sources.raw_rows import COMPRESSIONS, kind_of


def text_bytes(source: Any) -> int | None:
    """Bytes of the source's text, to a few per cent: of jsonl also its keys and quotes. None where only reading would tell:
    compressed files, and parquet that is not fetched yet."""
    total = 0
    for file in source.files:
        size = _text_bytes(file, source.format.column)
        if size is None:
            return None
        if file.period:
            size = size * (1 if file.part == "validation" else file.period - 1) // file.period
        total += size
    return total


def _text_bytes(file: Any, column: str | None) -> int | None:
    if file.label.lower().endswith(COMPRESSIONS):
        return None
    if kind_of(file.label) != "parquet":
        return file.bytes
    if file.path is None:
        return None
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(file.path)
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    chunks = [group.column(c) for group in groups for c in range(group.num_columns)]
    # A column of messages is several leaves below its name.
    return sum(c.total_uncompressed_size for c in chunks if column is None or c.path_in_schema.split(".")[0] == column)
