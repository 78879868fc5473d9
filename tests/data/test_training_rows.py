import json
import time
import types
from itertools import pairwise

import numpy as np
import pytest
import torch

from pipeline.data.preparation import Preparation
from pipeline.data.rows import TrainingRows
from pipeline.process.errors import DataError
from pipeline.recipe.schema import Optimizer, Schedule, Source
from pipeline.training.nonfinite import RowOrigins


def steps_as_dealt(rows, steps, *, world_size, micro_batch):
    """The rows of steps as all ranks read them, fillers left out, in the order of the step."""
    dealt = []
    for step in steps:
        found, micro_step = [], 0
        while micro_step * world_size * micro_batch < rows.step_rows.full:
            for rank in range(world_size):
                dealt_at_once = rows.micro_rows(step, micro_batch)
                batch = rows.micro_batch(step, micro_step, rank=rank, world_size=world_size, rows=dealt_at_once)
                assert batch["labels"] is batch["shift_labels"]
                pairs = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
                found += [pair for pair in pairs if any(label != -100 for label in pair[1])]
            micro_step += 1
        dealt.append(found)
    return dealt


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_rows_of_a_step_do_not_depend_on_processes_or_micro_batch(bench, stage):
    preparation = bench.prepared(bench.recipe(stage=stage))
    rows = TrainingRows.open(preparation=preparation)
    expected = steps_as_dealt(rows, [0, 1, 17], world_size=1, micro_batch=8)
    assert [len(step) for step in expected] == [8, 8, 8]
    for world_size, micro_batch in ((1, 1), (2, 2), (3, 1), (3, 2), (2, 16)):
        again = TrainingRows.open(preparation=Preparation.attach(json.loads(json.dumps(preparation.description()))))
        assert steps_as_dealt(again, [0, 1, 17], world_size=world_size, micro_batch=micro_batch) == expected


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_num_targets_counts_the_labels_of_the_whole_global_batch(bench, stage):
    rows = TrainingRows.open(preparation=bench.prepared(bench.recipe(stage=stage)))
    counts = [rows.num_targets(step) for step in range(5)]
    for step, count in enumerate(counts):
        labels = [
            rows.micro_batch(step, m, rank=r, world_size=3, rows=2)["labels"] for m in range(2) for r in range(3)
        ]
        assert count == sum(int((label != -100).sum()) for label in labels)
    if stage == "sft":
        assert len(set(counts)) > 1  # masks are ragged


def test_smaller_batches_at_the_beginning_deal_each_row_once_to_any_processes(bench):
    warmup = {"batch_warmup_steps": 5, "batch_halvings": 2}
    recipe = bench.recipe(train={"max_steps": 20})
    recipe.optimizer = Optimizer(type="adamw", schedule=Schedule(**warmup))
    rows = TrainingRows.open(preparation=bench.prepared(recipe))
    plain = TrainingRows.open(preparation=bench.prepared(bench.recipe(train={"max_steps": 20})))
    assert rows.total_rows() == 3 * 2 + 2 * 4 + 15 * 8
    expected = steps_as_dealt(rows, range(20), world_size=1, micro_batch=8)
    assert [len(step) for step in expected] == [2, 2, 2, 4, 4, *[8] * 15]
    assert [pair for step in expected for pair in step] == [
        pair for step in steps_as_dealt(plain, range(17), world_size=1, micro_batch=8) for pair in step
    ][:134]
    for world_size, micro_batch in ((1, 1), (2, 2), (3, 1), (3, 2)):
        assert steps_as_dealt(rows, range(20), world_size=world_size, micro_batch=micro_batch) == expected
    assert rows.micro_rows(0, 8) == 2  # a quarter of the work
    # Tried for its memory, a micro-batch is as large as in the steps to come.
    assert rows.micro_batch(0, 0, rank=0, world_size=1, rows=8)["input_ids"].shape[0] == 8
    # The guard names the rows that a rank read in a micro-step: here the second of the two.
    origins = RowOrigins(rows, types.SimpleNamespace(read_manifest=dict), micro_batch=2, batch_ranks=2)
    assert [row[1:] for row in origins.of_micro_step(0, 0, [1])] == [
        [f"file {rows.origins(0)[1][1]}", *rows.origins(0)[1][2:]]
    ]
    assert rows.position(4)["rows"] == 10
    assert sum(consumed.samples for consumed in rows.consumed(4).values()) == 10


def test_a_batch_past_the_last_row_is_all_fillers(bench):
    rows = TrainingRows.open(preparation=bench.prepared(bench.recipe()))
    batch = rows.micro_batch(0, 1, rank=2, world_size=3, rows=2)
    assert (batch["labels"] == -100).all()
    assert batch["input_ids"].shape == (2, 64)
    assert batch["input_ids"].dtype == torch.int64


def test_every_row_comes_once_an_epoch_and_reordered_in_the_next(bench):
    rows = TrainingRows.open(preparation=bench.prepared(bench.recipe(stage="sft", train={"num_train_epochs": 2})))
    sealed = rows.stream.datasets[0].rows
    places = rows.stream.places(0, 2 * sealed)
    first, second = ([(p.shard, p.row) for p in part] for part in (places[:sealed], places[sealed:]))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == sealed
    assert first != second
    assert [p.epoch for p in places] == [0] * sealed + [1] * sealed
    assert rows.total_rows() == 2 * sealed


def test_another_seed_is_another_order_of_the_same_shards(bench):
    orders = []
    for seed in (7, 8):
        rows = TrainingRows.open(
            preparation=bench.prepared(bench.recipe(stage="sft", train={"max_steps": 3, "seed": seed}))
        )
        orders.append([(p.shard, p.row) for p in rows.stream.places(0, 24)])
    assert orders[0] != orders[1]


def test_isolated_documents_restart_their_positions_at_every_bos(bench):
    preparation = bench.prepared(bench.recipe(isolate_documents=True))
    rows = TrainingRows.open(preparation=preparation)
    batch = rows.micro_batch(3, 0, rank=0, world_size=1, rows=8)
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        expected, position = [], 0
        for i, token in enumerate(ids.tolist()):
            if token == preparation.plan["bos"] or (
                labels[i] == -100 and labels[i - 1] == -100 and labels[i - 2] != -100
            ):
                position = 0
            expected.append(position)
            position += 1
        assert positions.tolist() == expected
    plain = TrainingRows.open(preparation=bench.prepared(bench.recipe()))
    assert "position_ids" not in plain.micro_batch(3, 0, rank=0, world_size=1, rows=8)


def test_only_what_the_assistant_writes_is_trained_and_conversations_are_isolated(bench):
    from pipeline.tokenizer.chat import render

    recipe = bench.recipe(stage="sft")
    rows = TrainingRows.open(preparation=bench.prepared(recipe))
    train, _ = bench.sources(recipe)
    rendered = set()
    for block in train[0].read():
        for talk in block.items:
            ids, trained = render(bench.tokenizer, talk.messages)
            for end in range(1, len(talk.messages) + 1):  # long ones are cut at a whole turn
                ids, trained = render(bench.tokenizer, talk.messages[:end])
                rendered.add((tuple(ids), tuple(trained)))
    seen = 0
    for step in range(4):
        batch = rows.micro_batch(step, 0, rank=0, world_size=1, rows=8)
        for ids, labels, positions in zip(
            *(batch[n].tolist() for n in ("input_ids", "labels", "position_ids")), strict=True
        ):
            starts = [i for i, p in enumerate(positions) if p == 0] + [len(ids)]
            for a, b in pairwise(starts):
                if b < len(ids):  # the last id of a row is only a label
                    trained = (False, *(label != -100 for label in labels[a : b - 1]))
                    if set(ids[a:b]) != {rows.plan["pad"]}:
                        assert (tuple(ids[a:b]), trained) in rendered
                        seen += 1
    assert seen > 20


def test_the_position_names_the_rows_used_and_the_last_ones_origin(bench):
    files = [Source(files=str(path), name=name) for path, name in zip(bench.text_files[:2], "ab", strict=True)]
    rows = TrainingRows.open(preparation=bench.prepared(bench.recipe(sources=files)))
    position = rows.position(12)
    assert json.loads(json.dumps(position)) == position
    used = [place.source for step in range(12) for place in rows.places(step)]
    assert {name: s["k"] for name, s in position["sources"].items()} == {"a": used.count(0), "b": used.count(1)}
    source, pq, rg, _ = rows.origins(11)[-1]
    assert (position["source"], position["pq"], position["rg"], position["epoch"]) == (source, pq, rg, 1)
    assert rows.position(0)["sources"]["a"]["k"] == 0


def test_a_seek_far_into_the_run_reads_nothing_before_it(bench):
    rows = TrainingRows.open(preparation=bench.prepared(bench.recipe(train={"max_steps": 100_000})))
    started = time.perf_counter()
    rows.micro_batch(99_999, 0, rank=0, world_size=1, rows=8)
    assert time.perf_counter() - started < 0.5


def test_too_little_text_for_one_step_is_refused_with_numbers(bench, tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text('{"text": "one two three"}\n{"text": "four"}\n')
    recipe = bench.recipe(sources=[Source(files=str(path), at_end="stop")])
    with pytest.raises(DataError, match=r"data.sources: 1 rows of 64 tokens.*fewer than the 8"):
        TrainingRows.open(preparation=bench.prepared(recipe))


def test_bad_rows_above_the_limit_stop_the_run_and_are_named(bench, tmp_path):
    lines = bench.text_files[0].read_text().splitlines()
    bad = len(lines) // 2  # files are opened by their first and last rows: what stands between proves bad later
    lines[bad] = '{"text": 7}'
    path = tmp_path / "one_bad.jsonl"
    path.write_text("\n".join(lines) + "\n")
    for allowed in (0, 1):
        recipe = bench.recipe(sources=[Source(files=str(path))], max_bad_rows=allowed, train={"max_steps": 200})
        rows = TrainingRows.open(preparation=bench.prepared(recipe))
        if allowed:
            rows.raise_if_too_bad()
        else:
            with pytest.raises(DataError, match=rf"one_bad.jsonl:{bad + 1}: "):
                rows.raise_if_too_bad()


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 3.0)])
def test_bad_rows_of_a_file_shared_by_two_sources_count_once(bench, tmp_path, weights):
    lines = bench.text_files[0].read_text().splitlines()
    lines *= -(-1200 // len(lines))
    for bad in (1100, 1101):  # behind the first block, which the source that is read less does not leave
        lines[bad] = '{"text": 7}'
    path = tmp_path / "two_bad.jsonl"
    path.write_text("\n".join(lines) + "\n")
    sources = [Source(files=str(path), name=name, weight=weight) for name, weight in zip("ab", weights, strict=True)]
    recipe = bench.recipe(sources=sources, max_bad_rows=1, train={"max_steps": 700}, shard_rows=64)
    rows = TrainingRows.open(preparation=bench.prepared(recipe))
    needed = [rows.stream.shards_needed(source) for source in (0, 1)]
    named = [len(rows.stream.datasets[source].bad_rows(needed[source])) for source in (0, 1)]
    assert sorted(named) == [0, 2]
    with pytest.raises(DataError, match=r"data\.sources: 2 rows are unreadable"):
        rows.raise_if_too_bad()


def test_a_conversation_too_long_is_cut_after_a_turn_or_dropped(bench, tmp_path):
    turn = [{"role": "user", "content": "why " * 5}, {"role": "assistant", "content": "because " * 8}]
    talks = [
        turn * 20,
        [*turn, {"role": "user", "content": "and " * 90}],
        [{"role": "user", "content": "x " * 90}, turn[1]],
    ]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in [*talks, *[turn] * 20]))
    for overflow, cut, dropped in (("cut", 2, 1), ("drop", 0, 3)):
        recipe = bench.recipe(stage="sft", sources=[Source(files=str(path))], max_row_overflow=overflow)
        rows = TrainingRows.open(preparation=bench.prepared(recipe))
        totals = rows.stream.datasets[0].totals()
        assert (totals["cut"], totals["too_long"]) == (cut, dropped)
        for step in range(3):
            labels = rows.micro_batch(step, 0, rank=0, world_size=1, rows=8)["labels"]
            assert (labels != -100).any(dim=1).all()


def test_reading_is_many_times_faster_than_any_training(bench):
    recipe = bench.recipe(row_tokens=1024, batch_tokens=8 * 1024, train={"max_steps": 40})
    rows = TrainingRows.open(preparation=bench.prepared(recipe))
    for step in range(40):
        rows.places(step)
        rows.stream.shard(rows.places(step)[0])
    started = time.process_time()
    for step in range(40):
        rows.micro_batch(step, 0, rank=0, world_size=1, rows=8)
        rows.num_targets(step)
    assert 40 * 8 * 1024 / (time.process_time() - started) > 10e6  # about 100M on one free core


def test_shares_are_those_of_the_weights(bench):
    files = [
        Source(files=str(path), name=name, weight=weight)
        for path, name, weight in zip(bench.text_files[:2], "ab", (3, 1), strict=True)
    ]
    rows = TrainingRows.open(preparation=bench.prepared(bench.recipe(sources=files)))
    assert rows.shares()["a"]["share"] == pytest.approx(0.75, abs=1 / 4096)
    assert np.mean([p.source for step in range(30) for p in rows.places(step)]) == pytest.approx(0.25, abs=0.01)
