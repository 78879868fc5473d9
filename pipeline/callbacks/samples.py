"""Texts generated while training, with fixed prompts: to samples.jsonl, the console and the trackers."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from pipeline.artifacts.rows import append_row
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.training.meter import StepMeter
from pipeline.training.rng import preserved_rng


class Samples(TrainerCallback):
    """Completes the prompts at every evaluation, or every `every_steps`; the training's random state does not move.

    complete(model, prompts) -> texts. writers: the trackers that take text (`add_text(step, name, text)`).
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        complete: Callable[[Any, list[str]], list[str]],
        prompts: list[str],
        every_steps: int | None,
        chat: bool,
        attempt: int,
        batch_tokens: int,
        meter: StepMeter,
        writers: list[Any],
    ):
        self.run, self.complete, self.prompts, self.every_steps, self.chat = run, complete, prompts, every_steps, chat
        self.attempt, self.batch_tokens, self.meter, self.writers = attempt, batch_tokens, meter, writers

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        if self.every_steps is None:
            self.sample(state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.every_steps and state.global_step % self.every_steps == 0:
            self.sample(state, model)

    def sample(self, state, model) -> None:
        if not state.is_world_process_zero or not self.prompts or self.every_steps == 0:
            return
        training = model.training
        with self.meter.pause(), preserved_rng(), torch.no_grad():
            model.eval()
            texts = self.complete(model, self.prompts)
            model.train(training)
        for prompt, text in zip(self.prompts, texts, strict=True):
            print(f"  {prompt!r} -> {text!r}")
            append_row(
                self.run.samples,
                {
                    "step": state.global_step,
                    "attempt": self.attempt,
                    "time": time.time(),
                    "tokens": state.global_step * self.batch_tokens,
                    "prompt": prompt,
                    "text": text,
                    "chat": self.chat,
                },
            )
        table = "\n\n".join(f"**{prompt}** {text}" for prompt, text in zip(self.prompts, texts, strict=True))
        for writer in self.writers:
            writer.add_text(state.global_step, "samples", table)
