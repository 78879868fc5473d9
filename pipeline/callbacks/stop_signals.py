"""A signal in training: all ranks agree on the step, save one whole checkpoint there, and leave."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch._dynamo import callback as compilations
from transformers import TrainerCallback

from pipeline.evals.bpb import EvaluationInterrupted
from pipeline.run_dir.failures import KeyboardSignals, Signals
from pipeline.training.distributed import num_ranks

Item = TypeVar("Item")


class StopSignals(TrainerCallback):
    """Comes last, so that what the step owes is done, or given up, when the ranks agree.

    An evaluation and the samples that are given up are due still, and done first after the resume.
    """

    def __init__(self, signals: Signals | KeyboardSignals) -> None:
        self.signals = signals
        self.group = None
        compilations.on_compile_start(lambda _: setattr(signals, "compiling", True))
        compilations.on_compile_end(lambda _: setattr(signals, "compiling", False))

    def on_train_begin(self, args, state, control, **kwargs):
        if num_ranks() > 1:
            # Its own CPU group: asking the accelerator every step would wait for it.
            self.group = torch.distributed.new_group(backend="gloo")

    def on_step_end(self, args, state, control, **kwargs):
        agreed = self.agreed()
        self.signals.training = True  # only now: until the first step is made a start has nothing to save
        if agreed:
            self._stop(control)

    def on_evaluate(self, args, state, control, **kwargs):
        if self.agreed():  # The step ends here, before the next one: what was given up is this step's.
            self._stop(control)

    def give_up(self, control) -> None:
        """Save the step and end the run, after EvaluationInterrupted on every rank."""
        self.agreed()  # on which signal it was
        self._stop(control)

    def _stop(self, control) -> None:
        control.should_save = True  # also when no save was due
        control.should_evaluate = False
        control.should_training_stop = self.signals.stopping = True

    def agreed(self) -> bool:
        """Return whether any rank was signalled; every rank asks at the same places."""
        if self.group is None:
            return bool(self.signals.received)
        flag = torch.tensor([self.signals.received])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self.group)
        if agreed := int(flag.item()):  # else a signal that has come meanwhile, for the next place, would be lost
            self.signals.received = agreed
        return bool(agreed)

    def on_every_rank(self, items: Iterable[Item], *, lockstep: bool = False) -> Iterator[Item]:
        """Yield the items of all ranks until one is signalled. The ranks agree once, after the last item of each: they
        may have unequal numbers of them, and each gives up where it is. In lockstep they have equally many and agree
        before each: the others would wait in their forward for the one that gives up."""
        for item in items:
            is_signalled = self.agreed() if lockstep else self.signals.received
            if is_signalled:
                break
            yield item
        if self.agreed():
            self.signals.stopping = True
            raise EvaluationInterrupted

    def on_this_rank(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            if self.signals.received:
                raise EvaluationInterrupted
            yield item
