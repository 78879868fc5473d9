"""Scores of the chat tasks: who guesses scores at chance, who knows scores 1, whatever the batches and ranks."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_task_files import NAMES, arc_row, mmlu_row, write_all, write_jsonl
from knowing_model import knowing_model
from tokenizers import normalizers

from pipeline.evals.chat import (
    TaskScore,
    chat_core,
    chat_protocol,
    chat_results,
    chosen_letters,
    letter_ids,
    score_chat_tasks,
)
from pipeline.evals.chat_tasks import BUILT_IN, built_in_tasks, custom_task, load_chat_tasks
from pipeline.evals.tasks import EvaluationInterrupted
from pipeline.process.errors import DataError
from pipeline.recipe.schema import Source
from pipeline.tokenizer.chat import prompt_ids
from pipeline.tokenizer.train import train_bpe
from tests.conftest import docstrings
from tests.model.tiny_models import stirred, tiny
from tests.ranks import printed_on_ranks


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(docstrings(modules=5), vocab_size=420, split_pattern="nanochat")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return load(NAMES, tmp_path_factory.mktemp("tasks"))


def load(names, folder, rows=12):
    tasks = built_in_tasks(names, execute=True, unsafe_exec=True, where="chat")
    return load_chat_tasks(tasks, places=[write_all(folder, rows)], cache=folder / "cache")


def small(name, tokenizer, **changes):
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    fields = {"n_positions": 512, "sliding_window": 9} | ids | changes
    model = tiny(name, vocab_size=len(tokenizer), **fields)
    return stirred(model, scale=0.3) if name == "gpt2" else model  # else it answers every question alike


def answers(tokenizer, loaded, written=lambda item: item.answer):
    """What a model that knows the answers writes behind each question, with the end of the turn."""
    return {
        tuple(prompt_ids(tokenizer, item.messages)): [
            *tokenizer(written(item), add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        for item in loaded.items
    }


def said(item):
    """The right answer in a form that its task's checker reads."""
    if item.letters:
        return item.answer
    return f"Hm. {', '.join(item.answer)}" if item.answer.isalpha() else f"So\n#### {item.answer}"


@pytest.mark.full
@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge", "mmlu", "gsm8k", "spelling_bee"])
def test_a_model_that_knows_the_answers_scores_one(tasks, tokenizer, name):
    (loaded,) = [task for task in tasks if task.task.name == name]
    model = knowing_model(tokenizer, answers(tokenizer, loaded, said))
    (score,) = score_chat_tasks([loaded], model, tokenizer, batch_rows=5)
    assert (score.accuracy, score.centred, score.n, score.of) == (1.0, 1.0, len(loaded.items), len(loaded.items))
    assert score.correct == [True] * score.n


@pytest.mark.full
def test_a_model_that_knows_half_of_the_answers_scores_exactly_these(tasks, tokenizer):
    loaded = tasks[3]
    known = answers(tokenizer, replace(loaded, items=loaded.items[::2]), said)
    (score,) = score_chat_tasks([loaded], knowing_model(tokenizer, known), tokenizer, batch_rows=4)
    assert score.correct == [True, False] * 6


def test_programs_that_pass_their_tests_score_one_in_the_sandbox(tasks, tokenizer):
    loaded = tasks[4]
    known = answers(tokenizer, replace(loaded, items=loaded.items[::2]))
    model = knowing_model(tokenizer, known)
    (score,) = score_chat_tasks([loaded], model, tokenizer)
    assert score.correct == [True, False] * 6


def test_a_random_model_scores_at_chance_within_its_interval(tokenizer, tmp_path):
    # Every letter is right equally often: a random model prefers one, and chance is that letter's share.
    places = torch.randperm(500, generator=torch.Generator().manual_seed(0)).remainder(4).tolist()
    rows = [
        row | {"answerKey": "ABCD"[place]} for row, place in zip(map(mmlu_as_arc, range(500)), places, strict=True)
    ]
    write_jsonl(tmp_path / "arc_easy.jsonl", rows)
    loaded = load_chat_tasks([BUILT_IN["arc_easy"]], places=[str(tmp_path)], cache=tmp_path / "cache")
    for seed in (1, 2):
        (score,) = score_chat_tasks(loaded, small("gpt2", tokenizer, seed=seed), tokenizer, batch_rows=32)
        low, high = score.interval
        assert low < 0.25 < high
        assert high - low < 0.08
        assert score.accuracy == pytest.approx(0.25 + 0.75 * score.centred)


def mmlu_as_arc(n):
    row = mmlu_row(n)
    return {"question": row["question"], "choices": {"text": row["choices"], "label": ["A", "B", "C", "D"]}}


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_letters_and_texts_are_the_same_for_any_batch_size(tasks, tokenizer, name):
    model = small(name, tokenizer)
    some = [*tasks[:3], replace(tasks[3], task=replace(tasks[3].task, max_new_tokens=8))]
    found = []
    for rows in (1, 3, 64):
        found.append(score_chat_tasks(some, model, tokenizer, batch_rows=rows))
    first = [score.correct for score in found[0]]
    assert any(any(correct) for correct in first)
    for other in found[1:]:
        assert [score.correct for score in other] == first


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_the_chosen_letter_has_the_highest_logit_behind_the_single_prompt(tasks, tokenizer, name):
    model = small(name, tokenizer)
    ids = letter_ids(tokenizer, ["A", "B", "C", "D"])
    prompts = [prompt_ids(tokenizer, item.messages) for item in tasks[2].items]
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            logits_V = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        expected.append(int(logits_V[list(ids.values())].argmax()))
    assert len(set(expected)) > 1
    assert len(set(map(len, prompts))) > 1
    got = chosen_letters(model, prompts, [list(ids.values())] * len(prompts), pad=0, batch_rows=4)
    assert got == expected


@pytest.mark.full
def test_a_model_without_logits_to_keep_is_scored_the_same(tasks, tokenizer):
    model = small("gpt2", tokenizer)
    (with_it,) = score_chat_tasks(tasks[:1], model, tokenizer, batch_rows=4)
    forward = model.forward
    model.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)
    (without,) = score_chat_tasks(tasks[:1], model, tokenizer, batch_rows=4)
    assert without.correct == with_it.correct


@pytest.mark.full
def test_a_letter_that_is_not_one_token_is_refused_before_scoring(tasks, tokenizer):
    item = replace(tasks[0].items[0], letters=("A", "first one"), answer="A")
    with pytest.raises(DataError, match="'first one' is not one token where the assistant's answer begins"):
        score_chat_tasks([replace(tasks[0], items=[item])], None_model(), tokenizer)


class None_model:
    """Stands where a model is not looked at."""

    training = False


@pytest.mark.full
def test_a_tokenizer_without_a_chat_template_is_refused_before_anything_is_scored(tasks, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(tmp_path)
    bare.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        score_chat_tasks(tasks[:1], None_model(), bare)


@pytest.mark.full
def test_a_question_beyond_the_positions_counts_as_wrong_and_is_counted(tasks, tokenizer):
    lengths = sorted(len(prompt_ids(tokenizer, item.messages)) for item in tasks[0].items)
    limit = lengths[len(lengths) // 2]
    model = small("gpt2", tokenizer, n_positions=limit)
    (score,) = score_chat_tasks(tasks[:1], model, tokenizer)
    assert score.too_long == sum(length > limit for length in lengths) > 0
    assert score.n == len(lengths)
    long = [len(prompt_ids(tokenizer, item.messages)) > limit for item in tasks[0].items]
    assert not any(right and too_long for right, too_long in zip(score.correct, long, strict=True))
    short = replace(tasks[3], task=replace(tasks[3].task, max_new_tokens=4))
    full = small("gpt2", tokenizer, n_positions=max(len(prompt_ids(tokenizer, i.messages)) for i in short.items))
    assert score_chat_tasks([short], full, tokenizer)[0].too_long >= 1  # no position is left for an answer


@pytest.mark.full
def test_the_first_items_of_a_task_are_those_of_the_whole(tasks, tokenizer):
    model = small("gpt2", tokenizer)
    (whole,) = score_chat_tasks(tasks[:1], model, tokenizer)
    (part,) = score_chat_tasks(tasks[:1], model, tokenizer, max_per_task=5)
    assert part.correct == whole.correct[:5]
    assert (part.n, part.of, part.complete) == (5, 12, False)


@pytest.mark.full
def test_every_batch_and_step_is_watched_and_the_mode_is_kept(tasks, tokenizer):
    seen, steps = [], []

    def watched(batches):
        if isinstance(batches, list):
            seen.append(len(batches))
            return batches
        steps.append(list(batches))
        return steps[-1]

    model = small("gpt2", tokenizer).train()
    short = replace(tasks[3], task=replace(tasks[3].task, max_new_tokens=2))
    score_chat_tasks([tasks[0], short], model, tokenizer, batch_rows=5, watched=watched)
    assert seen == [3, 3]
    assert [1 <= len(of_batch) <= 2 for of_batch in steps] == [True] * 3
    assert model.training


@pytest.mark.full
def test_a_signal_in_the_middle_of_an_answer_ends_the_scoring(tasks, tokenizer):
    def watched(items):
        for n, item in enumerate(items):
            if n == 1 and not isinstance(items, list):
                raise EvaluationInterrupted
            yield item

    model = small("gpt2", tokenizer).train()
    with pytest.raises(EvaluationInterrupted):
        score_chat_tasks([tasks[3]], model, tokenizer, batch_rows=5, watched=watched)
    assert model.training


def test_results_say_on_what_they_stand(tasks, tokenizer):
    model = small("gpt2", tokenizer)
    scores = score_chat_tasks([tasks[0], tasks[3]], model, tokenizer, max_per_task=5)
    arc, gsm8k = chat_results([tasks[0], tasks[3]], scores)
    assert (arc["name"], arc["value"], arc["items"], arc["of"]) == ("chat/arc_easy", scores[0].accuracy, 5, 12)
    assert arc["low"] <= arc["value"] <= arc["high"]
    (file,) = arc["files"]
    assert (file["label"], len(file["sha256"])) == ("ARC-Easy.jsonl", 64)
    assert arc["protocol_parts"]["items"] == 5
    assert (gsm8k["protocol_parts"]["items"], gsm8k["protocol_parts"]["max_new_tokens"]) == (5, 512)
    whole = score_chat_tasks([tasks[0]], model, tokenizer)
    assert chat_results([tasks[0]], whole)[0]["protocol_parts"]["items"] == "all"
    shorter = replace(tasks[3], task=replace(tasks[3].task, max_new_tokens=4))
    assert (
        chat_protocol(shorter, scores[1]).difference(chat_protocol(tasks[3], scores[1]))
        == "max new tokens 4 against 512"
    )
    other = replace(tasks[0], files=[{**tasks[0].files[0], "sha256": "0" * 64}])
    assert chat_protocol(other, scores[0]).id != arc["protocol"]
    checked = replace(tasks[3], task=replace(tasks[3].task, checker="contains"))
    assert chat_protocol(checked, scores[1]).id != gsm8k["protocol"]
    assert chat_protocol(tasks[3], replace(scores[1], window=128)).id != gsm8k["protocol"]


@pytest.mark.full
def test_a_tokenizer_that_replaces_question_text_changes_the_protocol(tasks, tokenizer):
    model = small("gpt2", tokenizer)
    lossy = copy.deepcopy(tokenizer)
    lossy.backend_tokenizer.normalizer = normalizers.Lowercase()
    (whole,), (part,) = (
        chat_results(tasks[:1], score_chat_tasks(tasks[:1], model, one, max_per_task=5)) for one in (tokenizer, lossy)
    )
    assert whole["protocol_parts"]["coverage"] == 1.0
    assert 0.5 < part["protocol_parts"]["coverage"] < 1.0
    assert part["protocol"] != whole["protocol"]


def conversations(folder, answered):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "hi"},
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": answered(n)},
            ]
        }
        for n in range(9)
    ]
    return Source(files=str(write_jsonl(folder / "own.jsonl", rows)))


OWN_CHECKS = """
def ends_alike(messages, text):
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    return text[-1:] == messages[-1]["content"][-1:]

def broken(messages, text):
    if messages[-1]["content"].endswith("3"):
        raise KeyError("nothing of the kind")
    return False
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("checker", "right"), [("exact", "1"), ("contains", "11"), ("own_chat_checks:ends_alike", "111")]
)
def test_any_conversations_are_scored_with_a_checker_of_one_s_own(tokenizer, tmp_path, checker, right):
    (tmp_path / "own_chat_checks.py").write_text(OWN_CHECKS)
    source = conversations(tmp_path, lambda n: f"number {n}")
    task = custom_task("own", source=source, checker=checker, folder=str(tmp_path))
    (loaded,) = load_chat_tasks([task], cache=tmp_path / "cache")
    loaded = replace(loaded, items=sorted(loaded.items, key=lambda item: item.answer)[:4])
    texts = ["number 0 ", "the number 1", "2", "x"]
    known = {}
    for item, text in zip(loaded.items, texts, strict=True):
        assert [message["content"] for message in item.messages[:2]] == ["hello", "hi"]
        known |= answers(tokenizer, replace(loaded, items=[item]), lambda _, text=text: text)
    texts_known = score_chat_tasks([loaded], knowing_model(tokenizer, known), tokenizer)[0].correct
    if checker == "own_chat_checks:ends_alike":
        assert texts_known == [False, True, True, False]
    else:
        assert texts_known == [n < len(right) for n in range(4)]


def score(name, accuracy, *, complete=True, baseline=0.0, n=100):
    return TaskScore(
        name=name,
        n=n,
        of=n,
        complete=complete,
        accuracy=accuracy,
        centred=(accuracy - baseline) / (1 - baseline),
        interval=(0.0, 1.0),
        correct=[],
        too_long=0,
        seconds=1.0,
    )


FIVE = [
    score("arc_easy", 0.625, baseline=0.25),
    score("arc_challenge", 0.25, baseline=0.25),
    score("mmlu", 0.4375, baseline=0.25),
    score("gsm8k", 0.1),
    score("humaneval", 0.05),
]


@pytest.mark.full
def test_the_interval_of_chat_core_combines_independent_errors_and_covers_zeros():
    many = [replace(one, n=100_000) for one in FIVE]
    slopes = {"arc_easy": 4 / 3, "arc_challenge": 4 / 3, "mmlu": 4 / 3}
    errors = [slopes.get(s.name, 1.0) * (s.accuracy * (1 - s.accuracy) / s.n) ** 0.5 for s in many]
    half = 1.96 * sum(error**2 for error in errors) ** 0.5 / 5
    mean = chat_core(many)
    assert mean["low"] == pytest.approx(mean["value"] - half, abs=half / 50)
    assert mean["high"] == pytest.approx(mean["value"] + half, abs=half / 50)
    wrong = chat_core([replace(score(one.name, 0.0), centred=0.0) for one in FIVE])
    assert (wrong["low"], 0.01 < wrong["high"] < 0.05) == (0.0, True)


@pytest.mark.full
def test_chat_core_is_the_mean_of_the_five_centred_accuracies():
    mean = chat_core(FIVE)
    assert mean["name"] == "chat/core"
    assert mean["value"] == pytest.approx((0.5 + 0.0 + 0.25 + 0.1 + 0.05) / 5)
    assert chat_core([*FIVE, score("spelling_bee", 0.9)]) == mean


@pytest.mark.full
def test_a_subset_of_tasks_or_items_is_never_called_chat_core():
    assert chat_core(FIVE[:4]) is None
    assert chat_core([*FIVE[:4], score("humaneval", 0.05, complete=False)])["name"] == "chat/core_part"


@pytest.mark.full
def test_a_file_of_another_length_than_the_official_set_is_not_complete(tasks, tokenizer):
    model = knowing_model(tokenizer, {})
    arc, spelling = score_chat_tasks([tasks[0], replace(tasks[5], items=tasks[5].items[:2])], model, tokenizer)
    assert not arc.complete
    assert spelling.complete
    official = replace(tasks[0], task=replace(tasks[0].task, rows=12))
    assert score_chat_tasks([official], model, tokenizer)[0].complete


def run_ranks(folder, checker, happens=""):
    (folder / "rendezvous").unlink(missing_ok=True)
    printed = printed_on_ranks(Path(__file__).with_name("chat_rank.py"), folder, checker, HAPPENS=happens)
    return [json.loads(output) for output in printed]


@pytest.fixture(scope="module")
def for_ranks(tokenizer, tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(3)
    sizes = {"n_positions": 512, "n_layer": 2, "n_embd": 32, "n_head": 2, "initializer_range": 0.5}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)).eval()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "own_chat_checks.py").write_text(OWN_CHECKS)
    write_jsonl(folder / "arc_easy.jsonl", map(arc_row, range(37)))
    source = conversations(folder, lambda n: f"number {n}")
    own = custom_task("own", source=source, checker="contains", max_new_tokens=8)
    tasks = load_chat_tasks([BUILT_IN["arc_easy"], own], places=[str(folder)], cache=folder / "cache")
    return folder, score_chat_tasks(tasks, model, tokenizer)


@pytest.mark.full
def test_two_gloo_ranks_give_one_process_s_scores(for_ranks):
    folder, one = for_ranks
    first, second = run_ranks(folder, "contains")
    assert first == second
    for ours, theirs in zip(one, first, strict=True):
        assert theirs["correct"] == ours.correct
        assert [theirs["n"], theirs["accuracy"]] == [ours.n, ours.accuracy]
    assert 0 < one[0].accuracy < 1


@pytest.mark.full
def test_a_checker_failing_on_one_rank_stops_both_with_one_sentence(for_ranks):
    first, second = run_ranks(for_ranks[0], "own_chat_checks:broken")
    assert first == second
    assert "the checker of own raised KeyError: 'nothing of the kind'" in first


@pytest.mark.full
@pytest.mark.parametrize(
    ("happens", "first", "second"),
    [("signal", "EvaluationInterrupted", "EvaluationInterrupted"), ("defect", "OtherRankFailed", "KeyError")],
)
def test_what_ends_one_rank_s_share_ends_the_scoring_on_both(for_ranks, happens, first, second):
    assert run_ranks(for_ranks[0], "contains", happens) == [first, second]
