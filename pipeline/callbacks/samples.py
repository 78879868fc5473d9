"""Texts that the model writes while it trains."""

from collections.abc import Callable, Collection, Sequence
from itertools import chain, islice
from typing import Any

import torch
from transformers import TrainerCallback

from pipeline.callbacks.metrics_file import stamp
from pipeline.evals.bpb import EvaluationInterrupted
from pipeline.process.progress import write
from pipeline.run_dir.rows import append_row, counts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sources.raw_rows import Conversation
from pipeline.training.distributed import on_rank_0, preserved_rng
from pipeline.training.log_row import has_evaluation
from pipeline.training.meters import StepMeter
from pipeline.training.trainer import forward_only

PROMPT_WORDS = 5
PROMPT_CHARACTERS = 40  # of languages that are written without spaces
MOST_LOOKED_AT = 1000  # items of a source: their beginnings may all be one license
MESSAGE_CHARACTERS = 200  # of a conversation's first message, which a prompt holds whole


def held_out_prompts(sources: Sequence[Any], count: int) -> list[str]:
    """Return so many prompts from held-out sources: the first words of documents, and the first messages of
    conversations that a user begins; fewer where the text has no more."""
    prompts: dict[str, None] = {}  # in order, none twice
    for source in sources:
        for item in islice(chain.from_iterable(block.items for block in source.read()), MOST_LOOKED_AT):
            if len(prompts) == count:
                return list(prompts)
            if isinstance(item, Conversation):
                asked = [message["content"] for message in item.messages if message["role"] == "user"]
                if asked and 0 < len(asked[0]) <= MESSAGE_CHARACTERS:
                    prompts[asked[0]] = None
                continue
            line = item.text.strip().partition("\n")[0]
            first_words = " ".join(line.split()[:PROMPT_WORDS])[:PROMPT_CHARACTERS].strip()
            if first_words:
                prompts[first_words] = None
    return list(prompts)


class Samples(TrainerCallback):
    """Completes the prompts at every evaluation, or every `every_steps`; the training's random state does not move.

    complete(model, prompts=prompts) -> texts; on a signal it raises EvaluationInterrupted, and the samples are made
    first after the resume. all_ranks: complete is called on every rank, as the forward of a sharded model needs; the
    first one writes. writers: the trackers that are given them (`add_samples(step, prompts, texts)`).
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        complete: Callable[..., list[str]],
        prompts: list[str],
        every_steps: int | None,
        chat: bool,
        attempt: int,
        meter: StepMeter,
        writers: list[Any],
        all_ranks: bool = False,
    ):
        self.run, self.complete, self.prompts, self.every_steps, self.chat = run, complete, prompts, every_steps, chat
        self.all_ranks, self.attempt, self.meter, self.writers = all_ranks, attempt, meter, writers

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        step = state.global_step
        # One rank's word: the others may read the files a moment later.
        is_due = step > 0 and on_rank_0(lambda: self._due(step))
        if not is_due:
            return
        there = on_rank_0(lambda: self._recorded(step))
        if not there.issuperset(self.prompts):
            self.sample(state, model, there=there)

    def _due(self, step: int) -> bool:
        """Return whether the checkpoint's step has samples; those of an evaluation that is due come with it."""
        if self.every_steps is not None:
            return self.every_steps > 0 and step % self.every_steps == 0
        return has_evaluation(self.run, step)

    def _recorded(self, step: int) -> set[str]:
        """Return the prompts whose samples of a step are there and count: no later attempt went on from before it."""
        attempts = [row for row in read_rows(self.run.metrics) if row.get("event") == "attempt"]
        return {row["prompt"] for row in read_rows(self.run.samples) if row["step"] == step and counts(row, attempts)}

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        if self.every_steps is None:
            self.sample(state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.every_steps and state.global_step % self.every_steps == 0:
            self.sample(state, model)

    def sample(self, state, model, *, there: Collection[str] = ()) -> None:
        """Write the samples of this step. there: prompts whose samples of this step were written before a kill."""
        first = state.is_world_process_zero
        if not (first or self.all_ranks) or not self.prompts or self.every_steps == 0:
            return
        training = model.training
        try:
            with self.meter.pause(), preserved_rng(), forward_only(model), torch.no_grad():
                model.eval()
                texts = self.complete(model, prompts=self.prompts)
        except EvaluationInterrupted:
            return
        finally:
            model.train(training)
        if not first:
            return
        for prompt, text in zip(self.prompts, texts, strict=True):
            if prompt in there:
                continue
            write(f"  {prompt!r} -> {text!r}")
            row = stamp(self.meter, state.global_step, self.attempt)
            append_row(self.run.samples, row | {"prompt": prompt, "text": text, "chat": self.chat})
        for writer in self.writers:
            writer.add_samples(state.global_step, self.prompts, texts)
