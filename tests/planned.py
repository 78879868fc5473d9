"""Plans of the quickstart on a CPU, and the messages of what keeps them from this machine."""

from pathlib import Path

from pipeline.hardware.accelerators import DeviceInfo
from pipeline.plan.capacity import find_problems
from pipeline.plan.plan import Plan, make_plan
from pipeline.process.errors import TandemError
from pipeline.recipe import read_recipe
from pipeline.run.checks import machine_problems

RECIPES = Path(__file__).parents[1] / "recipes"
CPU = DeviceInfo("cpu", "a CPU", 1, 16.0)


def quickstart_plan(folder: Path, *overrides: str, device: DeviceInfo = CPU, processes: int = 1) -> Plan:
    """Return the plan of the quickstart with its runs and its cache in folder."""
    places = [f"run.directory={folder}/runs", f"data.cache_dir={folder}/cache"]
    given = [str(RECIPES / "quickstart_pretrain.yaml"), *places, *overrides]
    return make_plan(read_recipe(given), device, processes=processes)


def problems_here(plan: Plan) -> list[TandemError]:
    """Return what keeps the plan from this machine."""
    return [*find_problems(plan, on_this_machine=True), *machine_problems(plan)]


def messages(problems: list[TandemError], kind: type[TandemError]) -> list[str]:
    """Return the messages of problems that are all of this kind."""
    assert all(type(problem) is kind for problem in problems), problems
    return [str(problem) for problem in problems]
