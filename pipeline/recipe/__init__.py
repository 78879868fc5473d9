"""From YAML and overrides to one typed recipe. Nothing here imports torch."""

from pipeline.recipe.dump import describe_filled, dump_recipe
from pipeline.recipe.help import help_text
from pipeline.recipe.reader import read_recipe
from pipeline.recipe.schema import Recipe, Source

__all__ = ["Recipe", "Source", "describe_filled", "dump_recipe", "help_text", "read_recipe"]
