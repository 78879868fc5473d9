"""The machine's numbers in the logged row: GPUs from a thread that samples them, the host's own, energy."""

import os
import socket
import time
from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback

from pipeline.metrics import Numbers
from pipeline.monitor.host import JOULES_PER_KWH, HostSampler, why_no_driver
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.meters import StepMeter

if TYPE_CHECKING:
    from pipeline.monitor.gpu_monitor import GpuMonitor

HOST_EVERY_S = 1.0  # reading the counters takes most of a millisecond; rows logged more often go without


class Machine(TrainerCallback):
    """Samples on the first rank of every host; its numbers join the row that the trainer logs.

    gpu/* are means over this host's GPUs of the run and all samples since the last row that has them, so a row logged
    sooner than the next sample has none. perf/energy_* are in runs on one host only: rank 0 knows no other host's.
    """

    def __init__(self, run: RunDirectory, *, attempt: int, gpu_hz: float, meter: StepMeter, world_size: int):
        self.run, self.attempt, self.gpu_hz, self.meter = run, attempt, gpu_hz, meter
        self.gpus: GpuMonitor | None = None
        self.host = HostSampler(run.path)
        self.host_due_s = 0.0
        self.one_host = world_size <= _local_ranks()
        self.meter_before: tuple[float, int] | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if args.local_process_index != 0:
            return
        self.host.sample()  # rates begin here
        if not self.gpu_hz:
            return
        if why_none := why_no_driver():
            if args.device.type == "cuda":
                print(why_none, flush=True)
            return
        from pipeline.monitor.gpu_monitor import GpuMonitor

        output = self.run.gpu_samples(socket.gethostname())
        self.gpus = GpuMonitor(output, attempt=self.attempt, hz=self.gpu_hz, uuids=gpus_of_this_host())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if args.local_process_index == 0 and logs and "train/loss" in logs:
            logs |= self.numbers(state.global_step)  # before the callbacks that write the row

    def on_train_end(self, args, state, control, **kwargs):
        if self.gpus is not None:
            self.gpus.stop()

    def numbers(self, step: int) -> Numbers:
        """Return the numbers by the names of docs/metrics.md; called once a logged step, after the meter was read."""
        row: Numbers = {}
        if (now := time.monotonic()) >= self.host_due_s:
            self.host_due_s = now + HOST_EVERY_S
            row |= self.host.sample()
        if self.gpus is not None:
            row |= self._gpu_numbers(self.gpus.read(), step)
        return row

    def _gpu_numbers(self, found: Numbers, step: int) -> Numbers:
        energy_j, gpus = found.pop("energy_j", None), found.pop("gpus", 0)
        if not found or energy_j is None or not self.one_host:
            return found
        before, self.meter_before = self.meter_before, (self.meter.total_s, step)
        found["perf/energy_kwh"] = energy_j / JOULES_PER_KWH
        if before is not None and "gpu/power_w" in found and step > before[1]:
            # W x s of steps / tokens: energy of evaluations and saves in between is not the tokens'.
            seconds = self.meter.total_s - before[0]
            tokens = self.meter.tokens_at(step) - self.meter.tokens_at(before[1])
            found["perf/energy_j_per_token"] = gpus * found["gpu/power_w"] * seconds / tokens
        return found


def gpus_of_this_host() -> list[str]:
    """Return the run's GPUs as their driver names them; none named, which means all of the host, where it trains on
    something else or each rank sees its own GPU only."""
    ranks = _local_ranks()
    if not torch.cuda.is_available() or torch.cuda.device_count() < ranks:
        return []
    return [f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(ranks)]


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
