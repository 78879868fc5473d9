"""What a stranger can make endless or absurd is refused before it is read, walked through or built."""

import os

import pytest

from pipeline.evals.subject import find_subject
from pipeline.process.errors import DamagedFileError, DataError, RecipeError
from pipeline.process.storage import refuse_endless_files
from pipeline.recipe.start_from import refuse_odd_sizes
from pipeline.sources.files import local_files
from pipeline.tokenizer.load import open_tokenizer


@pytest.mark.parametrize("pattern", ["/*", "/*/*/*", "/proc/**/*", "/proc/self/fd/*", "/sys/**/*.txt", "/dev/*"])
def test_a_glob_over_the_whole_disk_or_the_system_s_own_folders_is_refused(pattern):
    with pytest.raises(RecipeError, match=r"looks through .*, where links of the system lead round without end"):
        local_files(pattern, where="data.sources.0", folder=None)


def test_a_link_to_the_system_s_own_folders_is_looked_through_no_more_than_they(tmp_path):
    (tmp_path / "data").symlink_to("/proc")
    with pytest.raises(RecipeError, match="looks through /proc"):
        local_files("data/**/*.txt", where="data.sources.0", folder=str(tmp_path))


def test_a_folder_with_a_pipe_or_a_device_is_no_model_and_no_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "tokenizer.json")
    for use in (
        refuse_endless_files,
        lambda path: find_subject(str(path)),
        lambda path: open_tokenizer(str(path), revision=None, beside=None, where="x"),
    ):
        with pytest.raises(DamagedFileError, match=r"tokenizer.json: is a pipe or a device"):
            use(tmp_path)


@pytest.mark.parametrize("size", [10**9, -1, 0, "16", 1.5, True, [2]])
def test_a_config_of_sizes_that_no_model_has_is_refused_by_name(size):
    with pytest.raises(DataError, match=r"n_layer of its config.json is "):
        refuse_odd_sizes({"n_layer": size}, "model")
    refuse_odd_sizes(
        {"n_layer": 126, "vocab_size": 262144, "max_position_embeddings": None, "hidden_size": 16384}, "model"
    )
