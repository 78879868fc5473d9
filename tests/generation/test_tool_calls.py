"""Answers with tool calls, by a model that knows by heart what it writes, in the form that training renders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted

from pipeline.generation.texts import complete, continuations, stream
from pipeline.generation.tools import ToolCalls
from pipeline.tokenizer.chat import answer_messages, prompt_ids, render
from pipeline.tokenizer.encode import END, OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START, encode_documents


def says(content, code=None):
    calls = {} if code is None else {"tool_calls": [{"function": {"name": "python", "arguments": code}}]}
    return {"role": "assistant", "content": content, **calls}


def outputs(content):
    return {"role": "tool", "content": content}


# What follows the user's message of that number; outputs are the calculator's own.
ANSWERS = [
    [says("It's ", "7*8"), outputs("56"), says("56.")],
    [says("No.")],
    [says("", "'prompt'.count('p')"), outputs("2"), says(" and ", "2/3"), outputs(str(2 / 3)), says("!")],
    [says("def ", "import os"), says("it has no value")],
    [says("One ", "1,000 + 1"), outputs("1001"), says("more ", "1/0"), says("none ", "(2)"), outputs("2"), says("")],
    [says("ends with the call ", "12345*2"), outputs("24690"), says("")],
]


@pytest.fixture(scope="module")
def known(tokenizer):
    """(prompts, answers without their end, texts for Scripted)."""
    prompts, answers, texts = [], [], []
    end = tokenizer.eos_token_id
    for number, answer in enumerate(ANSWERS):
        user = {"role": "user", "content": "complete " * number + str(number)}
        prompt = prompt_ids(tokenizer, [user])
        ids, written = render(tokenizer, [user, *answer])
        assert ids[-1] == end
        prompts.append(prompt)
        answers.append(ids[len(prompt) : -1])
        # Where it is not asked it would end.
        texts.append((ids, [i if bit else end for i, bit in zip(ids, written, strict=True)]))
    return prompts, answers, texts


@pytest.fixture
def model(known, tokenizer):
    return Scripted(known[2], vocab_size=len(tokenizer)).eval()


@pytest.mark.parametrize("batch_size", [1, 2, 4, 6])
def test_a_call_is_answered_only_in_its_own_row_which_continues(model, tokenizer, known, batch_size):
    prompts, answers, _ = known
    found = continuations(model, tokenizer, prompts, batch_size=batch_size, max_new_tokens=200, calculator=True)
    assert found == answers


def test_a_single_stream_does_the_same(model, tokenizer, known):
    for prompt, answer in zip(known[0], known[1], strict=True):
        assert list(stream(model, tokenizer, prompt, max_new_tokens=200, calculator=True)) == answer


def test_rows_that_have_ended_are_not_forwarded_again(model, tokenizer, known):
    prompts, answers, _ = known
    continuations(model, tokenizer, prompts, batch_size=len(prompts), max_new_tokens=200, calculator=True)
    forwards = [len(answer) + 1 for answer in answers]  # One that gives the end.
    assert model.batch_sizes == [sum(n > step for n in forwards) for step in range(max(forwards))]


def test_without_the_calculator_a_call_is_followed_by_what_the_model_writes(model, tokenizer, known):
    python_end, end = tokenizer.convert_tokens_to_ids([PYTHON_END, END])
    prompts, answers, _ = known
    found = continuations(model, tokenizer, prompts[:3], batch_size=3, max_new_tokens=200)
    assert found == [
        answers[0][: answers[0].index(python_end) + 1],
        answers[1],
        answers[2][: answers[2].index(python_end) + 1],
    ]
    assert end not in found[0]


def test_the_limit_of_tokens_cuts_anywhere_in_a_call_or_its_output(model, tokenizer, known):
    prompts, answers, _ = known
    for limit in range(1, max(map(len, answers)) + 1):
        found = continuations(model, tokenizer, prompts, batch_size=3, max_new_tokens=limit, calculator=True)
        assert found == [answer[:limit] for answer in answers]


def test_the_models_last_position_cuts_anywhere_too(tokenizer, known):
    prompts, answers, texts = known
    longest = max(map(len, prompts))
    for limit in range(longest, longest + 40):
        model = Scripted(texts, vocab_size=len(tokenizer), n_positions=limit).eval()
        found = continuations(model, tokenizer, prompts, batch_size=4, max_new_tokens=200, calculator=True)
        assert found == [answer[: limit - len(prompt)] for prompt, answer in zip(prompts, answers, strict=True)]


def test_only_a_stop_that_the_model_writes_ends_the_row(model, tokenizer, known):
    prompts, answers, _ = known
    output_start, output_end = tokenizer.convert_tokens_to_ids([OUTPUT_START, OUTPUT_END])
    digits = answers[0][answers[0].index(output_start) + 1 : answers[0].index(output_end)]
    stop = digits[0]
    settings = {"batch_size": 2, "max_new_tokens": 200, "calculator": True}
    found = continuations(model, tokenizer, prompts[:2], stop_ids={stop, tokenizer.eos_token_id}, **settings)
    written = answers[0].index(output_end) + 1  # The words after the output begin with the same number.
    assert stop in answers[0][:written]
    assert answers[0][written] == stop
    assert found == [answers[0][:written], answers[1]]


def test_an_end_inside_a_call_ends_the_answer_and_nothing_is_calculated(tokenizer):
    start, python_end, end = tokenizer.convert_tokens_to_ids([PYTHON_START, PYTHON_END, END])
    one = encode_documents(tokenizer, ["1+1"])[0].tolist()
    text = [*prompt_ids(tokenizer, [{"role": "user", "content": "x"}]), start, *one, end, python_end]
    model = Scripted([(text, text)], vocab_size=len(tokenizer)).eval()
    prompt = text[: text.index(start)]
    assert continuations(model, tokenizer, [prompt], batch_size=1, max_new_tokens=20, calculator=True) == [
        [start, *one]
    ]


def test_completed_chats_use_the_calculator(tokenizer, model):
    texts = complete(model, tokenizer, ["0", "complete 1"], chat=True, max_new_tokens=50, batch_size=2)
    assert texts == ["It's 7*85656.", "No."]


def test_what_a_call_may_be(tokenizer):
    start, end, output_start, output_end = tokenizer.convert_tokens_to_ids(
        [PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END]
    )

    def written(text):
        return encode_documents(tokenizer, [text])[0].tolist()

    def pushed(tokens):
        calls = ToolCalls(tokenizer)
        return [calls.push(token) for token in tokens][-1]

    two = [output_start, *written("2"), output_end]
    assert pushed([start, *written("1+1"), end]) == two
    assert pushed([start, *written("9"), start, *written("1+1"), end]) == two  # The last start counts.
    assert pushed([*written("1+1"), end]) == []
    assert pushed([start, *written("1+1"), end, *written("1+1"), end]) == []
    assert pushed([start, end]) == []
    assert pushed([start, *written("1"), tokenizer.bos_token_id, *written("+1"), end]) == []
    assert pushed(written(f"{PYTHON_START}1+1{PYTHON_END}")) == []  # Spelt, and so only text.


def test_an_answer_is_remembered_as_the_messages_that_render_to_it(tokenizer, known):
    again = {"role": "user", "content": "again"}
    for number, (prompt, answer) in enumerate(zip(known[0], known[1], strict=True)):
        user = {"role": "user", "content": "complete " * number + str(number)}
        ids = prompt_ids(tokenizer, [user, *answer_messages(tokenizer, answer), again])
        assert ids[: len(prompt) + len(answer) + 1] == [*prompt, *answer, tokenizer.eos_token_id]
        assert ids == prompt_ids(tokenizer, [user, *ANSWERS[number], again])
    assert answer_messages(tokenizer, known[1][0]) == ANSWERS[0]
    assert answer_messages(tokenizer, []) == [says("")]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END, "a", "b"]), max_size=9))
def test_marks_in_any_order_are_remembered_as_messages_that_render(tokenizer, names):
    user = {"role": "user", "content": "x"}
    messages = answer_messages(tokenizer, tokenizer.convert_tokens_to_ids(names))
    ids = prompt_ids(tokenizer, [user, *messages, user])
    letters = tokenizer.decode(ids, skip_special_tokens=True)
    assert letters == "x" + "".join(name for name in names if name in "ab") + "x"


def test_a_tokenizer_without_the_marks_has_no_calls(tokenizer):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>", unk_token="</s>")
    other.add_special_tokens({"additional_special_tokens": [PYTHON_START, PYTHON_END]})
    calls = ToolCalls(other)
    assert [calls.push(i) for i in [*other.convert_tokens_to_ids([PYTHON_START, PYTHON_END]), 0]] == [[], [], []]
    assert answer_messages(other, []) == [says("")]
