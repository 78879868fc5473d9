"""Plan against outcome, and the GPUs' energy, from the run's files alone."""

import shutil
from pathlib import Path

import pytest
import yaml

from pipeline.process.storage import write_text
from pipeline.report.cost import energy_text, plan_vs_actual_text, wall_s
from pipeline.report.run_data import read_run
from pipeline.report.single import report
from pipeline.run_dir.columns import mean_step_s
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from tests.monitor.stand_in import joules

PROBE = {"step_s": 0.5, "low_s": 0.4, "high_s": 0.6, "steps": 9, "first_step_s": 7.0, "peak_bytes": 2**30, "time": 1.0}
PLAN = {"device": "CPU", "processes": 2, "parameters": 1000, "steps": 40, "tokens": 40960, "flops": 8e9, "checkpoint_bytes": 2000, "training_s": 20.0, "process_bytes": 2**30, "probe": PROBE, "cost": 0.0222}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Two attempts: the second went on from step 20. Steps of 0.6 s, but 3 s in each attempt's first interval of 5."""
    directory = RunDirectory(tmp_path / "a")
    directory.update_manifest(
        name="a", world_size=2, plan=PLAN, model={"parameters": 1000, "flops_per_token": 8e9 / 40960}, peak_memory_bytes={"host": 2**30 + 2**28}
    )  # fmt: skip
    write_text(directory.recipe, "run: {gpu_hour_cost: 2.0}")
    for attempt, first, last, began in ((1, 5, 30, 100.0), (2, 25, 40, 500.0)):
        append_row(directory.metrics, {"event": "attempt", "attempt": attempt, "step": first - 5, "time": began})
        for step in range(first, last + 1, 5):
            seconds = 3.0 if step == first else 0.6
            append_row(directory.metrics, {"step": step, "attempt": attempt, "time": began + step, "tokens": step * 1024, "train/loss": 2.0, "perf/step_s": seconds, "perf/total_s": 36.0})  # fmt: skip
    return directory


def cells(text, label):
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in line.split("|")[2:5]]


def test_counts_are_exact_and_measures_have_their_ratio(run):
    text = plan_vs_actual_text(read_run(str(run.path)))
    for exact in ("parameters", "steps", "tokens", "FLOPs"):
        assert cells(text, exact)[2] == "exact", exact
    assert cells(text, "a step") == ["0.500 s", "0.600 s", "1.200"]
    assert cells(text, "time in steps") == ["20.000 s", "24.000 s", "1.200"]
    assert cells(text, "memory of a process") == ["1.000 GiB", "1.250 GiB", "1.250"]
    assert "energy" not in text


def test_first_intervals_are_in_the_wall_time_and_not_in_step_times(run):
    data = read_run(str(run.path))
    assert mean_step_s(data.columns) == pytest.approx(0.6)
    assert wall_s(data) == 30 + 40
    assert cells(plan_vs_actual_text(data), "cost")[1] == f"{2.0 * 2 * 70 / 3600:.6g}"


def test_only_what_was_planned_and_found_has_a_ratio(run):
    run.update_manifest(
        plan={"device": "GPU", "steps": 80, "duration_source": "as probed"}, model={}, shape={"device": "CPU"}
    )
    text = plan_vs_actual_text(read_run(str(run.path)))
    assert cells(text, "steps") == ["80", "40", "0.500"]
    assert cells(text, "a step") == ["-", "0.600 s", "-"]
    assert "Hours were planned as probed." in text
    assert "The run is not at its end" in text
    run.update_manifest(plan={})
    assert plan_vs_actual_text(read_run(str(run.path))) == ""


RECORDED = Path(__file__).parents[1] / "monitor" / "recorded.csv"


def run_with_trace(folder):
    run = RunDirectory(folder)
    folder.mkdir()
    shutil.copy(RECORDED, run.gpu_samples("a.b-1"))
    run.recipe.write_text(yaml.safe_dump({"run": {"gpu_hour_cost": 3600.0}, "monitor": {"gpu_hz": 10.0}}))
    append_row(
        run.metrics, {"step": 2, "attempt": 1, "tokens": 1000, "train/loss": 2.0, "perf/energy_j_per_token": 0.5}
    )
    return run


def test_the_section_has_power_heat_throttling_and_energy(tmp_path):
    run = run_with_trace(tmp_path / "run")
    text = energy_text(read_run(str(run.path)))
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
    gpus = [line for line in text.splitlines() if line.startswith("| a.b-1 ")]
    assert len(gpus) == 2
    assert gpus[0].startswith("| a.b-1 | 0 | Stand-in, model 0 | ")
    assert "| 61 | 97.0 | 20 | 1,980.0 | " in gpus[0]
    assert "sw_power_cap+sw_thermal" in gpus[0]
    assert "| 200.0 | 50.0 | 62 | - | 20 | 1,980.0 | 0.00 % | - |" in gpus[1]
    lines = [line.split(",") for line in RECORDED.read_text().splitlines()[1:-1]]
    spans = []
    for attempt in "12":
        for gpu in "01":
            times = [float(cells[0]) for cells in lines if cells[1] == attempt and cells[3] == gpu]
            spans.append((gpu, times[0], times[-1]))
    exact = sum(joules(a, b) if gpu == "0" else 200 * (b - a) for gpu, a, b in spans)
    assert f"{exact / 3.6e6:.4g} kWh" in rows["energy of the GPUs, all attempts"]
    assert f"{exact / 1000:.4g} J" in rows["energy per token, start and evaluations included"]
    assert "## GPUs and energy" in report(read_run(str(run.path)))


def test_a_gpu_whose_energy_nobody_knows_leaves_the_sum_unknown(tmp_path):
    run = run_with_trace(tmp_path / "run")
    file = run.gpu_samples("a.b-1")
    file.write_text(file.read_text().replace("62,200,50,", "62,,,"))
    text = energy_text(read_run(str(run.path)))
    assert "kWh" not in text


def test_a_run_without_samples_has_no_section(tmp_path):
    run = run_with_trace(tmp_path / "run")
    run.gpu_samples("a.b-1").unlink()
    assert energy_text(read_run(str(run.path))) == ""
    assert "GPUs and energy" not in report(read_run(str(run.path)))
