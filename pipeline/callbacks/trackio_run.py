"""Trackio under the same names as metrics.jsonl: a process of its own copies the run's files into its database."""

import os
import subprocess
import sys
from typing import Any

from transformers import TrainerCallback

from pipeline.artifacts.run_directory import RunDirectory
from pipeline.artifacts.secrets import known_secrets
from pipeline.callbacks import trackio_writer

# What the end of a run waits for the last rows. They are written in any case: the process does not end with the run.
FINISH_S, FINISH_AFTER_SIGNAL_S = 30.0, 3.0


class TrackioRun(TrainerCallback):
    """Starts trackio_writer.py beside the training, which hands it nothing: no row waits for Trackio.

    It sees no token, and ends when its input does, with the training.
    """

    def __init__(self, run: RunDirectory):
        self.run = run
        self.process: subprocess.Popen | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        secret = {where.rpartition("$")[2] for where in known_secrets()}
        environment = {name: value for name, value in os.environ.items() if name not in secret}
        try:
            self.process = subprocess.Popen(
                [sys.executable, trackio_writer.__file__, str(self.run.path), "--follow"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # else who reads the training's output would wait for it, too
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # a signal for the training, or its death, is no reason to lose rows
            )
        except OSError as error:
            self._tell(str(error))

    def on_log(self, args, state, control, **kwargs):
        if self.process is not None and self.process.poll() is not None:
            self._end(None)

    def on_train_end(self, args, state, control, **kwargs):
        if self.process is not None:
            self._end(FINISH_S if state.global_step >= state.max_steps else FINISH_AFTER_SIGNAL_S)

    def _end(self, wait_s: float | None) -> None:
        process: Any = self.process
        self.process = None
        try:
            _, said = process.communicate(timeout=wait_s)  # which closes its input
        except subprocess.TimeoutExpired:
            print(f"Trackio did not take everything within {wait_s:.0f} s; process {process.pid} goes on.", flush=True)
            return
        if process.returncode:
            self._tell(said.decode(errors="replace").strip().split("\n")[-1] or f"status {process.returncode}")

    def _tell(self, reason: str) -> None:
        print(
            f"Trackio stopped taking numbers ({reason}); the run goes on without it. metrics.jsonl has every number; "
            f"write them all to Trackio with: python -m pipeline.callbacks.trackio_writer {self.run.path}",
            flush=True,
        )
