"""One run directory for all machines, on two gloo ranks that take themselves for two machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = """
import sys
from pathlib import Path
import torch
from pipeline.artifacts.errors import CannotWriteError
from pipeline.preflight.shared import refuse_unshared
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[3]), world_size=2)
try:
    refuse_unshared(Path(sys.argv[1]))
    print("shared")
except CannotWriteError as error:
    print(error)
"""


@pytest.mark.parametrize("shared", [True, False])
def test_every_rank_learns_whether_all_machines_see_one_run_directory(tmp_path, shared):
    (tmp_path / "rank.py").write_text(RANK)
    folders = [tmp_path / "run", tmp_path / ("run" if shared else "elsewhere")]
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
    told = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert all((text == "shared\n") if shared else ("cannot see what" in text) for text in told), told
    assert list((tmp_path / "run").iterdir()) == []
