"""Python's search for reference cycles, which takes up to half a second, between steps instead of within them."""

import gc

from transformers import TrainerCallback

EVERY_STEPS = 1000  # where a run saves and evaluates rarely


class GarbageCollection(TrainerCallback):
    """After the first step all objects there are are taken out of later searches; from then on they are made after
    saves and evaluations, which wait for the disk or the device anyway, and every EVERY_STEPS steps."""

    def __init__(self) -> None:
        self.frozen = False

    def on_step_end(self, args, state, control, **kwargs):
        if not self.frozen:
            self.frozen = True
            gc.collect()
            gc.freeze()
            gc.disable()
        elif state.global_step % EVERY_STEPS == 0:
            gc.collect()

    def on_save(self, args, state, control, **kwargs):
        if self.frozen:
            gc.collect()

    on_evaluate = on_save

    def on_train_end(self, args, state, control, **kwargs):
        self.frozen = False
        gc.unfreeze()
        gc.enable()
