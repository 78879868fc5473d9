"""Bounds on what a chat template costs: it came with somebody's model, and its loops, doublings and calls end in a sentence.

All that a template computes is counted, one step a character or operation; what would grow beyond the limit is refused before it is
made. Equal templates and messages end the same on every machine, but for operations so slow that the time decides.
"""

import re
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from jinja2.utils import Namespace

# Of one rendering: an ordinary conversation costs some thousand steps.
MOST_STEPS = 20_000_000
STEPS_PER_CHARACTER = 200  # of messages and tools, in addition; SmolVLM's template takes 42, letter by letter
MOST_CPU_S = 3.0  # of the thread, so that a process that is stopped or waits is not refused
CPU_S_PER_CHARACTER = 2e-5  # in addition
MOST_SOURCE = 300_000  # characters; the longest published template has some 20,000
MOST_BITS = 100_000  # of a whole number
ITEM, CALL, COMPARISON = 10, 20, 20  # steps
LOOK = 5_000  # steps between two looks at the time
SLOW_CHARACTERS = 100_000  # taken by filters that are quadratic in their text
SLOW = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# They give back what they are given, so that nothing has to be looked into.
PASSING = ("count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")  # fmt: skip
TOO_MUCH = "it makes texts or lists without end"
# An undefined value and a loop have a length too, which must not be asked for.
HOLDING: Any = (list, tuple, dict, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


def bound_templates() -> None:
    """Let transformers render templates in a sandbox of ours from now on.

    Not undone afterwards: transformers keeps what it has compiled with the sandbox of that moment.
    """
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = _sandbox_class()  # type: ignore[assignment,misc]


class Meter:
    """Counts the steps of one rendering. inputs: the template's variables, whose size raises the limit.

    Raises jinja2's SecurityError in every method.
    """

    __slots__ = ("began", "inputs", "limit", "looks_at", "steps")

    def __init__(self, inputs: dict[str, Any] | None):
        self.steps, self.looks_at, self.limit, self.inputs = 0, LOOK, MOST_STEPS, inputs
        self.began = time.thread_time()

    def step(self, cost: int = 1) -> None:
        """Count, and give nothing back: the code of a comparison begins with it."""
        self.steps += cost
        if self.steps > self.looks_at:
            self._look()

    def made(self, value: Any) -> Any:
        """Count a value that the template made and give it back."""
        if isinstance(value, str):
            self.steps += len(value)
            if self.steps > self.looks_at:
                self._look()
        elif isinstance(value, HOLDING):
            self.step(ITEM * len(value))
            self.bound(value)
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            _refuse("it makes a number of too many digits")
        return value

    def cut(self, value: Any) -> Any:
        """Count a part of a value, which holds nothing new, and give it back."""
        self.step(_length(value))
        return value

    def shown(self, value: Any) -> Any:
        """Count what is written and give it back."""
        self.steps += len(value) if isinstance(value, str) else self.bound(value)
        if self.steps > self.looks_at:
            self._look()
        return value

    def bound(self, *values: Any) -> int:
        """Return the size of values as text; what holds one list often is as large as its text would be."""
        size, left = 0, list(values)
        while left:
            value = left.pop()
            if isinstance(value, str | bytes):
                size += len(value)
            elif isinstance(value, HOLDING):
                size += ITEM * (1 + len(value))
                left += value
                left += value.values() if isinstance(value, dict) else ()
            elif isinstance(value, Namespace):
                size += ITEM
                left.append(object.__getattribute__(value, "_Namespace__attrs"))
            else:
                size += 1
            if size > self.limit:
                self.growing(size)
        return size

    def growing(self, size: int) -> None:
        """Refuse a value of that size, before it is made."""
        if size > self.limit and size > self._whole_limit():
            _refuse(TOO_MUCH)

    def joined(self, join: Callable[[tuple], str], parts: tuple) -> str:
        """Return the texts of `~`."""
        self.step(sum(len(part) if isinstance(part, str) else self.bound(part) for part in parts))
        return join(parts)

    def before(self, name: str, subject: Any, given: tuple, named: dict[str, Any]) -> None:
        """Count a filter or a text's method, and refuse one whose result would be too large. subject: what comes before it."""
        others = (*given, *named.values()) if named else given
        self.step(_length(subject))
        if name in PASSING:
            return
        for value in (subject, *others):
            if isinstance(value, (*HOLDING, Namespace)):
                self.bound(value)
        growth = GROWTH.get(name)
        if growth is not None:
            self.growing(growth(subject, others))
        if name in SLOW and self.bound(subject) > SLOW_CHARACTERS:
            _refuse(f"it gives {name} more than {SLOW_CHARACTERS:,} characters")

    def _look(self) -> None:
        self.growing(self.steps)
        spent = time.thread_time() - self.began
        if spent > MOST_CPU_S:
            characters = (self._whole_limit() - MOST_STEPS) // STEPS_PER_CHARACTER
            if spent > MOST_CPU_S + characters * CPU_S_PER_CHARACTER:
                _refuse(f"it computes for more than {spent:.0f} s")
        self.looks_at = self.steps + LOOK

    def _whole_limit(self) -> int:
        if self.inputs is not None:
            inputs, self.inputs = self.inputs, None
            self.limit = 2**62  # while they are measured
            self.limit = MOST_STEPS + STEPS_PER_CHARACTER * self.bound(inputs)
        return self.limit


def refusal_of(error: BaseException) -> str:
    """Return the sentence for what a template raised, which may be as long as the template likes."""
    reason = str(error) or type(error).__name__
    if isinstance(error, RecursionError):
        reason = "it calls itself without end"
    return f"the chat template refuses the conversation: {reason[:300]}{'...' if len(reason) > 300 else ''}"


def _refuse(reason: str) -> None:
    from jinja2.exceptions import SecurityError

    raise SecurityError(reason)


def _largest(values: tuple) -> int:
    """Return the largest whole number, or length of a text, among them."""
    return max(
        (value if isinstance(value, int) else len(value) for value in values if isinstance(value, int | str)), default=0
    )


def _widths(form: Any, values: tuple) -> int:
    """Return a bound on what `%` or str.format make of a text: its widths, and each value as often as there are fields."""
    if not isinstance(form, str):
        return 0
    if re.search(r"%[^a-zA-Z%]*\*|:[^{}]*\{", form):
        _refuse("it takes a width from a value")
    widths = sum(
        int(digits[:9])
        for field in re.findall(r"%[^a-zA-Z%]*|:[^{}]*", form)
        for digits in re.findall(r"\d{4,}", field)
    )
    fields = form.count("%") + form.count("{")
    return len(form) + widths + fields * max((len(v) if isinstance(v, str) else 0 for v in values), default=0)


def _replaced(text: Any, others: tuple) -> int:
    if len(others) < 2 or not all(isinstance(value, str) for value in (text, *others[:2])):
        return _largest((text,)) * _largest(others)
    return text.count(others[0]) * len(others[1])


def _sum_begins(_: Any, others: tuple) -> int:
    if any(not isinstance(value, int | float | str | None) for value in others):
        _refuse("it sums lists")
    return 0


# By the name of a filter or of a text's method: how long the result may be, from what comes before it and the other arguments.
GROWTH: dict[str, Callable[[Any, tuple], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice"), lambda _, others: ITEM * _largest(others)),
    **dict.fromkeys(("expandtabs", "indent", "tojson"), lambda text, others: _length(text) * _largest(others)),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "trim"), lambda text, others: _length(text) * _largest(others) // 50),
    "round": lambda _, others: 10_000 * _largest(others),
    "replace": _replaced,
    "translate": lambda text, others: _length(text) * max((len(v) for v in others[0].values() if isinstance(v, str)), default=0) if others and isinstance(others[0], dict) else 0,
    "join": lambda separated, others: _length(separated) * max(map(_length, others), default=0),
    "sum": _sum_begins,
    "format": _widths,
    "format_map": _widths,
    "strftime_now": lambda _, others: sum(_widths(value, ()) for value in others),
}  # fmt: skip


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, range, HOLDING)) else 1


@cache
def _bounded_filter(name: str, function: Callable) -> Callable:
    """Return the filter, counted."""
    from jinja2.utils import _PassArg, pass_context

    passed = _PassArg.from_obj(function)
    first: Callable[[Any], tuple] = {
        _PassArg.context: lambda context: (context,),
        _PassArg.eval_context: lambda context: (context.eval_ctx,),
        _PassArg.environment: lambda context: (context.environment,),
        None: lambda _: (),
    }[passed]

    def bounded(context, value, *given, **named):
        if name == "join" and not isinstance(value, (str, *HOLDING)):
            value = [context.meter.made(item) for item in value]
        context.meter.before(name, value, given, named)
        made = function(*first(context), value, *given, **named)
        return made if name in PASSING else context.meter.made(made)

    return pass_context(bounded)


@cache
def _sandbox_class() -> type:
    """Return the sandbox class: its contexts have a meter, and the code of its templates asks it."""
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.runtime import Context, Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Counted(Context):
        def __init__(self, environment, parent, *given, **named):
            super().__init__(environment, parent, *given, **named)
            self.meter = Meter(parent)

        def derived(self, locals=None):
            context = super().derived(locals)
            context.meter = self.meter  # type: ignore[attr-defined]
            return context

    class Counting(CodeGenerator):
        """Writes templates as Python that counts: blocks, comparisons, and what operators and literals make."""

        def blockvisit(self, nodes_, frame):
            nodes_ = list(nodes_)
            written = [child for node in nodes_ if isinstance(node, nodes.Output) for child in node.nodes]
            literal = sum(len(child.data) for child in written if isinstance(child, nodes.TemplateData))
            self.writeline(f"context.meter.step({1 + literal})")
            super().blockvisit(nodes_, frame)

        def visit_Compare(self, node, frame):
            self._within(f"(context.meter.step({COMPARISON}) or ", super().visit_Compare, node, frame)

        def visit_Test(self, node, frame):
            self._within(f"(context.meter.step({COMPARISON}) or ", super().visit_Test, node, frame)

        def visit_Add(self, node, frame):
            self._within("context.meter.made(", super().visit_Add, node, frame)

        def visit_List(self, node, frame):
            self._within("context.meter.made(" if node.items else "(", super().visit_List, node, frame)

        def visit_Dict(self, node, frame):
            self._within("context.meter.made(" if node.items else "(", super().visit_Dict, node, frame)

        def visit_Tuple(self, node, frame):
            if node.ctx == "load":
                self._within("context.meter.made(", super().visit_Tuple, node, frame)
            else:
                super().visit_Tuple(node, frame)

        def visit_Getitem(self, node, frame):
            if isinstance(node.arg, nodes.Slice):
                self._within("context.meter.cut(", super().visit_Getitem, node, frame)
            else:
                super().visit_Getitem(node, frame)

        def visit_Concat(self, node, frame):
            autoescape = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
            escaped = "(markup_join if context.eval_ctx.autoescape else str_join)" if autoescape else "str_join"
            self.write(f"context.meter.joined({escaped}, (")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

        def _make_finalize(self):
            return self._FinalizeInfo(None, "context.meter.shown(")

        def _within(self, begin, visit, node, frame):
            self.write(begin)
            visit(node, frame)
            self.write(")")

    class BoundedFilters(dict):
        def __getitem__(self, name):
            return _bounded_filter(name, super().__getitem__(name))

        def get(self, name, default=None):
            return self[name] if name in self else default  # noqa: SIM401  # it would ask itself

    class BoundedSandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**", "%"])
        context_class = Counted
        code_generator_class = Counting

        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.filters = BoundedFilters(self.filters)
            del self.globals["lipsum"]  # no conversation needs random Latin

        def from_string(self, source, *given, **named):
            if isinstance(source, str) and len(source) > MOST_SOURCE:
                _refuse(f"it has {len(source):,} characters, and {MOST_SOURCE:,} are read")
            return super().from_string(source, *given, **named)

        def call_binop(self, context, operator, left, right):
            meter, plain = context.meter, isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "**" and not (plain and abs(left) <= MOST_BITS and abs(right) <= 64):
                _refuse("it raises to a power that is too large")
            if operator == "*" and not plain:
                times, repeated = (left, right) if isinstance(left, int) else (right, left)
                if isinstance(times, int):
                    meter.growing(times * meter.bound(repeated))
            if operator == "%" and not plain:
                values = (
                    right if isinstance(right, tuple) else (right.values() if isinstance(right, dict) else (right,))
                )
                meter.before("%", left, (right,), {})
                meter.growing(_widths(left, tuple(values)))
            return meter.made(super().call_binop(context, operator, left, right))

        def call(self, context, function, *given, **named):
            meter = context.meter
            meter.step(CALL)
            if isinstance(function, Macro):
                return meter.made(super().call(context, function, *given, **named))
            method = getattr(function, "__wrapped__", function)  # of str.format, which the sandbox wraps
            own, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            if isinstance(own, HOLDING):
                return super().call(context, function, *given, **named)  # a part of a list or mapping
            others = {key: value for key, value in named.items() if key not in ("_loop_vars", "_block_vars")}
            if name == "join" and given:
                given = ([meter.made(item) for item in given[0]], *given[1:])
                meter.before(name, given[0], (own,), others)
            else:
                meter.before(name, own, given, others)
            return meter.made(super().call(context, function, *given, **named))

        def call_test(self, name, value, args=None, kwargs=None, context=None, eval_ctx=None):
            if context is not None:
                context.meter.step(COMPARISON)
            return super().call_test(name, value, args, kwargs, context, eval_ctx)

    return BoundedSandbox
