"""JSON that lies on a disk or came over a network is an object as it was written, or damage that names the file."""

import json

import pytest

from pipeline.process.errors import DamagedFileError, DataError
from pipeline.process.storage import read_json, read_sealed_json, write_sealed_json
from pipeline.run_dir.rows import append_row, read_rows
from pipeline.run_dir.run_directory import RunDirectory, latest_run

HOSTILE = {
    "torn": b'{"a": ',
    "empty": b"",
    "a list": b"[1]",
    "a number": b"7",
    "20,000 brackets": b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "a number of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_file_holding_no_object_is_named_as_damaged_with_status_65(tmp_path, content):
    path = tmp_path / "seal.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"seal\.json: ") as caught:
        read_json(path)
    assert isinstance(caught.value, DataError)


def test_every_flipped_bit_is_found_and_files_without_checksum_stay_readable(tmp_path):
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
