import json
import os
import signal
import time

import pytest

from pipeline.data.preparation import (
    Preparation,
    folders_of,
    locks,
    make_plan,
    open_stream,
    sequence_folder,
    start_preparation,
)
from pipeline.data.rows import TrainingRows, ValidationRows
from pipeline.process.errors import DataError
from pipeline.process.storage import LOOK_S, write_json
from pipeline.recipe.schema import Source, with_values

STEPS = 40


def started(bench, recipe, **how) -> Preparation:
    return start_preparation(recipe, bench.tokenizer, sources=bench.sources(recipe), **how)


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
    assert next(iter(ValidationRows.open(ahead).batches(rows=2)))["input_ids"].shape == (2, 64)


def test_what_is_prepared_starts_no_process(bench):
    recipe = bench.recipe(train={"max_steps": 5})
    bench.prepared(recipe)
    assert started(bench, recipe).child is None


def test_a_killed_preparation_is_told_and_the_next_start_goes_on_with_the_same_bytes(bench):
    recipe = bench.recipe(train={"max_steps": STEPS})
    expected = shard_bytes(bench.prepared(recipe).plan)
    recipe = bench.recipe(train={"max_steps": STEPS}, cache="killed")
    preparation = started(bench, recipe)
    stream = open_stream(preparation.plan, "train")
    while not stream.sequences[0].seals:
        time.sleep(0.001)
        stream.refresh()
    os.kill(preparation.child.pid, signal.SIGKILL)
    preparation.child.wait()
    attached = Preparation.attach(json.loads(json.dumps(preparation.description())))
    assert not attached.is_running()
    stream.refresh()
    if stream.missing() is not None:
        with pytest.raises(DataError, match=r"ended before .* was ready.*Run the same command again"):
            preparation.wait_until(lambda: False, what="a row")
    again = started(bench, recipe)
    batches(again)
    if again.child:
        again.child.wait(60)
    assert shard_bytes(again.plan) == expected


def test_a_failure_of_the_preparing_process_is_raised_where_rows_are_waited_for(bench, tmp_path):
    path = tmp_path / "vanishing.jsonl"
    path.write_bytes(bench.text_files[0].read_bytes())
    recipe = bench.recipe(sources=[Source(files=str(path))])
    sources = bench.sources(recipe)
    path.write_bytes(path.read_bytes() + b'{"text": "one more"}\n')
    preparation = start_preparation(recipe, bench.tokenizer, sources=sources)
    with pytest.raises(DataError, match="sources are not what they were"):
        TrainingRows.open(preparation=preparation)
    attached = Preparation.attach(preparation.description())
    with pytest.raises(DataError, match="sources are not what they were"):
        TrainingRows.open(preparation=attached)


def test_a_rank_on_another_machine_waits_for_a_preparation_whose_lock_it_cannot_see(bench):
    preparation = bench.prepared(bench.recipe(train={"max_steps": STEPS}))
    preparation.folder.mkdir(parents=True, exist_ok=True)
    attached = Preparation.attach({**preparation.description(), "machine": "another"})
    assert not Preparation.attach(preparation.description()).is_running()
    assert attached.is_running()
    write_json(preparation.folder / "failure.json", {"class": "DataError", "message": "no text"})
    assert not attached.is_running()


def test_a_preparation_that_is_stopped_leaves_no_lease_and_a_killed_one_is_followed_at_once(bench):
    recipe = bench.recipe(train={"num_train_epochs": 1}, cache="leases")
    for how in (Preparation.close, lambda preparation: preparation.child.kill()):
        preparation = started(bench, recipe)
        stream = open_stream(preparation.plan, "train")
        sealed = len(stream.sequences[0].seals)
        while len(stream.sequences[0].seals) == sealed:
            time.sleep(0.001)
            stream.refresh()
        leases = [folder / ".lock.owner" for folder in folders_of(preparation.plan)]
        assert all(lease.exists() for lease in leases)
        how(preparation)
        preparation.child.wait()
        assert {lease.exists() for lease in leases} == {how is not Preparation.close}
    begun = time.monotonic()
    with locks(preparation.plan):
        assert time.monotonic() - begun < LOOK_S


def test_a_second_start_attaches_and_takes_over_when_the_first_one_is_gone(bench):
    recipe = bench.recipe(train={"max_steps": STEPS}, cache="shared")
    holder = bench.recipe(train={"max_steps": STEPS}, cache="shared")
    first = started(bench, recipe)
    with locks(first.plan):  # the first child waits for the sequences, as behind another run
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


def test_kept_shards_slide_with_the_reader_and_come_back_for_the_next_epoch(bench):
    files = [Source(files=str(bench.text_files[0]))]
    how = {"sources": files, "train": {"max_steps": 280}, "shard_rows": 64}
    expected = batches(bench.prepared(bench.recipe(**how)), steps=280)
    recipe = bench.recipe(**how, keep_shards=2, cache="sliding")
    preparation = started(bench, recipe)
    rows = TrainingRows.open(preparation=preparation)
    sequence = rows.stream.sequences[0]
    most = 0
    for step in range(280):
        found = rows.micro_batch(step, 0, rank=0, world_size=1, rows=8)
        assert (found["input_ids"] == expected[step]["input_ids"]).all(), step
        most = max(most, len(list(sequence.folder.glob("shard-*.safetensors"))))
    assert sequence.end is not None
    assert sequence.rows * 1.5 < 280 * 8  # well into a second epoch
    assert most <= 2 + 1 + 2 + 1 < len(sequence.seals)
    preparation.close()
    again = started(bench, recipe, from_step=20)
    rows = TrainingRows.open(preparation=again)
    for step in range(20, 40):
        found = rows.micro_batch(step, 0, rank=0, world_size=1, rows=8)
        assert (found["input_ids"] == expected[step]["input_ids"]).all()
    again.close()


def test_rows_of_one_text_each_have_keys_of_their_own_and_packed_ones_keep_theirs(bench):
    recipe = bench.recipe(stage="sft")
    sources = bench.sources(recipe)
    plans = []
    for one in (False, True):
        plans.append(make_plan(with_values(recipe, {"data.one_text_rows": one}), bench.tokenizer, sources=sources))
    packed, alone = (plan["train"]["sequences"][0] for plan in plans)
    assert "packing" not in packed["settings"]
    assert alone["settings"] == packed["settings"] | {"packing": "one_text"}
    assert packed["key"] != alone["key"]
    assert [plan["isolated"] for plan in plans] == [True, False]


def test_plain_pretraining_of_a_model_that_leaks_changes_only_whole_documents(bench):
    recipe = bench.recipe()
    sources = bench.sources(recipe)
    packed = make_plan(recipe, bench.tokenizer, sources=sources)
    alone = make_plan(with_values(recipe, {"data.one_text_rows": True}), bench.tokenizer, sources=sources)
    assert alone["train"] == packed["train"]
    assert alone["validation"] == packed["validation"]
    assert alone["documents"]["sequences"][0]["settings"]["packing"] == "one_text"
