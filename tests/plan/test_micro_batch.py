"""train.per_device_train_batch_size: auto, by arithmetic; the hint that more would fit."""

import pytest

from pipeline.hardware.accelerators import device_without_torch, planned_device
from pipeline.hardware.processor import available_bytes
from pipeline.plan.memory import CPU_POSITIONS, larger_micro_batch, memory_of, options
from pipeline.plan.plan import make_plan
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.batch import micro_batch
from pipeline.recipe.schema import with_values
from tests.plan.test_memory import QUICKSTART

AUTO = "train.per_device_train_batch_size=auto"


def test_auto_is_planned_as_the_largest_divisor_whose_estimate_fits_the_device():
    wide = ["model.n_layer=24", "data.row_tokens=2048", "model.n_positions=2048", "data.batch_tokens=524288"]
    chosen = {}
    for hardware, processes in (("1xH100", 1), ("8xH100", 8), ("1xRTX 4090", 1)):
        plan = make_plan(read_recipe([QUICKSTART, AUTO, *wide]), planned_device(hardware), processes=processes)
        chosen[hardware] = rows = micro_batch(plan.recipe)
        limit = 0.9 * plan.device.memory_gib * 2**30
        assert plan.memory.total <= limit
        larger = [n for n in options(plan.recipe, processes) if n > rows]
        assert rows in options(plan.recipe, processes)
        assert plan.padding_share == 0
        if larger:
            next_one = with_values(plan.recipe, {"micro_batch": min(larger)})
            assert memory_of(next_one, plan.sizes, processes=processes, half=True, compiled=True).total > limit
    assert chosen["1xH100"] > chosen["1xRTX 4090"] > 0


def test_on_a_cpu_auto_takes_no_more_positions_than_keep_it_busy_and_no_more_than_half_of_the_free_memory():
    plan = make_plan(read_recipe([QUICKSTART, AUTO]), device_without_torch(), processes=1)
    rows = micro_batch(plan.recipe)
    positions = rows * plan.recipe.data.row_tokens
    assert positions <= CPU_POSITIONS
    assert plan.memory.total <= 0.5 * available_bytes() * 1.5  # others may take or give some meanwhile
    assert plan.micro_steps * rows == plan.batch_tokens // plan.recipe.data.row_tokens


def test_auto_beside_accumulation_is_refused_since_the_batch_would_depend_on_the_device():
    with pytest.raises(RecipeError, match="is auto beside train.gradient_accumulation_steps".replace(".", r"\.")):
        read_recipe([QUICKSTART, AUTO, "data.batch_tokens=null", "train.gradient_accumulation_steps=2"])


def test_twice_the_micro_batch_is_named_only_where_it_fits_and_divides_the_rows():
    recipe = read_recipe(
        [QUICKSTART, "data.row_tokens=512", "data.batch_tokens=16384", "train.per_device_train_batch_size=8"]
    )
    # 32 rows. 10 GB that stay and 20 that grow: twice the rows need 50.
    assert larger_micro_batch(recipe, 10e9, peak=30e9, limit=80e9, processes=1) == 16
    assert larger_micro_batch(recipe, 10e9, peak=30e9, limit=55e9, processes=1) is None  # 50 are more than 0.9 x 55
    assert (
        larger_micro_batch(recipe, 10e9, peak=30e9, limit=80e9, processes=4) is None
    )  # 8 rows are all that a process has
    assert larger_micro_batch(recipe, None, peak=30e9, limit=80e9, processes=1) is None
