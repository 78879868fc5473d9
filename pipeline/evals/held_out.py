"""A run's own validation rows, found again from its recipe: the same protocol, hence the same ids, as in training."""

from typing import Any

from pipeline.artifacts.run_directory import RunDirectory


def held_out_rows(run: RunDirectory, tokenizer: Any, *, trust_code: bool = False) -> Any:
    """The ValidationRows of the run's recipe, prepared first when the cache does not have them; nothing is trained on.

    Raises what the recipe and the sources raise when the text is no longer there or was changed.
    """
    from pipeline.artifacts.errors import InputMissingError
    from pipeline.data.plan import make_plan
    from pipeline.data.prepare import Preparation, locks
    from pipeline.data.validation import ValidationRows, held_out_coverage
    from pipeline.data.work import Workshop
    from pipeline.evals.own_sources import own_sources

    if not run.recipe.exists():
        raise InputMissingError(
            f"{run.recipe}: missing, so the run's validation text is unknown. Name text with --text."
        )
    recipe, sources = own_sources(run, trust_code=trust_code)
    plan = {**make_plan(recipe, tokenizer, sources=sources), "train": None}
    with locks(plan):
        for _ in Workshop(plan, tokenizer, sources=sources).prepare():
            pass
    rows = ValidationRows.open(Preparation(plan))
    rows.coverage = held_out_coverage(tokenizer, sources[1])
    return rows
