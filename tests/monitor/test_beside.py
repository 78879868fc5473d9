"""The sampler beside a training: what it hands over, and that it ends with the training, however that ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from pipeline.monitor.client import SIZE, TotalsReader
from pipeline.monitor.sampler import COLUMNS, TotalsWriter, energy_of, read_gpus
from tests.monitor.stand_in import read_samples

# A training that is nothing but its monitor: from its first sample on lets it sample for `seconds`, reads it twice, stops it.
TRAINING = """
import json, sys, time
from pathlib import Path
from pipeline.monitor.client import GpuMonitor

output, attempt, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
monitor = GpuMonitor(output, attempt=attempt, hz=20)
print(monitor.why_none or f"sampler {monitor.process.pid}", flush=True)
while monitor.process and not monitor.read():
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


def test_a_reading_has_means_since_the_last_one_and_an_attempt_goes_on_in_the_file_and_the_energy(driver, tmp_path):
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


def test_a_line_torn_by_a_crash_neither_is_a_row_nor_spoils_the_next_attempts(driver, tmp_path):
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
def test_the_sampler_ends_with_a_killed_training_and_leaves_whole_rows(driver, tmp_path, end):
    output = tmp_path / "gpu-host.csv"
    process = training(output, driver, seconds=60)
    sampler = psutil.Process(int(process.stdout.readline().split()[1]))
    wait_until(lambda: output.exists() and len(list(read_samples(output))) > 4, "no samples")
    process.send_signal(end)
    process.wait()
    wait_until(lambda: not sampler.is_running() or sampler.status() == psutil.STATUS_ZOMBIE, "it goes on")
    assert output.read_text().endswith("\n")


def test_ctrl_c_at_the_terminal_is_the_trainings_to_answer(driver, tmp_path):
    output = tmp_path / "gpu-host.csv"
    process = training(output, driver, seconds=60, start_new_session=True)
    sampler = psutil.Process(int(process.stdout.readline().split()[1]))
    assert os.getpgid(sampler.pid) != os.getpgid(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_sampler_that_cannot_write_says_so_once_and_the_training_goes_on(driver, tmp_path):
    _, *rest = attempt_of(tmp_path / "no" / "folder.csv", driver)
    assert rest == [f"{tmp_path}/no/folder.csv: GPUs are not sampled any more (No such file or directory)", "{}", "{}"]


def test_without_a_driver_no_process_is_started_and_the_reason_is_there(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    if "no NVIDIA driver" not in (said := attempt_of(tmp_path / "gpu-host.csv", environment))[0]:
        pytest.skip("this machine has one")
    assert said[1:] == ["{}", "{}"]
    assert not (tmp_path / "gpu-host.csv").exists()


@pytest.fixture
def totals():
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        yield TotalsWriter(file.fileno()), TotalsReader(file.fileno())


def sample(watts, temperature, throttle="none"):
    return [{"power_w": watts, "temp_c": temperature, "throttle": throttle}]


def test_readings_are_of_the_samples_since_the_last_one(totals):
    writer, reader = totals
    assert reader.read() == {}
    writer.add(sample(100, 80, "sw_power_cap"), energy_j=0.0)
    writer.add(sample(200, 60), energy_j=150.0)
    assert reader.read() == {
        "gpu/power_w": 150, "gpu/throttled_pct": 50, "gpu/temp_c": 80, "energy_j": 150.0, "gpus": 1,
    }  # fmt: skip
    assert reader.read() == {}
    writer.add(sample(300, 50), energy_j=None)
    assert reader.read() == {"gpu/power_w": 300, "gpu/throttled_pct": 0, "gpu/temp_c": 50, "gpus": 1}


def test_totals_that_are_being_written_are_read_the_next_time(totals):
    writer, reader = totals
    writer.add(sample(100, 80), energy_j=0.0)
    writer.memory[-8:] = (7).to_bytes(8, "little")  # the number behind the totals is of another sample
    assert reader.read() == {}
    writer.add(sample(200, 60), energy_j=150.0)
    assert reader.read()["gpu/power_w"] == 150
