"""Energy is the integral of the power, and what nobody measured is not made up."""

import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.monitor.energy import EnergyMeter, energy_of, kwh, longest_bridged_s, usual_period_s
from pipeline.monitor.samples_file import NUMBERS, GpuSeries, read_gpus
from tests.monitor.stand_in import joules

RECORDED = Path(__file__).with_name("recorded.csv")  # of the stand-in at 10 Hz: two attempts, the second one cut off


def integrate(samples, *, longest_s):
    meter = EnergyMeter(longest_s=longest_s)
    for time_s, watts in samples:
        meter.add(time_s, watts)
    return meter


def test_energy_of_known_power_at_uneven_samples_matches_to_a_thousandth():
    """600 W (1 - exp(-t / 20 s)), as a GPU that is given work; samples 0.2 to 1.8 s apart."""
    draw, times = random.Random(0), [0.0]
    while times[-1] < 120:
        times.append(times[-1] + draw.uniform(0.2, 1.8))
    meter = integrate([(t, 600 * (1 - math.exp(-t / 20))) for t in times], longest_s=longest_bridged_s(1.0))
    exact = 600 * (times[-1] + 20 * (math.exp(-times[-1] / 20) - 1))
    assert meter.joules == pytest.approx(exact, rel=1e-3)
    assert meter.covered_s == pytest.approx(times[-1])
    assert meter.gaps == 0


def test_a_gap_is_not_bridged_and_is_reported():
    times = [0.0, 1.0, 2.0, 2.0 + 5 * 1.0 + 0.1, 8.1]
    meter = integrate([(t, 100.0) for t in times], longest_s=longest_bridged_s(1.0))
    assert (meter.joules, meter.covered_s) == (pytest.approx(300.0), pytest.approx(3.0))
    assert (meter.gaps, meter.gap_s) == (1, pytest.approx(5.1))
    bridged = integrate([(0.0, 100.0), (5.0, 100.0)], longest_s=longest_bridged_s(1.0))
    assert bridged.joules == 500.0
    assert longest_bridged_s(0.01) == 1.0  # a driver that is busy answers late


def series(watts, counter):
    numbers = dict.fromkeys(NUMBERS, [math.nan] * len(watts)) | {"power_w": watts, "energy_j": counter}
    return GpuSeries(attempt=1, index=0, name="a", times=range(len(watts)), numbers=numbers)


def test_a_gpus_own_counter_goes_before_the_integral_and_may_begin_again():
    meter = energy_of(series([100.0] * 4, [7000.0, 7090.0, 10.0, 110.0]))  # the driver was loaded again
    assert meter.joules == 300
    assert meter.counted_j == 90 + 100
    assert meter.best_j() == 190


def test_energy_that_no_number_tells_is_not_zero():
    assert energy_of(series([math.nan] * 3, [math.nan] * 3)).best_j() is None
    assert energy_of(series([100.0] * 3, [math.nan] * 3)).best_j() == 200
    assert energy_of(series([math.nan] * 3, [5.0, 6.0, 8.0])).best_j() == 3


def test_a_kilowatt_hour_is_3_6_megajoules():
    assert kwh(7.2e6) == 2


def test_the_recorded_trace_has_its_energy_to_a_thousandth():
    first, other, second, _ = read_gpus(RECORDED)
    assert [(gpu.attempt, gpu.index) for gpu in (first, other, second)] == [(1, 0), (1, 1), (2, 0)]
    for gpu in (first, second):
        meter = energy_of(gpu)
        exact = joules(gpu.times[0], gpu.times[-1])
        assert meter.joules == pytest.approx(exact, rel=1e-3)
        assert meter.counted_j == pytest.approx(exact, rel=1e-3)
    assert energy_of(other).joules == pytest.approx(200 * (other.times[-1] - other.times[0]))
    assert energy_of(other).counted_j is None
    assert usual_period_s(first.times) == pytest.approx(0.1, rel=0.05)


def test_the_monitored_stand_in_has_its_energy_to_a_thousandth(driver, tmp_path):
    file = tmp_path / "gpu.csv"
    command = [sys.executable, "-m", "pipeline.monitor", "--hz", "50", "--samples", "120", "--output", str(file)]
    subprocess.run(command, env=driver, check=True, capture_output=True)
    meter = energy_of(gpu := read_gpus(file)[0])
    exact = joules(gpu.times[0], gpu.times[-1])
    assert meter.joules == pytest.approx(exact, rel=1e-3)
    assert meter.counted_j == pytest.approx(exact, rel=1e-3)


def test_a_line_that_is_no_whole_sample_is_left_out(tmp_path):
    lines = RECORDED.read_text().splitlines()
    good = lines[1]
    wrong = [
        good + ",5",
        good.rpartition(",")[0],
        good.replace('0"', "0", 1),
        good.replace("248.162", "1e"),
        good[:20] + "\0" + good[20:],
    ]
    file = tmp_path / "gpu-a.csv"
    file.write_text("\n".join([lines[0], good, *wrong, good]) + "\n")
    (series,) = read_gpus(file)
    assert len(series.times) == 2
