"""A local S3 server: pip install 'moto[server]'. Without it these tests are skipped."""

import pytest

from pipeline.process import stores


@pytest.fixture(scope="session")
def server():
    moto = pytest.importorskip("moto.server", reason="needs moto[server]")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bucket(server, monkeypatch, text_files):
    """The text files in s3://corpus/text, with notes beside them that are no data, and the empty s3://runs."""
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import boto3

    client = boto3.client("s3")
    for name in ("corpus", "runs"):
        client.create_bucket(Bucket=name)
    for path in text_files:
        client.put_object(Bucket="corpus", Key=f"text/{path.name}", Body=path.read_bytes())
    client.put_object(Bucket="corpus", Key="text/LICENSE", Body=b"none")
    stores.file_system.cache_clear()
    yield client
    stores.file_system.cache_clear()
