"""Evaluation items that stand in a run's training text: found while it is prepared, reported beside every score."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.contrib.contaminated_items import (
    contamination_line,
    record_findings,
    texts_of_bundle,
    texts_of_chat_tasks,
)
from pipeline.contrib.decontamination import Watchlist, items_digest
from pipeline.contrib.humaneval import humaneval_item
from pipeline.data.__main__ import main as prepare
from pipeline.evals.__main__ import main as evaluate
from pipeline.evals.chat import CHAT_CORE, chat_results
from pipeline.evals.chat import TaskScore as ChatTaskScore
from pipeline.evals.chat_tasks import BUILT_IN, LoadedTask, arc_item, gsm8k_item, mmlu_item
from pipeline.evals.core import CoreScore, TaskScore, core_results, in_order
from pipeline.evals.core_bundle import TASKS, Bundle, open_bundle
from pipeline.metrics import Protocol
from pipeline.process.errors import DataError
from tests.runner import WarmRunner

BY_NAME = {task.name: task for task in TASKS}
SCORED = ("squad", "copa", "winograd")
MOST = 12  # items of each task; fewer are scored
HALF_SEARCHED = {"shards": 2, "unchecked": 1, "text_of": ["own"], "not_searched": ["gone"]}  # of a task's findings
MADE_UP = "purple kettles argue with nine wooden admirals about the price of fog in lower"


@pytest.fixture
def runner(tmp_path, text_files, chat_files, warm) -> WarmRunner:
    return WarmRunner(tmp_path, tmp_path / "cache", text_files, chat_files, warm)  # shards that nobody made before


def trained_words(text_files, count=14):
    """Pieces of documents with which every run begins."""
    texts = [
        json.loads(line)["text"].split() for path in text_files[:2] for line in path.read_text().splitlines()[:60]
    ]
    return [" ".join(words[5 : 5 + count]) for words in texts if len(words) > 40]


def bundle_of(folder, text_files):
    """Three tasks, of which every third item stands in the training text, and one more is too short to be judged."""
    known = iter(trained_words(text_files))
    flags = {}
    for name in SCORED:
        items, flags[name] = [], []
        for n in range(MOST):
            text = next(known) if n % 3 == 0 else f"{MADE_UP} place {name} {n}"
            flags[name].append(n % 3 == 0)
            if n == 4:
                text, flags[name][-1] = "too short", None
            head, tail = text.rsplit(" ", 1)
            if BY_NAME[name].kind == "language_modeling":
                items.append({"context": f"{head} ", "continuation": tail})
            elif BY_NAME[name].kind == "multiple_choice":
                items.append({"query": head, "choices": ["wrong", tail], "gold": 1})
            else:
                items.append({"context_options": [head, "Nobody"], "continuation": tail, "gold": 0})
        path = folder / "eval_data" / BY_NAME[name].file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder, flags


def recipe_of(runner, name, **core):
    bundle, flags = bundle_of(runner.folder / "bundle", runner.text_files)
    core = {"every_steps": 4, "bundle": str(bundle), "max_per_task": 8} | core
    evals = {"bpb": {"tokens": 1024, "at_start": False}, "core": core}
    return runner.recipe(name, "gpt2", train={"max_steps": 10}, evals=evals), flags


def findings_of(run):
    return json.loads((run.directory / "report" / "contamination.json").read_text())


def entries_of(directory):
    return json.loads((directory / "report" / "evals.json").read_text())["entries"]


def assert_told(entry, flags, count):
    """The rows of an entry tell of just the contaminated ones among the first `count` items in the order of scoring."""
    rows = {row["name"]: row for row in entry["results"]}
    for name in SCORED:
        scored = in_order(flags[name], count)
        found = rows[f"core/{name}"]["contamination"]
        assert (found["items"], found["contaminated"]) == (len(scored), scored.count(True)), name
        assert found["unjudged"] == scored.count(None)
        assert found["score"] == pytest.approx(rows[f"core/{name}"]["value"])
        assert (found["shards"] > 0, found["unchecked_shards"]) == (True, 0)
        clean = [flag for flag in scored if not flag]
        assert (found["score_without"] is not None) == bool(clean)


@pytest.mark.full_except("1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_tells_which_items_it_saw_and_scores_without_them(runner, capsys, ranks):
    recipe, flags = recipe_of(runner, "run")
    run = runner.train(recipe, ranks=ranks)
    assert [entry["step"] for entry in entries_of(run.directory)] == [4, 8, 10]
    for entry in entries_of(run.directory):
        assert_told(entry, flags, 8)
    findings = findings_of(run)
    for name in SCORED:
        found = findings["tasks"][f"core/{name}"]
        assert found["unchecked"] == 0 < found["shards"]
        assert (found["text_of"], found["not_searched"]) == (["run"], [])
        assert found["contaminated"] == [place for place, flag in enumerate(flags[name]) if flag]
        assert found["unjudged"] == [place for place, flag in enumerate(flags[name]) if flag is None] == [4]
    assert "contamination:" not in run.output
    assert "An item is contaminated when" in (run.directory / "report" / "report.md").read_text()
    if ranks == 1:
        assert evaluate([str(run.directory), "core"]) == 0
        said = capsys.readouterr().out
        assert_told(entries_of(run.directory)[-1], flags, MOST)
        assert "contamination: 12 of 36 scored items are in the training text (3 cannot be judged)" in said
        copa = runner.folder / "bundle" / "eval_data" / BY_NAME["copa"].file
        copa.write_text("".join(copa.read_text().splitlines(keepends=True)[1:]))
        assert evaluate([str(run.directory), "core"]) == 0
        rows = {row["name"]: row for row in entries_of(run.directory)[-1]["results"]}
        assert "contamination" not in rows["core/copa"]
        assert "contamination" in rows["core/squad"]


@pytest.mark.full
def test_a_killed_and_resumed_run_tells_what_an_undisturbed_one_tells(runner):
    recipe, flags = recipe_of(runner, "cut")
    whole = runner.train(recipe, "run.name=whole", f"data.cache_dir={runner.folder / 'other'}")
    runner.kill(recipe, name="cut", after_step=7)
    run = runner.train(recipe, "run.callbacks=[]")
    found, undisturbed = findings_of(run)["tasks"], findings_of(whole)["tasks"]
    assert found == {name: about | {"text_of": ["cut"]} for name, about in undisturbed.items()}
    assert_told(entries_of(run.directory)[-1], flags, 8)


@pytest.mark.full
def test_without_benchmarks_nothing_is_looked_for(runner, capsys):
    recipe, _ = recipe_of(runner, "plain", every_steps=None)
    run = runner.train(recipe)
    assert list(runner.cache.rglob("shard-*"))
    assert not list(runner.cache.rglob("seen-*"))
    assert not list(runner.cache.rglob("watchlist-*"))
    assert not (run.directory / "report" / "contamination.json").exists()
    assert evaluate([str(run.directory), "core"]) == 0
    said = capsys.readouterr().out
    assert "contamination: the training text of this run was not searched for these items" in said


@pytest.mark.full
def test_text_prepared_earlier_is_counted_and_can_be_searched_later(runner):
    recipe, flags = recipe_of(runner, "late")
    runner.train(recipe, "evals.core.every_steps=null", "run.name=before")
    run = runner.train(recipe)
    (line,) = [line for line in run.output.splitlines() if line.startswith("contamination: ")]
    found = findings_of(run)["tasks"]["core/copa"]
    assert found["unchecked"] == found["shards"] > 0
    assert f"in {found['shards']} of {found['shards']} shards" in line
    assert not any("contamination" in row for entry in entries_of(run.directory) for row in entry["results"])
    module, *arguments = line.partition("python -m ")[2].split()
    assert (module, prepare(arguments)) == ("pipeline.data", 0)
    again = runner.train(recipe, "run.name=again")
    assert "contamination:" not in again.output
    assert_told(entries_of(again.directory)[-1], flags, 8)


@pytest.mark.full
def test_an_sft_run_tells_which_chat_items_stand_in_its_conversations(runner, capsys):
    trained = [json.loads(line)["messages"] for line in runner.chat_files[0].read_text().splitlines()]
    known = [talk for talk in trained if len(talk) == 2 and len(talk[1]["content"].split()) >= 14][:6]
    asked = [{"role": "user", "content": "What does it do?"}]
    other = [[*asked, {"role": "assistant", "content": f"{MADE_UP} place {n}"}] for n in range(6)]
    short = [[*asked, {"role": "assistant", "content": "Too little."}]]
    (runner.folder / "own.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in known + other + short)
    )
    own = [{"name": "mine", "files": "own.jsonl", "checker": "contains"}]
    chat = {"every_steps": 10, "tasks": [], "own": own, "max_new_tokens": 4}
    evals = {"bpb": {"tokens": 1024, "at_start": False}, "chat": chat}
    run = runner.train(runner.sft_recipe("talk", "gpt2", train={"max_steps": 10}, evals=evals), stage="sft")
    (entry,) = entries_of(run.directory)
    (row,) = entry["results"]
    found = row["contamination"]
    assert (row["name"], found["items"], found["contaminated"], found["unjudged"]) == ("chat/mine", 13, 6, 1)
    assert findings_of(run)["tasks"]["chat/mine"]["items"] == 13
    said = ["--own-task", f"mine={runner.folder / 'own.jsonl'}", "--checker", "contains", "--max-new-tokens", "4"]
    assert evaluate([str(run.directory), *said]) == 0
    assert (
        "contamination: 6 of 13 scored items are in the training text (1 cannot be judged)" in capsys.readouterr().out
    )
    (again,) = entries_of(run.directory)[-1]["results"]
    assert again["contamination"] == found


@pytest.mark.full
def test_findings_that_cannot_be_recorded_end_no_training(tmp_path, capsys):
    plan = {"watchlist": str(tmp_path / "watchlist-1.safetensors"), "train": "torn"}
    run = SimpleNamespace(contamination=tmp_path / "contamination.json")
    assert record_findings(run, plan, []) is None
    assert "is unknown (" in capsys.readouterr().err
    assert record_findings(run, {"watchlist": None}, []) is None
    assert not run.contamination.exists()


@pytest.mark.full
def test_a_tasks_text_is_its_question_and_right_answer(tmp_path):
    items = {
        "arc_easy": {"query": "Question: Why?", "choices": ["no", "so"], "gold": 1},
        "winograd": {"context_options": ["Tom", "Ann"], "continuation": "left.", "gold": 0},
        "squad": {"context": "Where?", "continuation": "there"},
    }
    others = {name: "not asked for" for name in BY_NAME if name not in items}
    bundle = Bundle({BY_NAME[name].file: [item] for name, item in items.items()}, {}, {}, others)
    assert texts_of_bundle(bundle) == {
        "core/arc_easy": ["Why? so"], "core/winograd": ["Tom left."], "core/squad": ["Where? there"]
    }  # fmt: skip


@pytest.mark.full
def test_a_chat_tasks_text_is_its_question_and_right_answer():
    arc = {"question": "Why\nso?", "choices": {"text": ["a\n- b=C", "c"], "label": ["1", "2"]}, "answerKey": "1"}
    mmlu = {"question": "Which?", "choices": ["x", "y", "z", "w"], "answer": 2, "subject": "s"}
    program = {"prompt": "def f():\n", "canonical_solution": "    return 1\n", "test": "", "entry_point": "f"}
    texts = {
        "arc_easy": (arc_item(arc), "Why\nso? a\n- b=C"),
        "mmlu": (mmlu_item(mmlu), "Which? z"),
        "gsm8k": (gsm8k_item({"question": "How many?", "answer": "So\n#### 4"}), "How many?\n4"),
        "humaneval": (humaneval_item(program), "def f():\n    return 1\n"),
    }
    for name, (item, text) in texts.items():
        loaded = LoadedTask(task=BUILT_IN[name], items=[item, item], files=[])
        assert texts_of_chat_tasks([loaded]) == {f"chat/{name}": [text, text]}


@pytest.mark.full
def test_a_core_score_leaves_out_exactly_its_contaminated_items(tmp_path, text_files):
    folder, flags = bundle_of(tmp_path, text_files)
    bundle = open_bundle(str(folder))
    tasks = {}
    for name in SCORED:
        texts = texts_of_bundle(bundle)[f"core/{name}"]
        found = {
            key: [n for n, flag in enumerate(flags[name]) if flag is is_]
            for key, is_ in (("contaminated", True), ("unjudged", None))
        }
        tasks[f"core/{name}"] = {"digest": items_digest(texts), "items": len(texts), **found, **HALF_SEARCHED}
    # Of a model that answers all but the contaminated ones rightly.
    scores = [TaskScore(BY_NAME[name], ~np.array(in_order(flags[name], 7), bool), 0) for name in SCORED]
    score = CoreScore(scores, dict(bundle.missing), bundle, Protocol({"score": "core"}), 1.0)
    rows = core_results(score, {"tasks": tasks})
    assert [row["contamination"]["score_without"] for row in rows[2:]] == [1.0] * 3
    assert all(row["value"] < 1 for row in rows)


@pytest.mark.full
def test_a_chat_score_leaves_out_exactly_its_contaminated_items():
    tasks, scores, found = [], [], {}
    for name in CHAT_CORE:
        row = {"question": "Is it so", "choices": {"text": ["no", "yes"], "label": ["A", "B"]}, "answerKey": "B"}
        items = [arc_item({**row, "question": f"Is it so, {n}?"}) for n in range(8)]
        tasks.append(LoadedTask(task=BUILT_IN[name], items=items, files=[{"sha256": ""}]))
        (texts,) = texts_of_chat_tasks(tasks[-1:]).values()
        about = {"digest": items_digest(texts), "items": 8, "contaminated": [1, 2, 7], "unjudged": [0]}
        found[f"chat/{name}"] = about | HALF_SEARCHED
        scores.append(chat_score(name, [True, False, False, True, True]))
    rows = chat_results(tasks, scores, {"tasks": found})
    assert [row["contamination"]["score_without"] for row in rows[1:]] == [1.0] * 5
    assert rows[0]["name"] == "chat/core_part"
    assert contamination_line(rows) == (
        "contamination: 10 of 25 scored items are in the training text (5 cannot be judged); 1 of 2 shards were not "
        "searched; not searched: the text of gone, which this model comes from"
    )
    assert all(row["value"] < 1 for row in rows)
    assert not any("contamination" in row for row in chat_results(tasks, scores))


def chat_score(name, correct):
    accuracy = sum(correct) / len(correct)
    return ChatTaskScore(
        name=name,
        n=len(correct),
        of=8,
        complete=False,
        accuracy=accuracy,
        centred=BUILT_IN[name].centred(accuracy),
        interval=(0.0, 1.0),
        correct=correct,
        too_long=0,
        seconds=1.0,
    )


@pytest.mark.full
def test_a_watchlist_that_was_damaged_is_written_anew_by_the_next_start(tmp_path):
    watchlist = Watchlist.of({"task": [MADE_UP]})
    path = watchlist.save(tmp_path)
    for content in (b"", path.read_bytes()[:-1], b"\x02\0\0\0\0\0\0\0{}"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="Start the training again"):
            Watchlist.load(path)
        assert watchlist.save(tmp_path) == path
        assert Watchlist.load(path).id == watchlist.id
