import json
import os
import signal
import time

import pytest

from pipeline.data.preparation import Preparation
from pipeline.data.row_plan import locks, open_stream, sequence_folder
from pipeline.data.rows import TrainingRows
from pipeline.data.validation import ValidationRows
from pipeline.process.errors import DataError, HangError
from pipeline.process.storage import lock, write_json
from pipeline.recipe.schema import Source, with_values

STEPS = 40


def started(bench, recipe, **how) -> Preparation:
    return bench.started(recipe, **how)


def batches(preparation, steps=STEPS):
    rows = TrainingRows.open(preparation=preparation)
    return [rows.micro_batch(step, 0, rank=0, world_size=1, rows=8) for step in range(steps)]


def shard_bytes(plan):
    return {
        path.name: path.read_bytes()
        for s in plan["train"]["sequences"]
        for path in sequence_folder(plan, s).glob("shard-*.safetensors")
    }


def two_sources(bench):
    return [Source(files=str(path), weight=w) for path, w in zip(bench.text_files[:2], (2, 1), strict=True)]


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_running_ahead_gives_the_rows_and_bytes_of_preparing_beforehand(bench, stage):
    sources = two_sources(bench) if stage == "pretrain" else None
    how = {"stage": stage, "sources": sources, "train": {"max_steps": STEPS}}
    before = bench.prepared(bench.recipe(**how))
    ahead = started(bench, bench.recipe(**how, cache="ahead"))
    assert ahead.child is not None
    for expected, found in zip(batches(before), batches(ahead), strict=True):
        assert expected.keys() == found.keys()
        assert all((expected[name] == found[name]).all() for name in expected)
    ahead.child.wait(60)
    assert shard_bytes(ahead.plan) == shard_bytes(before.plan)
    assert next(iter(ValidationRows(ahead).batches(rows=2)))["input_ids"].shape == (2, 64)


def test_what_is_prepared_starts_no_process(bench):
    recipe = bench.recipe(train={"max_steps": 5})
    bench.prepared(recipe)
    assert started(bench, recipe).child is None


def test_a_killed_preparation_is_reported_and_finished_with_the_same_bytes(bench):
    recipe = bench.recipe(train={"max_steps": STEPS})
    expected = shard_bytes(bench.prepared(recipe).plan)
    recipe = bench.recipe(train={"max_steps": STEPS}, cache="killed")
    preparation = started(bench, recipe)
    stream = open_stream(preparation.plan, "train")
    while not stream.datasets[0].seals:
        time.sleep(0.001)
        stream.refresh()
    os.kill(preparation.child.pid, signal.SIGKILL)
    preparation.child.wait()
    attached = Preparation.attach(json.loads(json.dumps(preparation.description())))
    assert not attached.is_running()
    stream.refresh()
    preparation.killed = True  # and started again before
    if stream.missing() is not None:
        with pytest.raises(HangError, match=r"ended before it had made a row.*Run the same command again"):
            preparation.wait_until(lambda: False, what="a row")
    again = started(bench, recipe)
    batches(again)
    if again.child:
        again.child.wait(60)
    assert shard_bytes(again.plan) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_preparation_is_started_again_where_rows_are_waited_for(bench, number, capsys):
    recipe = bench.recipe(train={"max_steps": STEPS}, cache=f"killed-{number}")
    preparation = started(bench, recipe)
    os.kill(preparation.child.pid, number)
    preparation.child.wait()
    stream = open_stream(preparation.plan, "train")

    def all_there() -> bool:
        stream.refresh()
        return stream.missing() is None

    preparation.wait_until(all_there, what="all rows")

    assert "was killed" in capsys.readouterr().err
    assert shard_bytes(preparation.plan) == shard_bytes(bench.prepared(bench.recipe(train={"max_steps": STEPS})).plan)


def test_a_failure_while_preparing_is_raised_where_rows_are_awaited(bench, tmp_path):
    path = tmp_path / "vanishing.jsonl"
    path.write_bytes(bench.text_files[0].read_bytes())
    recipe = bench.recipe(sources=[Source(files=str(path))])
    sources = bench.sources(recipe)
    path.write_bytes(path.read_bytes() + b'{"text": "one more"}\n')
    preparation = bench.started(recipe, sources=sources)
    with pytest.raises(DataError, match="was changed since it was verified"):
        TrainingRows.open(preparation=preparation)
    attached = Preparation.attach(preparation.description())
    with pytest.raises(DataError, match="was changed since it was verified"):
        TrainingRows.open(preparation=attached)


def test_a_rank_on_another_machine_waits_without_seeing_the_lock(bench):
    preparation = bench.prepared(bench.recipe(train={"max_steps": STEPS}))
    preparation.folder.mkdir(parents=True, exist_ok=True)
    attached = Preparation.attach({**preparation.description(), "machine": "another"})
    assert not Preparation.attach(preparation.description()).is_running()
    assert attached.is_running()
    write_json(preparation.folder / "failure.json", {"class": "DataError", "message": "no text"})
    assert not attached.is_running()


def test_a_second_start_joins_a_preparation_and_takes_over_when_abandoned(bench):
    recipe = bench.recipe(train={"max_steps": STEPS}, cache="shared")
    holder = bench.recipe(train={"max_steps": STEPS}, cache="shared")
    first = started(bench, recipe)
    with locks(first.plan):  # the first child waits for the sequences, as behind another run
        while (free := lock(first.folder / ".lock")) is not None:  # the child takes it when it has started
            free.release()
            time.sleep(0.1)
        second = started(bench, holder)
        assert second.child is None
        assert second.is_running()
        first.close()
    assert len(batches(second)) == STEPS
    assert second.child is not None
    second.close()


def test_training_starts_before_all_of_it_is_prepared(bench):
    recipe = bench.recipe(train={"max_steps": 1200})
    preparation = started(bench, recipe)
    TrainingRows.open(preparation=preparation)
    assert open_stream(preparation.plan, "train").missing() is not None
    preparation.close()


def test_one_text_rows_get_their_own_keys_and_packed_rows_do_not(bench):
    recipe = bench.recipe(stage="sft")
    sources = bench.sources(recipe)
    plans = []
    for one in (False, True):
        plans.append(bench.plan(with_values(recipe, {"data.one_text_rows": one}), sources=sources))
    packed, alone = (plan["train"]["sequences"][0] for plan in plans)
    assert "packing" not in packed["settings"]
    assert alone["settings"] == packed["settings"] | {"packing": "one_text"}
    assert packed["key"] != alone["key"]
    assert [plan["isolated"] for plan in plans] == [True, False]


def test_plain_pretraining_of_a_model_that_leaks_changes_only_whole_documents(bench):
    recipe = bench.recipe()
    sources = bench.sources(recipe)
    packed = bench.plan(recipe, sources=sources)
    alone = bench.plan(with_values(recipe, {"data.one_text_rows": True}), sources=sources)
    assert alone["train"] == packed["train"]
    assert alone["validation"] == packed["validation"]
    assert alone["documents"]["sequences"][0]["settings"]["packing"] == "one_text"
