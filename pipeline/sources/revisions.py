"""The commits of Hub datasets that a run began with."""

from typing import Any


def use_revisions(recipe: Any, inputs: dict[str, Any]) -> None:
    """Set the commits of the recipe's Hub datasets to those that a manifest's inputs name."""
    for role, specs in (("sources", recipe.data.sources), ("validation", recipe.data.validation or [])):
        for spec, before in zip(specs, inputs.get(role, []), strict=False):
            if spec.id is not None and spec.id == before["id"]:
                spec.revision = before["revision"] or spec.revision
