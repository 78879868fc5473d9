"""How much text a source holds, without reading it."""

from typing import Any

from pipeline.sources.raw_rows import COMPRESSIONS, kind_of

SAMPLED_FOOTERS = 8  # Parquet files whose footers are read; a footer of 1,000 row groups takes tens of milliseconds.


def text_bytes(source: Any) -> int | None:
    """Bytes of the source's text, to a few per cent: of jsonl also its keys and quotes, of many parquet files as some of
    them have it. None where only reading would tell: compressed files, arrow, and parquet that is not fetched yet."""
    parquet = [file for file in source.files if kind_of(file.label) == "parquet"]
    if any(file.path is None for file in parquet) or any(
        file.label.lower().endswith(COMPRESSIONS) or kind_of(file.label) == "arrow" for file in source.files
    ):
        return None
    sample = parquet[:: max(1, -(-len(parquet) // SAMPLED_FOOTERS))]
    known = {file.path: _parquet_bytes(file.path, source.format.column) for file in sample}
    text_share = sum(known.values()) / max(1, sum(file.bytes for file in sample))
    total = 0
    for file in source.files:
        size = file.bytes
        if kind_of(file.label) == "parquet":
            size = known.get(file.path, round(size * text_share))
        if file.period:
            size = size * (1 if file.part == "validation" else file.period - 1) // file.period
        total += size
    return total


def _parquet_bytes(path: Any, column: str | None) -> int:
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    # A column of messages is several leaves below its name.
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    leaves = [number for number, path in enumerate(paths) if column is None or path.split(".")[0] == column]
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    return sum(group.column(leaf).total_uncompressed_size for group in groups for leaf in leaves)
