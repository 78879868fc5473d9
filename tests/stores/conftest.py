"""Stores without a network: a local S3 server where there is one (pip install 'moto[server]'), else a folder behind the same interface.

What only a server can show (its errors, processes that find it by AWS_ENDPOINT_URL) is skipped without it.
"""

import importlib.util

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.process import network


@pytest.fixture(scope="session")
def server():
    moto = pytest.importorskip("moto.server", reason="needs moto[server]")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bucket(request, monkeypatch, tmp_path, text_files):
    """The store, with the text files in s3://corpus/text, notes beside them that are no data, and the empty s3://runs."""
    if importlib.util.find_spec("moto"):
        yield request.getfixturevalue("s3")
        return
    store = DirFileSystem(path=str(tmp_path / "store"), fs=LocalFileSystem(auto_mkdir=True))
    monkeypatch.setattr(network, "file_system", lambda scheme: store)
    for name in ("corpus", "runs"):
        store.makedirs(name)
    fill(store, text_files)
    yield store


def fill(store, text_files):
    for path in text_files:
        store.pipe_file(f"corpus/text/{path.name}", path.read_bytes())
    store.pipe_file("corpus/text/LICENSE", b"none")


@pytest.fixture
def s3(server, monkeypatch, text_files):
    """The same store on the server."""
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import boto3

    client = boto3.client("s3")
    for name in ("corpus", "runs"):
        client.create_bucket(Bucket=name)
    network.file_system.cache_clear()
    fill(network.file_system("s3"), text_files)
    yield network.file_system("s3")
    network.file_system.cache_clear()
