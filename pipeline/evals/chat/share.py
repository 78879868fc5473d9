"""One rank's share of a task: its questions put to the model, its answers judged."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.evals.chat.generated import written_answers
from pipeline.evals.chat.items import ChatItem
from pipeline.evals.chat.letters import chosen_letters
from pipeline.evals.chat.tasks import ChatTask
from pipeline.generation.stream import positions
from pipeline.monitor.heartbeat import beat
from pipeline.tokenizer.chat import prompt_ids


@dataclass(kw_only=True)
class Share:
    """What one rank found out. correct: by the item's place in its task; the other fields as in TaskScore."""

    correct: dict[int, bool]
    too_long: int
    tokens_forwarded: int
    tokens_generated: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Examiner:
    """What every question of every task is asked with.

    ids_of_letters: `letter_ids`. isolation: what programs are run in, by how many workers at once.
    """

    model: Any
    tokenizer: Any
    batch_rows: int
    watched: Callable[[Iterable], Iterable]
    ids_of_letters: Mapping[str, int]
    isolation: Any
    workers: int

    def share(self, task: ChatTask, items: Mapping[int, ChatItem]) -> Share:
        """The items' outcome. items: by their place in the task."""
        started = time.perf_counter()
        prompts = {n: prompt_ids(self.tokenizer, item.messages) for n, item in items.items()}
        # An answer needs a position of its own, but for a letter, which is read off the last one.
        limit = (positions(self.model) or math.inf) - (task.kind == "text")
        asked = {n: item for n, item in items.items() if len(prompts[n]) <= limit}
        share = Share(
            correct=dict.fromkeys(items, False),
            too_long=len(items) - len(asked),
            tokens_forwarded=sum(len(prompts[n]) for n in asked),
        )
        fitting = [prompts[n] for n in asked]
        if task.kind == "letters":
            right = self._right_letters(list(asked.values()), fitting)
        else:
            answers = written_answers(
                self.model,
                self.tokenizer,
                fitting,
                max_new_tokens=task.max_new_tokens,
                batch_rows=self.batch_rows,
                watched=self.watched,
            )
            share.tokens_generated = sum(map(len, answers))
            right = self._right_texts(task, list(asked.values()), answers)
        share.correct |= dict(zip(asked, right, strict=True))
        share.seconds = time.perf_counter() - started
        return share

    def _right_letters(self, items: list[ChatItem], prompts: list[list[int]]) -> list[bool]:
        chosen = chosen_letters(
            self.model,
            prompts,
            [[self.ids_of_letters[letter] for letter in item.letters] for item in items],
            pad=self.tokenizer.pad_token_id or 0,
            batch_rows=self.batch_rows,
            watched=self.watched,
        )
        return [item.letters[place] == item.answer for item, place in zip(items, chosen, strict=True)]

    def _right_texts(self, task: ChatTask, items: list[ChatItem], answers: list[list[int]]) -> list[bool]:
        texts = [self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in answers]
        pairs = list(zip(items, texts, strict=True))
        if task.check is not None:
            return [task.check(item, text) for item, text in pairs]
        from pipeline.evals.sandbox.run import run_programs

        assert task.program is not None, f"{task.name} has neither check nor program"
        programs = [task.program(item, text) for item, text in pairs]
        right: list[bool] = []
        for first in range(0, len(programs), self.batch_rows):
            beat()
            done = run_programs(
                programs[first : first + self.batch_rows], workers=self.workers, isolation=self.isolation
            )
            right += [execution.passed for execution in done]
        return right
