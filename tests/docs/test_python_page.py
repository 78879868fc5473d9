"""docs/python.md: its blocks one after the other in one process, as a reader pastes them."""

import json
import shutil

import pytest

from tests.docs.pages import ROOT, blocks, run, write_named_blocks

pytestmark = pytest.mark.full

DUMP_RESULTS = """
import json
json.dump({"status": status, "texts": texts, "bpb": score.bpb, "losses": losses, "run": str(run.path)}, open("results.json", "w"))
"""


def test_the_page_s_blocks_train_load_continue_and_score(tmp_path, cache):
    (tmp_path / "my_texts").mkdir()
    for name in ("data.md", "evals.md", "hub.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "my_texts")
    write_named_blocks("python.md", tmp_path)
    script = "\n".join(blocks("python.md", "python"))
    (tmp_path / "page.py").write_text(script + DUMP_RESULTS)

    printed = run(["python", "page.py"], folder=tmp_path, cache=cache)

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["status"] == 0
    assert results["run"].endswith("from_python")
    assert len(results["losses"]) >= 2
    assert 1 < results["bpb"] < 8
    assert "bits per byte over" in printed
