"""From YAML and overrides to one typed recipe. Nothing here imports torch."""

from pipeline.recipe.reader import describe_filled, dump_recipe, read_recipe
from pipeline.recipe.schema import Recipe, Source, help_text

__all__ = ["Recipe", "Source", "describe_filled", "dump_recipe", "help_text", "read_recipe"]
