"""A visitor's conversation with every model of the page, and its copy in the browser, which a reload begins with."""

import json
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from typing import Any

from pipeline.chat.conversation import Conversation, Sampling, Speaker
from pipeline.chat.rendering import html_of
from pipeline.process.errors import TandemError

MOST_STORED_CHARS = 200_000  # of the copy; a browser keeps some 5 MB for a site, and a request holds 1 MiB
SHOWN_S = 0.1  # between two pictures of a growing answer: a small model writes hundreds of tokens a second, too many for a browser


class Visit:
    """One browser tab. turns: questions, each with the answer of every speaker; settings: the page's, as they were last used."""

    def __init__(self, speakers: list[Speaker], *, notify: Callable[[str], Any] = print):
        self.speakers, self.notify = speakers, notify
        self.conversations = [Conversation(speaker, notify=notify) for speaker in speakers]
        self.turns: list[dict[str, Any]] = []
        # Each conversation's messages before the last turn; None where that turn cannot be taken back.
        self.before: list[list[dict]] | None = None
        self.settings: list[Any] = []

    def __deepcopy__(self, memo: dict) -> "Visit":
        """Return an empty visit: Gradio begins each tab with a copy of the first one, and the models are the same for all."""
        return Visit(self.speakers, notify=self.notify)

    def answer(self, text: str, *, system: str | None, sampling: Sampling) -> Generator[None, None, None]:
        """Let the last turn grow by pieces of every speaker's answer.

        Raises DataError when a chat template refuses the messages; the conversations are then as they were.
        """
        earlier, self.before = self.before, [list(conversation.messages) for conversation in self.conversations]
        for conversation in self.conversations:
            conversation.system = system
        answers = ["" for _ in self.conversations]
        self.turns.append({"question": text, "answers": answers})
        try:
            yield
            yield from self._grow(answers, text, sampling)
        except TandemError:
            self.take_back()
            self.before = earlier
            raise

    def _grow(self, answers: list[str], text: str, sampling: Sampling) -> Generator[None, None, None]:
        with ExitStack() as left:
            growing = {
                place: left.enter_context(closing(conversation.answer(text, sampling)))
                for place, conversation in enumerate(self.conversations)
            }
            shown = time.monotonic()
            while growing:
                for place, pieces in list(growing.items()):
                    piece = next(pieces, None)
                    if piece is None:
                        del growing[place]
                    else:
                        answers[place] += piece
                if time.monotonic() - shown > SHOWN_S:
                    yield
                    shown = time.monotonic()

    def take_back(self) -> str | None:
        """Take the last turn out of the conversations and return its question; None where that is not possible."""
        if not self.turns or self.before is None:
            return None
        for conversation, messages in zip(self.conversations, self.before, strict=True):
            conversation.messages = messages
        self.before = None
        return self.turns.pop()["question"]

    def shown(self, *, growing: bool = False) -> list[list[dict[str, Any]]]:
        """Return the value of each speaker's Chatbot. growing: the last answers are not at their end."""
        return [
            self._shown(place, conversation.speaker, growing=growing)
            for place, conversation in enumerate(self.conversations)
        ]

    def _shown(self, place: int, speaker: Speaker, *, growing: bool) -> list[dict[str, Any]]:
        messages = []
        for turn in self.turns:
            done = not (growing and turn is self.turns[-1])
            answer = html_of(turn["answers"][place], markdown=speaker.chats, done=done)
            messages += [
                {"role": "user", "content": html_of(turn["question"], markdown=False)},
                {"role": "assistant", "content": answer},
            ]
        return messages

    # What a reload begins with.

    def stored(self) -> str:
        """Return the visit as JSON of at most MOST_STORED_CHARS, without its oldest turns where it is longer."""
        kept: dict[str, Any] = {
            "turns": self.turns,
            "messages": [conversation.messages for conversation in self.conversations],
            "before": self.before,
            "answers": [conversation.answers for conversation in self.conversations],
            "settings": self.settings,
        }
        while len(text := json.dumps(kept)) > MOST_STORED_CHARS and kept["turns"]:
            kept["turns"] = kept["turns"][1 + len(kept["turns"]) // 10 :]
        return text if len(text) <= MOST_STORED_CHARS else ""

    def restore(self, text: str | None) -> None:
        """Take over what `stored` gave. What a browser sends may be anything: all else leaves the visit empty."""
        try:
            kept = json.loads(text or "")
        except (ValueError, RecursionError):
            return
        num = len(self.conversations)
        if not (
            isinstance(kept, dict)
            and _all(kept.get("turns"), lambda turn: _is_turn(turn, num))
            and _are_messages(kept.get("messages"), num)
            and (kept.get("before") is None or _are_messages(kept["before"], num))
            and _all(kept.get("answers"), lambda number: isinstance(number, int) and 0 <= number < 2**31, num)
            and isinstance(kept.get("settings"), list)
        ):
            return
        self.turns, self.before, self.settings = kept["turns"], kept.get("before"), kept["settings"]
        for conversation, messages, answers in zip(self.conversations, kept["messages"], kept["answers"], strict=True):
            conversation.messages, conversation.answers = messages, answers


def _all(values: Any, is_right: Any, num: int | None = None) -> bool:
    return isinstance(values, list) and num in (None, len(values)) and all(map(is_right, values))


def _is_turn(turn: Any, num: int) -> bool:
    return (
        isinstance(turn, dict)
        and turn.keys() == {"question", "answers"}
        and isinstance(turn["question"], str)
        and _all(turn["answers"], lambda answer: isinstance(answer, str), num)
    )


def _are_messages(of_all: Any, num: int) -> bool:
    return _all(of_all, lambda of_one: _all(of_one, _is_message), num)


def _is_message(message: Any) -> bool:
    """Return whether it is a message as `answer_messages` makes them."""
    if not (isinstance(message, dict) and message.keys() <= {"role", "content", "tool_calls"}):
        return False
    calls = message.get("tool_calls", [])
    return (
        message.get("role") in ("user", "assistant", "tool")
        and isinstance(message.get("content"), str)
        and _all(
            calls, lambda call: isinstance(call, dict) and call.keys() == {"function"} and _is_call(call["function"])
        )
    )


def _is_call(function: Any) -> bool:
    return (
        isinstance(function, dict)
        and function.keys() == {"name", "arguments"}
        and all(isinstance(value, str) for value in function.values())
    )
