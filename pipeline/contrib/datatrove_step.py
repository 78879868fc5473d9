"""Preparation as a step of a datatrove pipeline: datatrove's executors place the parts, on this machine or as a Slurm
array.

LocalPipelineExecutor([PreparePart("recipes/fineweb_d24.yaml")], tasks=16).run()
"""

from datatrove.pipeline.base import PipelineStep

from pipeline.data.__main__ import main
from pipeline.recipe import read_recipe
from pipeline.run_dir.earlier_runs import EarlierRuns


class PreparePart(PipelineStep):
    """Prepare part K of N of a recipe's data, as `python -m pipeline.data RECIPE --part K/N` does.

    N is the executor's number of tasks, K the task's rank + 1. A task that failed or was killed is encoded again by
    the executor's next call, from where it came to; the last one makes the shards. Raises RecipeError at once for a
    recipe that cannot be read.
    """

    name, type = "part of a recipe's data", "Tandem"

    def __init__(self, recipe: str, *overrides: str, watchlist: str | None = None):
        super().__init__()
        # Here, where somebody sees it; and a command line that ends a process would leave the local executor waiting.
        read_recipe([recipe, *overrides], earlier=EarlierRuns())
        self.arguments = [recipe, *overrides, *(["--watchlist", watchlist] if watchlist else [])]

    def run(self, data=None, rank=0, world_size=1):  # datatrove calls it with positions
        with self.track_time("part"):
            main([*self.arguments, "--part", f"{rank + 1}/{world_size}"])
        return data
