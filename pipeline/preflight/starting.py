"""The process itself, before anything else of a run: threads, ranks, import path."""

import os
import sys
from datetime import timedelta

from pipeline.hardware.cpu import set_threads
from pipeline.hardware.device import device_info
from pipeline.recipe import Recipe
from pipeline.recipe.batch import with_batch_tokens


def start_process(recipe: Recipe) -> int:
    """Join the other ranks and settle what depends on their number, which is returned.

    On a CPU the threads are set first, since their number changes the last bits of fp32 sums. `module:attr` strings of
    the recipe are importable from its folder.
    """
    from accelerate import PartialState
    from transformers.utils import logging

    logging.set_verbosity_error()  # hints about what the recipe decided on purpose
    logging.disable_progress_bar()  # one for every saved file
    if recipe.train.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"  # as a launcher's config file says it; asked by everything below
    on_cpu = device_info().kind == "cpu"
    if on_cpu:
        set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if recipe.run.code_folder:
        sys.path.insert(1, recipe.run.code_folder)
    state = PartialState(cpu=on_cpu, timeout=timedelta(seconds=int(recipe.train.get("ddp_timeout", 7200))))
    recipe.data.batch_tokens = with_batch_tokens(recipe, state.num_processes)
    return state.num_processes
