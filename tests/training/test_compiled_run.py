"""A run under torch.compile, as it is started by a user."""

from tests.runner import Runner


def test_a_run_with_evaluations_samples_and_saves_is_compiled_once_into_one_graph(
    tmp_path, cache, text_files, chat_files
):
    runner = Runner(tmp_path, cache, text_files, chat_files)
    recipe = runner.recipe("compiled", "modern", train={"max_steps": 6, "save_steps": 2, "eval_steps": 2})
    compiled = ["train.torch_compile=true", "train.torch_compile_backend=aot_eager", "samples.every_steps=3"]
    output = runner.train(recipe, *compiled, TORCH_LOGS="recompiles,graph_breaks").output
    assert "compiled True" in output
    assert "Recompiling" not in output
    assert "Graph break" not in output
