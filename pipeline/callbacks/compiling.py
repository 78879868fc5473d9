"""The wait for torch.compile: the first step takes longest, and prints nothing by itself."""

from contextlib import ExitStack

from transformers import TrainerCallback

from pipeline.process.progress import waiting, write


class Compiling(TrainerCallback):
    """Prints before the first step of a start that it is compiled, and shows the time until it is done."""

    def __init__(self) -> None:
        self.shown, self.began = ExitStack(), False

    def on_step_begin(self, args, state, control, **kwargs):
        if self.began or not args.torch_compile or not state.is_world_process_zero:
            return
        self.began = True
        write("compiling: the first step of a start takes from seconds to a few minutes; the others are faster for it")
        self.shown.enter_context(waiting("compiling", after_s=1.0))

    def on_step_end(self, args, state, control, **kwargs):
        self.shown.close()

    def on_train_end(self, args, state, control, **kwargs):
        self.shown.close()
