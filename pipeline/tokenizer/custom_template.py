"""A model's own chat template, used as it is: its ids, control strings in messages as text, and what the assistant
wrote.

CustomChatTemplate is for a tokenizer whose template is not the built-in one (tokenizer/chat.py).
"""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from os.path import commonprefix
from typing import Any

import numpy as np

from pipeline.process.errors import DataError
from pipeline.tokenizer.encode import control_strings, plain_backend, with_texts
from pipeline.tokenizer.messages import GENERATION, learned_spans, refusal_of, shown
from pipeline.tokenizer.template_sandbox import bound_templates

# Of templates that write the day's date: prepared rows must not depend on the day. Llama 3.1's own template falls back
# to it.
DATE = datetime(2024, 7, 26)
# Around a control string in a message while the template renders it. Noncharacters: no text has them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
TAKEN_APART = (
    "the chat template takes a message's text apart at a control string in it, so that the string cannot be kept as "
    "text"
)
NO_END = "the chat template writes no end of turn behind message {}"
SAID = 32  # characters of an answer's end, by which its turn is known
FIRST = "\ufdd2"  # begins the answers of the probe: no generation prompt goes on with it
# Nothing that a template could trim, split or read as reasoning.
PROBE = [
    {"role": "user", "content": "question one"},
    {"role": "assistant", "content": f"{FIRST}answer one"},
    {"role": "user", "content": "question two"},
    {"role": "assistant", "content": f"{FIRST}answer two"},
]
# A call, and the forms that templates want calls in: with a content, and with arguments as JSON text.
TOOL_CALL = {"id": "callnumb1", "type": "function", "function": {"name": "tool1", "arguments": {"a": "b"}}}
FORMS = ((False, False), (True, False), (False, True), (True, True))
Spans = list[tuple[int, int]]


class CustomChatTemplate:
    """Renders conversations with the chat template that a tokenizer came with.

    problems: why it cannot be trained with; empty when it can. end_of_turn: the id that ends what the assistant
    writes.
    """

    date = DATE

    def __init__(self, tokenizer: Any, tools: list[dict] | None = None):
        self.template: str = tokenizer.get_chat_template(tools=tools)
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
        # How turns begin and end in a whole text: from a control token to the answer, and from its end to the next
        # message.
        self._leads: set[str] = set()
        self._tails: list[str] = []
        self.end_of_turn: int | None = None
        self._form = FORMS[0]
        self.problems = self._probe()
        self._form = next(filter(self._writes_calls, FORMS), FORMS[1])
        self._with_tools = self
        if tools is None and isinstance(
            tokenizer.chat_template, dict
        ):  # which may hold one for conversations with tools
            self._with_tools = CustomChatTemplate(tokenizer, [])

    def render(
        self, conversations: list[list[dict]], tools: Sequence[list[dict] | None]
    ) -> list[tuple[list[int], list[bool]]]:
        """Return the ids of each conversation, and for each id whether it is trained. tools: those of each
        conversation."""
        rendered = [self._of(given)._render(talk, given) for talk, given in zip(conversations, tools, strict=True)]
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

    def _of(self, tools: list[dict] | None) -> "CustomChatTemplate":
        return self._with_tools if tools else self

    def prompt_ids(self, messages: list[dict], *, tools: list[dict] | None = None, today: bool = False) -> list[int]:
        """Return the ids up to where the assistant answers. today: a template that writes the date writes today's."""
        own = self._of(tools)
        template = own.template if today else own._dated
        text, _ = own._text(self._marked(messages), self._mark(tools), prompt=True, template=template)
        return self._encode_marked(text)[0]

    def _render(self, messages: list[dict], tools: list[dict] | None = None) -> tuple[str, Spans]:
        """Return the conversation's text, control strings of messages and tools between OPEN and CLOSE, and the spans
        to train."""
        marked, given = self._marked(messages), self._mark(tools)
        text, spans = self._text(marked, given)
        if (marked, given) != (messages, tools) and MARKED.sub("\\g<1>", text) != self._text(messages, tools)[0]:
            raise DataError(TAKEN_APART)
        if not self.marks_answers:
            spans = self._turns(marked, given, text)
        _must_write_calls(marked, "".join(text[start:end] for start, end in spans))
        return text, self._learned(marked, given, text, spans)

    def _learned(self, messages: list[dict], tools: Any, text: str, spans: Spans) -> Spans:
        """Return the spans without those of messages of weight 0."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        learnt = [messages[number].get("weight") != 0 for number in answers]
        if all(learnt):
            return spans
        starts = [self._start(messages[:number], tools, text) for number in answers]
        if None in starts:
            return learned_spans(messages, spans)
        # A template may mark an answer in parts, and its end behind the last one: each span is of the answer that it
        # is behind.
        return [span for span in spans if learnt[max(0, bisect_left(starts, span[1]) - 1)]]  # type: ignore[type-var]

    def _text(
        self, messages: list[dict], tools: Any = None, *, prompt: bool = False, template: str | None = None
    ) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            bound_templates()
            rendered: Any = render_jinja_template(
                [_with_calls(shown(messages), *self._form)],
                tools=tools or None,
                chat_template=template or self._dated,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self.marks_answers and not prompt,
                **self._variables,
            )
        except Exception as error:  # a template raises whatever its expressions raise
            raise DataError(refusal_of(error)) from None
        (text,), spans = rendered
        if not spans:
            return text, []
        return text, spans[0]

    def _turns(self, messages: list[dict], tools: Any, text: str) -> Spans:
        """Return where each of the assistant's turns is in the text, without the prompt that it answers.

        A turn is certain from the text of the messages up to it. The first and the last turn of each kind are found
        so; where headers and ends in the whole text show these at the same places, they show the others too, in one
        rendering.
        """
        numbers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        kinds: dict[Any, list[int]] = {}
        for number in numbers:
            around = [message.get("role") for message in messages[max(0, number - 1) : number + 2]]
            kinds.setdefault((tuple(around), tuple(messages[number])), []).append(number)
        turns = {}
        answers = [messages[number] for number in numbers]
        in_text = dict(zip(numbers, self._turns_in(text, answers), strict=False))
        for alike in kinds.values():
            known = {number: self._turn(messages, tools, text, number) for number in {alike[0], alike[-1]}}
            turns.update(known)
            agree = known.items() <= in_text.items()
            for number in alike[1:-1]:
                turns[number] = in_text[number] if agree else self._turn(messages, tools, text, number)
        spans = [turns[number] for number in numbers]
        for number, (_, end), (start, _) in zip(numbers, spans, spans[1:], strict=False):
            if end > start:
                raise DataError(NO_END.format(number))
        return spans

    def _turn(self, messages: list[dict], tools: Any, text: str, number: int) -> tuple[int, int]:
        """Return where the turn of that message is in the text."""
        start = self._start(messages[:number], tools, text)
        if start is None:
            raise DataError(
                f"the chat template renders what stands before message {number} in another way once it is answered, "
                "so what is trained there cannot be found. Mark the answers in the template with {% generation %} ... "
                "{% endgeneration %}, and name it as tokenizer.chat_template"
            )
        through = text if number + 1 == len(messages) else self._text(messages[: number + 1], tools)[0]
        if len(through) > start and text.startswith(through):
            return start, len(through)
        # Reasoning that only the last turn keeps, or another end where other turns follow: the turn's first end it is.
        end = self._end_of_turn().search(text, start)
        if end is None:
            raise DataError(NO_END.format(number))
        return start, end.end()

    def _end_of_turn(self) -> re.Pattern:
        ends = "|".join(map(re.escape, sorted(self._ends))) or "(?!)"
        return re.compile(f"(?<!{OPEN})(?:{ends})\\s*")

    def _turns_in(self, text: str, answers: list[dict]) -> Spans:
        """Return the turns of these messages by the template's own headers and ends; none where they do not show them
        all."""
        end_of_turn, turns, at = self._end_of_turn(), [], 0
        leads = "|".join(map(re.escape, sorted(self._leads, key=len, reverse=True))) or "(?!)"
        for lead in re.finditer(f"(?<!{OPEN})(?:{leads})", text):
            end = end_of_turn.search(text, lead.end())
            if lead.start() < at or end is None:
                return []
            tail = next((tail for tail in self._tails if text.startswith(tail, end.start())), end.group())
            at = end.start() + len(tail)
            turns.append((lead.end(), at))
        if len(turns) != len(answers):
            return []
        for answer, (start, stop) in zip(answers, turns, strict=True):
            if str(answer.get("content") or "").strip()[-SAID:] not in text[start:stop]:
                return []
        return turns

    def _start(self, before: list[dict], tools: Any, text: str) -> int | None:
        if not before:  # Templates fail on no messages; nothing before the first turn's header looks like it.
            places = [text.find(header) + len(header) for header in self._headers if header and header in text]
            return min(places, default=None)
        prompted, _ = self._text(before, tools, prompt=True)
        if text.startswith(prompted):
            return len(prompted)
        unprompted, _ = self._text(before, tools)
        for header in self._headers:  # templates whose prompt holds more than the turn's header (an open <think>)
            if text.startswith(unprompted + header):
                return len(unprompted + header)
        return None

    def _probe(self) -> list[str]:
        try:
            return self._look_at(PROBE) or self._look_at(PROBE[:2])
        except DataError as error:
            return [f"cannot be rendered or read ({error})"]

    def _writes_calls(self, form: tuple[bool, bool]) -> bool:
        self._form = form
        try:
            return "tool1" in self._text([PROBE[0], {"role": "assistant", "tool_calls": [TOOL_CALL]}])[0]
        except DataError:
            return False

    def _look_at(self, messages: list[dict]) -> list[str]:
        """Return what is wrong with the rendering of harmless messages; their headers and ends of turns are kept."""
        text, _ = self._text(messages)
        for message in messages:
            if message["content"] not in text:
                return [f"leaves out {message['content']!r}, which a message says"]
        if not self.marks_answers:
            problems = self._learn(messages, text)
            if problems:
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
        """Return the headers of the assistant's turns and the control tokens that end them, from a probe; what is
        wrong with them."""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # 1. The header: what the prompt has behind the messages before, as far as the whole text has it too.
            prompted, _ = self._text(messages[:number], prompt=True)
            unprompted, _ = self._text(messages[:number])
            lead = ""
            if prompted.startswith(unprompted) and text.startswith(unprompted):
                lead = commonprefix([prompted, text])[len(unprompted) :]  # noqa: RUF071 - of characters
                self._headers = sorted({*self._headers, lead}, key=len, reverse=True)
            if not lead.strip():
                begins = [place.start() for place in self._control.finditer(prompted)]
                lead = prompted[max(begins, default=0) :]
            self._leads.add(lead)
            # 2. The end, and what the template writes behind it where nothing follows.
            end = self._end_behind(messages, number, text)
            if end is None:
                return ["ends the assistant's turn with no control token, so that the model would not learn to stop"]
            self._ends.add(end)
            alone, _ = self._text(messages[: number + 1])
            if text.startswith(alone):
                behind = alone.rfind(message["content"]) + len(message["content"])
                self._tails = sorted({*self._tails, alone[alone.index(end, behind) :]}, key=len, reverse=True)
        return []

    def _end_behind(self, messages: list[dict], number: int, text: str) -> str | None:
        """Return the control token behind a message of the probe; None where the next turn's first token is what ends
        it."""
        content = messages[number]["content"]
        alone, _ = self._text(messages[: number + 1])
        behind = text.find(content) + len(content)
        end = self._control.search(text, behind)
        closes = self._control.search(alone, alone.rfind(content) + len(content))
        return end.group() if end and closes and not text[behind : end.start()].strip() else None

    def _marked(self, messages: list[dict]) -> list[dict]:
        """Return the messages with their control strings between OPEN and CLOSE; the same list when they have none."""
        marked = []
        for message in messages:
            marked.append({key: value if key == "role" else self._mark(value) for key, value in message.items()})
        for number, message in enumerate(messages):
            if isinstance(message.get("content"), list):
                self._refuse_joined(number, message["content"])
        return messages if marked == messages else marked

    def _mark(self, value: Any) -> Any:
        return with_texts(value, self._mark_text)

    def _mark_text(self, text: str) -> str:
        if OPEN in text or CLOSE in text:
            raise DataError("a message holds the noncharacter U+FDD0 or U+FDD1, which stands for nothing. Remove it")
        return self._control.sub(f"{OPEN}\\g<0>{CLOSE}", text)

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
            backend = self._plain if number % 2 else self._backend  # every second piece is a group of MARKED
            new, places = self._encode_piece(piece, backend, first=at == 0)
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


def _with_calls(messages: list[dict], content: bool, text: bool) -> list[dict]:
    """Return the messages with a content, and arguments as JSON text, beside the assistant's calls where these are
    wanted."""
    if not (content or text):
        return messages
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls and text:
            message = {**message, "tool_calls": list(map(_with_json_arguments, calls))}
        if calls and content:
            message = {"content": "", **message}
        found.append(message)
    return found


def _with_json_arguments(call: dict) -> dict:
    function = call.get("function", call)
    arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _must_write_calls(messages: list[dict], trained: str) -> None:
    """Raise DataError where the template passes over a tool call: the turn would be learned as an empty answer."""
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or []:
            if call.get("function", call)["name"] not in trained:
                raise DataError(
                    f"the chat template leaves out the tool call of message {number}. Name one that writes calls as "
                    "tokenizer.chat_template"
                )


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
    """Return a copy of the tokenizer's backend whose places in the text are exact: post-processors trim white space
    off them."""
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
