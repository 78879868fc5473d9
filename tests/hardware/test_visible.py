"""What the drivers say is there, without torch."""

import os
import sys

import pytest

from pipeline.hardware.accelerators import device_without_torch, planned_device, visible_gpus

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has its one accelerator")


@pytest.fixture
def eight_gpus(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f"NVIDIA {'H200' if i == 7 else 'H100 80GB HBM3'}, 81559\\n" for i in range(8))
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("visible", "counted"), [(None, 8), ("0,1,2", 3), ("7", 1), ("", 0), ("-1", 0), ("2,-1,3", 1), ("GPU-1,GPU-2", 2)]
)
def test_only_visible_gpus_count(visible, counted):
    assert len(visible_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})) == counted


@pytest.mark.usefixtures("eight_gpus")
def test_a_visible_gpu_keeps_its_name_and_memory():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "7"}) == [("NVIDIA H200", 81559 / 1024)]


@pytest.mark.usefixtures("eight_gpus")
def test_the_device_of_a_plan_has_the_peak_of_its_name(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = device_without_torch()
    assert (device.kind, device.count) == ("cuda", 8)
    assert device.peak_flops == planned_device("8xH100").peak_flops


@pytest.mark.parametrize("broken", ["#!/bin/sh\nexit 9\n", "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n"])
def test_a_driver_that_does_not_answer_means_no_gpu(tmp_path, monkeypatch, broken):
    (tmp_path / "nvidia-smi").write_text(broken)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert visible_gpus({}) == []
    device = device_without_torch()
    assert device.kind == "cpu"
    assert device.peak_flops is None
    assert device.memory_gib > 0
