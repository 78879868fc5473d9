"""Plan against outcome: ratios of what was promised and what came, from the run's files alone."""

import pytest

from pipeline.process.storage import write_text
from pipeline.report.run_data import read_run
from pipeline.report.sections import outcome_text, wall_s
from pipeline.run_dir.columns import mean_step_s
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory

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
    text = outcome_text(read_run(str(run.path)))
    for exact in ("parameters", "steps", "tokens", "FLOPs"):
        assert cells(text, exact)[2] == "exact", exact
    assert cells(text, "a step") == ["0.500 s", "0.600 s", "1.200"]
    assert cells(text, "time in steps, without") == ["20.000 s", "24.000 s", "1.200"]
    assert cells(text, "time in steps, all of it") == ["-", "36.000 s", "-"]
    assert cells(text, "memory of a process, as probed") == ["1.000 GiB", "1.250 GiB", "1.250"]
    assert "from a probe of 9 steps on this machine (0.400 to 0.600 s each)" in text
    assert "by arithmetic" not in text
    assert "energy" not in text


def test_the_process_of_a_cpu_is_compared_with_arithmetic_that_counts_it(run):
    assert "memory of a process, by arithmetic" not in outcome_text(read_run(str(run.path)))
    run.update_manifest(plan={**PLAN, "memory_bytes": {"weights": 2**20, "process": 2**29, "total": 2**30}})
    assert cells(outcome_text(read_run(str(run.path))), "memory of a process, by arithmetic")[2] == "1.250"


def test_a_first_interval_is_left_out_of_every_attempt_and_void_rows_of_the_time_of_steps_but_not_of_the_wall(run):
    data = read_run(str(run.path))
    assert mean_step_s(data.columns) == pytest.approx(0.6)
    assert wall_s(data) == 30 + 40
    assert cells(outcome_text(data), "cost")[1] == f"{2.0 * 2 * 70 / 3600:.6g}"


def test_what_was_not_planned_or_not_found_has_no_ratio_and_a_run_without_a_plan_no_section(run):
    run.update_manifest(
        plan={"device": "GPU", "steps": 80, "duration_source": "as probed"}, model={}, shape={"device": "CPU"}
    )
    text = outcome_text(read_run(str(run.path)))
    assert cells(text, "steps") == ["80", "40", "0.500"]
    assert cells(text, "a step") == ["-", "0.600 s", "-"]
    assert "Hours were planned as probed." in text
    assert "The run is not at its end" in text
    assert "It was planned for GPU and last ran on CPU." in text
    run.update_manifest(plan={})
    assert outcome_text(read_run(str(run.path))) == ""
