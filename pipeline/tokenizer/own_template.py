"""A model's own chat template: bounds on what it costs, and rendering it with the mask of what is learnt.

The bounds hold for every tokenizer that is opened; OwnTemplate is for one whose template is not the built-in one
(tokenizer/chat.py).
"""

import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from typing import Any

import numpy as np

from pipeline.hardware import peak_bytes
from pipeline.process.errors import DataError
from pipeline.tokenizer.chat import GENERATION, refusal_of
from pipeline.tokenizer.encode import control_strings, plain_backend

# Bounds on what a chat template costs: it came with somebody's model, and may loop or grow without end.
MOST_CPU_S = 10.0  # of the thread, for one rendering; an ordinary conversation takes milliseconds
MOST_GROWTH = 2**29  # bytes, of the process while it renders
MOST_SOURCE = 300_000  # characters; the longest published template has some 20,000
MOST_MADE = 20_000_000  # characters or items that one operation makes
MOST_EXPONENT = 64
LOOK_S = 0.05  # between two looks at the memory


def bound_templates() -> None:
    """Let transformers render templates in its sandbox with limits on time, memory and length from now on.

    Not undone afterwards: transformers keeps what it has compiled with the sandbox of that moment.
    """
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = _sandbox_class()  # type: ignore[assignment,misc]


@cache
def _sandbox_class() -> type:
    """Return the sandbox class: the code of its templates looks at the time before each block and after each operation."""
    from jinja2.compiler import CodeGenerator
    from jinja2.exceptions import SecurityError
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class TimedContext(Context):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.began = self.looked = time.thread_time()
            self.held = None

        def derived(self, locals=None):
            context = super().derived(locals)
            context.began, context.held = self.began, self.held  # type: ignore[attr-defined]
            return context

        def look(self, value=None):
            """Return the value; raise SecurityError where the rendering has cost too much."""
            now = time.thread_time()
            if now - self.looked > LOOK_S:
                self.looked = now
                if now - self.began > MOST_CPU_S:
                    raise SecurityError(f"it computes for more than {MOST_CPU_S:.0f} s")
                if self.held is None:
                    self.held = peak_bytes()
                if peak_bytes() - self.held > MOST_GROWTH:
                    raise SecurityError("it makes texts or lists without end")
            return value

    class TimedCode(CodeGenerator):
        def blockvisit(self, nodes, frame):
            self.writeline("context.look()")
            super().blockvisit(nodes, frame)

        def visit_Filter(self, node, frame):
            self._looking(super().visit_Filter, node, frame)

        def visit_Compare(self, node, frame):
            self._looking(super().visit_Compare, node, frame)

        def _looking(self, visit, node, frame):
            self.write("context.look(")
            visit(node, frame)
            self.write(")")

    class BoundedSandbox(ImmutableSandboxedEnvironment):
        context_class = TimedContext
        code_generator_class = TimedCode
        intercepted_binops = frozenset(["*", "**"])

        def from_string(self, source, *args, **kwargs):
            if isinstance(source, str) and len(source) > MOST_SOURCE:
                raise SecurityError(f"it has {len(source):,} characters, and {MOST_SOURCE:,} are read")
            return super().from_string(source, *args, **kwargs)

        def call_binop(self, context, operator, left, right):
            if operator == "**" and not (isinstance(right, int) and abs(right) <= MOST_EXPONENT):
                raise SecurityError("it raises to a power that is too large")
            if operator == "*":
                times, repeated = (right, left) if hasattr(left, "__len__") else (left, right)
                if hasattr(repeated, "__len__") and times * len(repeated) > MOST_MADE:
                    raise SecurityError("it repeats a text or list too often")
            return context.look(super().call_binop(context, operator, left, right))

        def call(self, context, function, *args, **kwargs):
            if any(isinstance(value, int) and value > MOST_MADE for value in (*args, *kwargs.values())):
                raise SecurityError("it asks for texts or lists without end")
            return context.look(super().call(context, function, *args, **kwargs))

        def call_test(self, name, value, args=None, kwargs=None, context=None, eval_ctx=None):
            if context is not None:
                context.look()
            return super().call_test(name, value, args, kwargs, context, eval_ctx)

    return BoundedSandbox


# A model's own chat template, used as it is: its ids, control strings in messages as text, and what the assistant
# wrote.

# Of templates that write the day's date: prepared rows must not depend on the day. Llama 3.1's own template falls back to it.
DATE = datetime(2024, 7, 26)
# Around a control string in a message while the template renders it. Noncharacters: no text has them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
TAKEN_APART = "the chat template takes a message's text apart at a control string in it, so that the string cannot be kept as text"
FIRST = "\ufdd2"  # begins the answers of the probe: no generation prompt goes on with it
# Nothing that a template could trim, split or read as reasoning.
PROBE = [
    {"role": "user", "content": "question one"},
    {"role": "assistant", "content": f"{FIRST}answer one"},
    {"role": "user", "content": "question two"},
    {"role": "assistant", "content": f"{FIRST}answer two"},
]
Spans = list[tuple[int, int]]


class OwnTemplate:
    """Renders conversations with the chat template that a tokenizer came with.

    problems: why it cannot be trained with; empty when it can. end_of_turn: the id that ends what the assistant writes.
    """

    date = DATE

    def __init__(self, tokenizer: Any):
        self.template: str = tokenizer.get_chat_template()
        if not isinstance(self.template, str):
            raise DataError(f"the chat template of the tokenizer is {type(self.template).__name__}, not text")
        self.marks_answers = bool(GENERATION.search(self.template))
        self.writes_date = "strftime_now" in self.template
        self._dated = with_fixed_date(self.template) if self.writes_date else self.template
        self._variables = tokenizer.special_tokens_map
        self._backend, self._plain = _offset_backend(tokenizer), plain_backend(tokenizer)
        controls = sorted(control_strings(tokenizer), key=len, reverse=True)  # the longest of those that begin alike
        self._control = re.compile("|".join(map(re.escape, controls)) or "(?!)")
        self._newline = self._backend.encode("\n", add_special_tokens=False).ids
        self._headers: list[str] = []
        self._ends: set[str] = set()
        self.end_of_turn: int | None = None
        self.problems = self._probe()

    def render(self, conversations: list[list[dict]]) -> list[tuple[list[int], list[bool]]]:
        """Return the ids of each conversation, and for each id whether it is trained."""
        rendered = [self._render(messages) for messages in conversations]
        harmless = [text for text, _ in rendered if OPEN not in text]
        encodings = iter(self._backend.encode_batch(harmless, add_special_tokens=False))
        found = []
        for text, spans in rendered:
            if OPEN in text:
                ids, offsets = self._encode_marked(text)
                places = [at for at, character in enumerate(text) if character in (OPEN, CLOSE)]
                spans = [(start - bisect_left(places, start), end - bisect_left(places, end)) for start, end in spans]
            else:
                encoding = next(encodings)
                ids, offsets = encoding.ids, encoding.offsets
            found.append((ids, _within(offsets, spans)))
        return found

    def prompt_ids(self, messages: list[dict], *, today: bool = False) -> list[int]:
        """Return the ids up to where the assistant answers. today: a template that writes the date writes today's."""
        text, _ = self._text(self._marked(messages), prompt=True, template=self.template if today else self._dated)
        return self._encode_marked(text)[0]

    def _render(self, messages: list[dict]) -> tuple[str, Spans]:
        """Return the conversation's text, control strings of its messages between OPEN and CLOSE, and the spans to train."""
        marked = self._marked(messages)
        text, spans = self._text(marked)
        if marked is not messages and MARKED.sub("\\g<1>", text) != self._text(messages)[0]:
            raise DataError(TAKEN_APART)
        if not self.marks_answers:
            spans = list(self._turns(marked, text))
        _must_write_calls(marked, "".join(text[start:end] for start, end in spans))
        return text, spans

    def _text(self, messages: list[dict], *, prompt: bool = False, template: str | None = None) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        # As apply_chat_template does: a key whose value is None is a key that is not there.
        known = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            bound_templates()
            rendered: Any = render_jinja_template(
                [known],
                chat_template=template or self._dated,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self.marks_answers and not prompt,
                **self._variables,
            )
        except Exception as error:  # a template raises whatever its expressions raise
            raise DataError(refusal_of(error)) from None
        (text,), spans = rendered
        return text, spans[0] if spans else []

    def _turns(self, messages: list[dict], text: str) -> Iterator[tuple[int, int]]:
        """Yield where each of the assistant's turns is in the text, without the prompt that it answers."""
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            start = self._start(messages[:number], text)
            if start is None:
                raise DataError(
                    f"the chat template renders what stands before message {number} in another way once it is answered, so what is trained "
                    "there cannot be found. Mark the answers in the template with {% generation %} ... {% endgeneration %}, and name it as tokenizer.chat_template"
                )
            through = text if number + 1 == len(messages) else self._text(messages[: number + 1])[0]
            if len(through) > start and text.startswith(through):
                yield start, len(through)
                continue
            # Reasoning that only the last turn keeps, or another end where other turns follow: the turn's first end it is.
            ends = "|".join(map(re.escape, sorted(self._ends)))
            end = re.compile(f"(?<!{OPEN})(?:{ends})\\s*").search(text, start) if ends else None
            if end is None:
                raise DataError(f"the chat template writes no end of turn behind message {number}")
            yield start, end.end()

    def _start(self, before: list[dict], text: str) -> int | None:
        if not before:  # Templates fail on no messages; nothing before the first turn's header looks like it.
            places = [text.find(header) + len(header) for header in self._headers if header and header in text]
            return min(places, default=None)
        prompted, _ = self._text(before, prompt=True)
        if text.startswith(prompted):
            return len(prompted)
        unprompted, _ = self._text(before)
        for header in self._headers:  # templates whose prompt holds more than the turn's header (an open <think>)
            if text.startswith(unprompted + header):
                return len(unprompted + header)
        return None

    def _probe(self) -> list[str]:
        try:
            return self._look_at(PROBE) or self._look_at(PROBE[:2])
        except DataError as error:
            return [f"cannot be rendered or read ({error})"]

    def _look_at(self, messages: list[dict]) -> list[str]:
        """Return what is wrong with the rendering of harmless messages; their headers and ends of turns are kept."""
        text, _ = self._text(messages)
        if missing := [message["content"] for message in messages if message["content"] not in text]:
            return [f"leaves out {missing[0]!r}, which a message says"]
        if not self.marks_answers and (problems := self._learn(messages, text)):
            return problems
        _, spans = self._render(messages)
        trained = "".join(text[start:end] for start, end in spans)
        for message in messages:
            if (message["content"] in trained) != (message["role"] == "assistant"):
                whose = "not the assistant's" if message["role"] == "assistant" else "the assistant's"
                return [f"takes {message['content']!r}, which the {message['role']} wrote, for {whose}"]
        answer = messages[-1]["content"]
        end = self._control.search(text, text.rfind(answer) + len(answer))
        if end and any(start <= end.start() < stop for start, stop in spans):
            self.end_of_turn = self._backend.token_to_id(end.group())
        return []

    def _learn(self, messages: list[dict], text: str) -> list[str]:
        """Return the headers of the assistant's turns and the control tokens that end them, from a probe; what is wrong with them."""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompted, unprompted = (self._text(messages[:number], prompt=prompt)[0] for prompt in (True, False))
            if prompted.startswith(unprompted) and text.startswith(unprompted):
                same = [a == b for a, b in zip(prompted, text, strict=False)]
                header = prompted[len(unprompted) : same.index(False) if False in same else len(same)]
                self._headers = sorted({*self._headers, header}, key=len, reverse=True)
            end = self._end_behind(messages, number, text)
            if end is None:
                return ["ends the assistant's turn with no control token, so that the model would not learn to stop"]
            self._ends.add(end)
        return []

    def _end_behind(self, messages: list[dict], number: int, text: str) -> str | None:
        """Return the control token behind a message of the probe; None where the next turn's first token is what ends it."""
        content = messages[number]["content"]
        alone, _ = self._text(messages[: number + 1])
        behind = text.find(content) + len(content)
        end = self._control.search(text, behind)
        closes = self._control.search(alone, alone.rfind(content) + len(content))
        return end.group() if end and closes and not text[behind : end.start()].strip() else None

    def _marked(self, messages: list[dict]) -> list[dict]:
        """Return the messages with their control strings between OPEN and CLOSE; the same list when they have none."""
        marked = [
            {key: value if key == "role" else self._mark(value) for key, value in message.items()}
            for message in messages
        ]
        for number, message in enumerate(messages):
            if isinstance(message.get("content"), list):
                self._refuse_joined(number, message["content"])
        return messages if marked == messages else marked

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            if OPEN in value or CLOSE in value:
                raise DataError(
                    "a message holds the noncharacter U+FDD0 or U+FDD1, which stands for nothing. Remove it"
                )
            return self._control.sub(f"{OPEN}\\g<0>{CLOSE}", value)
        if isinstance(value, dict):
            return {self._mark(key): self._mark(item) for key, item in value.items()}
        return [self._mark(item) for item in value] if isinstance(value, list) else value

    def _refuse_joined(self, number: int, parts: list) -> None:
        texts = [part if isinstance(part, str) else str(part.get("text", "")) for part in parts]
        if len(self._control.findall("".join(texts))) > sum(len(self._control.findall(text)) for text in texts):
            raise DataError(
                f"the parts of message {number} spell a control string together. Write its text in one part"
            )

    def _encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and places in the text without OPEN and CLOSE; what is between them gives no control token."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for number, piece in enumerate(MARKED.split(text)):
            if not piece:
                continue
            if OPEN in piece or CLOSE in piece:
                raise DataError(TAKEN_APART)
            new, places = self._encode_piece(piece, self._plain if number % 2 else self._backend, first=at == 0)
            ids += new
            offsets += [(start + at, end + at) for start, end in places]
            at += len(piece)
        return ids, offsets

    def _encode_piece(self, piece: str, backend: Any, *, first: bool) -> tuple[list[int], list[tuple[int, int]]]:
        if not first:
            # Behind a line's end, so that no tokenizer puts the space before it that it puts before a text.
            encoding = backend.encode("\n" + piece, add_special_tokens=False)
            skip = len(self._newline)
            if encoding.ids[:skip] == self._newline:
                return encoding.ids[skip:], [(start - 1, end - 1) for start, end in encoding.offsets[skip:]]
        encoding = backend.encode(piece, add_special_tokens=False)
        return encoding.ids, encoding.offsets


def _must_write_calls(messages: list[dict], trained: str) -> None:
    """Raise DataError where the template passes over a tool call: the turn would be learned as an empty answer."""
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or []:
            if call.get("function", call)["name"] not in trained:
                raise DataError(f"the chat template leaves out the tool call of message {number}")


def with_fixed_date(template: str) -> str:
    """Return the template with DATE for every day that it asks `strftime_now` for."""
    formats = {found[1] for found in re.findall(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", template)}
    days = json.dumps({name: DATE.strftime(name) for name in sorted(formats)})
    unknown = "raise_exception('it asks for a date in a format that is no constant')"
    # The last expression writes nothing; it keeps a line's end behind it, which a block would take.
    macro = (
        f"{{%- macro strftime_now(format) -%}}{{{{- {days}[format] or {unknown} -}}}}{{%- endmacro -%}}{{{{- '' }}}}"
    )
    return macro + template


def _offset_backend(tokenizer: Any) -> Any:
    """Return a copy of the tokenizer's backend whose places in the text are exact: post-processors trim white space off them."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    backend = Tokenizer.from_str(json.dumps(state | {"post_processor": None, "padding": None, "truncation": None}))
    backend.encode_special_tokens = False
    return backend


def _within(offsets: list[tuple[int, int]], spans: Spans) -> list[bool]:
    """Return whether each place shares a character with one of the spans."""
    if not offsets:
        return []
    last = max(end for _, end in offsets)
    trained = np.zeros(last + 2, np.int64)
    for start, end in spans:
        trained[start + 1 : end + 1] = 1
    before = np.cumsum(trained)
    starts, ends = np.array(offsets).T
    return (before[ends] > before[starts]).tolist()
