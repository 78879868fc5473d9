"""Files made whole, and folders of them that this user may not read."""

import os
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from pipeline.process.errors import InputMissingError
from pipeline.process.storage import refuse_unreadable_files
from pipeline.run_dir.checkpoints import whole_folder


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_whole_folders_tensors_have_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int):
    before = os.umask(umask)
    try:
        with whole_folder(tmp_path / "model") as folder:
            save_file({"weight": numpy.zeros(3)}, folder / "model.safetensors")
    finally:
        os.umask(before)

    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes == {mode}


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may read any file")
def test_a_file_of_another_mode_is_named_with_its_mode(tmp_path: Path):
    (tmp_path / "model.safetensors").touch(mode=0o200)

    with pytest.raises(InputMissingError, match=r"model.safetensors: this user may not read it \(mode 0200\)"):
        refuse_unreadable_files(tmp_path)
