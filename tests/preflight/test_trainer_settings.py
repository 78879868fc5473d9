"""What transformers refuses of `train:` is said before data are prepared, with the key and its line."""

import re

import pytest
import torch
from transformers import Trainer, TrainingArguments

from pipeline.preflight.checks import trainer_problems
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.schema import training_arguments
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


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("optim: sgd\n  optim_args: momentum=0.9,weight_decay=0.1", "its weight_decay would have no effect"),
        ("optim: adamw_torch\n  optim_args: amsgrad=True", "its amsgrad would have no effect with optim: adamw_torch"),
        ("optim_args: betas=0.5", "its betas would have no effect with optim: adamw_torch"),
        ("optim: rmsprop\n  optim_args: momentun=0.9", "it takes momentum, alpha, eps, centered"),
        ("optim: stable_adamw\n  optim_args: decouple_lr=False", "decouple_lr=False would be read as true"),
    ],
)
def test_an_argument_of_the_optimizer_without_its_effect_is_refused(tmp_path, monkeypatch, lines, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(trainer(lines))
    with pytest.raises(RecipeError, match=r"recipe\.yaml:1\d: train\.optim_args: .*" + re.escape(said)):
        read_recipe(["recipe.yaml"])


def test_arguments_that_the_optimizer_takes_reach_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for optim, given in (("sgd", "momentum=0.9, nesterov=True"), ("adagrad", "eps=1e-6"), ("rmsprop", "alpha=0.9")):
        (tmp_path / "recipe.yaml").write_text(trainer(f"optim: {optim}\n  optim_args: {given}"))
        recipe = read_recipe(["recipe.yaml"])
        arguments = training_arguments(recipe, output_dir=str(tmp_path), max_steps=1, gradient_accumulation_steps=1)
        trainer_of = Trainer(
            torch.nn.Linear(2, 2), TrainingArguments(**arguments | {"use_cpu": True, "eval_strategy": "no"})
        )
        (name, value), *_ = [pair.strip().split("=") for pair in given.split(",")]
        assert trainer_of.create_optimizer().param_groups[0][name] == float(value)
