import json
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import save

from pipeline.data.losses import shares_lost
from pipeline.data.row_plan import open_stream, plan_rows, sequence_folder
from pipeline.data.shard_writer import ShardWriter
from pipeline.data.shards import NUMPY_TYPES, map_tensors, open_shard, shard_path, state_path
from pipeline.process.errors import DataError
from pipeline.recipe.dial import row_settings
from pipeline.recipe.schema import Source


def shard_hashes(folder):
    return {path.name: json.loads(path.read_text())["sha256"] for path in sorted(folder.glob("shard-*.json"))}


def train_folder(plan, number=0):
    return sequence_folder(plan, plan["train"]["sequences"][number])


def writer(bench, recipe, plan, role="train"):
    train, validation = bench.sources(recipe)
    about = plan[role]["sequences"][0]
    return ShardWriter(
        sequence_folder(plan, about),
        source=(train if role == "train" else validation)[0],
        tokenizer=bench.tokenizer,
        settings=about["settings"],
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_memory_map_of_a_file_holds_the_tensors_that_were_saved(seed, tmp_path):
    draw = np.random.default_rng(seed)
    tensors = {
        f"{draw.integers(1000)}": draw.integers(0, 200, draw.integers(0, 4, draw.integers(1, 4))).astype(kind)
        for kind in draw.choice([*NUMPY_TYPES.values()], draw.integers(0, 9))
    }
    (tmp_path / "file").write_bytes(save(tensors))
    read = map_tensors(tmp_path / "file")
    assert {name: (a.dtype, a.tolist()) for name, a in read.items()} == {
        n: (a.dtype, a.tolist()) for n, a in tensors.items()
    }


@pytest.mark.parametrize("packing", ["cut_and_fit", "best_fit_crop", "concat"])
def test_interrupted_after_any_shard_preparation_gives_the_same_bytes(bench, packing):
    recipe = bench.recipe(packing=packing, shard_rows=64)
    plan = plan_rows(row_settings(recipe), bench.tokenizer, sources=bench.sources(recipe))
    whole = writer(bench, recipe, plan)
    while whole.extend():
        pass
    expected = shard_hashes(whole.folder)
    assert len(expected) >= 8

    recipe = bench.recipe(packing=packing, shard_rows=64, cache="interrupted")
    plan = plan_rows(row_settings(recipe), bench.tokenizer, sources=bench.sources(recipe))
    more = True
    while more:  # a new writer for every shard, as if the process had been killed after each seal
        once = writer(bench, recipe, plan)
        torn = shard_path(once.folder, once.number)
        torn.write_bytes(b"half a shard without a seal")
        more = once.extend()
        torn.unlink() if not more else None
    assert shard_hashes(once.folder) == expected
    for name in expected:
        seals = [json.loads((folder / name).read_text()) for folder in (whole.folder, once.folder)]
        assert seals[0]["read"] == seals[1]["read"]
    assert (once.folder / "end.json").read_text() == (whole.folder / "end.json").read_text()


def test_conversations_interrupted_after_any_shard_give_the_same_bytes(bench):
    hashes = []
    for cache in ("whole", "interrupted"):
        recipe = bench.recipe(stage="sft", cache=cache, packing_documents=100)
        plan = plan_rows(row_settings(recipe), bench.tokenizer, sources=bench.sources(recipe))
        here = writer(bench, recipe, plan)
        while here.extend():
            here = here if cache == "whole" else writer(bench, recipe, plan)
        hashes.append(shard_hashes(here.folder))
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) >= 3


def test_a_longer_run_extends_the_shards_and_weights_do_not_change_them(bench):
    files = [Source(files=str(path), weight=weight) for path, weight in zip(bench.text_files[:2], (1, 3), strict=True)]
    first = bench.prepared(bench.recipe(sources=files, train={"max_steps": 10}))
    before = shard_hashes(train_folder(first.plan))
    files[0].weight = 5
    second = bench.prepared(bench.recipe(sources=files, train={"max_steps": 60}))
    after = shard_hashes(train_folder(second.plan))
    assert train_folder(first.plan) == train_folder(second.plan)
    assert after.items() > before.items()


@pytest.mark.parametrize("change", [{"row_tokens": 32}, {"packing": "concat"}, {"shard_rows": 16}])
def test_another_packing_is_another_key(bench, change):
    plans = [
        plan_rows(row_settings(r), bench.tokenizer, sources=bench.sources(r))
        for r in (bench.recipe(), bench.recipe(**change))
    ]
    assert train_folder(plans[0]) != train_folder(plans[1])


def test_another_tokenizer_is_another_key(bench):
    recipe = bench.recipe()
    other = bench.tokenizer.__class__.from_pretrained(_saved(bench))
    same = plan_rows(row_settings(recipe), other, sources=bench.sources(recipe))
    assert train_folder(same) == train_folder(
        plan_rows(row_settings(recipe), bench.tokenizer, sources=bench.sources(recipe))
    )
    other.add_tokens(["zyxw"])
    assert train_folder(plan_rows(row_settings(recipe), other, sources=bench.sources(recipe))) != train_folder(same)


def test_a_stale_state_left_by_a_killed_process_is_removed_later(bench):
    recipe = bench.recipe(shard_rows=64)
    plan = plan_rows(row_settings(recipe), bench.tokenizer, sources=bench.sources(recipe))
    folder, first = train_folder(plan), writer(bench, recipe, plan)
    for _ in range(2):
        first.extend()
    left = state_path(folder, 1).read_bytes()
    first.extend()
    state_path(folder, 1).write_bytes(left)  # it was killed when shard 2 was sealed
    assert writer(bench, recipe, plan).number == 3
    assert [path.name for path in sorted(folder.glob("state-*"))] == [state_path(folder, n).name for n in (0, 2)]


def _saved(bench):
    bench.tokenizer.save_pretrained(bench.folder / "tokenizer")
    return bench.folder / "tokenizer"


def test_only_as_much_is_prepared_as_the_run_reads(bench):
    preparation = bench.prepared(bench.recipe(train={"max_steps": 10}))
    assert sum(s["rows"] for s in open_stream(preparation.plan, "train").datasets[0].seals) == 96  # 80 in shards of 32


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_shard_is_named_and_made_again_with_the_same_bytes(bench, damage):
    recipe = bench.recipe()
    preparation = bench.prepared(recipe)
    folder = train_folder(preparation.plan)
    path = shard_path(folder, 5)
    content = path.read_bytes()
    state_path(folder, 3).unlink(missing_ok=True)
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if damage == "truncate" else content[:-9] + b"123456789")
    with pytest.raises(DataError, match="shard-00005"):
        open_shard(folder, 5)
    bench.prepared(recipe, verify=True)
    assert path.read_bytes() == content


def test_the_seal_counts_what_the_shard_holds(bench):
    preparation = bench.prepared(bench.recipe())
    stream = open_stream(preparation.plan, "train")
    for number, seal in enumerate(stream.datasets[0].seals):
        shard = open_shard(train_folder(preparation.plan), number)
        assert seal["rows"] == len(shard.input_ids)
        assert seal["targets"] == int(shard.targets.sum())
        assert seal["padded"] == int(sum((row == preparation.plan["pad"]).sum() for row in shard.input_ids))
    seals = stream.datasets[0].seals
    padded, positions = (sum(seal[name] for seal in seals) for name in ("padded", "positions"))
    assert (
        positions == sum(seal["rows"] for seal in seals) * preparation.plan["row_tokens"]
    )  # the padding is among them
    assert padded
    assert shares_lost(stream.datasets[0].totals(), kind="text")["padded"] == padded / positions


def test_the_rows_hold_the_text_of_the_documents_they_name(bench):
    preparation = bench.prepared(bench.recipe())
    train, _ = bench.sources(bench.recipe())
    texts = {(d.file, d.row): d.text for block in train[0].read() for d in block.items}
    shard = open_shard(train_folder(preparation.plan), 0)
    for ids, used, (file, _, row) in zip(shard.input_ids, shard.used, shard.origins.tolist(), strict=True):
        starts = [*np.flatnonzero(ids[:used] == preparation.plan["bos"]), used]
        text = bench.tokenizer.decode(ids[1 : starts[1]])
        assert text.strip("\ufffd") in texts[file, row]


def test_bad_rows_are_named_once_in_the_seals_also_over_interruptions(bench, tmp_path):
    lines = bench.text_files[0].read_text().splitlines()
    lines[40], lines[200] = '{"text": 7}', "{not json"
    path = tmp_path / "some_bad.jsonl"
    path.write_text("\n".join(lines) + "\n")
    recipe = bench.recipe(sources=[Source(files=str(path))], max_bad_rows=5)
    plan = plan_rows(row_settings(recipe), bench.tokenizer, sources=bench.sources(recipe))
    while writer(bench, recipe, plan).extend():
        pass
    sequence = open_stream(plan, "train").datasets[0]
    named = Counter(line for seal in sequence.seals for line in seal["bad_rows"]) + Counter(sequence.end["bad_rows"])
    assert sorted(named.values()) == [1, 1]
    assert {line.partition(":")[0] for line in named} == {
        "some_bad.jsonl"
    }  # no folder of this machine: seals are published
    assert len(sequence.bad_rows(len(sequence.seals))) == 2
