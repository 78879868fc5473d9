"""Prepared shards that are published to a store or a dataset of the Hub, and taken there instead of being made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.contrib.decontamination import Matches, Watchlist, id_of_file
from pipeline.contrib.published_shards import LIST, publish
from pipeline.data import prepare
from pipeline.data.__main__ import main
from pipeline.data.row_plan import locks
from pipeline.data.rows import TrainingRows
from pipeline.data.shard_writer import ShardWriter
from pipeline.process.errors import RecipeError, ServiceError
from pipeline.process.storage import sha256_file, write_sealed_json
from pipeline.recipe import read_recipe
from pipeline.tokenizer.train import train_bpe
from tests.data.conftest import Bench
from tests.hub.hub_stand_in import Fault, hub_stand_in
from tests.runner import Runner

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(text_files):
    texts = [json.loads(line)["text"] for line in text_files[0].read_text().splitlines()]
    return train_bpe(texts[:400], vocab_size=600, split_pattern="nanochat")


@pytest.fixture
def bench(tmp_path, text_files, chat_files, tokenizer):
    return Bench(tmp_path, text_files, chat_files, tokenizer)


@pytest.fixture
def address(tmp_path):
    return f"s3://runs/{tmp_path.name}"  # a server keeps what other tests have sent


def files_of(preparation):
    return shards_in(Path(preparation.plan["cache_dir"]))


def shards_in(cache):
    """Return name and sha256 of every file of the prepared shards."""
    folder = cache / "shards"
    names = (path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors"))
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in names}


@pytest.fixture
def published(bench, bucket, address):
    """A preparation of 30 steps, whose shards are in the store."""
    made = bench.prepared(bench.recipe())
    publish(made.plan, address)
    return made


@pytest.fixture
def no_writer(monkeypatch):
    monkeypatch.setattr(prepare, "ShardWriter", lambda *_, **__: pytest.fail("a shard is made here"))


@pytest.fixture
def taken(bench, address):
    return lambda **changes: bench.prepared(bench.recipe(cache="other", shards_from=address, **changes))


def test_published_shards_are_taken_as_they_are_and_none_is_made(bench, published, no_writer, capsys, address, taken):
    assert files_of(taken()) == files_of(published)
    assert f"taken from {address}" in capsys.readouterr().out
    assert publish(published.plan, address) == (0, 0)


def test_a_longer_run_continues_the_published_shards_with_the_same_bytes(bench, published, address, taken):
    train = {"max_steps": 60, "seed": 7}
    longer = taken(train=train)
    assert files_of(longer) == files_of(bench.prepared(bench.recipe(cache="whole", train=train)))
    sent, _ = publish(longer.plan, address)
    assert 0 < sent < len(files_of(longer))  # what is there is not sent again


def test_only_text_of_shards_that_are_made_here_is_searched(bench, published, monkeypatch, address):
    path = Watchlist.of({"task": ["eight or more words that are in no text"]}).save(bench.folder)

    def searched(recipe, sources):
        plan = bench.plan(recipe, sources=sources, watchlist=path)
        with locks(plan), prepare.ShardBuilder(plan, bench.tokenizer, sources=sources) as builder:
            assert [*builder.prepare()]
        return Matches.by_run(plan, id_of_file(path))

    recipe = bench.recipe(cache="other", shards_from=address)
    sources = bench.sources(recipe)
    monkeypatch.setattr(sources[0][0], "path_of", lambda number: pytest.fail("a raw file is fetched"))
    taken = searched(recipe, sources)
    assert taken.unchecked == taken.shards > 1
    longer = bench.recipe(cache="other", shards_from=address, train={"max_steps": 60, "seed": 7})
    found = searched(longer, bench.sources(longer))
    assert found.unchecked == taken.shards < found.shards


@pytest.mark.parametrize("what", ["shard", "seal", "state", "list", "foreign list", "foreign shard", "gone"])
def test_damaged_or_foreign_shards_are_refused_in_words_and_made_here(
    bench, published, bucket, capsys, what, address, taken
):
    key = published.plan["train"]["sequences"][0]["key"]
    other = published.plan["validation"]["sequences"][0]["key"]
    at = f"{address.removeprefix('s3://')}/{key}"
    if what in ("shard", "seal", "state"):
        name = {"shard": "shard-00001.safetensors", "seal": "shard-00001.json", "state": "state-00000.safetensors"}[
            what
        ]
        content = bucket.cat_file(f"{at}/{name}")
        bucket.pipe_file(f"{at}/{name}", content[:-1] + bytes([content[-1] ^ 1]))
    elif what == "list":
        bucket.pipe_file(f"{at}/{LIST}", bucket.cat_file(f"{at}/{LIST}").replace(b"shard-00000", b"shard-00009"))
    elif what == "foreign list":
        bucket.pipe_file(f"{at}/{LIST}", bucket.cat_file(f"{address.removeprefix('s3://')}/{other}/{LIST}"))
    elif what == "gone":
        bucket.rm_file(f"{at}/shard-00001.safetensors")
    else:  # whole and listed, of other rows
        listed = json.loads(bucket.cat_file(f"{at}/{LIST}"))["files"]
        wide = bench.prepared(bench.recipe(cache="wide", row_tokens=32, batch_tokens=8 * 32))
        folder = Path(wide.plan["cache_dir"]) / "shards" / wide.plan["train"]["sequences"][0]["key"]
        for name in ("shard-00001.safetensors", "shard-00001.json"):
            bucket.pipe_file(f"{at}/{name}", (folder / name).read_bytes())
            listed[name] = sha256_file(folder / name)
        write_sealed_json(bench.folder / LIST, {"key": key, "files": listed})
        bucket.pipe_file(f"{at}/{LIST}", (bench.folder / LIST).read_bytes())
    assert files_of(taken()) == files_of(published)
    said = capsys.readouterr().err
    assert f"data: {address}: {key}/" in said
    assert "from there on shards are made here" in said
    again = what in ("list", "foreign list", "foreign shard")  # what the list does not say as it is
    assert bool(publish(published.plan, address)[0]) == again


def test_a_store_that_is_away_costs_nothing_but_the_preparation(
    bench, published, bucket, monkeypatch, capsys, address, taken
):
    def away(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(type(bucket), "get_file", away)
    assert files_of(taken()) == files_of(published)
    assert capsys.readouterr().err.count("no route to host") == 3  # once for each sequence
    with pytest.raises(ServiceError, match=f"{address}: does not take the prepared shards"):
        publish(published.plan, address)


def test_a_publication_that_failed_halfway_can_be_used_and_later_completed(
    bench, bucket, monkeypatch, capsys, address, taken
):
    made, opened, writes = bench.prepared(bench.recipe()), type(bucket).open, []

    def failing(store, path, mode="rb", **more):
        if mode == "wb":
            writes.append(path)
            if len(writes) == 8:  # behind two lists of two more files each and another file
                raise OSError("connection reset")
        return opened(store, path, mode, **more)

    monkeypatch.setattr("pipeline.contrib.published_shards.FILES_A_COMMIT", 2)
    with monkeypatch.context() as patched:
        patched.setattr(type(bucket), "open", failing)
        with pytest.raises(
            ServiceError, match=r"connection reset.*what a published\.json there lists is not sent again"
        ):
            publish(made.plan, address)
    assert files_of(taken()) == files_of(made)
    assert f"data: 1 shards and ends of sources were taken from {address}" in capsys.readouterr().out
    assert publish(made.plan, address)[0] == len(files_of(made)) - 2 * 2
    assert publish(made.plan, address) == (0, 0)


def test_an_address_without_these_shards_says_nothing_and_takes_nothing(bench, bucket, capsys, address, taken):
    assert files_of(taken()) == files_of(bench.prepared(bench.recipe()))
    assert address not in "".join(capsys.readouterr())


def test_the_preparation_beside_a_training_takes_them_too(bench, s3, address):
    made = bench.prepared(bench.recipe())
    publish(made.plan, address)
    recipe = bench.recipe(cache="other", shards_from=address)
    preparation = bench.started(recipe)
    rows = TrainingRows.open(preparation=preparation)
    rows.places(29)
    preparation.child.wait(60)
    assert files_of(preparation) == files_of(made)
    assert f"taken from {address}" in (preparation.folder / "log.txt").read_text()


def test_a_hub_dataset_takes_and_gives_shards_by_the_command(tmp_path, text_files, chat_files):
    recipe = Runner(tmp_path, tmp_path / "cache", text_files, chat_files).recipe("published", "gpt2")
    address = "hf://datasets/somebody/shards"
    with hub_stand_in() as hub:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {
            "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_TOKEN": "hf_test",
            "HF_HOME": str(tmp_path / "hf_home"), "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1",
        }  # fmt: skip

        def data(*arguments):
            command = [sys.executable, "-m", "pipeline.data", str(recipe), *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

        sent = data(f"data.cache_dir={tmp_path / 'a'}", "--publish", address)
        assert sent.returncode == 0, sent.stderr
        assert f"were sent to {address}. Take them with data.shards_from={address}" in sent.stdout
        repo = hub.repos["somebody/shards"]
        assert repo.private
        name = next(name for name in repo.commits[-1][1] if name.endswith("shard-00000.safetensors"))
        hub.damaged.add(sorted(n for n in repo.commits[-1][1] if n.endswith("shard-00000.safetensors"))[-1])
        got = data(f"data.cache_dir={tmp_path / 'b'}", f"data.shards_from={address}")
    assert got.returncode == 0, got.stderr
    assert f"taken from {address}" in got.stdout
    assert "not as it was published; from there on shards are made here" in got.stderr
    assert shards_in(tmp_path / "a") == shards_in(tmp_path / "b")
    assert name in shards_in(tmp_path / "a")


def test_a_dropped_hub_request_is_repeated_and_no_shard_is_made_here(bench, monkeypatch, no_writer, caplog):
    address = "hf://datasets/somebody/shards/of/text"
    monkeypatch.setattr("pipeline.sources.hub_files.FIRST_WAIT_S", 0.02)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with hub_stand_in() as hub:
        for name, value in {
            "ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False,
        }.items():  # fmt: skip
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        with monkeypatch.context() as patched:
            patched.setattr(prepare, "ShardWriter", ShardWriter)
            made = bench.prepared(bench.recipe())
        publish(made.plan, address)
        hub.fault = Fault(to="/resolve/main/of/text/", lost=True, times=1)
        got = bench.prepared(bench.recipe(cache="other", shards_from=address))
        assert hub.fault is None
    assert files_of(got) == files_of(made)
    assert "attempt 1 of 5 failed" in caplog.text


def test_an_address_that_takes_no_shards_is_refused(tmp_path, text_files, chat_files, capsys):
    recipe = str(Runner(tmp_path, tmp_path / "cache", text_files, chat_files).recipe("refused", "gpt2"))
    for address in ("s3:///x", "hf://models/a/b", "hf://datasets/a", "/tmp/x", "ftp://a/b"):
        with pytest.raises(RecipeError, match=r"data\.shards_from: is .*hf://datasets/NAMESPACE/NAME"):
            read_recipe([recipe, f"data.shards_from={address}"], stage="pretrain")
    with pytest.raises(SystemExit):
        main([recipe, "--publish", "ftp://a/b"])
    assert "takes no shards" in capsys.readouterr().err
