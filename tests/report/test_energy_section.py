"""The report's section on GPUs and energy says what gpu-<host>.csv holds, and nothing where there is none."""

import shutil
from pathlib import Path

import yaml

from pipeline.report.run_data import read_run
from pipeline.report.sections import energy_text
from pipeline.report.single import report
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from tests.monitor.stand_in import joules

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


def test_the_section_tells_power_heat_throttling_rate_energy_and_cost(tmp_path):
    run = run_with_trace(tmp_path / "run")
    text = energy_text(read_run(str(run.path)))
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
    gpus = [line for line in text.splitlines() if line.startswith("| a.b-1 ")]
    assert len(gpus) == 2
    assert gpus[0].startswith("| a.b-1 | 0 | Stand-in, model 0 | ")
    assert "| 61.0, 61.0 | 97.0 % | 20 | 1,980.0 | " in gpus[0]
    assert "sw_power_cap+sw_thermal" in gpus[0]
    assert "| 200.0, 200.0 | 50.0 % | 62.0, 62.0 | - | 20 | 1,980.0 | 0.00 % | - |" in gpus[1]
    assert "| 9.99 to 10, 10 asked for |" in rows["samples of a GPU per second, reached"]
    lines = [line.split(",") for line in RECORDED.read_text().splitlines()[1:-1]]
    spans = []
    for attempt in "12":
        for gpu in "01":
            times = [float(cells[0]) for cells in lines if cells[1] == attempt and cells[3] == gpu]
            spans.append((gpu, times[0], times[-1]))
    exact = sum(joules(a, b) if gpu == "0" else 200 * (b - a) for gpu, a, b in spans)
    assert f"{exact / 3.6e6:.4g} kWh" in rows["energy of the GPUs, all attempts"]
    assert "counters where there are, else trapezoids" in rows["energy of the GPUs, all attempts"]
    against = rows["trapezoids over the sampled power, against the counters"].split(" | ")[1]
    assert abs(float(against.split()[0])) < 0.1
    assert f"{exact / 1000:.4g} J" in rows["energy per token, start-up, evaluations and lost steps included"]
    assert "| 0.5 J |" in rows["energy per token in steps, median"]
    assert f"| {sum(b - a for _, a, b in spans):.2f} |" in rows["cost at run.gpu_hour_cost"]
    assert "## GPUs and energy" in report(read_run(str(run.path)))


def test_a_gpu_whose_energy_nobody_knows_leaves_the_sum_unknown(tmp_path):
    run = run_with_trace(tmp_path / "run")
    file = run.gpu_samples("a.b-1")
    file.write_text(file.read_text().replace("62,200,50,", "62,,,"))
    text = energy_text(read_run(str(run.path)))
    assert "not known: 2 of 4 records have no power" in text
    assert "kWh" not in text


def test_a_run_without_samples_has_no_section(tmp_path):
    run = run_with_trace(tmp_path / "run")
    run.gpu_samples("a.b-1").unlink()
    assert energy_text(read_run(str(run.path))) == ""
    assert "GPUs and energy" not in report(read_run(str(run.path)))
