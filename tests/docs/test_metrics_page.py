"""The registry of metrics, docs/metrics.md and the code name the same numbers."""

import ast
import re
import sys
from pathlib import Path

from pipeline.data.rows import Consumed
from pipeline.evals.chat import CHAT_CORE, TaskScore, chat_core
from pipeline.evals.core import VERSIONS
from pipeline.metrics import (
    BEST_BY,
    METRICS,
    SFT_BPB,
    TRAINER,
    VAL_BPB,
    VAL_BPB_DOCUMENTS,
    VAL_LOSS,
    aliases_of,
    groups,
    metric_of,
)
from pipeline.report.curves import KINDS
from pipeline.report.scores import MEANS
from pipeline.training.log_row import data_numbers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from metrics_page import table, with_tables  # noqa: E402

PAGE = (ROOT / "docs" / "metrics.md").read_text()
NAME = re.compile(rf"({'|'.join(groups())})/[a-z0-9_]+(/(<[a-z]+>)?)?")
OF_NUMBERS = {name for name in METRICS if "/" in name}  # step, attempt, time and tokens stand in every row
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
    names = set()
    for complete in (True, False):
        scores = [
            TaskScore(
                name=name, n=1, of=1, complete=complete, accuracy=1.0, centred=1.0, interval=(0.0, 1.0), correct=[True],
                too_long=0, seconds=0.0,
            )
            for name in CHAT_CORE
        ]  # fmt: skip
        names.add(chat_core(scores)["name"])
    return names


def of_sources():
    """The numbers that a row has of a mixture of two sources."""
    one = Consumed(samples=1, tokens=1, padded=0, documents=1, bad_rows=0)
    return data_numbers({"<source>": one, "another": one}, row_tokens=1)


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
    from pipeline.monitor.samples_file import COLUMNS

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
    # The constants that pipeline/evals writes by; by_source(name, score, names) writes f"{name}/{source}".
    of_runs = {VAL_BPB, VAL_BPB_DOCUMENTS, SFT_BPB}
    return found | of_runs | {VAL_LOSS} | {f"{name}/<source>" for name in of_runs}


def test_every_metric_that_the_code_writes_is_in_the_registry():
    missing = written() - OF_NUMBERS
    assert not missing, f"add to pipeline/metrics.py: {sorted(missing)}"


def test_every_metric_of_the_registry_is_written():
    stale = OF_NUMBERS - written()
    assert not stale, f"remove from pipeline/metrics.py, or write them: {sorted(stale)}"


def test_the_tables_of_the_page_are_those_of_the_registry():
    assert with_tables(PAGE) == PAGE, "run python docs/metrics_page.py"
    assert all(f"| `{name}`" in PAGE or f", `{name}`" in PAGE for name in METRICS)


def test_every_metric_has_a_unit_a_meaning_and_an_existing_panel():
    for name, metric in METRICS.items():
        assert metric.unit, name
        assert len(metric.meaning) > 8, name
        assert metric.panel in {None, *(kind.title for kind in KINDS)}, name


def test_a_name_finds_its_metric_or_family_and_unknown_ones_nothing():
    assert metric_of("core/v1") == METRICS["core/v1"]
    assert metric_of("core/piqa") == METRICS["core/<task>"]
    assert metric_of("data/source/web.v2/tokens") == METRICS["data/source/<source>/tokens"]
    assert [metric_of(name) for name in ("val/bpc", "data/source/web", "val", "optim/lr/")] == [None] * 4


def test_the_best_checkpoint_has_the_lowest_of_metrics_better_when_lower():
    assert {METRICS[name].better for name in BEST_BY} == {"lower"}


def test_a_row_names_the_aliases_of_other_programs_with_their_meaning():
    row = "| `perf/total_s` | s | time in steps over all attempts that count | nanochat: `total time` (min, without the first ten steps of a start), "
    assert row in table([METRICS["perf/total_s"]])
    ours, alias = aliases_of(TRAINER)["train_runtime"]
    assert (ours, alias.factor, alias.meaning) == ("perf/total_s", 1.0, "with evaluations and saves")


def test_the_means_that_the_report_knows_are_those_that_the_code_writes():
    means = {name for name in written() if name.startswith(("core/v", "core_partial/", "chat/core"))}
    assert means == set(MEANS)
