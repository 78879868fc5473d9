"""recipes/schema.json, by which editors complete recipes: it agrees with the reader."""

import json
import sys
from pathlib import Path

import fastjsonschema
import pytest

from pipeline.recipe import dump_recipe, read_recipe
from pipeline.recipe.keys import all_keys
from pipeline.recipe.located_yaml import Problems, compose
from tests.recipe.wrong_recipes import GOOD, changed, in_data, in_run, in_source

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from recipes_page import json_schema, render

WITHOUT_DATA = (
    "ladder",
    "own_text",
    "own_chat",
    "own_finetune",
    "lora_8gb",
    "full_24gb",
)  # for the user, or the command that runs them, to give
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def validate():
    return fastjsonschema.compile(json_schema())


def load(text):
    return compose(text, "recipe.yaml", Problems()).plain()  # by YAML 1.2, as editors do


def test_the_schema_file_is_up_to_date():
    assert json.loads((RECIPES / "schema.json").read_text()) == json_schema(), "run python docs/recipes_page.py"


def test_the_page_about_recipes_is_up_to_date():
    assert (RECIPES.parent / "docs" / "recipes.md").read_text() == render(), "run python docs/recipes_page.py"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid_as_written_and_as_resolved(validate, path):
    assert path.read_text().startswith(
        "# yaml-language-server: $schema=schema.json\n"
    )  # anywhere else it is not found
    validate(load(path.read_text()))
    if path.stem not in WITHOUT_DATA:
        validate(load(dump_recipe(read_recipe([str(path)]))))


def test_a_number_with_underscores_is_one_also_where_an_editor_reads_text(validate):
    validate({"data": {"batch_tokens": "524_288"}, "train": {"max_steps": "1_000"}})
    for wrong in ("524288", "524_", "many", ""):
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            validate({"data": {"batch_tokens": wrong}})


def test_every_key_has_a_type_and_a_description():
    def walk(schema, prefix):
        for name, value in schema["properties"].items():
            if name == "adapter":  # a section that may be left out
                yield from walk(value["anyOf"][0], f"{prefix}{name}.")
            if "properties" in value and "options" not in name and "kwargs" not in name and "config" not in name:
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value
                if "properties" in value.get("items", {}):
                    yield from walk(value["items"], f"{prefix}{name}.0.")

    found = dict(walk(json_schema(), ""))
    known = {path for paths in all_keys().values() for path in paths if not path.startswith("data.validation.")}
    sections = {path for path in known if any(other.startswith(f"{path}.") for other in found)} - found.keys()
    assert known - found.keys() - sections == set()
    assert [path for path, value in found.items() if not value.get("description")] == []


@pytest.mark.parametrize(
    "text",
    [
        changed("max_steps: 100", "max_stepz: 100"),
        changed("max_steps: 100", "max_steps: many"),
        changed("max_steps: 100", "output_dir: here"),
        changed("n_layer: 2", "n_layer: 0"),
        changed("n_layer: 2", "n_layer: 2.5"),
        changed("optimizer:", "optimiser:"),
        in_run("keep_best: 1"),
        in_run("nme: a"),
        in_source("weight: 0"),
        in_source("at_end: loop"),
        in_data("packing: best"),
        changed("train:", "train: []\nx-train:"),
    ],
)
def test_a_mistake_in_one_key_is_invalid(validate, text):
    validate(load(GOOD))
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        validate(load(text))
