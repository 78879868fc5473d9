"""What fits which card, and how long it takes: the table of docs/hardware.md. Planned by arithmetic, nothing is run or measured.

python benchmarks/what_fits.py            prints the table
python benchmarks/what_fits.py --write    puts it into docs/hardware.md
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.hardware.accelerators import planned_device  # noqa: E402
from pipeline.plan.memory import usable_bytes  # noqa: E402
from pipeline.plan.plan import Plan, make_plan  # noqa: E402
from pipeline.recipe import read_recipe  # noqa: E402

PAGE = ROOT / "docs" / "hardware.md"
BEGIN, END = "<!-- by benchmarks/what_fits.py -->\n", "<!-- to here -->\n"
CARDS = ("T4", "RTX3090", "RTX4090", "RTX5090", "L40S", "A100-40GB", "A100", "H100", "H200", "MI300X")
DEPTHS = (4, 8, 12, 16, 20, 24)
RECIPE = ["fineweb_d12", "train.per_device_train_batch_size=auto", "model.options.window_pattern=L"]


def plan_of(depth: int, card: str) -> Plan:
    """Return the plan of fineweb_d12 with another depth on one card, with the largest micro-batch that fits by arithmetic."""
    device = planned_device(card)
    half = [] if "bfloat16" in (device.peak_flops or {}) else ["train.fp16=true", "train.bf16=false"]
    recipe = read_recipe([*RECIPE, *half, f"model.depth={depth}", f"run.hardware=1x{card}"], stage="pretrain")
    return make_plan(recipe, device, processes=1)


def time_text(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def cell(plan: Plan) -> str:
    """Return the rows of a micro-batch and the time, or a dash where not even one row fits."""
    assert plan.memory
    assert plan.memory.total
    assert plan.duration
    assert plan.device.memory_gib
    if plan.memory.total > usable_bytes(plan.device.memory_gib):
        return "-"
    return f"{plan.recipe.micro_batch_rows} rows, {time_text(plan.duration.total)}"


def table() -> str:
    plans = {card: [plan_of(depth, card) for depth in DEPTHS] for card in CARDS}
    sizes = [f"depth {depth}, {sum_of(plan)}" for depth, plan in zip(DEPTHS, plans[CARDS[0]], strict=True)]
    lines = [f"| card | memory | {' | '.join(sizes)} |", f"|---|---|{'---|' * len(DEPTHS)}"]
    for card, of_card in plans.items():
        cells = " | ".join(cell(plan) for plan in of_card)
        lines.append(f"| {card} | {of_card[0].device.memory_gib:.0f} GiB | {cells} |")
    return "\n".join(lines) + "\n"


def sum_of(plan: Plan) -> str:
    assert plan.sizes
    return f"{plan.sizes.parameters()['total'] / 1e6:,.0f}M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put it into docs/hardware.md")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
