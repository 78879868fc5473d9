"""The small world: the same bytes everywhere, nothing held out in training, and every answer worked out again by other code."""

import calendar
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.quickstart_corpora as quickstart
from pipeline.data.overlap import overlap_of
from pipeline.recipe import Recipe, read_recipe
from pipeline.recipe.schema import Source
from pipeline.sources.built_in import corpus_folder
from pipeline.sources.open import open_sources
from pipeline.tokenizer.train import train_bpe, training_texts

RECIPES = Path(__file__).parents[2] / "recipes"
PINNED = {
    "quickstart_chat-test.jsonl": "c056acc14225fb18",
    "quickstart_chat-train.jsonl": "d9e0d2629cbfb1fb",
    "quickstart_chat-validation.jsonl": "8c2be94663d115f3",
    "quickstart_text-train.jsonl": "3fa3b17dcf71cb2c",
    "quickstart_text-validation.jsonl": "e58b7d1e854f2c30",
    "spelling-train.jsonl": "a048aff8eed5fe18",
    "spelling-validation.jsonl": "71eb96b933ef82f5",
}
NUMBERS = ["no", "one", "two"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rows(cache) -> dict[str, list[dict]]:
    folder = corpus_folder(cache)
    return {path.stem: [json.loads(line) for line in path.open()] for path in folder.glob("*.jsonl")}


@pytest.fixture(scope="module")
def texts(rows) -> list[str]:
    """All training text, of both stages, a row each."""
    chats = (" ".join(m["content"] for m in row["messages"]) for row in rows["quickstart_chat-train"])
    return [row["text"] for row in rows["quickstart_text-train"]] + list(chats)


def right_answer(context: str, question: str) -> str:
    """Work out the answer from the sentences alone, without the generator's code."""
    where, holder, left, ages = {}, {}, {}, {}
    for sentence in re.findall(r"[^.]+\.", context):
        if m := re.fullmatch(r" ?(\w+) (?:is in|went to) the (\w+)\.", sentence):
            if where.get(m[1], [None])[-1] != m[2]:
                where.setdefault(m[1], []).append(m[2])
        elif m := re.fullmatch(r" ?(\w+) took the (\w+)\.", sentence):
            holder[m[2]] = m[1]
            holder[m[2]] = holder.pop(m[2])
            left.pop(m[2], None)
        elif m := re.fullmatch(r" ?(\w+) gave (\w+) the (\w+)\.", sentence):
            assert holder.pop(m[3]) == m[1]
            assert where[m[1]][-1] == where[m[2]][-1]
            holder[m[3]] = m[2]
        elif m := re.fullmatch(r" ?(\w+) left the (\w+) in the (\w+)\.", sentence):
            assert holder.pop(m[2]) == m[1]
            assert where[m[1]][-1] == m[3]
            left[m[2]] = m[3]
        elif m := re.fullmatch(r" ?(\w+) is (\d+) years old\.", sentence):
            ages[m[1]] = int(m[2])
        else:
            raise AssertionError(sentence)
    if m := re.fullmatch(r"Where is (\w+)\?", question):
        return f"{m[1]} is in the {where[m[1]][-1]}." if m[1] in where else "I do not know."
    if m := re.fullmatch(r"Who has the (\w+)\?", question):
        return f"{holder[m[1]]} has the {m[1]}." if m[1] in holder else "I do not know."
    if m := re.fullmatch(r"Where is the (\w+)\?", question):
        if m[1] in holder:
            return f"{holder[m[1]]} has the {m[1]}. {holder[m[1]]} is in the {where[holder[m[1]]][-1]}."
        return f"The {m[1]} is in the {left[m[1]]}." if m[1] in left else "I do not know."
    if m := re.fullmatch(r"Where was (\w+) before the (\w+)\?", question):
        assert where[m[1]][-1] == m[2]
        return f"{m[1]} was in the {where[m[1]][-2]} before the {m[2]}."
    if m := re.fullmatch(r"How many things does (\w+) have\?", question):
        things = [f"the {thing}" for thing, person in holder.items() if person == m[1]]
        n = len(things)
        return (
            f"{m[1]} has {' and '.join(things)}: {NUMBERS[n]} thing{'s' * (n > 1)}." if n else f"{m[1]} has no things."
        )
    if m := re.fullmatch(r"Who is (older|younger), (\w+) or (\w+)\?", question):
        restated = " and ".join(f"{name} is {age}" for name, age in ages.items())
        right, other = sorted((m[2], m[3]), key=ages.get, reverse=m[1] == "older")
        compared = "more" if m[1] == "older" else "less"
        return f"{restated}. {ages[right]} is {compared} than {ages[other]}. {right} is {m[1]}."
    return fact(question)


def fact(question: str) -> str:
    if m := re.fullmatch(r"(?:What is|How much is|Add|Tell me) (\d+) (?:\+|and) (\d+)[?.]", question):
        return f"{m[1]} + {m[2]} = {int(m[1]) + int(m[2])}."
    if m := re.fullmatch(r"(?:How do you spell|Spell|Spell the word|How is) (\w+)(?: spelled)?[?.]", question):
        return f"The word {m[1]} is spelled {' '.join(m[1])}."
    if m := re.fullmatch(r"What is ((?:\w )+\w) backwards\?", question):
        return f"The letters {m[1]} backwards are {m[1][::-1]}."
    if m := re.search(r"(day|month)\b.*?(after|before) (\w+)\?", question):
        names = list(calendar.day_name if m[1] == "day" else calendar.month_name[1:])
        return (
            f"The {m[1]} {m[2]} {m[3]} is {names[(names.index(m[3]) + (1 if m[2] == 'after' else -1)) % len(names)]}."
        )
    m = re.fullmatch(r"(?:What is|Tell me|Which word is|Say) the opposite of (\w+)[?.]", question)
    pairs = dict(pair.split() for pair in quickstart.OPPOSITES.split(","))
    return f"The opposite of {m[1]} is {(pairs | {b: a for a, b in pairs.items()})[m[1]]}."


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_answer_follows_from_what_was_told(rows, split):
    for row in rows[f"quickstart_chat-{split}"]:
        if row["subject"] == "talk":
            continue
        context = ""
        for asked, answered in zip(row["messages"][::2], row["messages"][1::2], strict=True):
            story, question = re.fullmatch(r"(.*\.)? ?([^.]+[?.])", asked["content"]).groups()
            context += " " + story if story else ""
            assert right_answer(context.strip(), question) == answered["content"], row


def test_the_files_have_their_known_bytes_on_any_machine(cache):
    folder = corpus_folder(cache)
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in folder.glob("*.jsonl")} == PINNED


def test_the_script_gives_the_files_of_the_package(cache):
    folder = corpus_folder(cache)
    made = quickstart.corpora()
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.jsonl")} == made


def test_the_test_asks_300_different_questions_and_as_many_of_each_kind(rows):
    test = rows["quickstart_chat-test"]
    assert len({json.dumps(row["messages"]) for row in test}) == len(test) == 300
    assert Counter(row["subject"] for row in test) == dict.fromkeys(quickstart.KINDS, 300 // len(quickstart.KINDS))


def test_no_training_text_joins_held_out_people_with_held_out_places(texts):
    people, others = (
        re.compile(rf"\b(?:{'|'.join(words)})\b")
        for words in (quickstart.HELD_OUT_PEOPLE, quickstart.HELD_OUT_PLACES + quickstart.HELD_OUT_THINGS)
    )
    assert not [text for text in texts if people.search(text) and others.search(text)]
    assert sum(bool(people.search(text)) for text in texts) > 1000 < sum(bool(others.search(text)) for text in texts)


def test_the_test_names_nothing_but_what_is_held_out(rows):
    others = re.compile(rf"\b(?:{'|'.join(quickstart.PEOPLE + quickstart.PLACES + quickstart.THINGS)})\b")
    assert not [row for row in rows["quickstart_chat-test"] if others.search(json.dumps(row["messages"]))]


def test_the_questions_found_in_training_text_are_those_of_the_page(rows, texts):
    all_text = "\n".join(texts)
    asked = [(row["subject"], row["messages"][-2]["content"]) for row in rows["quickstart_chat-test"]]
    assert Counter(kind for kind, question in asked if question in all_text) == {"compare": 11}
    page = " ".join((RECIPES.parent / "docs" / "results.md").read_text().split())
    assert "289 of the 300 questions are combinations and wordings that no training text has. The other 11," in page


def test_no_fact_question_of_the_test_stands_in_any_training_text(rows, texts):
    asked = [row for row in rows["quickstart_chat-test"] if row["subject"] in (*quickstart.FACT_KINDS, "backwards")]
    all_text = "\n".join(texts)
    for row in asked:
        question, answer = (message["content"] for message in row["messages"])
        assert question not in all_text
        assert (answer in all_text) == (row["subject"] in quickstart.FACT_KINDS), answer


def test_the_built_in_sources_open_like_any_other_with_their_own_validation(cache):
    for name, kind in (("quickstart_text", "text"), ("quickstart_chat", "chat"), ("spelling", "chat")):
        made = Recipe()
        made.data.sources, made.data.cache_dir = [Source(id=f"tandem:{name}")], str(cache)
        train, validation = open_sources(replace(made.source_settings(), kind=kind))
        assert [file.label for file in train[0].files + validation[0].files] == [
            f"{name}-train.jsonl",
            f"{name}-validation.jsonl",
        ]
        assert train[0].files[0].sha256 != validation[0].files[0].sha256
        assert next(validation[0].read()).items
        assert overlap_of(train, validation).note() is None  # nobody can act on it


def test_spelling_answers_are_right_and_no_word_is_on_both_sides(rows):
    words = {}
    for split in ("train", "validation"):
        words[split] = set()
        for row in rows[f"spelling-{split}"]:
            for message in row["messages"][1::2]:
                word, letters = re.match(r"(\w+)(?:: | is spelled )((?:\w, )*\w)\.", message["content"]).groups()
                assert letters == ", ".join(word)
                words[split].add(word)
    assert len(words["train"]) > 1500
    assert len(words["validation"]) > 40
    assert not words["train"] & words["validation"]
    assert words["train"] | words["validation"] == set(quickstart.spelling_words())


def test_the_quickstart_asks_for_as_many_ids_as_its_world_has(cache):
    recipe = read_recipe([str(RECIPES / "quickstart_pretrain.yaml"), f"data.cache_dir={cache}"])
    train, _ = open_sources(recipe.source_settings())
    texts = training_texts(train, total_chars=int(recipe.tokenizer.train_chars), document_chars=10_000)
    asked = {"split_pattern": recipe.tokenizer.split_pattern, "vocab_size": 2 * recipe.tokenizer.vocab_size}
    assert len(train_bpe(texts, **asked)) == recipe.tokenizer.vocab_size, "plans count a model of another size"
