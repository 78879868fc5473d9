import os
import sys
from pathlib import Path

import pytest

from tests.monitor.stand_in import compiled

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """The environment in which a process finds the stand-in for NVIDIA's driver."""
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD is Linux's")
    pytest.importorskip("pynvml")
    library = compiled(tmp_path_factory.mktemp("nvml"))
    if library is None:
        pytest.skip("no C compiler")
    return {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
