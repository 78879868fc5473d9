"""The support table against the installed transformers.TrainingArguments, and what is passed to it."""

from dataclasses import fields
from typing import get_args

import pytest
import yaml

from pipeline.recipe import dump_recipe, read_recipe
from pipeline.recipe.error_messages import RENAMED
from pipeline.recipe.identity import resume_keys
from pipeline.recipe.keys import all_keys
from pipeline.recipe.schema import ARGUMENTS, OPTIMIZERS, SCHEDULERS, defaults, training_arguments


@pytest.fixture(scope="module")
def training_argument_fields():
    from transformers import TrainingArguments

    return {f.name: f for f in fields(TrainingArguments)}


def recipe_file(tmp_path, **train):
    optimizer = train.pop("optimizer", "trainer")
    lines = "".join(f"  {name}: {value}\n" for name, value in {"max_steps": 10, "use_cpu": "true", **train}.items())
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "data: {sources: [{files: x.txt}], row_tokens: 64, batch_tokens: 512}\n"
        f"model: {{n_layer: 1, n_embd: 32, n_head: 2}}\noptimizer: {{type: {optimizer}}}\ntrain:\n{lines}"
    )
    return str(path)


def test_every_field_of_the_installed_training_arguments_has_exactly_one_entry(training_argument_fields):
    assert {name for name, argument in ARGUMENTS.items() if argument.kind != "added"} == set(training_argument_fields)


def test_what_is_added_is_no_field_and_is_not_handed_to_transformers(tmp_path, training_argument_fields):
    added = {name for name, argument in ARGUMENTS.items() if argument.kind == "added"}
    assert added == {"fp8"}
    assert not added & set(training_argument_fields)
    recipe = read_recipe([recipe_file(tmp_path, bf16="true", fp8="true")])
    values = training_arguments(recipe.train, output_dir=str(tmp_path), max_steps=10, gradient_accumulation_steps=2)
    assert recipe.train["fp8"] is True
    assert not added & set(values)


def test_passed_defaults_are_those_of_transformers(training_argument_fields):
    ours_when_open = {"max_steps", "num_train_epochs", "gradient_accumulation_steps"}
    for name, argument in ARGUMENTS.items():
        if argument.kind == "supported" and name not in ours_when_open:
            assert argument.default == training_argument_fields[name].default, name


def test_every_default_of_ours_differs_from_transformers_or_is_pinned(training_argument_fields):
    for name, argument in ARGUMENTS.items():
        if argument.kind == "overridden" and not argument.only:
            assert argument.default != training_argument_fields[name].default or name == "save_strategy", name


def test_every_field_explains_itself_and_its_refusals_or_names_its_owner():
    keys = {path for paths in all_keys().values() for path in paths}
    for name, argument in ARGUMENTS.items():
        assert argument.text, name
        if argument.kind == "managed":
            owner = argument.text.split(" ")[0]
            assert owner in keys or owner == "the", name


def test_the_choices_are_names_that_transformers_knows():
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    assert set(get_args(SCHEDULERS)) < {s.value for s in SchedulerType}
    assert set(get_args(OPTIMIZERS)) < {o.value for o in OptimizerNames}


def test_renamed_names_are_no_keys_where_they_are_refused():
    assert not set(RENAMED) & set(ARGUMENTS)


@pytest.mark.parametrize("optimizer", ["trainer", "muon_adamw"])
def test_transformers_accepts_what_is_passed(tmp_path, optimizer):
    from transformers import TrainingArguments

    recipe = read_recipe([recipe_file(tmp_path, optimizer=optimizer, bf16="auto", torch_compile="auto", seed=7)])
    values = training_arguments(
        recipe.train,
        run_name=recipe.run.name,
        output_dir=str(tmp_path / "out"),
        max_steps=10,
        gradient_accumulation_steps=2,
    )
    assert not {"bf16", "torch_compile"} & set(values)  # "auto" would count as true
    arguments = TrainingArguments(**values)
    assert (arguments.max_steps, arguments.gradient_accumulation_steps, arguments.seed) == (10, 2, 7)
    assert arguments.logging_nan_inf_filter is False
    assert arguments.ddp_timeout == 7200
    assert arguments.report_to == []
    assert arguments.run_name == recipe.run.name
    assert arguments.accelerator_config.dispatch_batches is False
    assert ("learning_rate" in values) == (optimizer == "trainer")


@pytest.mark.parametrize("name", [n for n, f in ARGUMENTS.items() if f.accepted])
def test_every_accepted_field_reaches_the_recipe(tmp_path, name):
    argument = ARGUMENTS[name]
    sample = {
        "lr_scheduler_type": "cosine",
        "optim": "sgd",
        "ddp_backend": "gloo",
        "log_level": "info",
        "log_level_replica": "info",
        "activation_checkpointing_kwargs": "{every_n_layers: 2}",
        "gradient_checkpointing_kwargs": "{use_reentrant: false}",
        "torch_compile_backend": "eager",
        "torch_compile_mode": "default",
        "accelerator_config": "{non_blocking: true}",
        "debug": "underflow_overflow",
    }
    kind = str(argument.type)
    number = (
        "3"
        if "int" in kind or "float" in kind
        else "true"
        if "bool" in kind
        else "{a: 1}"
        if "dict" in kind
        else "text"
    )
    value = sample.get(name, {"adam_beta1": "0.5", "adam_beta2": "0.5", "warmup_steps": "3"}.get(name, number))
    if argument.only or name in ("eval_strategy", "save_strategy"):
        value = str(argument.default).lower()
    if name in ("max_steps", "num_train_epochs"):
        return
    batch = ["data.batch_tokens=null"] if name == "gradient_accumulation_steps" else []
    beside = (
        {"bf16": "true"} if name == "fp8" else {"torch_compile": "true"} if name.startswith("torch_compile_") else {}
    )
    recipe = read_recipe([recipe_file(tmp_path, **{name: value}, **beside), *batch])
    expected = yaml.safe_load(value) if value.startswith("{") else {"true": True, "false": False}.get(value, value)
    got = recipe.train[name]
    if isinstance(got, dict):
        assert expected.items() <= got.items()
    else:
        assert got == (float(expected) if isinstance(got, (int, float)) and not isinstance(got, bool) else expected)


@pytest.mark.parametrize("name", [n for n, f in ARGUMENTS.items() if not f.accepted])
def test_every_other_field_is_refused_with_its_owner_or_reason(tmp_path, name):
    from pipeline.process.errors import RecipeError

    with pytest.raises(RecipeError) as error:
        read_recipe([recipe_file(tmp_path, **{name: 1})])
    message = str(error.value)
    assert ARGUMENTS[name].text in message or "a recipe holds no secrets" in message


def test_rate_settings_of_the_trainer_stay_out_beside_groups():
    assert "learning_rate" in defaults(trainer_optimizer=True)
    assert not [n for n in defaults(trainer_optimizer=False) if ARGUMENTS[n].trainer_only]


def test_an_adapter_is_left_out_or_a_section_of_pefts_names(tmp_path):
    path = recipe_file(tmp_path)
    assert read_recipe([path]).model.adapter is None
    assert "model.adapter" not in resume_keys(read_recipe([path]))  # runs begun before it keep their names
    adapted = read_recipe([path, "model.start_from=a/b", "model.adapter={r: 4, target: [q_proj]}"])
    assert (adapted.model.adapter.r, adapted.model.adapter.target) == (4, ["q_proj"])
    assert resume_keys(adapted)["model.adapter.r"] == 4
    assert "  adapter:\n    r: 4\n" in dump_recipe(adapted).replace("    type: lora\n", "")
    inherits = tmp_path / "plain.yaml"
    inherits.write_text(f"extends: {path}\nmodel: {{adapter: {{r: 4}}}}\n")
    assert read_recipe([str(inherits), "model.adapter=null"]).model.adapter is None
