"""What a chat template may cost: an endless one ends in a sentence within seconds, one that people have renders as
transformers renders it."""

import copy
import gc
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.tokenizer import template_sandbox

DOUBLING = "{% set ns = namespace(x='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.x = GROWN %}{% endfor %}"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
LISTS = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = GROWN %}{% endfor %}"
ENDLESS = {
    "loops in loops": NESTED.replace("BODY", ""),
    "loops that write": NESTED.replace("BODY", "some text"),
    "loops over what they filter out": "{% for a in range(99999) %}{% for b in range(99999) if b == 'x' %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "searches": "{% for a in range(99999) %}{% set y = 'x' in range(99999) %}{% endfor %}",
    "doubling by ~": DOUBLING.replace("GROWN", "ns.x ~ ns.x"),
    "doubling by +": DOUBLING.replace("GROWN", "ns.x + ns.x"),
    "doubling by a block": DOUBLING.replace("{% set ns.x = GROWN %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubling by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING.replace("GROWN", "m(ns.x)"),
    "lists added": LISTS.replace("GROWN", "ns.x + ns.x"),
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a block that calls itself twice": "{% block b scoped %}{{ self.b() }}{{ self.b() }}{% endblock %}",
}  # fmt: skip
TRL = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}, "b": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}}}  # fmt: skip
CALLED = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": "x", "b": [1, 2]}}}]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "r"},
    {"role": "assistant", "content": "done"},
]  # fmt: skip
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", "unk_token": "<u>"}


def talk(turns: int, characters: int = 200) -> list[dict]:
    text = ("a word " * characters)[:characters].strip()
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n in range(turns)]


CONVERSATIONS = {
    "two turns": (talk(2), False, None),
    "a prompt": (talk(3), True, None),
    "long turns": (talk(8, 5_000), False, None),
    "many turns": (talk(80), False, None),
    "a system text": ([{"role": "system", "content": "S"}, *talk(3)], True, None),
    "tools": (CALLED, False, [TOOL]),
    "parts": ([{**m, "content": [{"type": "text", "text": m["content"]}]} for m in talk(3)], True, None),
}


def rendered(template, messages, prompt, tools) -> str:
    given = {"messages": copy.deepcopy(messages), "tools": tools, "documents": None, "add_generation_prompt": prompt}
    try:
        return template.render(**given, **SPECIALS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture
def sandboxes(monkeypatch):
    """transformers' own sandbox, and ours."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", None)
    template_sandbox.bound_templates()
    ours = chat_template_utils.ImmutableSandboxedEnvironment

    def compiled(text: str, sandbox: type):
        monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", sandbox)
        return chat_template_utils._cached_compile_jinja_template(text)

    return lambda text: compiled(text, ImmutableSandboxedEnvironment), lambda text: compiled(text, ours)


@pytest.fixture(scope="module")
def earlier_peak():
    """A process that has held more memory before than a template may take: only what it holds now counts."""
    _ = b"x" * 2**30


@pytest.mark.full_except("loops in loops")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_take_all_time_or_memory_is_stopped(name, earlier_peak, sandboxes, monkeypatch):
    from jinja2.exceptions import TemplateError

    monkeypatch.setattr(template_sandbox, "MAX_CPU_S", 1.0)
    _, ours = sandboxes
    gc.collect()  # what earlier tests left is not to be freed between the two looks
    before, held = time.thread_time(), psutil.Process().memory_info().rss
    with pytest.raises((TemplateError, RecursionError, SyntaxError, MemoryError)) as raised:
        ours(ENDLESS[name]).render(messages=talk(4), tools=None, **SPECIALS)
    assert time.thread_time() - before < 10
    assert psutil.Process().memory_info().rss - held < 2_000_000_000
    assert str(raised.value)


@pytest.mark.full
def test_memory_that_others_free_meanwhile_is_no_room_for_a_template(sandboxes):
    from jinja2.exceptions import SecurityError

    held = [b"x" * 3 * 2**30]
    _, ours = sandboxes
    template = ours("{{ free() }}" + ENDLESS["doubling by a block"])
    before = psutil.Process().memory_info().rss
    with pytest.raises(SecurityError) as raised:
        template.render(messages=talk(4), tools=None, free=held.clear, **SPECIALS)
    assert psutil.Process().memory_info().rss - before < -1 * 2**30
    assert "without end" in str(raised.value)


KEPT = """
import psutil
from pipeline.hardware.processor import keep_freed_memory
from tests.tokenizer.test_template_sandbox import DOUBLING, ENDLESS, SPECIALS, talk
from pipeline.tokenizer import template_sandbox
from transformers.utils import chat_template_utils

keep_freed_memory()
blocks = [b"x" * 2**28 for _ in range(12)]
del blocks
held = psutil.Process().memory_info().rss
assert held > 3 * 2**30
template_sandbox.bound_templates()
for name in ("doubling by +", "doubling by a block"):
    template = chat_template_utils._cached_compile_jinja_template(ENDLESS[name])
    try:
        template.render(messages=talk(4), tools=None, **SPECIALS)
    except Exception as error:
        print(type(error).__name__, error)
print("grown", psutil.Process().memory_info().rss - held)
"""


@pytest.mark.full
def test_freed_memory_that_is_kept_is_no_room_for_a_template():
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    lines = done.stdout.splitlines()
    assert lines[:2] == ["SecurityError it makes texts or lists without end"] * 2, done.stdout + done.stderr
    assert int(lines[2].split()[1]) < 2**30


@pytest.mark.full
@pytest.mark.parametrize("file", sorted(path.name for path in TRL.glob("*.jinja")))
def test_templates_that_people_have_render_as_in_transformers_own_sandbox(file, sandboxes):
    stock, ours = (compiled((TRL / file).read_text()) for compiled in sandboxes)
    for messages, prompt, tools in CONVERSATIONS.values():
        assert rendered(ours, messages, prompt, tools) == rendered(stock, messages, prompt, tools)


@pytest.mark.full
def test_a_long_conversation_is_rendered_whole(sandboxes):
    _, ours = sandboxes
    template = ours("{% for m in messages %}{% for n in range(40) %}{{ m.content }}{% endfor %}{% endfor %}")
    assert len(template.render(messages=talk(20, 100_000))) > 70_000_000
