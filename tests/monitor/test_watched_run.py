"""A real run beside a driver: its samples, its energy over a restart, its profile, and that its numbers stay the same."""

import json

import pytest

from pipeline.monitor.energy import energy_of, kwh
from pipeline.monitor.host import why_no_driver
from pipeline.monitor.samples_file import read_gpus
from pipeline.report.run_data import read_run
from pipeline.report.single import report
from tests.runner import Runner

pytestmark = pytest.mark.full


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files) -> Runner:
    return Runner(tmp_path, cache, text_files, chat_files)


def test_a_killed_and_restarted_run_has_all_samples_energy_and_profiled_steps(runner, driver):
    settings = {"trackers": [], "gpu_hz": 20, "profile_steps": [6, 7]}
    recipe = runner.recipe(
        "watched",
        "gpt2",
        monitor=settings,
        run={"gpu_hour_cost": 2.0, "callbacks": ["paced:Paced"]},
    )
    recipe.write_text(
        recipe.read_text().replace("max_steps: 20", "max_steps: 10").replace("save_steps: 5", "save_steps: 3")
    )
    environment = {"LD_PRELOAD": driver["LD_PRELOAD"]}
    directory = runner.kill(recipe, name="watched", after_step=4, **environment)
    run = runner.train(recipe, STEP_S="0.1", **environment)
    (file,) = directory.glob("gpu-*.csv")
    gpus = read_gpus(file)
    assert [(gpu.attempt, gpu.index) for gpu in gpus] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    energy = run.values("perf/energy_kwh")
    assert list(energy.values()) == sorted(energy.values())
    total = kwh(sum(energy_of(gpu).best_j() for gpu in gpus))
    first = kwh(sum(energy_of(gpu).best_j() for gpu in gpus[:2]))
    assert first < max(energy.values()) <= total
    powers = run.values("gpu/power_w").values()
    assert powers
    assert all(200 <= watts <= 300 for watts in powers)  # the means of 200 W and 300 +- 100 W
    assert all(value > 0 for value in run.values("perf/energy_j_per_token").values())
    assert set(run.values("gpu/temp_c").values()) == {62}
    row = next(row for row in run.rows() if "train/loss" in row)
    assert {"host/cpu_pct", "mem/host_rss_gib", "mem/host_used_pct", "disk/free_gib"} <= row.keys()
    assert f"{file.name}: 2 GPUs, " in run.output
    trace = json.loads((directory / "profile" / "steps-6-7.json").read_text())["traceEvents"]
    names = [event["name"] for event in trace if event.get("ph") == "X"]
    assert [name for name in names if name.startswith("step ")] == ["step 6", "step 7"]
    assert any("mm" in name for name in names)
    text = report(read_run(str(directory)))
    assert "## GPUs and energy" in text
    assert "cost (device hours x run.gpu_hour_cost)" in text


def test_a_run_on_a_cpu_has_no_gpu_numbers_and_no_complaint(runner):
    if not why_no_driver():
        pytest.skip("this machine has one")
    run = runner.train(runner.recipe("unwatched", "gpt2", train={"max_steps": 4, "save_steps": 4, "logging_steps": 1}))
    assert "GPU" not in run.output
    assert not list(run.directory.glob("gpu-*.csv"))
    assert not [name for row in run.rows() for name in row if name.startswith("gpu/") or "energy" in name]
