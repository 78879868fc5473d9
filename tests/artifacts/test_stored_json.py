"""JSON that lies on a disk or came over a network is an object as it was written, or damage that names the file."""

import json
import os
from pathlib import Path

import pytest

from pipeline.process.errors import DamagedFileError, DataError
from pipeline.process.storage import read_json, read_sealed_json, write_sealed_json
from pipeline.run_dir.columns import read_columns
from pipeline.run_dir.hub_queue import HubQueue
from pipeline.run_dir.rows import append_row, read_rows
from pipeline.run_dir.run_directory import RunDirectory, latest_run

HOSTILE = {
    "torn": b'{"a": ',
    "empty": b"",
    "a list": b"[1]",
    "a number": b"7",
    "20,000 brackets": b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "101 levels": b'{"a": ' * 101 + b"1" + b"}" * 101,
    "a number of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_object_is_damage_of_status_65_that_names_the_file(tmp_path, content):
    path = tmp_path / "seal.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"seal\.json: ") as caught:
        read_json(path)
    assert isinstance(caught.value, DataError)


def test_a_file_that_is_too_long_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.process.storage.JSON_BYTES", 100)
    (tmp_path / "a.json").write_text(json.dumps({"a": "x" * 200}))
    with pytest.raises(DamagedFileError, match="longer than"):
        read_json(tmp_path / "a.json")


def test_every_flipped_bit_of_a_value_is_found_and_files_without_a_checksum_stay_readable(tmp_path):
    path = tmp_path / "a.json"
    value = {"rows": 128, "read": {"documents": 7}, "by_step": {1: [0.1, None, "ä"]}}
    write_sealed_json(path, value)
    assert read_sealed_json(path) == json.loads(json.dumps(value))
    content = path.read_bytes()
    for bit in range(8 * content.index(b'"own_sha256"')):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedFileError):
            read_sealed_json(path)
    path.write_text('{"rows": 128}')
    assert read_sealed_json(path) == {"rows": 128}


def test_a_row_of_hostile_json_among_metrics_is_left_out(tmp_path):
    append_row(tmp_path / "metrics.jsonl", {"step": 1})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(HOSTILE["20,000 brackets"] + b"\n" + HOSTILE["a number of 5,000 digits"] + b"\n")
    append_row(tmp_path / "metrics.jsonl", {"step": 2})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_manifest_ends_its_own_run_with_65_and_no_other(tmp_path, content, capsys):
    good, bad = (RunDirectory(tmp_path / name) for name in ("good", "bad"))
    good.update_manifest(name="good", recipe_name="base", finished=1.0)
    bad.path.mkdir()
    bad.manifest.write_bytes(content)
    with pytest.raises(DataError, match=r"run_manifest\.json"):
        bad.read_manifest()
    found = latest_run("base", str(tmp_path))
    assert found is not None
    assert found.path == good.path
    assert str(bad.manifest) in capsys.readouterr().err


def test_a_queued_item_with_values_of_another_type_is_none(tmp_path):
    run = RunDirectory(tmp_path / "run")
    folder = tmp_path / "run" / "hub_queue" / "checkpoint-5"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    for value in ({"name": "checkpoint-5", "step": "5", "content": "a"}, {"name": 5, "step": 5, "content": "a"}, [1]):
        (folder.parent / "checkpoint-5.json").write_text(json.dumps(value))
        assert HubQueue(run).items() == []
    (folder.parent / "checkpoint-5.json").write_text(json.dumps({"name": "checkpoint-5", "step": 5, "content": "a"}))
    assert len(HubQueue(run).items()) == 1


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_a_folder_or_a_device_under_the_name_of_a_file_is_reported_and_not_waited_for(tmp_path, make):
    path = tmp_path / "file.json"
    make(path)
    for read in (read_json, read_rows, read_columns):
        with pytest.raises(DamagedFileError, match=r"file.json: is a .*, not a file"):
            read(path)
