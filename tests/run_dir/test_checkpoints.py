"""Checkpoints exist whole or not at all, and damage is found, named and moved aside."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pipeline.process.storage import folder_bytes, new_folder, write_bytes
from pipeline.run_dir import checkpoints


def make_checkpoint(folder, step):
    path = folder / f"checkpoint-{step}"
    with checkpoints.whole_folder(path, step=step) as temporary:
        (temporary / "model.safetensors").write_bytes(os.urandom(1000))
        (temporary / "optimizer.safetensors").write_bytes(os.urandom(1000))
        (temporary / "trainer_state.json").write_text("{}")
    return path


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[500 % len(data)] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a missing file": lambda p: (p / "optimizer.safetensors").unlink(),
    "a truncated file": lambda p: os.truncate(p / "model.safetensors", 400),
    "an empty file": lambda p: os.truncate(p / "trainer_state.json", 0),
    "one flipped bit": lambda p: flip_bit(p / "model.safetensors"),
    "a missing manifest": lambda p: (p / "MANIFEST.json").unlink(),
    "a torn manifest": lambda p: os.truncate(p / "MANIFEST.json", 40),
}


def test_a_whole_checkpoint_has_no_problems(tmp_path):
    assert checkpoints.problems(make_checkpoint(tmp_path, 1)) == []


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_newest_checkpoint_is_quarantined_and_the_one_before_it_used(tmp_path, damage):
    older, newer = make_checkpoint(tmp_path / "checkpoints", 5), make_checkpoint(tmp_path / "checkpoints", 10)
    damage(newer)
    found, notes = checkpoints.newest_whole(tmp_path / "checkpoints", tmp_path / "quarantine")
    assert found == older
    assert len(notes) == 1
    assert "checkpoint-10" in notes[0]
    assert (tmp_path / "quarantine" / "checkpoint-10").is_dir()


@pytest.mark.parametrize(
    "name", [".DS_Store", "._model.safetensors", "Thumbs.db", ".nfs000000000001", "README.md", "notes/mine.txt"]
)
def test_a_stray_file_in_the_newest_checkpoint_is_named_and_ignored(tmp_path, name):
    make_checkpoint(tmp_path / "checkpoints", 5)
    newer = make_checkpoint(tmp_path / "checkpoints", 10)
    (newer / name).parent.mkdir(exist_ok=True)
    (newer / name).write_bytes(b"x")
    found, notes = checkpoints.newest_whole(tmp_path / "checkpoints", tmp_path / "quarantine")
    assert found == newer
    assert notes == [f"{newer}: {name} does not belong to the checkpoint; ignored."]
    assert not (tmp_path / "quarantine").exists()


def test_only_strays_that_from_pretrained_might_read_are_loadable(tmp_path):
    folder = make_checkpoint(tmp_path, 5)
    for name in ("adapter_config.json", "._config.json", "README.md", "modeling_x.py"):
        (folder / name).write_text("{}")
    assert checkpoints.unexpected_model_files(folder) == ["adapter_config.json", "modeling_x.py"]


def test_a_model_is_whole_where_only_the_training_state_is_damaged(tmp_path):
    folder = make_checkpoint(tmp_path, 5)
    flip_bit(folder / "optimizer.safetensors")
    assert checkpoints.has_whole_model(folder)
    flip_bit(folder / "model.safetensors")
    assert not checkpoints.has_whole_model(folder)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    checkpoint = tmp_path / "checkpoint-5"
    with checkpoints.whole_folder(checkpoint, step=5, run="a", tokens=2560) as temporary:
        (temporary / "scheduler.json").write_text("{}")
    manifest = checkpoint / "MANIFEST.json"
    content = manifest.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        assert checkpoints.problems(checkpoint), flipped
    manifest.write_bytes(content)
    assert checkpoints.problems(checkpoint) == []


def test_files_swapped_between_two_checkpoints_are_found(tmp_path):
    one, two = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    (two / "model.safetensors").write_bytes((one / "model.safetensors").read_bytes())
    assert checkpoints.problems(two) == ["model.safetensors has other content than was written"]


def test_a_folder_whose_writing_failed_does_not_exist(tmp_path):
    with pytest.raises(RuntimeError), checkpoints.whole_folder(tmp_path / "checkpoint-3"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_in_the_middle_leaves_nothing_that_counts(tmp_path):
    code = f"""
        import os, signal
        from pathlib import Path
        from pipeline.run_dir.checkpoints import whole_folder
        with whole_folder(Path({str(tmp_path)!r}) / "checkpoint-7") as folder:
            (folder / "model.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    assert child.returncode == -signal.SIGKILL
    assert checkpoints.newest_whole(tmp_path, tmp_path / "quarantine") == (None, [])
    checkpoints.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rotation_keeps_the_newest_by_number_not_by_time(tmp_path):
    for step in (100, 20, 3):  # written in the order that file times would get wrong
        make_checkpoint(tmp_path, step)
    checkpoints.rotate(tmp_path, keep=2)
    assert [p.name for p in checkpoints.by_step(tmp_path)] == ["checkpoint-20", "checkpoint-100"]


def test_rotation_never_deletes_the_last_whole_checkpoint(tmp_path):
    make_checkpoint(tmp_path, 1)
    checkpoints.rotate(tmp_path, keep=0)
    assert [p.name for p in checkpoints.by_step(tmp_path)] == ["checkpoint-1"]


def test_a_second_writer_of_the_same_folder_is_discarded(tmp_path):
    with new_folder(tmp_path / "shards") as late:
        (late / "a").write_text("late")
        with new_folder(tmp_path / "shards") as early:
            (early / "a").write_text("early")
    assert (tmp_path / "shards" / "a").read_text() == "early"
    assert [p.name for p in tmp_path.iterdir()] == ["shards"]


def test_a_failed_replacement_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    write_bytes(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


def test_a_file_on_bad_blocks_is_damaged_and_a_forbidden_one_not(tmp_path, monkeypatch):
    for step in (5, 10):
        make_checkpoint(tmp_path / "checkpoints", step)
    read = checkpoints.sha256_file
    number = errno.EIO

    def failing(path):
        if path.parent.name == "checkpoint-10":
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(checkpoints, "sha256_file", failing)
    number = errno.EACCES
    with pytest.raises(PermissionError):
        checkpoints.newest_whole(tmp_path / "checkpoints", tmp_path / "quarantine")
    assert len(checkpoints.by_step(tmp_path / "checkpoints")) == 2
    number = errno.EIO
    folder, notes = checkpoints.newest_whole(tmp_path / "checkpoints", tmp_path / "quarantine")
    assert folder.name == "checkpoint-5"
    assert "cannot be read (Input/output error)" in notes[0]
    assert (tmp_path / "quarantine" / "checkpoint-10").is_dir()


def test_a_folder_can_be_measured_while_its_folders_are_renamed_and_removed(tmp_path, monkeypatch):
    """As a start does while a killed attempt's writer still renames its checkpoint (found by the resume campaign)."""
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "file").write_bytes(b"12345")
    (tmp_path / ".checkpoint-12").mkdir()
    scandir = os.scandir

    def gone_when_its_turn_comes(path):
        if Path(path).name == ".checkpoint-12":
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone_when_its_turn_comes)
    assert folder_bytes(tmp_path) == 5
    assert not (tmp_path / ".checkpoint-12").exists()
    assert folder_bytes(tmp_path / "not there") == 0
