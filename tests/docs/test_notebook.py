"""docs/quickstart.ipynb: its cells in their order, with fewer steps.

A notebook of `!commands` and plain Python needs no Jupyter to be run: nbclient with ipykernel would bring some twenty packages.
"""

import ast
import json
import os
import shlex

import matplotlib
import pytest

from tests.docs.pages import ROOT, run

CELLS = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())["cells"]
SOURCES = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def run_cells(folder, cache) -> tuple[dict, list]:
    """Return the cells' variables, and the value of each cell's last expression as a notebook shows it."""
    variables: dict = {}
    shown = []
    for source in SOURCES:
        if source.startswith("!"):
            shown.append(run(shlex.split(source[1:].format_map(variables)), folder=folder, cache=cache))
            continue
        *body, last = ast.parse(source).body
        is_value = isinstance(last, ast.Expr)
        exec(compile(ast.Module(body if is_value else [*body, last], []), "cell", "exec"), variables)
        shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), variables) if is_value else None)
    return variables, shown


@pytest.mark.full
def test_the_notebook_trains_both_stages_draws_the_curve_and_chats(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "QUICKSTART_STEPS", "20")
    monkeypatch.setitem(os.environ, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    matplotlib.use("Agg")
    variables, shown = run_cells(tmp_path, cache)
    assert (tmp_path / "loss.png").stat().st_size > 5_000
    assert min(variables["loss"]) == 1
    assert max(variables["loss"]) == 20
    assert variables["bpb"][20] < variables["bpb"][0]
    assert variables["answers"] == list(shown[-2].values())
    assert str(variables["run"].parent) == "runs"


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "".join(cell["source"])[:30])
def test_the_notebook_is_committed_without_outputs(cell):
    assert not cell.get("outputs")
    assert not cell.get("execution_count")
