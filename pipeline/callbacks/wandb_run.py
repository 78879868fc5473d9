"""Weights & Biases under the same names as metrics.jsonl; a tracker that fails is reported once and never stops a run."""

import queue
import threading
import uuid
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from pipeline.artifacts.run_directory import RunDirectory
from pipeline.artifacts.secrets import redact_output

INIT_S = 20  # then the run is kept offline
# What the end of a run waits for W&B to take the rest: little where a signal ends it, since the machine may be going away.
FINISH_S, FINISH_AFTER_SIGNAL_S = 30.0, 3.0


class Table(list):
    """Rows of step, prompt and text on their way to W&B."""

    def shown(self, wandb: Any) -> Any:
        return wandb.Table(columns=["step", "prompt", "text"], data=list(self))


class WandbRun(TrainerCallback):
    """One W&B run per run directory, continued by a restart (its id is kept in the manifest).

    Rows carry `step`, the axis of every chart, `attempt` and `tokens`. W&B's own counter only grows, and rows at or below
    it are dropped: those that a restart makes again after an unplanned end. A thread does the talking: starting takes
    seconds, and a server that hangs takes as long as it likes.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        project: str,
        config: dict,
        notes: str | None,
        tags: list[str],
        attempt: int,
        batch_tokens: int,
    ):
        self.run, self.project, self.config, self.notes, self.tags = run, project, config, notes, tags
        self.attempt, self.batch_tokens = attempt, batch_tokens
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.sender: threading.Thread | None = None
        self.run_id = ""

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        try:
            import wandb  # here, not in the thread: it patches the output streams
        except Exception as error:
            print(
                f"W&B cannot be used ({error}); the run goes on without it. metrics.jsonl has every number.", flush=True
            )
            return
        redact_output()
        self.run_id = self.run.read_manifest().get("wandb_id") or uuid.uuid4().hex[:8]
        self.run.update_manifest(wandb_id=self.run_id)
        # A daemon: what it waits for must not hold the process.
        self.sender = threading.Thread(target=self._send, args=(wandb,), name="wandb", daemon=True)
        self.sender.start()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and self.sender is not None:
            self._put(logs, state.global_step)

    def add_samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        rows = [[step, prompt, text] for prompt, text in zip(prompts, texts, strict=True)]
        if self.sender is not None:
            self._put({"samples": Table(rows)}, step)

    def _put(self, values: dict[str, Any], step: int) -> None:
        stamp = {"step": step, "attempt": self.attempt, "tokens": step * self.batch_tokens}
        self.messages.put({**values, **stamp})

    def on_train_end(self, args, state, control, **kwargs):
        if self.sender is None:
            return
        self.messages.put(None)
        wait_s = FINISH_S if state.global_step >= state.max_steps else FINISH_AFTER_SIGNAL_S
        self.sender.join(wait_s)
        if self.sender.is_alive():
            print(f"W&B did not take everything within {wait_s:.0f} s. {self._later()}", flush=True)

    def _send(self, wandb: Any) -> None:
        try:
            run = self._start(wandb)
            while (message := self.messages.get()) is not None:
                run.log(
                    {name: value.shown(wandb) if isinstance(value, Table) else value for name, value in message.items()}
                )
            run.finish()
        except Exception as error:  # wandb raises many kinds; none of them is worth a training run
            print(
                f"W&B stopped taking numbers ({str(error) or type(error).__name__}); the run goes on without it. {self._later()}",
                flush=True,
            )

    def _start(self, wandb: Any) -> Any:
        """The W&B run, offline when the server does not take it: its files can be sent later."""
        try:
            run = self._init(wandb, self.run_id, mode=None)
        except Exception as error:
            print(f"W&B could not start ({error}); the run is kept offline. {self._later()}", flush=True)
            # Another id: W&B's service still holds the first one, and letting go of it asks the server.
            run = self._init(wandb, uuid.uuid4().hex[:8], mode="offline")
        run.define_metric("*", step_metric="step")
        return run

    def _init(self, wandb: Any, run_id: str, *, mode: str | None) -> Any:
        return wandb.init(
            project=self.project,
            name=self.run.name,
            id=run_id,
            resume="allow",
            mode=mode,
            config=self.config,
            notes=self.notes,
            tags=self.tags,
            dir=str(self.run.path),
            settings=wandb.Settings(init_timeout=INIT_S, login_timeout=INIT_S),
        )

    def _later(self) -> str:
        folder = Path(self.run.path) / "wandb"
        return f"metrics.jsonl has every number; send W&B's later with: wandb sync --include-online --id {self.run_id} {folder}/*run-*"
