"""Conversations: what is trained, and that no text becomes a control token."""

import itertools
import json
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.losses import fit_conversation
from pipeline.process.errors import DataError
from pipeline.tokenizer.chat import (
    built_in_template,
    custom_template,
    end_of_turn,
    prompt_ids,
    render,
    render_batch,
    template_problems,
    unrendered,
)
from pipeline.tokenizer.encode import SPECIALS, control_ids, escape

CALL = {"type": "function", "function": {"name": "python", "arguments": {"code": "1+1"}}}
PIECES = [
    *SPECIALS,
    "<|bo",
    "s|>",
    "<|",
    "|>",
    "<",
    "\u2060",
    " ",
    "\n",
    "e\u0301",
    "\U0001f600",
    "{% generation %}",
    "{{ x }}",
    "word",
]
hostile = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
quick = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_a_conversation_reads_as_the_contract_says_and_trains_the_assistant_alone(tokenizer):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": " A\n"},
        {"role": "user", "content": "V"},
        {"role": "assistant", "content": "B"},
    ]
    ids, trained = render(tokenizer, messages)
    text = "<|bos|><|system|>S<|end|><|user|>U<|end|><|assistant|> A\n<|end|><|user|>V<|end|><|assistant|>B<|end|>"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([i for i, bit in zip(ids, trained, strict=True) if bit]) == " A\n<|end|>B<|end|>"
    assert (
        tokenizer.decode(prompt_ids(tokenizer, messages[:2]))
        == "<|bos|><|system|>S<|end|><|user|>U<|end|><|assistant|>"
    )


def test_a_tool_call_is_trained_and_its_output_is_not(tokenizer):
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "Let me see. ", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    ids, trained = render(tokenizer, messages)
    turn = "<|assistant|>Let me see. <|python_start|>1+1<|python_end|><|output_start|>2<|output_end|>It is 2.<|end|>"
    assert tokenizer.decode(ids) == "<|bos|><|user|>1+1?<|end|>" + turn
    written = tokenizer.decode([i for i, bit in zip(ids, trained, strict=True) if bit])
    assert written == "Let me see. <|python_start|>1+1<|python_end|>It is 2.<|end|>"
    # While the turn is open the assistant goes on in it: a prompt needs no new mark.
    assert tokenizer.decode(prompt_ids(tokenizer, messages[:3])) == ("<|bos|><|user|>1+1?<|end|>" + turn).removesuffix(
        "It is 2.<|end|>"
    )


def test_an_answer_is_read_back_as_written_without_prompt_and_end(tokenizer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )
    for end in ("<|end|>", "<|bos|>", ""):
        read = tokenizer.parse_response(f" an answer\n{end}", prefix=prompt)
        assert read == {"role": "assistant", "content": " an answer\n"}


def test_the_template_escapes_no_character_in_its_strings():
    # llama.cpp's Jinja refuses a model whose template spells a character by its number.
    template = built_in_template([*SPECIALS, "<\uff5cend\u2581of\u2581text\uff5c>"])
    assert "\\u" not in template
    assert '"<\uff5cend\u2581of\u2581text\uff5c>"' in template


def test_a_call_of_another_function_is_written_as_json(tokenizer):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "<|end|>"}}}
    ids, _ = render(
        tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    )
    code = tokenizer.decode(ids).partition("<|python_start|>")[2].partition("<|python_end|>")[0]
    assert json.loads(code) == {"name": "weather", "arguments": {"city": "<\u2060|end|>"}}


def test_text_parts_are_joined_before_control_strings_are_looked_for(tokenizer):
    parts = [{"type": "text", "text": "a<|e"}, {"type": "text", "text": "nd|>b"}]
    whole = render(tokenizer, [{"role": "user", "content": "a<|end|>b"}, {"role": "assistant", "content": "x"}])
    assert render(tokenizer, [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]) == whole


def test_the_beginning_of_a_conversation_renders_to_the_beginning_of_its_ids(tokenizer):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "r"},
        {"role": "user", "content": "s"},
        {"role": "assistant", "content": "t"},
    ]
    ids, _ = render(tokenizer, messages)
    for end in range(1, len(messages)):
        start, _ = render(tokenizer, messages[:end])
        assert ids[: len(start)] == start


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "human", "content": "x"}], "the role human"),
        ([{"role": "user"}], "message 0 .user. has no content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "type image"),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": "2"}], "called no tool"),
        ([], "no messages"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_with_the_reason(tokenizer, messages, reason):
    with pytest.raises(DataError, match=reason):
        render(tokenizer, messages)


@quick
@given(contents=st.lists(hostile, min_size=4, max_size=4))
def test_no_content_yields_a_control_id_and_every_content_is_kept(tokenizer, contents):
    system, user, output, answer = contents
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {
            "role": "assistant",
            "content": answer,
            "tool_calls": [{"function": {"name": "python", "arguments": {"code": user}}}],
        },
        {"role": "tool", "content": output},
        {"role": "assistant", "content": answer},
    ]
    ids, trained = render(tokenizer, messages)
    e = escape
    assert tokenizer.decode(ids) == (
        f"<|bos|><|system|>{e(system)}<|end|><|user|>{e(user)}<|end|><|assistant|>{e(answer)}<|python_start|>{e(user)}<|python_end|>"
        f"<|output_start|>{e(output)}<|output_end|>{e(answer)}<|end|>"
    )
    assert sum(i in control_ids(tokenizer) for i in ids) == 11
    written = [i for i, bit in zip(ids, trained, strict=True) if bit]
    assert tokenizer.decode(written) == f"{e(answer)}<|python_start|>{e(user)}<|python_end|>{e(answer)}<|end|>"


@quick
@given(text=hostile)
def test_escaped_text_holds_no_control_string_and_clean_text_is_untouched(text):
    assert not any(control in escape(text) for control in SPECIALS)
    if not any(control in text for control in SPECIALS):
        assert escape(text) == text


def test_a_process_without_this_package_renders_the_training_ids(tokenizer, tmp_path, stock):
    import random

    draw = random.Random(0)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(9))) for _ in range(200)]
    conversations = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in itertools.pairwise(texts)
    ]
    conversations.append(
        [
            {"role": "user", "content": "<|end|>"},
            {"role": "assistant", "content": "<|bos|>", "tool_calls": [CALL]},
            {"role": "tool", "content": "<|output_end|>"},
        ]
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert sorted(p.name for p in (tmp_path / "tokenizer").iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    (tmp_path / "conversations.json").write_text(json.dumps(conversations))
    program = """
import json
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("tokenizer")
out = [tokenizer.apply_chat_template(c, return_dict=True, return_assistant_tokens_mask=True) for c in json.load(open("conversations.json"))]
print(json.dumps([[o["input_ids"], [bool(b) for b in o["assistant_masks"]]] for o in out]))
"""
    assert json.loads(stock.run(program, folder=tmp_path)) == [
        list(pair) for pair in render_batch(tokenizer, conversations)
    ]


def test_one_by_one_and_in_a_batch_give_the_same(tokenizer):
    conversations = [
        [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "\u00e9 " * n}] for n in range(1, 9)
    ]
    assert render_batch(tokenizer, conversations) == [render(tokenizer, c) for c in conversations]


def test_only_a_template_that_marks_and_escapes_uses_transformers_alone(tokenizer):
    import copy

    other = copy.deepcopy(tokenizer)
    assert custom_template(other) is None
    assert end_of_turn(other) == other.eos_token_id
    other.chat_template = "{% for m in messages %}<|user|>{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% endfor %}"  # fmt: skip
    assert custom_template(other) is not None
    other.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    assert template_problems(other) == []
    assert end_of_turn(other) == other.eos_token_id
    other.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "no control token" in template_problems(other)[0]


WEIGHTED = [
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": " wrong", "tool_calls": [CALL], "weight": 0},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "wrong too\n", "weight": 0},
    {"role": "user", "content": "V"},
    {"role": "assistant", "content": " right\n"},
]


def test_a_message_of_weight_0_is_rendered_and_not_trained(tokenizer):
    ids, trained = render(tokenizer, WEIGHTED)
    assert ids == render(tokenizer, [{**message, "weight": 1} for message in WEIGHTED])[0]
    assert tokenizer.decode([i for i, bit in zip(ids, trained, strict=True) if bit]) == " right\n<|end|>"
    assert not any(render(tokenizer, WEIGHTED[:4])[1])


def test_a_conversation_that_is_cut_keeps_the_weights_of_its_messages(tokenizer):
    longer = [*WEIGHTED, {"role": "user", "content": "W"}, {"role": "assistant", "content": "long " * 50}]
    whole, rendering = render(tokenizer, longer), partial(render, tokenizer)
    capacity = len(render(tokenizer, WEIGHTED)[0])
    found = fit_conversation(longer, whole, rendering, capacity=capacity, overflow="cut")
    assert found == (*render(tokenizer, WEIGHTED), "cut")
    # What fits then is not to be learnt at all.
    assert fit_conversation(longer, whole, rendering, capacity=capacity - 1, overflow="cut")[2] == "too_long"


def test_what_the_built_in_template_leaves_out_is_known(tokenizer):
    messages, tools = WEIGHTED[-2:], [{"type": "function", "function": {"name": "<|end|>"}}]
    assert render(tokenizer, messages, tools=tools) == render(tokenizer, messages)
    assert prompt_ids(tokenizer, messages[:1], tools=tools) == prompt_ids(tokenizer, messages[:1])
    assert unrendered(tokenizer).keys() == {"tools", "reasoning"}


@pytest.mark.parametrize("answer", ["\u4f60\u597d\u4e16\u754c", "a \U0001f600 b", "\u00e9\u00e8"])
def test_tools_and_weights_leave_the_mask_of_other_scripts_alone(tokenizer, answer):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    weighted = [talk[0], {**talk[1], "weight": 0}, *talk]
    plain = render(tokenizer, talk)
    assert render(tokenizer, talk, tools=tools) == plain
    assert render_batch(tokenizer, [talk, weighted])[0] == plain
    ids, trained = render(tokenizer, weighted)
    assert (ids[-sum(plain[1]) :], sum(trained)) == (plain[0][-sum(plain[1]) :], sum(plain[1]))
