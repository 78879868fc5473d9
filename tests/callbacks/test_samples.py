"""Which samples a start still has to make: those of its checkpoint's step that are not there or do not count any more."""

from types import SimpleNamespace

import torch

from pipeline.callbacks.samples import Samples, held_out_prompts
from pipeline.run_dir.rows import append_row, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sources.raw_rows import Block, Conversation, Document
from pipeline.training.meters import StepMeter

PROMPTS = ["The", "A", "One"]


def begin(run, *, attempt, step):
    """The prompts that a start from this step completes before it trains."""
    append_row(run.metrics, {"event": "attempt", "attempt": attempt, "step": step})
    meter = StepMeter(tokens_at=lambda step: step, max_steps=10, world_size=1)
    samples = Samples(
        run,
        complete=lambda model, prompts: [f"{prompt} {attempt}" for prompt in prompts],
        prompts=PROMPTS,
        every_steps=4,
        chat=False,
        attempt=attempt,
        meter=meter,
        writers=[],
    )
    before = len(read_rows(run.samples))
    state = SimpleNamespace(is_world_process_zero=True, global_step=step)
    samples.on_train_begin(None, state, None, model=torch.nn.Linear(1, 1))
    return [row["prompt"] for row in read_rows(run.samples)[before:]]


def test_a_kill_between_two_prompts_loses_neither_and_repeats_neither(tmp_path):
    run = RunDirectory(tmp_path)
    append_row(run.metrics, {"event": "attempt", "attempt": 1, "step": 0})
    append_row(run.samples, {"step": 4, "attempt": 1, "prompt": "The", "text": "The 1"})
    assert begin(run, attempt=2, step=4) == ["A", "One"]
    assert begin(run, attempt=3, step=4) == []


def test_samples_of_steps_that_were_gone_back_behind_are_made_anew(tmp_path):
    run = RunDirectory(tmp_path)
    assert begin(run, attempt=1, step=8) == PROMPTS
    assert begin(run, attempt=2, step=3) == []  # no step that has samples; those of step 8 are void now
    assert begin(run, attempt=3, step=8) == PROMPTS


def source_of(items):
    blocks = [Block(items=items[:2]), Block(items=items[2:])]
    return SimpleNamespace(read=lambda: iter(blocks))


def test_prompts_are_the_first_words_of_held_out_documents():
    texts = ["  The cat sat on the mat.\nIt slept.", "\n", "The cat sat on the floor.", "貓" * 90, "Das Haus ist alt."]
    documents = [Document(text, 0, 0, row) for row, text in enumerate(texts)]
    assert held_out_prompts([source_of(documents)], 3) == ["The cat sat on the", "貓" * 40, "Das Haus ist alt."]
    assert held_out_prompts([source_of(documents)], 1) == ["The cat sat on the"]
    assert held_out_prompts([source_of(documents[:1]), source_of(documents[4:])], 9)[1] == "Das Haus ist alt."


def test_prompts_of_a_chat_are_what_held_out_users_begin_with():
    def conversation(text):
        turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]
        return Conversation([*turns, {"role": "assistant", "content": "Yes."}], 0, 0, 0)

    asked = [conversation(text) for text in ("Who are you?", "x" * 300, "Who are you?", "What is 2 + 3?")]
    assert held_out_prompts([source_of(asked)], 5) == ["Who are you?", "What is 2 + 3?"]
