"""SIGTERM, SIGHUP and Ctrl-C: all ranks agree on the step, save one whole checkpoint there, and leave."""

import os
import signal

import torch
from transformers import TrainerCallback

from pipeline.artifacts.errors import Interrupted, Preempted, TandemError


class StopSignals(TrainerCallback):
    """Install before anything long. Before training and after it a signal ends the process at once (nothing can be lost);
    while it trains, the step is finished and a checkpoint written. A second signal leaves at once.

    `accelerate launch` hands signals on to nobody: the death of the launcher counts as SIGTERM.
    """

    def __init__(self) -> None:
        self.received = 0
        self.training = False
        self.where = "before the first step; nothing was trained"
        # `accelerate launch` leaves its variables behind; started without it, the shell may end and the run goes on.
        self.launcher = os.getppid() if any(name.startswith("ACCELERATE_") for name in os.environ) else None
        self.group = None
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        if not self.training:
            raise self.outcome(self.where)

    def outcome(self, where: str) -> TandemError:
        orphaned = self.launcher is not None and os.getppid() != self.launcher
        name = "the end of the launcher" if orphaned else signal.Signals(self.received).name
        kind = Interrupted if self.received == signal.SIGINT else Preempted
        return kind(f"{name} {where}. Run the same command again to go on.")

    def on_train_begin(self, args, state, control, **kwargs):
        self.training = True
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            # Its own CPU group: asking the accelerator every step would wait for it.
            self.group = torch.distributed.new_group(backend="gloo")

    def on_step_end(self, args, state, control, **kwargs):
        if self.launcher is not None and os.getppid() != self.launcher and not self.received:
            self.received = signal.SIGTERM
        if self.group is not None:
            flag = torch.tensor([self.received])
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self.group)
            self.received = int(flag.item())
        if self.received:
            # Also when no save was due; evaluations wait for the next start.
            control.should_save = state.global_step < state.max_steps or control.should_save
            control.should_evaluate = control.should_evaluate and state.global_step >= state.max_steps
            control.should_training_stop = True

    def raise_if_stopped(self, *, step: int, max_steps: int) -> None:
        """After training: leave with the signal's status unless the run had come to its end anyway."""
        self.training = False
        self.where = "after the last step, while the finished model was being written; every checkpoint is whole"
        if self.received and step < max_steps:
            raise self.outcome(f"at step {step}; checkpoint-{step} is whole")
