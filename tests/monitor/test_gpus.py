"""Host and GPU numbers by the command: units, rates since the last sample, and what is left out."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest

from pipeline.monitor import host as host_module
from pipeline.monitor.gpus import GpuSampler, is_throttled, throttle_words
from pipeline.monitor.host import HostSampler
from pipeline.monitor.samples_file import COLUMNS
from tests.monitor.stand_in import read_samples

ROOT = Path(__file__).parents[2]


def monitor(*arguments, **popen):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen}
    return subprocess.Popen([sys.executable, "-m", "pipeline.monitor", *arguments], cwd=ROOT, **pipes)


def samples(folder, environment, *arguments):
    """The rows of `python -m pipeline.monitor`, and its last words."""
    file = folder / "gpu.csv"
    process = monitor("--output", str(file), *arguments, env=environment)
    _, words = process.communicate(timeout=30)
    assert process.returncode == 0, words
    return list(read_samples(file)), words


def test_gpu_numbers_are_in_the_units_of_their_names(driver, tmp_path):
    rows, words = samples(tmp_path, driver, "--hz", "100", "--samples", "3")
    assert [row["gpu/index"] for row in rows] == ["0", "1"] * 3
    first, second = rows[:2]
    assert (first["gpu/name"], second["gpu/name"]) == ("Stand-in, model 0", "Stand-in, model 1")
    assert 200 <= float(first["gpu/power_w"]) <= 400
    assert float(first["gpu/power_pct"]) == pytest.approx(float(first["gpu/power_w"]) / 4, rel=1e-3)
    assert (second["gpu/power_w"], second["gpu/power_pct"]) == ("200", "50")
    assert (first["gpu/util_pct"], first["gpu/mem_busy_pct"], first["gpu/temp_c"]) == ("97", "40", "61")
    assert (first["gpu/mem_used_gib"], first["gpu/mem_total_gib"]) == ("20", "80")
    assert (first["gpu/sm_clock_mhz"], first["gpu/mem_clock_mhz"]) == ("1980", "2619")
    assert "2 GPUs: 3 samples at " in words


def test_only_what_a_gpu_does_not_tell_is_left_out(driver, tmp_path):
    rows, _ = samples(tmp_path, {**driver, "STAND_IN_NO_POWER": "0"}, "--hz", "100", "--samples", "2")
    first, second = rows[:2]
    assert not first.keys() & {"gpu/power_w", "gpu/power_pct", "gpu/energy_j"}
    assert first["gpu/temp_c"] == "61"
    assert not second.keys() & {"gpu/util_pct", "gpu/mem_busy_pct", "gpu/energy_j"}
    assert second["gpu/power_w"] == "200"


def test_what_holds_the_clocks_back_is_reported_in_words(driver, tmp_path):
    rows, _ = samples(tmp_path, {**driver, "STAND_IN_GPUS": "3"}, "--hz", "20", "--samples", "41")
    capped = [row for row in rows if row["gpu/index"] == "0"]
    assert {row["gpu/throttle"] for row in capped} == {"none", "sw_power_cap+sw_thermal"}
    for row in capped:
        watts = float(row["gpu/power_w"])
        if abs(watts - 350) > 20:  # the two questions are asked one after the other
            assert is_throttled(row["gpu/throttle"]) == (watts > 350)
    assert {row["gpu/throttle"] for row in rows if row["gpu/index"] == "1"} == {"application_clocks"}
    assert {row["gpu/throttle"] for row in rows if row["gpu/index"] == "2"} == {"gpu_idle"}
    seconds = float(capped[-1]["time"]) - float(capped[0]["time"])
    assert 1 <= len([row for row in capped if "host/cpu_pct" in row]) <= 1 + seconds / 0.9


def test_idleness_and_a_set_clock_are_no_throttling_and_bits_are_named():
    assert throttle_words(0) == "none"
    assert throttle_words(0x3) == "gpu_idle+application_clocks"
    assert not is_throttled("none")
    assert not is_throttled("gpu_idle+application_clocks+sync_boost")
    assert is_throttled("gpu_idle+hw_thermal")
    assert throttle_words(0x804) == "sw_power_cap+0x800"


def test_without_pynvml_there_are_no_rows_and_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = GpuSampler()
    assert sampler.sample() == []
    assert "pip install nvidia-ml-py" in sampler.why_none


def test_a_driver_without_a_gpu_is_reported(driver, tmp_path):
    rows, words = samples(tmp_path, {**driver, "STAND_IN_GPUS": "0"}, "--hz", "100", "--samples", "1")
    assert "NVIDIA's driver sees no GPU" in words
    assert not any("gpu/index" in row for row in rows)
    assert float(rows[0]["mem/host_used_pct"]) > 0


def test_only_the_gpus_that_are_named_are_asked(driver):
    code = (
        "from pipeline.monitor.gpus import GpuSampler\n"
        "print([row['index'] for row in GpuSampler(['GPU-00000000-0000-0000-0000-000000000001']).sample()])\n"
        "print(GpuSampler(['GPU-of-another-host']).why_none)"
    )
    output = subprocess.run([sys.executable, "-c", code], env=driver, capture_output=True, text=True, check=True)
    assert output.stdout == "[1]\nno GPU numbers: NVIDIA's driver sees no GPU that the run uses\n"


def test_host_samples_have_rates_per_second_only_after_the_first(monkeypatch, tmp_path):
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


def test_a_hundred_samples_a_second_are_taken_and_their_rate_is_reported(driver, tmp_path):
    rows, words = samples(tmp_path, driver, "--hz", "100", "--samples", "150")
    times = [float(row["time"]) for row in rows if row["gpu/index"] == "0"]
    assert len(times) == 150
    assert times == sorted(times)
    rate = (len(times) - 1) / (times[-1] - times[0])
    rate_line = re.search(r"2 GPUs: 150 samples at ([\d.]+) Hz \(100 Hz asked for\)", words)
    assert float(rate_line[1]) == pytest.approx(rate, rel=1e-3)
    assert rate < 101


def test_sigterm_ends_the_command_with_every_sample_written(tmp_path):
    file = tmp_path / "gpu.csv"
    with monitor("--every", "0.1", "--output", str(file)) as process:
        while not file.exists() or file.read_text().count("\n") < 3:
            assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=20) == 0
        words = process.stderr.read()
    rows = list(read_samples(file))
    assert len(rows) >= 2
    assert all(row["time"] and row["host"] for row in rows)
    assert f"0 GPUs: {len(rows)} samples at " in words
    assert file.read_text().startswith(",".join(COLUMNS))


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    process = monitor("--every", "0.05", stdout=write)
    os.close(write)
    os.read(read, 10)
    os.close(read)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_file_that_cannot_be_written_is_reported_in_a_sentence(tmp_path):
    process = monitor("--output", str(tmp_path / "no" / "folder.csv"))
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 73
    assert "folder.csv: cannot be written" in errors


@pytest.mark.parametrize("rate", [["--every", "0"], ["--every", "-1"], ["--hz", "0"], ["--hz", "101"]])
def test_a_rate_that_is_none_or_too_high_is_refused(rate):
    process = monitor(*rate)
    process.communicate(timeout=20)
    assert process.returncode == 64
