"""What a stranger can make endless or absurd is refused before it is read, walked through or built."""

import time

import pytest

from pipeline.data.preview import preview
from pipeline.monitor.samples_file import COLUMNS, read_gpus
from pipeline.process.errors import DataError, RecipeError
from pipeline.run.inputs import _weights
from pipeline.sources.patterns import local_files
from pipeline.training.checkpoint import read_state


@pytest.mark.parametrize("pattern", ["/*", "/*/*/*", "/proc/**/*", "/proc/self/fd/*", "/sys/**/*.txt", "/dev/*"])
def test_a_glob_over_the_whole_disk_or_system_folders_is_refused(pattern):
    with pytest.raises(RecipeError, match=r"looks through .*, where links of the system lead round without end"):
        local_files(pattern, where="data.sources.0", folder=None)


def test_a_link_to_system_folders_is_refused_like_the_folders_themselves(tmp_path):
    (tmp_path / "data").symlink_to("/proc")
    with pytest.raises(RecipeError, match="looks through /proc"):
        local_files("data/**/*.txt", where="data.sources.0", folder=str(tmp_path))


def test_weights_of_a_terabyte_of_nothing_are_not_hashed(tmp_path):
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"model.safetensors: holds no weights as safetensors writes them"):
        _weights(str(tmp_path), None, cache=None)


def test_a_row_of_one_long_word_is_looked_at_in_no_time(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "' + "a" * (16 << 20) + '"}\n')
    began = time.process_time()
    lines = list(preview(str(tmp_path / "a.jsonl"), [], tokenizer=None, rows=3, colour=False))
    assert time.process_time() - began < 20  # 1 s; half a minute when all of it was wrapped
    assert any(line.strip() == "..." for line in lines)


@pytest.mark.parametrize("text", ["time,power\n1,2\n", "\x1b[2J\n", '"' + "\n" * 200_000, ",".join(COLUMNS) + "\n" + ",".join(["x"] * len(COLUMNS)) + "\n"])  # fmt: skip
def test_a_table_that_is_none_of_gpu_samples_has_no_gpus(tmp_path, text):
    (tmp_path / "gpu-host.csv").write_text(text)
    assert read_gpus(tmp_path / "gpu-host.csv") == []


def test_a_checkpoint_with_missing_or_odd_training_state_names_the_file(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"trainer_state.json, optimizer.safetensors, .* missing, so the run cannot continue"
    ):
        read_state(tmp_path)
    for name in ("optimizer.safetensors", "scheduler.json", "position.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "trainer_state.json").write_text('{"no_such_field": 1}')
    with pytest.raises(DataError, match=r"trainer_state.json: is no state of a Trainer"):
        read_state(tmp_path)
