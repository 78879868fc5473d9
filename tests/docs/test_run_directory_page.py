"""docs/run_directory.md names the files that the code writes."""

import re
from pathlib import Path

from pipeline.run_dir.checkpoints import SEAL
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training import checkpoint

PAGE = (Path(__file__).parents[2] / "docs" / "run_directory.md").read_text()


def test_every_path_of_a_run_directory_is_in_tree_and_table():
    run = RunDirectory("run")
    paths = {str(path.relative_to(run.path)) for path in vars(run).values() if isinstance(path, Path)} - {"."}
    assert len(paths) > 10
    tree, rows = PAGE.split("```")[1], [line for line in PAGE.splitlines() if line.startswith("| `")]
    for path in sorted(paths):
        assert Path(path).name in tree, f"{path} is not in the tree"
        assert any(line.startswith((f"| `{path}`", f"| `{path}/`")) for line in rows), f"{path} is not in the table"


def test_every_training_file_of_a_checkpoint_is_in_its_table():
    names = {
        checkpoint.OPTIMIZER,
        checkpoint.SCHEDULER,
        checkpoint.POSITION,
        checkpoint.rng_file(0).replace("0", "<rank>"),
        SEAL,
    }
    assert not [name for name in names if f"| `{name}`" not in PAGE]


def test_the_example_reads_the_losses_of_a_run(tmp_path):
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
    metrics = tmp_path / "metrics.jsonl"
    append_row(metrics, {"step": 5, "attempt": 1, "train/loss": 3.0})
    append_row(metrics, {"step": 9, "attempt": 1, "train/loss": 99.0})
    append_row(metrics, {"event": "attempt", "attempt": 2, "step": 5})
    append_row(metrics, {"step": 9, "attempt": 2, "train/loss": 2.0})
    values: dict = {}
    exec(code.replace("runs/quickstart/metrics.jsonl", str(metrics)), values)
    assert values["losses"] == {5: 3.0, 9: 2.0}
