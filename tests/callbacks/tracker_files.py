"""What trackers hold, read from their files without the code that wrote them."""

import json
import sqlite3
import struct
from datetime import datetime
from pathlib import Path

# The framing of a .wandb file, that of LevelDB's log, in blocks of 32 KiB after a header of 7 bytes.
BLOCK, HEADER, WHOLE, LAST = 32768, 7, 1, 4


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each tag in the order of writing, without what was purged; values as float32."""
    accumulator = _accumulator(folder)
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def tensorboard_descriptions(folder: Path) -> dict[str, str]:
    """What TensorBoard shows beside the chart of each tag, as its own reader of event files finds it."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import (
        EventAccumulator,  # what its web server reads
    )

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["tensors"]
    return {tag: accumulator.SummaryMetadata(tag).summary_description for tag in tags}


def tensorboard_texts(folder: Path, tag: str) -> dict[int, str]:
    """The text of a tag by step."""
    return {event.step: event.tensor_proto.string_val[0].decode() for event in _accumulator(folder).Tensors(tag)}


def _accumulator(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def wandb_history(folder: Path) -> list[dict]:
    """The rows of an offline run in the order of writing, with W&B's own `_step`."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("run-*.wandb")
    rows = []
    for body in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(body)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


def _records(data: bytes):
    assert data[:4] == b":W&B"
    at, body = HEADER, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        at += HEADER + size
        if kind == 0 or at > len(data):
            return  # torn by a kill
        body += data[at - size : at]
        if kind in (WHOLE, LAST):
            yield body
            body = b""


def trackio_rows(folder: Path) -> list[dict]:
    """The rows of the one run in the one database there, in the order of writing: run, step, time and the values. None
    where it is only being made."""
    if not (files := list(folder.glob("*.db"))):
        return []
    (file,) = files
    with sqlite3.connect(file) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'metrics'").fetchone():
            return []
        found = database.execute(
            "SELECT run_name, step, timestamp, metrics FROM metrics ORDER BY timestamp, id"
        ).fetchall()
    return [
        {"run": run, "step": step, "time": datetime.fromisoformat(time).timestamp(), **json.loads(metrics)}
        for run, step, time, metrics in found
    ]
