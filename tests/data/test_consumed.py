"""What a run has trained on, by source, against a count of every row that it reads."""

import numpy as np
import pytest

from pipeline.data.row_plan import sequence_folder
from pipeline.data.rows import TrainingRows, bits
from pipeline.data.shards import seal_path
from pipeline.process.storage import read_json, write_json
from pipeline.recipe.schema import Source


def counted_row_by_row(rows, step):
    """By source: rows, targets, padding and pieces of the first `step` steps, of what the trainer is given."""
    found = {s["name"]: np.zeros(4, int) for s in rows.plan["train"]["sequences"]}
    T = rows.row_tokens
    for n in range(step):
        batch = rows.micro_batch(n, 0, rank=0, world_size=1, rows=rows.step_rows.full)
        for i, (place, (name, *_)) in enumerate(zip(rows.places(n), rows.origins(n), strict=True)):
            shard = rows.stream.shard(place)
            used = int(shard.used[place.row])
            ids = batch["input_ids"][i, :used].tolist()
            pieces = ids.count(rows.plan["bos"])
            if shard.starts is not None:
                pieces = int(bits(shard.starts[place.row], T + 1)[: min(used, T)].sum())
            found[name] += [1, int((batch["labels"][i] != -100).sum()), T + 1 - used, pieces]
    return {name: tuple(map(int, counts)) for name, counts in found.items()}


def as_counts(consumed):
    return {name: (c.samples, c.tokens, c.padded, c.documents) for name, c in consumed.items()}


MIXED = {"name": "many", "weight": 0.7}, {"name": "few", "weight": 0.3}


@pytest.mark.parametrize("packing", ["cut_and_fit", "best_fit_crop", "concat"])
def test_mixture_sources_are_counted_as_the_rows_of_the_steps_say(bench, packing):
    sources = [Source(files=str(f), **how) for f, how in zip(bench.text_files[:2], MIXED, strict=True)]
    rows = TrainingRows.open(preparation=bench.prepared(bench.recipe(sources=sources, packing=packing)))
    for step in (0, 1, 7, 30):
        assert as_counts(rows.consumed(step)) == counted_row_by_row(rows, step)
    assert sum(c.tokens for c in rows.consumed(30).values()) == sum(rows.num_targets(step) for step in range(30))
    assert rows.consumed(30)["few"].documents > 10


def test_epochs_of_conversations_are_counted_and_their_padding_begins_none(bench):
    sources = [Source(files=str(f), name=n) for f, n in zip(bench.chat_files[:2], ("many", "few"), strict=True)]
    recipe = bench.recipe(stage="sft", sources=sources, train={"max_steps": 40, "seed": 7})
    rows = TrainingRows.open(preparation=bench.prepared(recipe))
    few = rows.stream.datasets[1]
    assert rows.consumed(40)["few"].samples > 2 * few.rows  # into a third epoch
    for step in (1, 13, 40):
        assert as_counts(rows.consumed(step)) == counted_row_by_row(rows, step)


def test_every_conversation_of_an_epoch_is_one_document(bench):
    recipe = bench.recipe(stage="sft", sources=[Source(files=str(bench.chat_files[0]))], train={"num_train_epochs": 2})
    rows = TrainingRows.open(preparation=bench.prepared(recipe))
    counter, sealed = rows.counter, rows.stream.datasets[0].rows
    assert counter.consumed(sealed)[0].documents == 300
    assert counter.consumed(2 * sealed)[0].documents == 600


def test_unreadable_rows_are_counted_once_however_many_epochs_pass_them(bench, tmp_path):
    lines = bench.text_files[0].read_text().splitlines()
    lines[1] = '{"text": 7}'
    lines[-1] = '{"text": 8}'
    path = tmp_path / "torn.jsonl"
    path.write_text("\n".join(lines) + "\n")
    recipe = bench.recipe(sources=[Source(files=str(path))], max_bad_rows=5, train={"num_train_epochs": 2})
    rows = TrainingRows.open(preparation=bench.prepared(recipe))
    sealed = rows.stream.datasets[0].rows
    told = [rows.counter.consumed(k)[0].bad_rows for k in (0, 1, sealed, 2 * sealed)]
    assert told == [0, 2, 2, 2]  # they were read before the first shard was sealed


def test_documents_are_left_out_where_a_shard_does_not_tell_them(bench):
    preparation = bench.prepared(bench.recipe())
    plan = preparation.plan
    path = seal_path(sequence_folder(plan, plan["train"]["sequences"][0]), 0)
    seal = read_json(path)
    del seal["documents"], seal["own_sha256"]  # as an earlier version sealed it
    write_json(path, seal)
    (consumed,) = TrainingRows.open(preparation=preparation).consumed(2).values()
    assert consumed.documents is None
    assert consumed.samples == 16
