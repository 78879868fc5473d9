"""The prompts of CORE, the examples before them, and which of their tokens are scored."""

import random

import pytest

from pipeline.evals.core import Tokens, in_order, prompts_of, rows_of, shots_of
from pipeline.evals.core_bundle import TASKS
from tests.evals.core_items import items_of

BY_NAME = {task.name: task for task in TASKS}
COPA, JEOPARDY, WINOGRAD, ARC = (BY_NAME[name] for name in ("copa", "jeopardy", "winograd", "arc_easy"))


@pytest.fixture
def tokens(tokenizer):
    """One token a byte, after BOS."""
    return Tokens(tokenizer, tokenizer.bos_token_id)


def scored(rows, tokenizer):
    return [tokenizer.decode(row.ids[row.start :]) for row in rows]


def test_there_are_22_tasks_of_21_files_and_three_baselines_were_corrected():
    assert len({task.name for task in TASKS}) == 22
    assert len({task.file for task in TASKS}) == 21
    assert {task.name: (task.v1, task.v2) for task in TASKS if task.v2 is not None} == {
        "commonsense_qa": (0.2, 0.403),
        "agi_eval_lsat_ar": (0.2, 0.25),
        "bigbench_language_identification": (0.091, 0.25),
    }
    boolq = BY_NAME["boolq"]
    assert boolq.centred(0.62, "v1") == boolq.centred(0.62, "v2") == 0
    assert BY_NAME["commonsense_qa"].centred(1.0, "v2") == 1
    assert BY_NAME["commonsense_qa"].centred(0.403, "v1") == pytest.approx((0.403 - 0.2) / 0.8)


def test_examples_delimiters_and_baselines_of_the_tasks_are_those_of_the_definition():
    shots = {task.name: task.shots for task in TASKS if task.shots != 10}
    zero = "hellaswag_zeroshot copa openbook_qa lambada_openai winograd winogrande coqa"
    assert shots == dict.fromkeys(zero.split(), 0) | {"agi_eval_lsat_ar": 3}
    answer = {task.name for task in TASKS if task.delimiter == "\nAnswer: "}
    assert answer == {"jeopardy", "arc_easy", "arc_challenge", "piqa", "boolq"}
    assert {task.delimiter for task in TASKS} == {" ", "\nAnswer: "}
    guessed = {
        0.25: "hellaswag_zeroshot hellaswag arc_easy arc_challenge openbook_qa",
        0.5: "copa piqa winograd winogrande",
    }
    others = {"commonsense_qa": 0.2, "agi_eval_lsat_ar": 0.2, "bigbench_language_identification": 0.091, "boolq": 0.62}
    known = {name: share for share, names in guessed.items() for name in names.split()} | others
    assert {task.name: task.v1 for task in TASKS if task.v1} == known


def test_items_are_tokenized_some_at_a_time_without_a_difference(tokens, monkeypatch):
    items = items_of(ARC, 12)
    whole, _ = rows_of(ARC, items, tokens)
    monkeypatch.setattr("pipeline.evals.core.ITEMS_AT_ONCE", 5)
    some, _ = rows_of(ARC, items, tokens)
    assert [(r.item, r.option, r.start, r.ids.tolist()) for r in some] == [
        (r.item, r.option, r.start, r.ids.tolist()) for r in whole
    ]


def test_three_options_are_scored_from_where_any_of_them_differs(tokens, tokenizer):
    rows, _ = rows_of(COPA, [{"query": "x", "choices": ["abc", "abd", "axx"], "gold": 0}], tokens)
    assert scored(rows, tokenizer) == ["bc", "bd", "xx"]


def test_a_question_that_is_all_targets_keeps_a_token_before_them(tokens, tokenizer):
    item = {"context": "a", "continuation": "b" * 40}
    for rule in ("crop", "fewer_shots"):
        rows, long = rows_of(JEOPARDY, [item], Tokens(tokenizer, tokenizer.bos_token_id, 10, rule))
        assert (rows[0].start, len(rows[0].ids), long) == (1, 10, 1)


def test_multiple_choice_puts_each_option_behind_examples_with_their_right_option():
    shots = [{"query": "1+1", "choices": ["3", "2"], "gold": 1}]
    item = {"query": "2+2", "choices": ["4", "5"], "gold": 0}
    assert prompts_of(ARC, item, shots) == ["1+1\nAnswer: 2\n\n2+2\nAnswer: 4", "1+1\nAnswer: 2\n\n2+2\nAnswer: 5"]


def test_a_schema_puts_one_ending_behind_each_context():
    item = {"context_options": ["The cat", "The dog"], "continuation": "barks", "gold": 1}
    assert prompts_of(WINOGRAD, item, [item]) == ["The dog barks\n\nThe cat barks", "The dog barks\n\nThe dog barks"]


def test_language_modelling_trims_contexts_and_leaves_no_blank_at_the_prompts_end():
    shots = [{"context": " first \n", "continuation": "one"}]
    item = {"context": "second ", "continuation": "two"}
    assert prompts_of(JEOPARDY, item, shots) == [
        "first\nAnswer: one\n\nsecond\nAnswer:",
        "first\nAnswer: one\n\nsecond\nAnswer: two",
    ]


def test_options_are_scored_from_where_they_begin_to_differ(tokens, tokenizer):
    items = [{"query": "x", "choices": ["abc", "abde"], "gold": 0}]
    rows, long = rows_of(COPA, items, tokens)
    assert scored(rows, tokenizer) == ["c", "de"]
    assert [row.ids[0] for row in rows] == [tokenizer.bos_token_id] * 2
    assert long == 0


def test_a_schema_is_scored_over_the_ending_that_its_contexts_share(tokens, tokenizer):
    items = [{"context_options": ["the cat", "the dog"], "continuation": "ran", "gold": 0}]
    rows, _ = rows_of(WINOGRAD, items, tokens)
    assert scored(rows, tokenizer) == [" ran", " ran"]
    assert [tokenizer.decode(row.ids[1 : row.start]) for row in rows] == ["the cat", "the dog"]


def test_language_modelling_is_scored_after_the_prompt(tokens, tokenizer):
    rows, _ = rows_of(JEOPARDY, [{"context": "a", "continuation": "b c"}], tokens)
    assert scored(rows, tokenizer) == [" b c"]


def test_examples_are_sampled_as_from_a_list_without_the_item():
    for count in (12, 200, 1000):
        for index in (0, 5, count - 1):
            others = [i for i in range(count) if i != index]
            assert shots_of(ARC, index, count) == random.Random(1234 + index).sample(others, 10)


def test_there_are_no_more_examples_than_other_items():
    assert sorted(shots_of(ARC, 1, 3)) == [0, 2]
    assert shots_of(ARC, 0, 1) == []


def test_items_have_one_order_of_which_a_capped_evaluation_takes_the_first():
    items = list(range(50))
    shuffled = list(items)
    random.Random(1337).shuffle(shuffled)
    assert in_order(items, None) == shuffled
    assert in_order(items, 7) == shuffled[:7]
    assert items == list(range(50))


@pytest.mark.parametrize("positions", [30, 60, 120, 250])
def test_a_long_prompt_loses_the_fewest_whole_examples_and_keeps_bos(tokens, tokenizer, positions):
    items = items_of(ARC, 12)
    whole, _ = rows_of(ARC, items, tokens)
    short, long = rows_of(ARC, items, Tokens(tokenizer, tokenizer.bos_token_id, positions))
    assert 0 < long <= 12
    for index in range(12):
        before, after = ([row for row in rows if row.item == index] for rows in (whole, short))
        drawn = shots_of(ARC, index, 12)
        for keep in range(len(drawn), -1, -1):
            prompts = prompts_of(ARC, items[index], [items[i] for i in drawn[len(drawn) - keep :]])
            if max(map(len, prompts)) + 1 <= positions:
                assert [tokenizer.decode(row.ids[1:]) for row in after] == prompts
                break
        assert scored(before, tokenizer)[0][-5:] == scored(after, tokenizer)[0][-5:]
        assert all(len(row.ids) <= positions and row.start >= 1 for row in after)
        assert all(row.ids[0] == tokenizer.bos_token_id for row in after)


def test_cropping_keeps_the_last_tokens_of_each_option(tokens, tokenizer):
    items = items_of(ARC, 12)
    whole, _ = rows_of(ARC, items, tokens)
    short, long = rows_of(ARC, items, Tokens(tokenizer, tokenizer.bos_token_id, 50, "crop"))
    assert long == 12
    for before, after in zip(whole, short, strict=True):
        assert after.ids.tolist() == before.ids[-50:].tolist()
        assert len(after.ids) - after.start == len(before.ids) - before.start
