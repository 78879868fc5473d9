"""monitor.profile_steps: what a few steps are made of, operator by operator, as a timeline."""

import os

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.meters import StepMeter


class ProfileSteps(TrainerCallback):
    """A torch.profiler trace of the steps first to last (zero-based, as the console counts), of rank 0.

    Each step, and in it its forward and backward passes and its optimizer, is a named range of the trace and on CUDA
    an NVTX range too, for nsys. Starting the profiler and writing the trace are not in the step's time; the steps
    themselves are slower than others.
    """

    def __init__(self, run: RunDirectory, first: int, last: int, *, meter: StepMeter):
        self.first, self.last, self.meter = first, last, meter
        self.trace = run.profile_trace(first, last)
        self.profiler: profile | None = None
        self.ranges: list[record_function] = []

    def on_step_begin(self, args, state, control, **kwargs):
        step = state.global_step
        if args.process_index != 0 or not self.first <= step <= self.last:
            return
        if self.profiler is None:
            with self.meter.pause():
                activities = [ProfilerActivity.CPU]
                if torch.cuda.is_available():
                    activities.append(ProfilerActivity.CUDA)
                self.profiler = profile(activities=activities)
                self.profiler.start()
        self._open(f"step {step}")
        self._open("forward and backward")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.ranges:
            self._close()
            self._open("optimizer")

    def on_step_end(self, args, state, control, **kwargs):
        while self.ranges:
            self._close()
        if self.profiler is not None and state.global_step > self.last:
            self._write()

    def on_train_end(self, args, state, control, **kwargs):
        if self.profiler is not None:  # a run that stops within the steps
            self._write()

    def _open(self, name: str) -> None:
        self.ranges.append(record_function(name))
        self.ranges[-1].__enter__()
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(name)

    def _close(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_pop()
        self.ranges.pop().__exit__(None, None, None)

    def _write(self) -> None:
        profiler, self.profiler = self.profiler, None
        assert profiler is not None
        with self.meter.pause():
            profiler.stop()
            self.trace.parent.mkdir(exist_ok=True)
            written = self.trace.with_suffix(".part")
            profiler.export_chrome_trace(str(written))
            os.replace(written, self.trace)
        print(f"profile: {self.trace}, for ui.perfetto.dev or chrome://tracing", flush=True)
