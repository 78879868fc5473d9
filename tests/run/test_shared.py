"""One run directory for all machines, on two gloo ranks that take themselves for two machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
RANK = """
import sys
from pathlib import Path
import torch
from pipeline.process.errors import CannotWriteError
from pipeline.training.shared_folder import refuse_unshared
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[3]), world_size=2)
try:
    refuse_unshared(Path(sys.argv[1]))
    print("shared")
except CannotWriteError as error:
    print(error)
"""


def outputs_of(folders, tmp_path):
    """What each of two ranks says, each with its own path to the folder."""
    (tmp_path / "rank.py").write_text(RANK)
    environ = {**os.environ, "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "rank.py", folder, tmp_path / "meet", str(rank)],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    return [rank.communicate(timeout=60)[0] for rank in ranks]


@pytest.mark.parametrize("shared", [True, False])
def test_every_rank_learns_whether_all_machines_see_one_run_directory(tmp_path, shared):
    outputs = outputs_of([tmp_path / "run", tmp_path / ("run" if shared else "elsewhere")], tmp_path)
    assert all((text == "shared\n") if shared else ("cannot see what" in text) for text in outputs), outputs
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("reader", [0, 1])
def test_every_rank_learns_that_one_machine_cannot_write_where_all_can_read(tmp_path, reader):
    """The reader's path to the folder is so long that it can be listed, and the name of a new file in it is too long."""
    (tmp_path / "run").mkdir()
    room = 4095 - len(str(tmp_path / "run" / "x"))
    long = f"{tmp_path}/run/" + "../run/" * (room // 7 - 1)
    folders = [long if rank == reader else tmp_path / "run" for rank in range(2)]
    outputs = outputs_of(folders, tmp_path)
    assert all("cannot be written by" in text and "(File name too long)" in text for text in outputs), outputs
    assert list((tmp_path / "run").iterdir()) == []
