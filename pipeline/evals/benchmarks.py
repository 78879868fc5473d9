"""The benchmarks that a recipe asks for while training, opened and read through before step 1."""

from pathlib import Path
from typing import Any

from pipeline.evals.core.bundle import open_bundle
from pipeline.evals.core.results import core_results
from pipeline.evals.core.score import score_core
from pipeline.recipe.schema import Recipe


def benchmarks_of(recipe: Recipe) -> list[Any]:
    """Those with a cadence (evals.core.every_steps, evals.chat.every_steps). Raises what their files raise."""
    found: list[Any] = []
    if recipe.evals.core.every_steps is not None:
        found.append(CoreBenchmark(recipe))
    return found


def beside_recipe(path: str | None, recipe_path: str | None) -> str | None:
    """The path relative to the recipe's folder where that is there, else as it stands, relative to the working folder."""
    if path is None or recipe_path is None:
        return path
    near = Path(recipe_path).parent / Path(path).expanduser()
    return str(near) if near.exists() else path


class CoreBenchmark:
    """CORE as evals.core says."""

    name = "core"

    def __init__(self, recipe: Recipe):
        self.settings = recipe.evals.core
        self.every_steps = self.settings.every_steps
        self.bundle = open_bundle(beside_recipe(self.settings.bundle, recipe.path), cache=recipe.data.cache_dir)

    def score(self, model: Any, tokenizer: Any, **where: Any) -> list[dict[str, Any]]:
        """Rows for evals.json, the same on every rank. where: device, rank ... as score_core takes them."""
        settings = self.settings
        return core_results(
            score_core(
                self.bundle,
                model,
                tokenizer,
                max_per_task=settings.max_per_task,
                max_s=settings.max_s,
                long_prompts=settings.long_prompts,
                **where,
            )
        )
