"""A run under torch.compile, as it is started by a user."""

import re

import pytest

from pipeline.run_dir.rows import read_rows
from tests.runner import Runner

pytestmark = pytest.mark.full

COMPILED = ["train.torch_compile=true", "train.torch_compile_backend=aot_eager", "samples.every_steps=3"]
GRAPHS = 3  # of the step, of validation rows, of validation documents


def evaluations(directory):
    """The numbers of each evaluation by its step."""
    rows = [row for row in read_rows(directory / "metrics.jsonl") if "val/bpb" in row]
    return {row["step"]: {name: row[name] for name in row if name.startswith("val/")} for row in rows}


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files):
    return Runner(tmp_path, cache, text_files, chat_files)


def test_a_run_with_evaluations_samples_and_saves_compiles_each_graph_once(runner):
    recipe = runner.recipe("compiled", "modern", train={"max_steps": 6, "save_steps": 2, "eval_steps": 2})
    run = runner.train(recipe, *COMPILED, TORCH_LOGS="recompiles,graph_breaks,aot_graphs")
    assert "torch.compile" in run.output
    assert len(evaluations(run.directory)) == 3
    assert len(set(re.findall(r"===== Forward graph (\d+) =====", run.output))) == GRAPHS
    assert "Recompiling" not in run.output
    assert "Graph break" not in run.output


@pytest.mark.slow
def test_compiled_evaluations_equal_eager_ones_and_repeat_after_a_resume(runner):
    train = {"max_steps": 6, "save_steps": 2, "eval_steps": 2, "bf16": False}
    recipe = runner.recipe("compared", "modern", train=train)
    uncut = evaluations(runner.train(recipe, *COMPILED, "run.name=uncut", "evals.bpb.at_start=true").directory)
    eager = evaluations(runner.train(recipe, "run.name=eager", "evals.bpb.at_start=true").directory)
    assert uncut.keys() == eager.keys() == {0, 2, 4, 6}
    for name, value in eager[0].items():  # before a step has rounded its own way
        assert uncut[0][name] == pytest.approx(value, rel=1e-5)
    runner.kill(recipe, *COMPILED, name="cut", after_step=4)
    resumed = evaluations(runner.train(recipe, *COMPILED, "run.name=cut").directory)
    assert resumed[6] == uncut[6]
