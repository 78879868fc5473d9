"""docs/python.md: its blocks one after the other in one process, as a reader pastes them."""

import json
import shutil

import pytest

from tests.docs.pages import ROOT, blocks, run

pytestmark = pytest.mark.full

DUMP_RESULTS = """
import json
losses = run.metrics["train/loss"].dropna().to_dict()
found = {"scores": scores, "bpb": score.bpb, "losses": losses, "run": str(run.path), "turns": len(talk.messages)}
json.dump(found, open("results.json", "w"))
"""


def test_the_page_s_blocks_train_load_score_and_talk(tmp_path, cache):
    (tmp_path / "my_texts").mkdir()
    for name in ("data.md", "evals.md", "hub.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "my_texts")
    script = "\n".join(blocks("python.md", "python"))
    (tmp_path / "page.py").write_text(script + DUMP_RESULTS)

    printed = run(["python", "page.py"], folder=tmp_path, cache=cache)

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["run"].endswith("first")
    assert len(results["losses"]) >= 2
    assert 1 < results["bpb"] < 9
    assert 1 < results["scores"]["text/bpb_documents"] < 9
    assert results["turns"] == 2
    assert "bits per byte over" in printed
    assert (tmp_path / "runs" / "first" / "report" / "report.html").is_file()
