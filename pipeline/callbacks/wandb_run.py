"""Weights & Biases under the same names as metrics.jsonl; a tracker that fails is reported once and never stops a run."""

import html
import uuid
from typing import Any

from transformers import TrainerCallback

from pipeline.artifacts.run_directory import RunDirectory


class WandbRun(TrainerCallback):
    """One W&B run per run directory, continued by a restart (its id is kept in the manifest).

    Rows carry `step`, the axis of every chart. W&B's own counter only grows, and rows at or below it are dropped: those
    that a restart makes again after an unplanned end.
    """

    def __init__(self, run: RunDirectory, *, project: str, config: dict, notes: str | None, tags: list[str]):
        self.run, self.project, self.config, self.notes, self.tags = run, project, config, notes, tags
        self.wandb_run: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        import wandb

        run_id = self.run.read_manifest().get("wandb_id") or uuid.uuid4().hex[:8]
        try:
            self.wandb_run = wandb.init(
                project=self.project,
                name=self.run.name,
                id=run_id,
                resume="allow",
                config=self.config,
                notes=self.notes,
                tags=self.tags,
                dir=str(self.run.path),
                settings=wandb.Settings(init_timeout=20),
            )
            self.wandb_run.define_metric("*", step_metric="step")
        except Exception as error:  # wandb raises many kinds; none of them is worth a training run
            print(f"W&B could not start ({error}); the run goes on without it. metrics.jsonl has every number.")
            return
        self.run.update_manifest(wandb_id=run_id)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._try(lambda: self.wandb_run.log({**logs, "step": state.global_step}) if logs else None)

    def add_text(self, step: int, name: str, text: str) -> None:
        def send():
            import wandb

            self.wandb_run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>"), "step": step})

        self._try(send)

    def on_train_end(self, args, state, control, **kwargs):
        self._try(lambda: self.wandb_run.finish())

    def _try(self, send) -> None:
        if self.wandb_run is None:
            return
        try:
            send()
        except Exception as error:  # a service that goes away mid-run must not end it
            print(f"W&B stopped taking numbers ({error}); the run goes on without it. metrics.jsonl has every number.")
            self.wandb_run = None
