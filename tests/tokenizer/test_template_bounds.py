"""What a chat template may cost: a hostile one ends in a sentence within seconds, one that people have renders as it always did."""

import copy
import resource
import time
from pathlib import Path

import pytest

from pipeline.tokenizer import own_template as chat

DOUBLING = "{% set ns = namespace(x='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.x = GROWN %}{% endfor %}"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
LISTS = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = GROWN %}{% endfor %}"
HOSTILE = {
    "loops in loops": NESTED.replace("BODY", ""),
    "loops that write": NESTED.replace("BODY", "some text"),
    "loops over what they filter out": "{% for a in range(99999) %}{% for b in range(99999) if b == 'x' %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "searches": "{% for a in range(99999) %}{% set y = 'x' in range(99999) %}{% endfor %}",
    "searches without a loop": "{% set r = range(99999) %}" + "{{ 'x' in r }}" * 12_000,
    "searches by a filter": "{{ range(99999)|map('string')|select('in', range(99999))|list }}",
    "doubling by ~": DOUBLING.replace("GROWN", "ns.x ~ ns.x"),
    "doubling by +": DOUBLING.replace("GROWN", "ns.x + ns.x"),
    "doubling by *": DOUBLING.replace("GROWN", "ns.x * 9"),
    "doubling by %": DOUBLING.replace("GROWN", "'%s%s' % (ns.x, ns.x)"),
    "doubling by format": DOUBLING.replace("GROWN", "'{0}{0}'.format(ns.x)"),
    "doubling by the filter format": DOUBLING.replace("GROWN", "'%s%s'|format(ns.x, ns.x)"),
    "doubling by replace": DOUBLING.replace("GROWN", "ns.x.replace('a', 'aaaa')"),
    "doubling by join": DOUBLING.replace("GROWN", "ns.x.join([ns.x, ns.x, ns.x])"),
    "doubling by the filter join": DOUBLING.replace("GROWN", "[ns.x, ns.x]|join(ns.x)"),
    "doubling by a block": DOUBLING.replace("{% set ns.x = GROWN %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubling by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING.replace("GROWN", "m(ns.x)"),
    "doubling of a number": "{% set ns = namespace(x=99) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "lists added": LISTS.replace("GROWN", "ns.x + ns.x"),
    "a text repeated": "{{ 'a' * 100000000000 }}",
    "a list repeated": "{{ ['a'] * 100000000000 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a width of center": "{{ 'a'.center(99999999999) }}",
    "a width of ljust by name": "{{ 'a'|attr('ljust')(99999999999) }}",
    "bytes of a number": "{{ (1).to_bytes(99999999999, 'big') }}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a block that calls itself twice": "{% block b scoped %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "brackets": "{{ " + "(" * 100_000,
    "lists without end": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "ifs in ifs": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "a very long template": "{{ 1 }}" * 1_000_000,
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
    chat.bound_templates()
    ours = chat_template_utils.ImmutableSandboxedEnvironment

    def compiled(text: str, sandbox: type):
        monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", sandbox)
        return chat_template_utils._cached_compile_jinja_template(text)

    return lambda text: compiled(text, ImmutableSandboxedEnvironment), lambda text: compiled(text, ours)


@pytest.mark.full_except("loops in loops")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_would_take_all_time_or_memory_ends_in_a_sentence(name, sandboxes, monkeypatch):
    from jinja2.exceptions import TemplateError

    monkeypatch.setattr(chat, "MOST_CPU_S", 1.0)
    _, ours = sandboxes
    held, before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises((TemplateError, RecursionError, SyntaxError, MemoryError)) as raised:
        ours(HOSTILE[name]).render(messages=talk(4), tools=None, **SPECIALS)
    assert time.thread_time() - before < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 2_000_000, "KiB more than before"
    assert str(raised.value)


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
