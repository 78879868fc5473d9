"""What the data mark as the assistant's is found in the trained ids, however templates and tokenizers write it, and is missed where they do not."""

import time

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.tokenizer.chat import render
from pipeline.tokenizer.train import train_bpe
from pipeline.tokenizer.trained_share import missing_lines, missing_text, untrained_shares
from tests.families import FAMILIES, tokenizer_of

HEAD = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
FOOT = "{{- '<|im_end|>\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
CALLS = "{{- m.content or '' -}}{%- for c in m.tool_calls or [] -%}{%- set f = c.function -%}"
SYNTAXES = {
    "json": "{{- '<tool_call>' + f.name + (f.arguments | tojson(indent=4)) -}}",
    "ascii json": "{{- '<tool_call>' + f.name + (f.arguments | tojson(ensure_ascii=true)) -}}",
    "json in json": "{{- {'name': f.name, 'arguments': f.arguments | tojson} | tojson -}}",
    "xml": "{{- '<function=' + f.name + '>' -}}{%- for k, v in f.arguments.items() -%}{{- '<parameter=' + k + '>\\n' + (v | tojson if v is mapping else v | string) + '\\n</parameter>' -}}{%- endfor -%}",
    "python": "{{- '[' + f.name + '(' -}}{%- for k, v in f.arguments.items() -%}{{- k + '=' + ((\"'\" + v + \"'\") if v is string else v | string) + ', ' -}}{%- endfor -%}{{- ')]' -}}",
    "harmony": "{{- '<|im_end|>\\n<|im_start|>assistant to=functions.' + f.name + '<|im_end|>' + (f.arguments | tojson) -}}",
}  # fmt: skip
ARGUMENTS = {"city": "Orl\u00e9ans", "days": 3, "exact": True, "code": "if a:\n    b = \"c\\d\" + 'e'", "more": {"deep": [1.5, "x y"]}}  # fmt: skip


def asked(content="", **message):
    return [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": content, **message}]


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def with_template(template):
    return tokenizer_of(FAMILIES["qwen2"], template=template)


def share_missing(counts):
    return sum(untrained_shares(counts).values())


def missing(tokenizer, messages, tools=None):
    counts = missing_text(tokenizer, messages, *render(tokenizer, messages, tools=tools), tools=tools)
    return {key: n for key, n in counts.items() if not key.endswith((" marked", " given"))}


@pytest.fixture(scope="module")
def built_in():
    return train_bpe(["The quick brown fox answers the question. " * 20], vocab_size=400, split_pattern="gpt2")


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_arguments_of_calls_are_found_in_every_syntax(syntax):
    tokenizer = with_template(HEAD + CALLS + SYNTAXES[syntax] + "{%- endfor -%}" + FOOT)
    messages = asked("I look.", tool_calls=[call("weather", ARGUMENTS), call("add", {"a": 12, "b": None})])
    counts = missing_text(tokenizer, messages, *render(tokenizer, messages))
    assert share_missing(counts) <= (0.1 if syntax == "json in json" else 0)  # what is escaped twice has more marks
    assert counts["calls marked"] > 40


def test_nothing_is_missing_of_what_the_built_in_template_writes(built_in):
    hostile = "  Say <|end|> and <|assistant|> \u2060 <|x|>\n\n \u00bd caf\u00e9 cafe\u0301 \ufb01 \U0001f600 "
    messages = [
        *asked(hostile, tool_calls=[call("python", "print('<|end|>')"), call("f", ARGUMENTS)]),
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": hostile},
        *asked("4")[:1],
        {"role": "assistant", "content": "4"},
    ]
    assert not missing(built_in, messages)
    for name in ("llama", "qwen2", "qwen3", "gemma3", "smollm3"):
        assert not missing(tokenizer_of(FAMILIES[name]), [*asked(hostile), *asked("Two."), *asked(hostile)]), name


def test_an_answer_that_the_template_drops_is_not_found_in_the_question(built_in):
    tokenizer = with_template(
        HEAD + "{{- m.content if m.role == 'user' or m.content == 'Probed.' else 'Yes.' -}}" + FOOT
    )
    tokenizer.chat_template = tokenizer.chat_template.replace("== 'Probed.'", "| length < 12")
    messages = [{"role": "user", "content": "Repeat: a long text."}, {"role": "assistant", "content": "a long text."}]
    assert missing(tokenizer, messages) == {"content template": len("alongtext")}  # its full stop is there


def test_reasoning_that_a_template_takes_out_or_does_not_know_is_missing(built_in):
    stripping = with_template(HEAD + "{{- m.content.split('</think>')[-1] -}}" + FOOT)
    messages = asked("<think>\nI take it.\n</think>\n\nThat is 2.")
    assert missing(stripping, messages) == {"think template": len("Itakeit.")}
    assert not missing(built_in, messages)
    counts = missing_text(stripping, messages, *render(stripping, messages))
    (line,) = missing_lines(stripping, counts, least=0.01)
    assert line.startswith("50.0 % of the answers' characters are not trained: the chat template takes <think>")
    assert missing(built_in, asked("2.", reasoning="I add them.")) == {"reasoning template": len("Iaddthem.")}


def test_the_last_reasoning_only_is_kept_by_the_template_of_qwen3():
    turn = asked("Two.", reasoning_content="First one, then another")
    qwen3 = tokenizer_of(FAMILIES["qwen3"])
    assert not missing(qwen3, turn)
    assert missing(qwen3, [*turn, *asked("Three.", thinking="Once more now")]) == {"reasoning template": 20}


def test_an_answer_before_the_marks_is_outside_of_what_is_trained():
    marks = "{%- if m.role == 'assistant' -%}{{- m.reasoning or '' -}}{%- generation -%}{{- m.content + '<|im_end|>' -}}{%- endgeneration -%}{%- else -%}{{- m.content -}}{%- endif -%}"
    tokenizer = with_template(HEAD + marks + FOOT)
    assert missing(tokenizer, asked("Two.", reasoning="I add")) == {"reasoning outside": 4}


def test_a_list_of_no_calls_that_replaces_the_answer_is_missed():
    """As a template does that asks whether there is the key; the messages do not have it any more when it is rendered."""
    tokenizer = with_template(
        HEAD + "{%- if m.name is defined -%}{{- '[TOOL_CALLS] []' -}}{%- else -%}{{- m.content -}}{%- endif -%}" + FOOT
    )
    assert missing(tokenizer, asked("The real answer.", name="x")) == {"content template": 14}


def test_a_message_of_weight_0_is_not_looked_for(built_in):
    messages = [*asked("Not this one.", weight=0), *asked("This one.")]
    ids, trained = render(built_in, messages)
    counts = missing_text(built_in, messages, ids, trained)
    assert counts == {"content marked": len("Thisone.")}


def test_definitions_of_tools_that_a_template_does_not_write_are_named(built_in):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert missing(built_in, asked("Two."), tools) == {"tools template": 1}
    counts = missing_text(built_in, asked("Two."), *render(built_in, asked("Two.")), tools=tools)
    assert share_missing(counts) == 0
    assert "renders no tool definitions" in missing_lines(built_in, counts, least=0.01)[0]
    rendering = with_template("{{- tools | tojson if tools else '' -}}" + HEAD + "{{- m.content -}}" + FOOT)
    assert not missing(rendering, asked("Two."), tools)


def fast(model, *, normalizer=None, pre_tokenizer=None, decoder=None):
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre_tokenizer, decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTES = {f"<0x{n:02X}>": n for n in range(256)}
LETTERS = {letter: n for n, letter in enumerate(["[UNK]", *"abcdefghijklmnopqrstuvwxyz .?\u2581"])}
TOKENIZERS = {
    "llama": fast(
        models.BPE(BYTES | {"\u2581": 256, "a": 257}, [], byte_fallback=True),
        normalizer=normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        decoder=decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "lower case": fast(
        models.WordPiece(LETTERS | {f"##{k}": n + 40 for k, n in LETTERS.items()}, unk_token="[UNK]"),
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    ),
    "compatible forms": fast(
        models.BPE(LETTERS, [], unk_token="[UNK]"),
        normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_a_tokenizer_only_writes_in_another_way_is_not_missing(name):
    tokenizer, text = TOKENIZERS[name], "The \ufb01rst Caf\u00e9 is here. Cafe\u0301 two"
    if name == "lower case":  # which knows no ligatures
        text = text.replace("\ufb01", "fi")
    ids = tokenizer.encode(text, add_special_tokens=False)
    counts = missing_text(tokenizer, asked(text), ids, [True] * len(ids))
    assert counts == {"content marked": len("ThefirstCafeishere.Cafetwo")}


@pytest.mark.parametrize(("text", "lost"), [("the year 1984 is over", 4), ("\u4e2d\u6587 text", 2), ("plain", 0)])
def test_characters_without_ids_are_missing_and_no_more(text, lost):
    tokenizer = TOKENIZERS["compatible forms"]
    ids = tokenizer.encode(f"user: {text} .", add_special_tokens=False)
    counts = missing_text(tokenizer, asked(text), ids, [True] * len(ids))
    assert counts["content tokenizer"] == lost
    assert share_missing(counts) == pytest.approx(lost / counts["content marked"])


@pytest.mark.parametrize("dropped", [".", r"\d", r"\p{L}"])
def test_a_tokenizer_that_drops_text_has_no_ids_for_it(dropped):
    tokenizer = fast(models.BPE(LETTERS | {"1": 60}, []), normalizer=normalizers.Replace(Regex(dropped), ""))
    ids = tokenizer.encode("one 111", add_special_tokens=False)
    counts = missing_text(tokenizer, asked("one 111"), ids, [True] * len(ids))
    assert counts["content tokenizer"] == {".": 6, r"\d": 3, r"\p{L}": 3}[dropped]
    assert "has no ids" in missing_lines(tokenizer, counts, least=0.01)[0]


@pytest.mark.parametrize("is_found", [True, False])
def test_the_cost_grows_with_the_text(built_in, is_found):
    def seconds(messages):
        ids, trained = render(built_in, messages)
        trained = [bit and is_found for bit in trained]
        start = time.thread_time()
        counts = missing_text(built_in, messages, ids, trained)
        assert share_missing(counts) == (not is_found)
        return time.thread_time() - start

    sentence = "The fox has seen it 12 times, and so on. "
    for one, ten in ((asked(sentence * 300), asked(sentence * 3_000)), (asked(sentence) * 100, asked(sentence) * 1_000)):  # fmt: skip
        assert seconds(ten) < 30 * seconds(one) + 0.5
