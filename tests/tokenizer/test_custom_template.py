"""A model's own chat template: its ids, what is trained, and that no text of a message becomes a control token.

Measured against what others make: transformers' apply_chat_template in a process without this package, and TRL's data preparation.
"""

import json
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.data.row_plan import plan_rows
from pipeline.process.errors import DataError, RecipeError
from pipeline.recipe.dial import row_settings
from pipeline.recipe.schema import Recipe
from pipeline.tokenizer import identity
from pipeline.tokenizer.chat import custom_template, prompt_ids, render, render_batch, template_problems, unrendered
from pipeline.tokenizer.encode import control_ids, control_strings, document_start
from pipeline.tokenizer.load import ready_tokenizer
from tests.families import FAMILIES, save_model, template_of, tokenizer_of

WITH_TEMPLATE = [name for name, family in FAMILIES.items() if family.template]
TURN = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello!"}]
TURNS = [*TURN, {"role": "user", "content": " q2\n"}, {"role": "assistant", "content": " A2 \n"}]
CONVERSATIONS = [TURN, TURNS, [{"role": "system", "content": "Be brief."}, *TURNS], [*TURNS, *TURN]]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<|im_end|>"}}}


@pytest.fixture(scope="session")
def own(tmp_path_factory):
    """The folder of each family's model."""
    folder = tmp_path_factory.mktemp("own")
    return {name: save_model(name, folder / name) for name in FAMILIES}


def recipe_of(path, stage="sft", **tokenizer):
    recipe = Recipe()
    recipe.tokenizer.path, recipe.stage = str(path), stage
    for key, value in tokenizer.items():
        setattr(recipe.tokenizer, key, value)
    return recipe


def trained_text(tokenizer, ids, trained):
    """What is trained, piece by piece."""
    pieces, before = [], False
    for token, bit in zip(ids, trained, strict=True):
        if bit:
            pieces = [*pieces[:-1], [*pieces[-1], token]] if before else [*pieces, [token]]
        before = bit
    return [tokenizer.decode(piece) for piece in pieces]


def stock_ids(stock, folder, conversations, tmp_path, **arguments):
    """input_ids of transformers' apply_chat_template, in a process that cannot import this package."""
    (tmp_path / "conversations.json").write_text(json.dumps(conversations))
    program = f"""
import json
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
tokenizer.chat_control_tokens = []
out = [tokenizer.apply_chat_template(c, return_dict=True, **{arguments!r})["input_ids"] for c in json.load(open("conversations.json"))]
print(json.dumps(out))
"""
    return json.loads(stock.run(program, folder=tmp_path))


def trl_rows(folder, conversations, tmp_path):
    """input_ids and trained of TRL's own data preparation with assistant_only_loss, which takes its training template."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        str(tmp_path / "trl"), assistant_only_loss=True, use_cpu=True, bf16=False, report_to=[], max_length=None
    )
    data = Dataset.from_list([{"messages": messages} for messages in conversations])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = SFTTrainer(model=str(folder), args=arguments, train_dataset=data, processing_class=tokenizer)
    return [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in trainer.train_dataset]


@pytest.mark.full_except("llama")
@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_the_tokenizer_stays_as_the_model_has_it(own, name):
    tokenizer, lines = ready_tokenizer(recipe_of(own[name]).tokenizer_settings())
    assert identity(tokenizer) == identity(AutoTokenizer.from_pretrained(own[name]))
    assert f"keeps its chat template and its {len(tokenizer):,} ids; nothing is added" in lines[0]
    tokenizer, lines = ready_tokenizer(recipe_of(own[name], stage="pretrain").tokenizer_settings())
    assert identity(tokenizer) == identity(AutoTokenizer.from_pretrained(own[name]))
    assert len(lines) == 1


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_ids_are_those_of_a_process_without_this_package(own, name, tmp_path, stock):
    tokenizer, _ = ready_tokenizer(recipe_of(own[name]).tokenizer_settings())
    assert [ids for ids, _ in render_batch(tokenizer, CONVERSATIONS)] == stock_ids(
        stock, own[name], CONVERSATIONS, tmp_path
    )
    asked = [messages[:-1] for messages in CONVERSATIONS]
    prompts = stock_ids(stock, own[name], asked, tmp_path, add_generation_prompt=True)
    assert [prompt_ids(tokenizer, messages) for messages in asked] == prompts


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_rows_are_those_of_trl_with_its_training_template(own, name, tmp_path, monkeypatch):
    tokenizer, _ = ready_tokenizer(recipe_of(own[name]).tokenizer_settings())
    if name == "smollm3":  # TRL renders the day on which it runs, ours a fixed one
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", FixedClock)
    theirs, ours = trl_rows(own[name], CONVERSATIONS, tmp_path), render_batch(tokenizer, CONVERSATIONS)
    if name == "qwen2":
        # TRL trains the line's end behind "assistant" too, which is in the generation prompt.
        newline = tokenizer.convert_tokens_to_ids("\u010a")
        header = tokenizer.encode("<|im_start|>assistant\n")
        for (ids, trained), (their_ids, their_trained) in zip(ours, theirs, strict=True):
            assert ids == their_ids
            more = [n for n in range(len(ids)) if their_trained[n] != trained[n]]
            assert more == [n for n in range(2, len(ids)) if ids[n - len(header) + 1 : n + 1] == header]
            assert all(ids[n] == newline and their_trained[n] for n in more)
    elif name == "qwen3":
        # TRL's template writes an empty <think> block in every turn, Qwen's in the last one: one turn is the same.
        assert ours[0] == theirs[0]
        empty = tokenizer.encode("<think>\n\n</think>\n\n")
        for messages, (ids, trained), (their_ids, their_trained) in zip(CONVERSATIONS, ours, theirs, strict=True):
            turns = sum(message["role"] == "assistant" for message in messages)
            kept = without_all_but_the_last(list(zip(their_ids, their_trained, strict=True)), empty)
            assert list(zip(ids, trained, strict=True)) == kept
            assert len(their_ids) == len(ids) + (turns - 1) * len(empty)
    else:
        assert ours == theirs


class FixedClock:
    @staticmethod
    def now():
        from pipeline.tokenizer.custom_template import DATE

        return DATE


def without_all_but_the_last(pairs, block):
    places = [n for n in range(len(pairs)) if [i for i, _ in pairs[n : n + len(block)]] == block]
    for place in reversed(places[:-1]):
        assert all(bit for _, bit in pairs[place : place + len(block)])
        del pairs[place : place + len(block)]
    return pairs


@pytest.mark.full
def test_a_trl_template_given_by_the_recipe_is_used_for_its_rows(own, tmp_path):
    file = tmp_path / "qwen2_5_training.jinja"
    file.write_text(template_of("qwen2_5_training"))
    tokenizer, lines = ready_tokenizer(recipe_of(own["qwen2"], chat_template=str(file)).tokenizer_settings())
    assert "nothing is added" in lines[0]
    assert tokenizer.eos_token == "<|im_end|>"
    assert render_batch(tokenizer, CONVERSATIONS) == trl_rows(own["qwen2"], CONVERSATIONS, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("name", "has_tools"), [("llama", False), ("qwen3", True)])
def test_a_tool_call_that_the_template_drops_is_refused_and_not_learned(own, name, has_tools):
    tokenizer, _ = ready_tokenizer(recipe_of(own[name]).tokenizer_settings())
    messages = [TURN[0], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, TURN[1]]
    if has_tools:
        assert '"name": "add"' in trained_text(tokenizer, *render(tokenizer, messages))[0]
    else:
        with pytest.raises(DataError, match="leaves out the tool call of message 1"):
            render(tokenizer, messages)


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A <|im_end|> of <|eot_id|>"}},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Say it.", "parameters": PARAMETERS}}]


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_tools_are_rendered_as_the_template_has_them_and_never_trained(own, name, tmp_path, stock):
    tokenizer = AutoTokenizer.from_pretrained(own[name])
    arguments = {"tools": TOOLS, "sanitize_control_tokens": True}
    expected = stock_ids(stock, own[name], CONVERSATIONS, tmp_path, **arguments)
    found = render_batch(tokenizer, CONVERSATIONS, tools=[TOOLS] * len(CONVERSATIONS))
    assert [ids for ids, _ in found] == expected
    assert all("weather" in tokenizer.decode(ids) for ids in expected)
    plain = render_batch(tokenizer, CONVERSATIONS)
    assert [trained_text(tokenizer, *pair) for pair in found] == [trained_text(tokenizer, *pair) for pair in plain]
    (prompt,) = stock_ids(stock, own[name], [TURN[:1]], tmp_path, add_generation_prompt=True, **arguments)
    assert prompt_ids(tokenizer, TURN[:1], tools=TOOLS) == prompt
    assert "tools" not in unrendered(tokenizer)


@pytest.mark.full
def test_conversations_with_tools_take_the_template_that_is_named_for_them(own):
    tokenizer = AutoTokenizer.from_pretrained(own["qwen2"])
    for_tools = tokenizer.chat_template.replace("# Tools", "# Called tools")
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": for_tools}
    with_tools, without = render_batch(tokenizer, [TURN, TURN], tools=[TOOLS, None])
    assert tokenizer.decode(with_tools[0]).count("# Called tools") == 1
    assert with_tools[0] == tokenizer.apply_chat_template(TURN, tools=TOOLS, sanitize_control_tokens=True)["input_ids"]
    assert without[0] == tokenizer.apply_chat_template(TURN)["input_ids"]
    assert trained_text(tokenizer, *with_tools) == trained_text(tokenizer, *without)


@pytest.mark.full
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_trained_whatever_name_the_data_have_for_it(own, key):
    tokenizer = AutoTokenizer.from_pretrained(own["qwen3"])
    step = {"role": "assistant", key: "I add <|im_end|>.", "tool_calls": [CALL]}
    messages = [
        TURN[0],
        {**TURN[1], key: "First."},
        TURN[0],
        step,
        {"role": "tool", "content": "3"},
        {**TURN[1], key: "Then."},
    ]
    ids, trained = render(tokenizer, messages)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        [{**message, "reasoning_content": message.get(key)} for message in messages], tokenize=False
    )
    first, call, last = trained_text(tokenizer, ids, trained)
    assert first == "Hello!<|im_end|>\n"
    assert call.startswith("<think>\nI add <|im_end|>.\n</think>\n\n<tool_call>")
    assert last == "<think>\nThen.\n</think>\n\nHello!<|im_end|>\n"


@pytest.mark.full
def test_reasoning_that_the_template_does_not_render_is_named(own):
    assert "answers but the last" in unrendered(AutoTokenizer.from_pretrained(own["qwen3"]))["reasoning"]
    plain = unrendered(AutoTokenizer.from_pretrained(own["llama"]))
    assert plain.keys() == {"reasoning", "tools"}
    assert "Write it into the content" in plain["reasoning"]
    stripping = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    reasons = unrendered(tokenizer_of(FAMILIES["qwen2"], template=stripping))
    assert reasons["think"].endswith("Name a template that keeps it as tokenizer.chat_template.")
    kept = stripping.replace("{{ m.content", "{{ m.reasoning_content }}{{ m.content")
    assert (
        "Put the reasoning in reasoning_content" in unrendered(tokenizer_of(FAMILIES["qwen2"], template=kept))["think"]
    )


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_a_message_of_weight_0_keeps_its_ids_and_is_not_trained(own, name):
    tokenizer = AutoTokenizer.from_pretrained(own[name])
    ids, trained = render(tokenizer, TURNS)
    weighted = [TURNS[0], {**TURNS[1], "weight": 0}, *TURNS[2:]]
    assert render(tokenizer, weighted)[0] == ids
    assert trained_text(tokenizer, *render(tokenizer, weighted)) == trained_text(tokenizer, ids, trained)[1:]
    assert not any(render(tokenizer, weighted[:2])[1])


@pytest.mark.full
@pytest.mark.parametrize("name", ["phi3_training", "phi3_5_training", "diffusion_gemma_training"])
def test_weights_hold_where_a_template_marks_an_answer_in_parts(name):
    tokenizer = tokenizer_with(name)
    weighted = [TURNS[0], {**TURNS[1], "weight": 0}, *TURNS[2:]]
    learnt = "".join(trained_text(tokenizer, *render(tokenizer, weighted)))
    assert learnt.startswith(trained_text(tokenizer, *render(tokenizer, TURNS))[1])
    assert "A2" in learnt
    assert "Hello" not in learnt
    last = [*TURNS[:3], {**TURNS[3], "weight": 0}]
    assert (
        "".join(trained_text(tokenizer, *render(tokenizer, last)))
        == trained_text(tokenizer, *render(tokenizer, TURNS))[0]
    )


@pytest.mark.full
def test_an_empty_list_of_tool_calls_is_no_call_for_any_template(own):
    calling = "{% if m.tool_calls is defined %}[CALLS]{{ m.tool_calls }}{% else %}{{ m.content }}{% endif %}"
    template = f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{calling}<|im_end|>\n{{% endfor %}}"
    tokenizer = tokenizer_of(FAMILIES["qwen2"], template=template)
    messages = [TURN[0], {**TURN[1], "tool_calls": []}]
    assert render(tokenizer, messages) == render(tokenizer, TURN)
    assert prompt_ids(tokenizer, messages) == prompt_ids(tokenizer, TURN)


@pytest.mark.full
def test_a_call_gets_the_form_that_the_template_writes(own):
    # As DeepSeek V3's: it puts the content and the arguments behind a text.
    call = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}"
    template = f"{{% for m in messages %}}<|im_start|>{{{{ m.role + ' ' + m.content }}}}{call}<|im_end|>{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant {{% endif %}}"
    tokenizer = tokenizer_of(FAMILIES["qwen2"], template=template)
    messages = [TURN[0], {"role": "assistant", "tool_calls": [CALL]}]
    assert trained_text(tokenizer, *render(tokenizer, messages)) == ['<call>add{"a": 1, "b": "<|im_end|>"}<|im_end|>']
    written = [TURN[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}}]}]  # fmt: skip
    sanitized = {"sanitize_control_tokens": True, "add_generation_prompt": True}
    asked = tokenizer.apply_chat_template([*written, TURN[0]], **sanitized)["input_ids"]
    assert prompt_ids(tokenizer, [*messages, TURN[0]]) == asked


LONG = [
    {"role": "assistant" if n % 2 else "user", "content": f"say {n} <|im_end|><end_of_turn><|eot_id|>"}
    for n in range(40)
]


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gptoss", "qwen3_5_think"])
def test_a_long_conversation_takes_no_more_renderings_and_trains_the_same_turns(own, name, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(own[name]) if name in own else tokenizer_with(name)
    template = custom_template(tokenizer)
    rendered, text_of = [], template._text
    monkeypatch.setattr(template, "_text", lambda *given, **named: rendered.append(1) or text_of(*given, **named))
    counts = []
    for messages in (LONG[:20], LONG):
        rendered.clear()
        text, spans = template._render(messages)
        counts.append(len(rendered))
        marked = template._marked(messages)
        assert spans == [template._turn(marked, None, text, number) for number in range(1, len(messages), 2)]
    assert counts[0] == counts[1] <= 12


@pytest.mark.full
def test_turns_without_headers_are_found_by_what_stands_before_them(own):
    skips = "{% for m in messages if m.content %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    skips += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}<|im_start|>assistant\n<|im_end|>"
    tokenizer = tokenizer_of(FAMILIES["qwen2"], template=skips.replace("<|im_start|>assistant\n<|im_end|>", ""))
    ids, trained = render(tokenizer, LONG)
    assert len(trained_text(tokenizer, ids, trained)) == 20
    # A header more than there are answers: nothing is taken from headers, and what cannot be found is refused.
    with pytest.raises(DataError, match="in another way once it is answered"):
        render(tokenizer_of(FAMILIES["qwen2"], template=skips), LONG)


@pytest.mark.full
def test_a_turn_without_an_end_of_its_own_is_refused(own):
    # Neither a call nor its result has an end, and a call reads otherwise where it is the last message.
    template = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') -}}
    {%- for call in m.tool_calls or [] -%}{{- call.function.name + ('!' if loop.last and messages|length == 2 else '') -}}{%- endfor -%}
    {%- if m.role != 'tool' and not m.tool_calls -%}{{- '<|im_end|>' -}}{%- endif -%}{%- endfor -%}
    {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
    tokenizer = tokenizer_of(FAMILIES["qwen2"], template=template)
    messages = [TURN[0], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, TURN[1]]
    with pytest.raises(DataError, match="no end of turn behind message 1"):
        render(tokenizer, messages)


TEXT_MODELS = [
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "gemma4", "gptoss", "lfm2", "lfm2_2_5", "llama3", "llama3_1",
    "llama3_2", "muse_glimmer", "nemotron_3_nano", "phi3", "phi3_5", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
    "qwen3_instruct_2507",
]  # fmt: skip


def tokenizer_with(name):
    """A tokenizer that has every control string of the template."""
    import re

    template = template_of(name)
    found = re.findall(
        r"<\|[A-Za-z_]+\|>|<\uff5c[^\uff5c]*\uff5c>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>", template
    )
    family = SimpleNamespace(
        specials=tuple(dict.fromkeys(["<s>", "</s>", *found])), plain=(), bos_first=False, bos="<s>", eos="</s>"
    )
    family.pad, family.template = None, template
    return tokenizer_of(family)


@pytest.mark.full
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_published_templates_train_every_answer_with_its_end_and_no_question(name, monkeypatch):
    tokenizer = tokenizer_with(name)
    assert template_problems(tokenizer) == []
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", FixedClock)
    answers = ["Hello!", "A2"]
    messages = [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": answers[1]},
    ]
    for some in (messages[:2], messages):
        ids, trained = render(tokenizer, some)
        assert ids == tokenizer.apply_chat_template(some)["input_ids"]
        pieces = trained_text(tokenizer, ids, trained)
        assert len(pieces) == len(some) // 2
        for piece, answer in zip(pieces, answers, strict=False):
            assert answer in piece
            end = piece.partition(answer)[2].strip()
            assert any(end.startswith(control) for control in control_strings(tokenizer))
            assert "Hi there" not in piece
            assert "q2" not in piece


@pytest.mark.full
def test_the_date_of_rows_is_fixed_and_a_chat_has_today(own, monkeypatch):
    import datetime

    class Tomorrow:
        @staticmethod
        def now():
            return datetime.datetime(2031, 1, 2)

    tokenizer, lines = ready_tokenizer(recipe_of(own["smollm3"]).tokenizer_settings())
    assert "the rows have 26 July 2024" in lines[-1]
    before = render(tokenizer, TURN)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    assert render(tokenizer, TURN) == before
    assert "Today Date: 26 July 2024\n" in tokenizer.decode(prompt_ids(tokenizer, TURN[:1]))
    assert (
        prompt_ids(tokenizer, TURN[:1], today=True)
        == (tokenizer.apply_chat_template(TURN[:1], add_generation_prompt=True)["input_ids"])
    )


PIECES = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "<|eot_id|>", "<|begin_of_text|>", "<end_of_turn>", "<bos>", "<", "|>", " ", "\n", "\u2060", "e\u0301", "\U0001f600", "word", "{{ x }}", "{% generation %}", "<think>", "</think>"]  # fmt: skip
hostile = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_TEMPLATE)
@quick
@given(texts=st.lists(hostile, min_size=4, max_size=4))
def test_no_content_yields_a_control_id(own, name, texts):
    tokenizer = AutoTokenizer.from_pretrained(own[name])
    controls = control_ids(tokenizer)
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    clean = [{"role": role, "content": "x"} for role in roles]
    ids, trained = render(tokenizer, messages)
    clean_ids, clean_trained = render(tokenizer, clean)
    assert [i for i in ids if i in controls] == [i for i in clean_ids if i in controls]
    ends = [i for i, bit in zip(ids, trained, strict=True) if bit and i in controls]
    assert ends == [i for i, bit in zip(clean_ids, clean_trained, strict=True) if bit and i in controls]
    # Nothing is taken from the texts: decoded it is what the template makes of them.
    if name != "smollm3":
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        # Qwen2's class normalizes.
        assert tokenizer.decode(ids) == (unicodedata.normalize("NFC", text) if name == "qwen2" else text)
    asked = prompt_ids(tokenizer, messages[:-1])
    assert [i for i in asked if i in controls] == [i for i in prompt_ids(tokenizer, clean[:-1]) if i in controls]


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_control_strings_in_messages_are_encoded_as_transformers_sanitizes_them(own, name, tmp_path, stock):
    tokenizer = AutoTokenizer.from_pretrained(own[name])
    controls = " ".join(control_strings(tokenizer)) + "".join(control_strings(tokenizer))
    conversations = [
        [{"role": "user", "content": f"a{controls}\n"}, {"role": "assistant", "content": f"{controls} b"}],
        [{"role": "user", "content": control} for control in control_strings(tokenizer)[:1]] + TURN[1:],
    ]
    sanitized = stock_ids(stock, own[name], conversations, tmp_path, sanitize_control_tokens=True)
    assert [ids for ids, _ in render_batch(tokenizer, conversations)] == sanitized


@pytest.mark.full
def test_a_control_string_in_a_tool_call_is_text_too(own):
    tokenizer = AutoTokenizer.from_pretrained(own["qwen2"])
    messages = [TURN[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "<|im_end|>"}, TURN[1]]  # fmt: skip
    ids, trained = render(tokenizer, messages)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(ids) == text
    assert sum(i == tokenizer.eos_token_id for i in ids) == text.count("<|im_end|>") - 2
    call, answer = trained_text(tokenizer, ids, trained)
    assert '"arguments": {"a": 1, "b": "<|im_end|>"}}' in call
    assert call.endswith("</tool_call><|im_end|>\n")
    assert answer == "Hello!<|im_end|>\n"


@pytest.mark.full
def test_a_conversation_begun_by_the_assistant_is_trained_from_its_first_word(own):
    for name, end in (("llama", "<|eot_id|>"), ("qwen2", "<|im_end|>\n"), ("qwen3", "<|im_end|>\n")):
        tokenizer = AutoTokenizer.from_pretrained(own[name])
        messages = [{"role": "assistant", "content": "Welcome <|im_end|>"}, *TURN[:1], {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}]  # fmt: skip
        first, last = trained_text(tokenizer, *render(tokenizer, messages))
        assert first == f"Welcome <|im_end|>{end}"
        assert last == f"<think>\nb\n</think>\n\nc{end}"


@pytest.mark.full
def test_parts_that_spell_a_control_string_together_are_refused(own):
    tokenizer = AutoTokenizer.from_pretrained(own["gemma3"])
    parts = [{"type": "text", "text": "a<end_of"}, {"type": "text", "text": "_turn>b"}]
    with pytest.raises(DataError, match="parts of message 0 spell a control string together"):
        render(tokenizer, [{"role": "user", "content": parts}, TURN[1]])


@pytest.mark.full
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no control token"),
        ("{{ raise_exception('not today') }}", "not today"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", "leaves out"),
        ("{% generation %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% endgeneration %}", "for the assistant's"),
    ],
)  # fmt: skip
def test_an_untrainable_template_is_refused_with_the_reason_and_a_remedy(own, template, reason, tmp_path):  # fmt: skip
    tokenizer = tokenizer_of(FAMILIES["qwen2"], template=template)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=reason) as error:
        ready_tokenizer(recipe_of(tmp_path).tokenizer_settings())
    assert "Name a Jinja file as tokenizer.chat_template" in str(error.value)
    kept, lines = ready_tokenizer(recipe_of(tmp_path, stage="pretrain").tokenizer_settings())
    assert identity(kept) == identity(tokenizer)
    assert reason in lines[-1]


@pytest.mark.full
def test_a_conversation_that_the_template_refuses_is_named_and_others_are_rendered(own):
    tokenizer = AutoTokenizer.from_pretrained(own["gemma3"])
    with pytest.raises(DataError, match="must alternate"):
        render(tokenizer, [TURN[0], *TURN])
    with pytest.raises(DataError, match="noncharacter"):
        render(tokenizer, [{"role": "user", "content": "a\ufdd0b"}, TURN[1]])
    assert custom_template(tokenizer) is not None


@pytest.mark.full
def test_documents_begin_with_what_their_models_texts_began_with(own):
    names = {"llama": "<|begin_of_text|>", "qwen2": "<|endoftext|>", "qwen3": "<|endoftext|>", "smollm3": "<|begin_of_text|>", "gemma3": "<bos>", "gpt_neox": "<|endoftext|>"}  # fmt: skip
    for name, token in names.items():
        tokenizer = AutoTokenizer.from_pretrained(own[name])
        assert document_start(tokenizer) == tokenizer.convert_tokens_to_ids(token)


@pytest.mark.full
def test_a_base_model_without_a_template_gets_ours_and_names_its_ids(own):
    tokenizer, lines = ready_tokenizer(recipe_of(own["gpt_neox"]).tokenizer_settings())
    assert "<|end|> <|system|> <|user|> <|assistant|>" in " ".join(lines)
    assert custom_template(tokenizer) is None
    assert tokenizer.bos_token == "<|endoftext|>"
    assert Path(own["gpt_neox"], "chat_template.jinja").exists() is False


@pytest.mark.full
def test_only_rows_of_own_templates_have_the_rendering_in_their_key(own, tokenizer):
    source = SimpleNamespace(name="s", fingerprint="f", files=[], passes=1, spec=SimpleNamespace(weight=None, epochs=None, at_end="repeat"))  # fmt: skip
    recipe = recipe_of("any")
    recipe.data.batch_tokens, recipe.train["max_steps"] = recipe.data.row_tokens, 1

    def settings_of(one):
        plan = plan_rows(row_settings(recipe), one, sources=([source], [source]))
        return plan["train"]["sequences"][0]["settings"]

    assert "rendering" not in settings_of(tokenizer)
    assert settings_of(AutoTokenizer.from_pretrained(own["qwen3"]))["rendering"] == 1
