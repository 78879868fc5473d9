"""Sources in an object store."""

import httpx
import pyarrow
import pytest

from pipeline.process import network
from pipeline.process.errors import InputMissingError, RecipeError, ServiceError
from pipeline.recipe import read_recipe
from pipeline.sources.open import open_sources
from pipeline.sources.patterns import local_files
from tests.runner import Runner


@pytest.mark.parametrize("address", ["s3://corpus/text/*.jsonl", "s3://corpus/text", "s3://corpus/**/part-*.jsonl"])
def test_a_source_in_a_store_is_the_same_as_its_local_files(tmp_path, text_files, chat_files, bucket, address):
    recipe = Runner(tmp_path, tmp_path / "cache", text_files, chat_files).recipe("stored", "gpt2")
    opened = []
    for files in (address, str(text_files[0].parent / "part-*.jsonl")):
        arguments = [str(recipe), f"data.sources=[{{files: '{files}'}}]", "data.validation=null"]
        (train,), (held_out,) = open_sources(read_recipe(arguments, stage="pretrain").source_settings())
        texts = [document.text for block in train.read() for document in block.items]
        opened.append(([file.label for file in train.files], train.fingerprint, held_out.fingerprint, texts))
    assert opened[0] == opened[1]
    assert len(opened[0][0]) == 2


def test_a_file_is_fetched_once_and_again_when_it_has_changed(tmp_path, text_files, bucket, monkeypatch):
    fetched = []
    get_file = type(network.file_system("s3")).get_file
    monkeypatch.setattr(
        type(network.file_system("s3")),
        "get_file",
        lambda self, name, *args: fetched.append(name) or get_file(self, name, *args),
    )
    address = f"s3://corpus/text/{text_files[0].name}"
    first, again = (local_files(address, where="here", folder=None, cache=tmp_path) for _ in range(2))
    assert first[0].path == again[0].path
    assert fetched == [f"corpus/text/{text_files[0].name}"]
    first[0].path.write_bytes(b"")  # a power cut
    local_files(address, where="here", folder=None, cache=tmp_path)
    assert first[0].path.read_bytes() == text_files[0].read_bytes()
    bucket.pipe_file(f"corpus/text/{text_files[0].name}", b'{"text": "other"}\n')
    (other,) = local_files(address, where="here", folder=None, cache=tmp_path)
    assert other.path.read_text() == '{"text": "other"}\n'


@pytest.mark.parametrize("name", ["web[2024]/part.jsonl", "web/part[1].jsonl"])
def test_a_name_with_brackets_is_that_name_and_no_pattern(tmp_path, bucket, name):
    bucket.pipe_file(f"corpus/{name}", b'{"text": "this one"}\n')
    bucket.pipe_file("corpus/web/part1.jsonl", b'{"text": "not this one"}\n')
    for address in (name, name.partition("/")[0]) if "[" in name.partition("/")[0] else (name,):
        (file,) = local_files(f"s3://corpus/{address}", where="here", folder=None, cache=tmp_path)
        assert file.path.read_bytes() == b'{"text": "this one"}\n'


def test_what_is_not_there_is_told_in_a_sentence(tmp_path, bucket):
    for address in ("s3://corpus/nothing/*.jsonl", "s3://corpus/text/part-9.jsonl", "s3://elsewhere/a.jsonl"):
        with pytest.raises(InputMissingError, match=r"here.files: .*Look at what the bucket holds"):
            local_files(address, where="here", folder=None, cache=tmp_path)
    with pytest.raises(RecipeError, match="addresses and paths of this machine"):
        local_files(["s3://corpus/text", "a.jsonl"], where="here", folder=None, cache=tmp_path)


def test_two_stores_with_a_bucket_of_one_name_are_two_places(tmp_path, text_files, bucket, monkeypatch):
    addresses = [f"{scheme}://corpus/text/{text_files[0].name}" for scheme in ("s3", "gs")]
    with monkeypatch.context() as patch:
        patch.setattr(network, "file_system", lambda scheme: bucket)
        files = local_files(addresses, where="here", folder=None, cache=tmp_path)
    assert [file.label for file in files] == [f"{name}/corpus/text/{text_files[0].name}" for name in ("gs", "s3")]


@pytest.mark.parametrize("error", [httpx.ConnectError("no network"), pyarrow.ArrowInvalid("no bucket")])
def test_a_client_of_its_own_errors_is_told_in_a_sentence_too(tmp_path, bucket, monkeypatch, error):
    monkeypatch.setattr(type(bucket), "isdir", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(ServiceError, match=f"the store does not give s3://corpus/text \\({error}"):
        local_files("s3://corpus/text", where="here", folder=None, cache=tmp_path)


def test_a_store_that_is_away_is_told_in_a_sentence(tmp_path, s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    network.file_system.cache_clear()
    with pytest.raises(ServiceError, match="the store does not give s3://corpus/text"):
        local_files("s3://corpus/text", where="here", folder=None, cache=tmp_path)
