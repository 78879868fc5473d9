"""The machine's numbers in the logged row: what they are means of, and which stand there when."""

from types import SimpleNamespace

import pytest

from pipeline.callbacks.machine import Machine
from pipeline.run_dir.run_directory import RunDirectory

HOST = {"mem/host_rss_gib", "mem/host_used_pct", "disk/free_gib"}


class Readings:
    """What a GpuMonitor reads, one after the other."""

    def __init__(self, *readings):
        self.readings = list(readings)

    def read(self):
        return dict(self.readings.pop(0))


def machine(tmp_path, monkeypatch, *, world_size=1, local_ranks=1):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=world_size, local_process_index=0),
        meter=SimpleNamespace(total_s=0.0, tokens_at=lambda step: 1000 * step),
        state=SimpleNamespace(global_step=0),
    )
    made = Machine(RunDirectory(tmp_path), attempt=1, gpu_hz=0, meter=trainer.meter, world_size=world_size)
    made.on_train_begin(trainer.args, trainer.state, None)
    return made, trainer


def after(trainer, *, steps, seconds):
    trainer.state.global_step += steps
    trainer.meter.total_s += seconds


def reading(joules):
    return {"gpu/power_w": 300.0, "energy_j": joules, "gpus": 2}


def test_energy_per_token_is_power_times_step_time_over_tokens(tmp_path, monkeypatch):
    callback, trainer = machine(tmp_path, monkeypatch)
    callback.gpus = Readings(reading(3.6e6), {}, reading(7.2e6))
    first = {"train/loss": 1.0}
    callback.on_log(trainer.args, trainer.state, None, logs=first)
    assert first["perf/energy_kwh"] == 1
    assert "perf/energy_j_per_token" not in first  # its interval is open: it holds the start
    after(trainer, steps=2, seconds=3.0)
    assert "perf/energy_kwh" not in callback.numbers(trainer.state.global_step)  # no sample since
    after(trainer, steps=2, seconds=1.0)
    row = callback.numbers(trainer.state.global_step)
    assert row["perf/energy_kwh"] == 2
    assert row["perf/energy_j_per_token"] == pytest.approx(2 * 300 * 1.0 / 1000)
    assert not {"energy_j", "gpus"} & row.keys()


def test_a_run_on_several_hosts_logs_local_gpus_and_no_energy(tmp_path, monkeypatch):
    callback, trainer = machine(tmp_path, monkeypatch, world_size=16, local_ranks=8)
    callback.gpus = Readings(reading(3.6e6), reading(7.2e6))
    callback.numbers(trainer.state.global_step)
    after(trainer, steps=2, seconds=3.0)
    row = callback.numbers(trainer.state.global_step)
    assert row["gpu/power_w"] == 300
    assert not any(name.startswith("perf/") for name in row)


def test_energy_that_is_not_known_is_left_out(tmp_path, monkeypatch):
    callback, trainer = machine(tmp_path, monkeypatch)
    callback.gpus = Readings({"gpu/temp_c": 60.0, "gpus": 2})
    assert {
        name for name in callback.numbers(trainer.state.global_step) if name.startswith(("gpu", "perf", "energy"))
    } == {"gpu/temp_c"}


def test_host_numbers_are_logged_in_the_first_row_and_every_second(tmp_path, monkeypatch):
    callback, trainer = machine(tmp_path, monkeypatch)
    assert set(callback.numbers(trainer.state.global_step)) >= HOST | {"host/cpu_pct"}
    assert callback.numbers(trainer.state.global_step) == {}
    callback.host_due_s = 0.0
    assert set(callback.numbers(trainer.state.global_step)) >= HOST
