"""What RUN_OR_MODEL means, before anything is loaded."""

import json

import pytest

from pipeline.evals.subject import find_subject
from pipeline.process.errors import InputMissingError, ServiceError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two finished runs of one recipe and an unfinished one, in runs/ of the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, finished in (("mine-1", 10.0), ("mine-2", 20.0), ("mine-3", None)):
        model = tmp_path / "runs" / name / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        manifest = {"recipe_name": "mine", "stage": "sft", **({"finished": finished} if finished else {})}
        (model.parent / "run_manifest.json").write_text(json.dumps(manifest))


def test_latest_is_the_last_finished_run_of_a_recipe_or_stage(runs):
    assert find_subject("latest:mine").path == find_subject("latest:sft").path == "runs/mine-2/model"
    with pytest.raises(InputMissingError, match="latest:other: runs/ has no finished run of that recipe or stage"):
        find_subject("latest:other")


def test_a_run_that_is_not_there_is_no_id_of_the_hub(runs, monkeypatch):
    with pytest.raises(InputMissingError, match=r"there is no such run\. runs/ has mine-1, mine-2, mine-3"):
        find_subject("runs/mine")
    with pytest.raises(ServiceError, match="no run, model folder or cached model of that name"):
        find_subject("someone/mine")  # the Hub is away in the tests
    monkeypatch.setattr("pipeline.evals.subject.is_hub_away", lambda: False)
    assert find_subject("someone/mine").path == "someone/mine"
