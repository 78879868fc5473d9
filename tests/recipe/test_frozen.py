"""A recipe that was read is read-only; what is decided later makes another one."""

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from pipeline.recipe import dump_recipe, read_recipe
from pipeline.recipe.schema import with_values
from pipeline.recipe.start_from import resolve_start
from pipeline.run_dir.earlier_runs import EarlierRuns

QUICKSTART = "recipes/quickstart_pretrain.yaml"


def sections_of(section):
    yield section
    for key in fields(section):
        value = getattr(section, key.name)
        for inner in value if isinstance(value, list) else [value]:
            if is_dataclass(inner) and not key.metadata.get("internal"):
                yield from sections_of(inner)


def test_no_key_of_a_recipe_that_was_read_can_be_assigned():
    recipe = read_recipe([QUICKSTART])
    sections = list(sections_of(recipe))
    assert len(sections) > 15
    for section in sections:
        for key in fields(section):
            with pytest.raises(FrozenInstanceError):
                setattr(section, key.name, None)
    for write in (
        lambda: recipe.train.update(max_steps=1),
        lambda: recipe.train.__setitem__("max_steps", 1),
        lambda: recipe.train.pop("max_steps"),
        lambda: recipe.model.options.setdefault("qk_norm", True),
    ):
        with pytest.raises(FrozenInstanceError):
            write()


def test_another_recipe_has_new_values_and_is_frozen_beside_the_old_one():
    recipe = read_recipe([QUICKSTART])
    before = dump_recipe(recipe)
    other = with_values(
        recipe, {"train.max_steps": 7, "data.batch_tokens": 4096, "optimizer.schedule.warmup_steps": 3}
    )
    assert (other.train["max_steps"], other.data.batch_tokens, other.optimizer.schedule.warmup_steps) == (7, 4096, 3)
    assert dump_recipe(recipe) == before
    assert other.evals is recipe.evals
    for section in (other, other.data, other.optimizer.schedule):
        with pytest.raises(FrozenInstanceError):
            section.batch_tokens = 1
    with pytest.raises(FrozenInstanceError):
        other.train["max_steps"] = 8


def test_copies_of_a_frozen_recipe_are_equal_and_frozen():
    recipe = resolve_start(read_recipe([QUICKSTART], earlier=EarlierRuns()))
    for other in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert other == recipe
        with pytest.raises(FrozenInstanceError):
            other.run.name = "another"
        with pytest.raises(FrozenInstanceError):
            other.train["max_steps"] = 8
