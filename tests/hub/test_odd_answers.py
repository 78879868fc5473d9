"""A Hub that answers what no Hub does: a sentence, and our own mistakes keep their tracebacks."""

import json

import pytest
from hub_stand_in import Repo, hub_stand_in

from pipeline.hub.pull import retried
from pipeline.process.errors import ServiceError

ANSWERS = {
    "no JSON": b"<html>",
    "deep": b"[" * 100_000,
    "a list": b"[1]",
    "wrong types": b'{"id": 7, "siblings": "abc"}',
    "names above": json.dumps({"id": "a/b", "sha": "a" * 40, "siblings": [{"rfilename": "../../pwned"}]}).encode(),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_no_hub_gives_ends_a_pull_with_69_and_nothing_is_written(tmp_path, monkeypatch, answer):
    from huggingface_hub import HfApi, constants, snapshot_download

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_stand_in() as hub:
        hub.repos["a/b"] = Repo(False, {"main": [("a" * 40, {"config.json": b"{}"})]})
        hub.answers["GET /api/models/"] = lambda handler: handler.answer(200, ANSWERS[answer])

        def ask():
            HfApi(endpoint=hub.url).model_info("a/b")
            snapshot_download("a/b", endpoint=hub.url, local_dir=tmp_path / "to", cache_dir=tmp_path / "cache")

        with pytest.raises(ServiceError, match="the Hub answered what no Hub does"):
            retried(ask, what="reading a/b")
    assert not list(tmp_path.rglob("*pwned*"))


def test_a_mistake_of_our_own_is_no_odd_answer():
    def wrong():
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        retried(wrong, what="reading")


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch):
    from huggingface_hub import HfApi, constants

    from pipeline.hub.pull import bound_waits
    from pipeline.process import network

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(network, "ANSWER_BYTES", 1 << 20)
    bound_waits()
    with hub_stand_in() as hub:
        hub.answers["GET /api/models/"] = lambda handler: handler.answer(200, b" " * (1 << 21))
        with pytest.raises(ServiceError, match="answers with more than 1 MiB"):
            retried(lambda: HfApi(endpoint=hub.url).model_info("a/b"), what="reading a/b")
