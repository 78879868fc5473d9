"""docs/metrics.md and the code name the same numbers."""

import ast
import re
from pathlib import Path

from pipeline.data.rows import Consumed
from pipeline.evals.chat.score import CHAT_CORE, TaskScore, chat_numbers
from pipeline.evals.core.score import VERSIONS
from pipeline.report.run_data import MEANS
from pipeline.training.metrics import data_numbers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
NAME = re.compile(
    r"(train|optim|perf|data|val|sft|core|core_partial|chat|ckpt|gpu|host|mem|disk|net|text)/[a-z0-9_]+(/(<[a-z]+>)?)?"
)
DOCUMENTED = {
    name
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([^`]+)`", line.split("|")[1])
}
# Rooms that write numbers; the others only read them.
WRITERS = ["training", "callbacks", "evals", "monitor", "data"]


def literals(path):
    """Every text in the code of a file but docstrings; of an f-string its constant head, ending in <...>."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            yield f"{node.values[0].value}<>" if len(node.values) == 2 else ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | inside:
            yield node.value


def chat_means():
    """The names of all means that chat scores give, of whole test sets and of parts of them."""
    numbers: dict = {}
    for complete in (True, False):
        scores = [
            TaskScore(
                name=name, n=1, of=1, complete=complete, accuracy=1.0, centred=1.0, interval=(0.0, 1.0), correct=[True],
                too_long=0, seconds=0.0, tokens_forwarded=1, tokens_generated=1,
            )
            for name in (*CHAT_CORE, "spelling_bee")
        ]  # fmt: skip
        numbers |= chat_numbers(scores)
    return {name for name in numbers if name.startswith("chat/core")}


def of_sources():
    """The numbers that a row has of a mixture of two sources."""
    one = Consumed(samples=1, tokens=1, padded=0, documents=1, bad_rows=0)
    return data_numbers({"<source>": one, "another": one}, row_tokens=1)


BPB_OF_RUNS = {"val/bpb", "val/bpb_documents", "sft/assistant_bpb"}


def written():
    found = set()
    for room in WRITERS:
        for path in (ROOT / "pipeline" / room).rglob("*.py"):
            found |= {
                text
                for text in literals(path)
                if NAME.fullmatch(text) or re.fullmatch(r"(optim/lr|data|gpu|core|chat)/<>", text)
            }
    # f"data/{name}" for name in (...), f"gpu/{column}" for the monitor's columns, f"core/{task}", and f"{mean}/{version}".
    from pipeline.monitor.samples import COLUMNS

    generic = {
        "data/<>": {"data/epoch", "data/pq", "data/rg"},
        "gpu/<>": {c for c in COLUMNS if c.startswith("gpu/")},
        "optim/lr/<>": {"optim/lr/<group>"},
        "core/<>": {"core/<task>", "core/eval_s"}
        | {f"{name}/{v}" for name in ("core", "core_partial") for v in VERSIONS},
        "chat/<>": {"chat/<task>", "chat/eval_s"} | chat_means(),
    }
    for pattern, names in generic.items():
        if pattern in found:
            found = (found - {pattern}) | names
    found |= {name for name in of_sources() if "<source>" in name}
    # by_source(name, score, names) writes f"{name}/{source}".
    return found | {f"{name}/<source>" for name in BPB_OF_RUNS & found}


def test_every_metric_that_the_code_writes_is_explained():
    missing = written() - DOCUMENTED
    assert not missing, f"add to docs/metrics.md: {sorted(missing)}"


def test_every_metric_that_is_explained_is_written():
    stale = DOCUMENTED - written()
    assert not stale, f"remove from docs/metrics.md, or write them: {sorted(stale)}"


def test_every_row_of_the_page_has_a_unit_and_a_meaning():
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 6, line
            assert cells[1], line
            assert len(cells[2]) > 8, line


def test_the_means_that_the_report_knows_are_those_that_the_code_writes():
    means = {name for name in written() if name.startswith(("core/v", "core_partial/", "chat/core"))}
    assert means == set(MEANS)
