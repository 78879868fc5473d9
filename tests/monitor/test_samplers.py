"""Host and GPU numbers: units, rates since the last sample, and what is left out."""

import csv
import io
import os
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest

from pipeline.monitor import __main__ as command
from pipeline.monitor import host as host_module
from pipeline.monitor.gpu import GpuSampler
from pipeline.monitor.host import HostSampler


class NVMLError(Exception):
    pass


def fake_pynvml(*, has_power=True):
    def power(device):
        if not has_power:
            raise NVMLError("not supported")
        return 350_000  # milliwatts

    return types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda device: "NVIDIA H100 80GB HBM3",
        nvmlDeviceGetUtilizationRates=lambda device: types.SimpleNamespace(gpu=97, memory=40),
        nvmlDeviceGetMemoryInfo=lambda device: types.SimpleNamespace(used=20 * 2**30, total=80 * 2**30),
        nvmlDeviceGetTemperature=lambda device, kind: 61,
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetEnforcedPowerLimit=lambda device: 700_000,
        nvmlDeviceGetClockInfo=lambda device, kind: 1980,
    )


def test_gpu_numbers_are_in_the_units_of_their_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml())
    first, second = GpuSampler().sample()
    assert (first["index"], second["index"]) == (0, 1)
    assert (first["power_w"], first["power_pct"]) == (350, 50)
    assert (first["mem_used_gib"], first["mem_total_gib"]) == (20, 80)
    assert (first["util_pct"], first["temp_c"], first["sm_clock_mhz"]) == (97, 61, 1980)


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(has_power=False))
    row = GpuSampler().sample()[0]
    assert "power_w" not in row
    assert "power_pct" not in row
    assert row["temp_c"] == 61


def test_without_pynvml_there_are_no_rows_and_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = GpuSampler()
    assert sampler.sample() == []
    assert "pip install nvidia-ml-py" in sampler.why_none


def test_the_first_host_sample_has_no_rates_and_later_ones_are_per_second(monkeypatch, tmp_path):
    clock = iter([10.0, 14.0])
    bytes_written = iter([1_000_000, 9_000_000])
    monkeypatch.setattr(host_module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(
        psutil, "disk_io_counters", lambda: types.SimpleNamespace(read_bytes=0, write_bytes=next(bytes_written))
    )
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)
    sampler = HostSampler(tmp_path)
    first, second = sampler.sample(), sampler.sample()
    assert "disk/write_mb_s" not in first
    assert second["disk/write_mb_s"] == 2.0
    assert "net/sent_mb_s" not in second
    assert 0 < first["mem/host_used_pct"] < 100
    assert first["mem/host_rss_gib"] > 0.001
    assert first["disk/free_gib"] > 0


def test_the_csv_has_a_row_for_each_gpu_with_the_hosts_numbers_in_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml())
    output = io.StringIO()
    command.write_samples(output, every_s=0.01, samples=2)
    rows = list(csv.DictReader(io.StringIO(output.getvalue())))
    assert [row["gpu/index"] for row in rows] == ["0", "1", "0", "1"]
    assert {row["gpu/power_w"] for row in rows} == {"350.0"}
    assert all(float(row["mem/host_used_pct"]) > 0 for row in rows)


def monitor(*arguments, **popen):
    root = Path(__file__).parents[2]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen}
    return subprocess.Popen([sys.executable, "-m", "pipeline.monitor", *arguments], cwd=root, **pipes)


def test_sigterm_ends_the_command_with_every_sample_written(tmp_path):
    file = tmp_path / "gpu.csv"
    with monitor("--every", "0.1", "--output", str(file)) as process:
        while not file.exists() or file.read_text().count("\n") < 3:
            assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=20) == 0
    rows = list(csv.DictReader(file.open()))
    assert len(rows) >= 2
    assert all(row["time"] and row["host"] for row in rows)


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    process = monitor("--every", "0.05", stdout=write)
    os.close(write)
    os.read(read, 10)
    os.close(read)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_file_that_cannot_be_written_is_told_in_a_sentence(tmp_path):
    process = monitor("--output", str(tmp_path / "no" / "folder.csv"))
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 73
    assert "folder.csv: cannot be written" in errors


@pytest.mark.parametrize("every", ["0", "-1"])
def test_a_pause_that_is_none_is_refused(every):
    process = monitor("--every", every)
    process.communicate(timeout=20)
    assert process.returncode == 64
