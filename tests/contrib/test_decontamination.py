import json
import os
import random
import re
import signal
import time
from itertools import islice

import numpy as np
import pytest

from pipeline.contrib import decontamination as ngrams
from pipeline.contrib.decontamination import (
    Matches,
    NumberSet,
    Watchlist,
    Words,
    flags_of,
    item_ngrams,
    without_contaminated,
)
from pipeline.data.mixture import mixed
from pipeline.data.prepare import ShardBuilder
from pipeline.data.row_plan import locks, open_stream, plan_rows, sequence_folder
from pipeline.process.errors import DataError
from pipeline.recipe.dial import row_settings
from tests.data.conftest import chat_files  # noqa: F401 - a fixture: three files, of which contrib has two

THIRTEEN = "the quick brown fox jumps over the lazy dog while nobody looks 42"


def hashes(*texts, n=13):
    return Words([text.encode() for text in texts]).ngrams(n)[0].tolist()


def words_in_plain_python(text):
    """The definition of a word, spelt by a regular expression over characters."""
    lower = "".join(c.lower() if c < "\x80" else c for c in text)
    return [w for w in re.split("[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\xbf\u2000-\u203f]+", lower) if w]


def ngrams_in_plain_python(text, n):
    words = words_in_plain_python(text)
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)}


def documents(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def long_documents(path):
    return [text for text in documents(path) if len(words_in_plain_python(text)) >= 40]


@pytest.mark.parametrize(
    "other",
    [
        f"before it stands {THIRTEEN} and after it this",
        "The QUICK, brown fox:\n\n\tjumps (over) the 'lazy' dog -- while nobody looks \u201c42\u201d.",
        "the\u2014quick\u00a0brown\u2026fox jumps over \u00abthe\u00bb lazy dog while nobody looks 42",
    ],
)
def test_the_hash_of_thirteen_words_does_not_depend_on_their_surroundings(other):
    (wanted,) = hashes(THIRTEEN)
    assert wanted in hashes("first", other, "last")


@pytest.mark.parametrize("other", [THIRTEEN.replace("42", "43"), THIRTEEN.replace("fox", "box"), THIRTEEN[:-3]])
def test_other_words_have_another_hash(other):
    assert hashes(THIRTEEN)[0] not in hashes(other + " and so on")


def test_no_ngram_spans_two_texts():
    half, rest = THIRTEEN[:30], THIRTEEN[30:]
    assert hashes(half, rest) == []
    assert len(hashes(half + " " + rest)) == 1
    assert hashes("a b c", "d e f", n=3) == [*hashes("a b c", n=3), *hashes("d e f", n=3)]


def test_words_are_those_of_the_definition_for_any_text(text_files):
    awkward = "caf\u00e9 na\u00efve \u00abquoted\u00bb x\u00b2 \u0418\u0432\u0430\u043d \u4e2d\u6587 e\u0301 don\u2019t \u20ac5 \U0001f600 \x00\x1f\x7f a\u200db _x_ \u00c2\u00c3"
    for text in [awkward, "", " ", "\u2019", *documents(text_files[0])[:50]]:
        found = Words([text.encode()])
        pieces = found.folded[1:].tobytes().split(b"\xff")[1].replace(b"\0", b" ").decode().split(" ")
        assert [piece for piece in pieces if piece] == words_in_plain_python(text)


@pytest.fixture(scope="module")
def tasks(text_files):
    """Items that are trained on, items of the held-out file, and short ones."""
    chance = random.Random(5)
    known, other = long_documents(text_files[0]), long_documents(text_files[2])

    def piece(text, n):
        words = text.split()
        at = chance.randrange(max(1, len(words) - n))
        return " ".join(words[at : at + n])

    return {
        "known": [f"What is said here? {piece(text, 20).upper()}" for text in known[:30]],
        "held_out": [piece(text, 30) for text in other[:30]],
        "short": [piece(text, 9) for text in [*known[30:45], *other[30:45]]] + ["two words"],
    }


def found_in_plain_python(tasks, texts):
    """Which items have an n-gram in the texts, by sets of strings; None for items of fewer than 8 words."""
    trained = {n: set().union(*(ngrams_in_plain_python(text, n) for text in texts)) for n in range(8, 14)}

    def flag(item):
        n = min(13, len(words_in_plain_python(item)))
        return None if n < 8 else bool(ngrams_in_plain_python(item, n) & trained[n])

    return {name: [flag(item) for item in items] for name, items in tasks.items()}


def test_the_sieve_finds_just_what_a_search_of_strings_finds(tasks, text_files, monkeypatch):
    texts = long_documents(text_files[0])[:200] + documents(text_files[1])[:200]
    expected = found_in_plain_python(tasks, texts)
    for chunk in (1, 700, ngrams.CHUNK_CHARS):
        monkeypatch.setattr(ngrams, "CHUNK_CHARS", chunk)
        watchlist = Watchlist.of(tasks)
        seen = Matches(watchlist.id, watchlist.found(texts), 1, 0)
        assert {name: seen.contaminated(items) for name, items in tasks.items()} == expected, chunk
    assert all(expected["known"])
    assert not all(expected["held_out"])
    assert None in expected["short"]
    assert {True, False} <= set(expected["short"])


@pytest.mark.parametrize("n", range(8, 16))
def test_an_item_is_found_at_any_place_of_the_text(n):
    item = " ".join(f"word{i}" for i in range(n))
    watchlist = Watchlist.of({"task": [item]})
    for before in range(8):
        text = "so " * before + item + " and on"
        assert len(watchlist.found([text])) == max(1, n - 12), before
    for other in (item.replace("word5", "x").replace("word6", "y"), " ".join(item.split()[: min(12, n - 1)])):
        assert not len(watchlist.found([other]))


def test_short_items_and_words_shared_by_many_items_are_not_judged():
    wording = "please complete the rest of this sequence and make sure that all parentheses are closed input"
    texts = [f"{wording} {'a' * i}" for i in range(1, 30)] + ["only seven words are in this one"]
    assert set(item_ngrams(texts)[1].tolist()) == set(range(29))  # the last words of each are its own
    seen = Watchlist.of({"task": texts}).found([wording, "only seven words are in this one"])
    flags = Matches("", seen, 1, 0).contaminated(texts)
    assert flags == [False] * 29 + [None]
    assert Matches("", seen, 1, 0).contaminated([wording] * 30) == [None] * 30


def test_a_watchlist_is_its_file_and_a_changed_file_is_refused(tasks, text_files, tmp_path):
    watchlist = Watchlist.of(tasks)
    path = watchlist.save(tmp_path)
    again = Watchlist.load(path)
    assert again.id == watchlist.id == Watchlist.of(tasks).id
    assert again.tasks == watchlist.tasks
    assert (again.found(documents(text_files[0])) == watchlist.found(documents(text_files[0]))).all()
    assert Watchlist.of({**tasks, "more": [THIRTEEN]}).id != watchlist.id
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="not the one that was written"):
        Watchlist.load(path)
    path.write_bytes(content[:100])
    with pytest.raises(DataError, match="cannot be read"):
        Watchlist.load(path)
    assert not len(Watchlist.of({}).found(["any text"]))


def files(plan, pattern, role="train"):
    return {
        path.name: path.read_bytes()
        for s in plan[role]["sequences"]
        for path in sequence_folder(plan, s).glob(pattern)
    }


def prepared(bench, recipe, path):
    return bench.prepared(recipe, watchlist=path).plan


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_shards_are_the_same_bytes_whether_or_not_items_are_looked_for(bench, tasks, tmp_path, stage):
    talk = "What is 17 plus 0? It is 17. What is 17 plus 1? It is 18."
    watchlist = Watchlist.of({**tasks, "talk": [talk, talk.replace("17", "9999")]})
    plain = prepared(bench, bench.recipe(stage=stage), None)
    plan = prepared(bench, bench.recipe(stage=stage, cache="watched"), watchlist.save(tmp_path))
    assert files(plan, "shard-*") == files(plain, "shard-*")
    assert not files(plain, "seen-*")
    assert not files(plan, "seen-*", "validation")
    assert len(files(plan, "seen-*")) == len(files(plan, "shard-*.json"))
    seen = Matches.by_run(plan, watchlist.id)
    assert seen.unchecked == 0 < seen.shards
    if stage == "sft":
        assert seen.contaminated([talk, talk.replace("17", "9999")]) == [True, False]
    else:
        assert all(seen.contaminated(tasks["known"]))


def test_worker_processes_find_what_one_process_finds(bench, tasks, tmp_path, monkeypatch):
    path = Watchlist.of(tasks).save(tmp_path)
    how = {"shard_rows": 256, "train": {"max_steps": 300}}
    alone = prepared(bench, bench.recipe(**how), path)
    monkeypatch.setattr(Watchlist, "found", lambda *_: pytest.fail("the process that packs searches"))
    plan = prepared(bench, bench.recipe(cache="workers", num_proc=2, **how), path)
    for pattern in ("seen-*", "shard-*", "state-*"):
        assert files(plan, pattern) == files(alone, pattern)
    assert len(set(files(plan, "seen-*").values())) > 1


def test_what_a_shard_contains_does_not_depend_on_where_preparation_stopped(bench, tasks, tmp_path):
    path = Watchlist.of(tasks).save(tmp_path)
    found = []
    for cache, stops_after in (("whole", 10_000), ("stopped", 1), ("stopped later", 3)):
        recipe = bench.recipe(cache=cache, shard_rows=256, train={"max_steps": 300})
        sources = bench.sources(recipe)
        plan = plan_rows(row_settings(recipe), bench.tokenizer, sources=sources, watchlist=path)
        made = True
        while made:
            with locks(plan), ShardBuilder(plan, bench.tokenizer, sources=sources) as builder:
                made = [role for role, *_ in islice(builder.prepare(), stops_after)]
        found.append(files(plan, "seen-*"))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 5
    assert len(set(found[0].values())) > 1


def test_shards_sealed_without_the_watchlist_are_counted_and_searched_again(bench, tasks, tmp_path):
    watchlist = Watchlist.of(tasks)
    path = watchlist.save(tmp_path)
    expected = files(prepared(bench, bench.recipe(cache="watched"), path), "seen-*")
    recipe = bench.recipe()
    plan = prepared(bench, recipe, None)
    seen = Matches.by_run(plan, watchlist.id)
    assert seen.unchecked == seen.shards > 1
    assert not len(seen.ngrams)
    assert bench.started(recipe, watchlist=path).child is None
    again = prepared(bench, recipe, path)
    assert files(again, "seen-*") == expected
    assert Matches.by_run(again, watchlist.id).unchecked == 0
    assert Matches.by_run(again, "another").unchecked == seen.shards


def test_a_killed_child_and_its_successor_find_what_an_undisturbed_one_finds(bench, tasks, tmp_path):
    train = {"max_steps": 40}
    watchlist = Watchlist.of(tasks)
    path = watchlist.save(tmp_path)
    expected = files(prepared(bench, bench.recipe(train=train), path), "seen-*")
    recipe = bench.recipe(train=train, cache="killed")
    sources = bench.sources(recipe)
    preparation = bench.started(recipe, sources=sources, watchlist=path)
    stream = open_stream(preparation.plan, "train")
    while not stream.datasets[0].seals:
        time.sleep(0.001)
        stream.refresh()
    os.kill(preparation.child.pid, signal.SIGKILL)
    preparation.child.wait()
    again = bench.started(recipe, sources=sources, watchlist=path)
    if again.child:
        assert again.child.wait(60) == 0
    assert files(again.plan, "seen-*") == expected
    assert Matches.by_run(again.plan, watchlist.id).unchecked == 0


def test_a_runs_findings_tell_of_just_the_items_that_were_looked_for(tasks, text_files):
    watchlist = Watchlist.of(tasks)
    seen = Matches(watchlist.id, watchlist.found(documents(text_files[0])), 3, 1)
    findings = json.loads(json.dumps(seen.findings(tasks, text_of=["own"], not_searched=["base"])))
    assert findings["tasks"].keys() == watchlist.tasks.keys()
    for name, items in tasks.items():
        assert (findings["tasks"][name]["shards"], findings["tasks"][name]["unchecked"]) == (3, 1)
        assert flags_of(findings, name, items) == seen.contaminated(items)
    assert flags_of(findings, "known", tasks["known"][1:]) is None
    assert flags_of(findings, "other", tasks["known"]) is None
    nowhere = Matches(watchlist.id, seen.ngrams, 3, 3).findings(tasks, text_of=["own"], not_searched=[])
    assert flags_of(nowhere, "known", tasks["known"]) is None
    told = {key: value for key, value in findings["tasks"]["known"].items() if key not in ("shards", "unchecked")}
    before = {"watchlist": watchlist.id, "shards": 3, "unchecked": 1, "tasks": {"known": told}}  # of an older version
    assert flags_of(before, "known", tasks["known"]) is None


def test_the_score_without_contaminated_items_keeps_those_that_cannot_be_judged():
    found = without_contaminated([True, True, False, True, False], [True, False, False, None, True])
    assert found == {
        "items": 5,
        "unjudged": 1,
        "contaminated": 2,
        "contaminated_share": 0.5,
        "score": 0.6,
        "score_without": pytest.approx(2 / 3),
    }
    assert without_contaminated([True], [True])["score_without"] is None
    assert without_contaminated([], [])["score"] is None
    assert without_contaminated([1.0], [None])["contaminated_share"] is None
    with pytest.raises(ValueError, match="shorter"):
        without_contaminated([True], [])


def test_no_other_number_passes_the_filter():
    numbers = np.sort(mixed(np.arange(1000, dtype=np.uint64)))
    others = mixed(np.arange(1000, 300_000, dtype=np.uint64))
    known = NumberSet(numbers)
    assert known.places_in(np.concatenate([others, numbers])).tolist() == list(range(len(others), len(others) + 1000))
