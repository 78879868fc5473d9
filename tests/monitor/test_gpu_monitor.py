"""The monitor in a training: what it hands over, and that it ends with the training, however that ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pipeline.monitor.energy import energy_of
from pipeline.monitor.gpu_monitor import Totals
from pipeline.monitor.samples_file import COLUMNS, read_gpus
from tests.monitor.stand_in import read_samples

# A training that is nothing but its monitor: from its first sample on lets it sample for `seconds`, reads it twice, stops it.
TRAINING = """
import json, sys, time
from pathlib import Path
from pipeline.monitor.gpu_monitor import GpuMonitor

output, attempt, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
monitor = GpuMonitor(output, attempt=attempt, hz=20)
print(monitor.why_none or "sampling", flush=True)
while monitor._thread.is_alive() and not monitor.read():
    time.sleep(0.02)
time.sleep(seconds)
print(json.dumps(monitor.read()), flush=True)
print(json.dumps(monitor.read()), flush=True)
monitor.stop()
"""


def training(output, environment, *, attempt=1, seconds=0.0, **popen):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **popen}
    arguments = [str(output), str(attempt), str(seconds)]
    return subprocess.Popen([sys.executable, "-c", TRAINING, *arguments], env=environment, **pipes)


def attempt_of(output, environment, **settings):
    said, _ = training(output, environment, **settings).communicate(timeout=60)
    return said.splitlines()


def wait_until(true, what):
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(0.02)


def test_a_reading_has_means_since_the_last_and_attempts_add_up_energy(driver, tmp_path):
    output = tmp_path / "gpu-host.csv"
    _, reading, again, words = attempt_of(output, driver, seconds=2.5)
    numbers = eval(reading)
    rows = list(read_samples(output))
    assert {row["attempt"] for row in rows} == {"1"}
    assert numbers["gpus"] == 2
    assert (numbers["gpu/temp_c"], numbers["gpu/util_pct"], numbers["gpu/sm_clock_mhz"]) == (62, 97, 1980)
    assert 200 < numbers["gpu/power_w"] < 300  # of 200 W and 300 +- 100 W
    assert 0 < numbers["gpu/throttled_pct"] < 50  # GPU 0, a third of the time
    assert again == "{}" or eval(again)["gpu/power_w"] > 0  # a sample may lie between the two readings
    assert words.startswith("gpu-host.csv: 2 GPUs, ")
    assert " Hz (20 Hz asked for), " in words
    assert words.endswith("kWh over all attempts, by counters and power")

    _, reading, _, _ = attempt_of(output, driver, attempt=2, seconds=2.0)
    gpus = read_gpus(output)
    assert [(gpu.attempt, gpu.index) for gpu in gpus] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    earlier, both = (sum(energy_of(gpu).best_j() for gpu in found) for found in (gpus[:2], gpus))
    assert earlier < eval(reading)["energy_j"] <= both * 1.001


def test_a_line_torn_by_a_crash_is_no_row_and_spoils_nothing(driver, tmp_path):
    output = tmp_path / "gpu-host.csv"
    attempt_of(output, driver, seconds=0.3)
    rows = list(read_samples(output))
    torn = output.read_text()[:-9]
    output.write_text(torn)
    assert list(read_samples(output)) == rows[:-1]
    attempt_of(output, driver, attempt=2, seconds=0.3)
    after = list(read_samples(output))
    assert after[: len(rows) - 1] == rows[:-1]
    second = after[len(rows) - 1 :]
    assert {row["attempt"] for row in second} == {"2"}
    assert [row["gpu/index"] for row in second[:2]] == ["0", "1"]
    assert output.read_text().count(",".join(COLUMNS)) == 1


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_training_leaves_rows_that_are_read(driver, tmp_path, end):
    output = tmp_path / "gpu-host.csv"
    process = training(output, driver, seconds=60)
    wait_until(lambda: output.exists() and len(list(read_samples(output))) > 4, "no samples")
    process.send_signal(end)
    process.wait()
    assert len(read_gpus(output)) == 2


def test_a_sampler_that_cannot_write_says_so_once_and_training_goes_on(driver, tmp_path):
    _, *rest = attempt_of(tmp_path / "no" / "folder.csv", driver)
    assert rest == [f"{tmp_path}/no/folder.csv: GPUs are not sampled any more (No such file or directory)", "{}", "{}"]


def test_without_a_driver_no_process_is_started_and_the_reason_is_there(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    if "no NVIDIA driver" not in (said := attempt_of(tmp_path / "gpu-host.csv", environment))[0]:
        pytest.skip("this machine has one")
    assert said[1:] == ["{}", "{}"]
    assert not (tmp_path / "gpu-host.csv").exists()


def sample(watts, temperature, throttle="none"):
    return [{"power_w": watts, "temp_c": temperature, "throttle": throttle}]


def test_totals_are_means_over_the_samples():
    totals = Totals()
    assert totals.numbers() == {}
    totals.add(sample(100, 80, "sw_power_cap"), energy_j=0.0)
    totals.add(sample(200, 60), energy_j=150.0)
    assert totals.numbers() == {
        "gpu/power_w": 150, "gpu/throttled_pct": 50, "gpu/temp_c": 80, "energy_j": 150.0, "gpus": 1,
    }  # fmt: skip
