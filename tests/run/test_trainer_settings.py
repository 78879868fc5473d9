"""What transformers refuses of `train:` is said before data are prepared, with the key and its line."""

import pytest

from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.run.checks import trainer_problems
from tests.recipe.wrong_recipes import trainer


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("lr_scheduler_kwargs: {nope: 1}", "recipe.yaml:18: train.lr_scheduler_kwargs: is {'nope': 1}, which cannot be used here (TypeError"),
        ("seed: 1\n  lr_scheduler_type: cosine_with_min_lr", "recipe.yaml:19: train.lr_scheduler_type: is 'cosine_with_min_lr', which"),
        ("optim_args: oops", "recipe.yaml:18: train.optim_args: is 'oops', which"),
        ("optim: adamw_anyprecision", "recipe.yaml:18: train.optim: is 'adamw_anyprecision', which"),
    ],
)  # fmt: skip
def test_settings_that_transformers_refuses_are_named_by_their_key(tmp_path, monkeypatch, lines, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(trainer(lines))
    (problem,) = trainer_problems(read_recipe(["recipe.yaml"]))
    assert isinstance(problem, RecipeError)
    assert str(problem).startswith(said)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"])
def test_optimizers_of_torch_and_transformers_make_their_first_update(tmp_path, monkeypatch, optim):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(trainer(f"optim: {optim}"))
    assert trainer_problems(read_recipe(["recipe.yaml"])) == []
