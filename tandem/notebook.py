"""A progress bar and a table of the evaluations, in a notebook."""

from transformers import TrainerCallback
from transformers.utils.notebook import NotebookTrainingTracker

from pipeline.metrics import is_evaluation, metric_of


class NotebookTable(TrainerCallback):
    """Shows the steps as a bar, and below it a row for each evaluation: step, smoothed loss, scores."""

    def __init__(self) -> None:
        self.tracker: NotebookTrainingTracker | None = None
        self.loss: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.tracker = NotebookTrainingTracker(state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self.tracker.update(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        self.loss = logs.get("train/loss_ema", self.loss)
        scores = {}
        for name, value in logs.items():
            metric = metric_of(name)
            if is_evaluation(name) and name.count("/") == 1 and (metric is None or metric.console):
                scores[name] = f"{value:.4f}"
        if scores and self.tracker is not None:
            loss = "" if self.loss is None else f"{self.loss:.4f}"
            self.tracker.write_line({"step": state.global_step, "train/loss": loss, **scores})

    def on_train_end(self, args, state, control, **kwargs):
        self.tracker.update(state.global_step, force_update=True)
