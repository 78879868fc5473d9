"""A seal that is not as it was written is named and made again, with its shard, to the same bytes; never a traceback."""

import json
import os

import pytest

from pipeline.data.row_plan import open_stream, sequence_folder
from pipeline.data.shards import end_path, seal_path, shard_path
from pipeline.process.errors import DamagedFileError
from pipeline.process.storage import read_sealed_json, write_json
from tests.process.test_storage import HOSTILE

pytestmark = pytest.mark.full


def another_count(path):
    seal = json.loads(path.read_text())
    name = "rows" if "rows" in seal else "shards"
    write_json(path, {**seal, name: seal[name] + 1})


DAMAGE = {
    "empty": lambda path: os.truncate(path, 0),
    "torn": lambda path: os.truncate(path, path.stat().st_size // 2),
    "another count": another_count,
    "20,000 brackets": lambda path: path.write_bytes(HOSTILE["20,000 brackets"]),
    "an object of something else": lambda path: path.write_text('{"rows": "many"}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("which", ["seal of the first shard", "seal in the middle", "end"])
def test_a_damaged_seal_is_named_and_made_again_to_the_same_bytes(bench, capsys, which, damage):
    recipe = bench.recipe(train={"num_train_epochs": 1.0, "seed": 7}, cache="seals")
    plan = bench.prepared(recipe).plan
    folder = sequence_folder(plan, plan["train"]["sequences"][0])
    before = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    shards = {path.name: path.read_bytes() for path in folder.glob("shard-*.safetensors")}
    assert len(shards) > 4
    path = {
        "seal of the first shard": seal_path(folder, 0),
        "seal in the middle": seal_path(folder, 3),
        "end": end_path(folder),
    }[which]
    damage(path)
    with pytest.raises(DamagedFileError, match=path.name):
        open_stream(plan, "train")
    capsys.readouterr()
    if which == "end":  # by the process that runs ahead, as a training does
        preparation = bench.started(recipe)
        preparation.wait_until(lambda: end_path(folder).exists(), what="the end")
        preparation.close()
    else:
        bench.prepared(recipe)
    assert f"data: {path}: is not as it was written; made again" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.glob("*.json")} == before
    assert {path.name: path.read_bytes() for path in folder.glob("shard-*.safetensors")} == shards


def test_a_deleted_seal_is_made_again_even_after_the_last_one(bench):
    recipe = bench.recipe(train={"num_train_epochs": 1.0, "seed": 7}, cache="seals")
    plan = bench.prepared(recipe).plan
    folder = sequence_folder(plan, plan["train"]["sequences"][0])
    before = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    seal_path(folder, 3).unlink()
    bench.prepared(recipe)
    assert {path.name: path.read_bytes() for path in folder.glob("*.json")} == before


def test_seals_of_an_earlier_version_are_read_as_they_are(bench, capsys):
    recipe = bench.recipe(train={"num_train_epochs": 1.0, "seed": 7}, cache="seals")
    plan = bench.prepared(recipe).plan
    folder = sequence_folder(plan, plan["train"]["sequences"][0])
    for path in folder.glob("*.json"):
        write_json(path, read_sealed_json(path))
    before = shard_path(folder, 0).stat().st_mtime_ns
    assert open_stream(plan, "train").missing() is None
    bench.prepared(recipe)
    assert capsys.readouterr().err == ""
    assert shard_path(folder, 0).stat().st_mtime_ns == before
