"""docs/metrics.md and the importers know the same names of other programs."""

import re
from pathlib import Path

from pipeline.report.imported_logs import NANOCHAT, NANOCHAT_WANDB, NEMO, TRAINER

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
TABLES = {"NeMo": NEMO, "nanochat": NANOCHAT + NANOCHAT_WANDB, "Trainer": TRAINER}
# Named on the page for the reader and not imported: no export has them as a number of a step.
NOT_IMPORTED = {
    "number of nan iterations",
    "train_mem_gpu_peaked_delta",
    "number of skipped iterations",
    "time remaining",
    "save-checkpoint",
    "chatcore/<task>",
}


def documented():
    """{our name: {program: its cell}}"""
    cells = [line.strip().strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    return {
        name: dict(zip(TABLES, row[-3:], strict=True)) for row in cells for name in re.findall(r"`([^`]+)`", row[0])
    }


def test_every_name_that_is_imported_stands_in_its_row_and_column_of_the_page():
    page = documented()
    missing = [
        f"{alias.ours}: {program} `{alias.theirs}`"
        for program, aliases in TABLES.items()
        for alias in aliases
        if alias.ours in page and f"`{alias.theirs}`" not in page[alias.ours][program]
    ]
    assert not missing, f"add to docs/metrics.md: {missing}"


def test_every_name_of_another_program_on_the_page_is_imported():
    unknown = []
    for ours, row in documented().items():
        for program, cell in row.items():
            # W&B's own system panels stand in NeMo's column: they are no metrics of NeMo.
            told = set(re.findall(r"(?<!W&B )`([^`]+)`" if program == "NeMo" else r"`([^`]+)`", cell))
            known = {alias.theirs for alias in TABLES[program]} | NOT_IMPORTED
            unknown += [f"{ours}: {program} `{name}`" for name in told - known]
    assert not unknown, f"add to pipeline/report/imported_logs.py, or to NOT_IMPORTED: {unknown}"


def test_a_number_that_is_not_ours_says_so_on_the_page_too():
    page = documented()
    silent = [
        f"{alias.ours}: {program} `{alias.theirs}`"
        for program, aliases in TABLES.items()
        for alias in aliases
        if alias.meaning and alias.ours in page and not re.search(r"\(.+\)|without", page[alias.ours][program])
    ]
    assert not silent, f"say in docs/metrics.md what it is: {silent}"
