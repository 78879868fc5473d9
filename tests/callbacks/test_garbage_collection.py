"""No search for reference cycles falls into a step."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from pipeline.callbacks.garbage_collection import EVERY_STEPS, GarbageCollection


class Node:
    def __init__(self):
        self.itself = self


@pytest.fixture
def garbage():
    callback = GarbageCollection()
    yield callback
    callback.on_train_end(None, None, None)


def step(callback: GarbageCollection, number: int) -> None:
    callback.on_step_end(None, SimpleNamespace(global_step=number), None)


@pytest.mark.parametrize("moment", ["on_save", "on_evaluate", "many steps"])
def test_cycles_are_collected_only_at_saves_evaluations_and_every_thousand_steps(garbage, moment):
    step(garbage, 1)
    cycle = weakref.ref(Node())
    junk = [[] for _ in range(100_000)]  # would start a search many times over
    step(garbage, 2)
    assert cycle() is not None
    assert len(junk) == 100_000
    if moment == "many steps":
        step(garbage, EVERY_STEPS)
    else:
        getattr(garbage, moment)(None, None, None)
    assert cycle() is None


def test_after_the_training_python_searches_by_itself_again(garbage):
    step(garbage, 1)
    assert not gc.isenabled()
    garbage.on_train_end(None, None, None)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
