"""Plans against outcomes: eight short runs of this machine, each planned by arithmetic, by the runs before it, and by a probe.

    python benchmarks/plan_against_outcome.py [--folder runs/plans] [--runs quickstart,sft,...] [--seconds 90] [--probe 10] [--overrides "model.n_embd=64 ..."]

One after the other; nothing else should run. Each gets as many steps as its probe says that `--seconds` hold. `planned` is over
found: 1.1 is a plan that was a tenth too high. Counts must be exact; hours are the process's, from its start to its last row.
The ranges without a probe: by arithmetic alone, as on a machine that has trained nothing, and by its finished runs, of which the
first has none. Data are prepared before, since no plan counts that.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import DEVICE, ROOT, arguments, show

from pipeline.hardware.device import device_info
from pipeline.plan.plan import Plan, Span, make_plan
from pipeline.recipe import read_recipe
from pipeline.recipe.start_from import resolve_start, start_folder
from pipeline.report.run_data import read_run
from pipeline.report.sections import wall_s

ADAMW = ["optimizer.type=adamw", "optimizer.groups={matrices: {learning_rate: 0.001}}"]
GPT2 = ["model.preset=gpt2", "model.options={}", "model.attn_implementation=sdpa", *ADAMW]
SMALL = ["evals.bpb.tokens=32768", "evals.bpb.document_bytes=50000"]
NEVER = ["train.eval_strategy=no", "evals.bpb.at_start=false", "train.save_steps=100000", "samples.every_steps=0"]
WIDE = ["model.n_embd=512", "model.n_head=8", "model.n_layer=6"]
# Stage, processes, overrides of the quickstart's recipe.
RUNS: dict[str, tuple[str, int, list[str]]] = {
    "quickstart": ("pretrain", 1, SMALL),
    "sft": ("sft", 1, SMALL),
    "gpt2_adamw": ("pretrain", 1, [*SMALL, *NEVER, *GPT2]),
    "modern_muon": ("pretrain", 1, [*SMALL, *NEVER, "train.seed=7"]),
    "two_ranks": ("pretrain", 2, [*SMALL, *NEVER]),
    "wide": ("pretrain", 1, [*SMALL, *NEVER, *WIDE]),
    "evaluations": ("pretrain", 1, ["train.eval_steps=50", "train.save_steps=100000", "train.seed=8"]),
    "saves": ("pretrain", 1, [*SMALL, "train.eval_strategy=no", "train.save_steps=10", "train.seed=9"]),
}


def main() -> None:
    options = arguments(__doc__, folder="runs/plans", runs=",".join(RUNS), seconds=90.0, probe=10.0, overrides="")
    folder = Path(options.folder).resolve()
    rows = []
    for name in options.runs.split(","):
        stage, processes, own = RUNS[name]
        argv = [
            str(ROOT / "recipes" / f"quickstart_{'pretrain' if stage == 'pretrain' else 'sft'}.yaml"),
            *(f"run.name={name}", f"run.directory={folder}", f"data.cache_dir={folder / 'cache'}"),
            *([f"model.start_from={folder / 'quickstart'}"] if stage == "sft" else []),
            *{word.partition("=")[0]: word for word in [*own, *options.overrides.split()]}.values(),
        ]
        rows.append({"run": name, **planned_and_found(stage, processes, argv, folder, options)})
        print(json.dumps(rows[-1]), flush=True)
    show(options, rows)


def planned_and_found(stage: str, processes: int, argv: list[str], folder: Path, options: Any) -> dict[str, Any]:
    """Plan, probe, run, and return the row of the table."""
    environment = {**os.environ, "NPROC": str(processes)}
    command("pipeline.preflight", *argv, "--probe", str(options.probe), environment=environment)
    probe = plan_of(argv, processes).probe
    if probe is None:
        raise SystemExit(f"{argv[1]}: the probe gave nothing: python -m pipeline.preflight says why")
    argv = [*argv, f"train.max_steps={max(4, round(options.seconds / probe.step_s))}"]
    command("pipeline.data", *argv, environment=environment)
    with_probe = plan_of(argv, processes)
    by_runs = replace(with_probe, probe=None)
    elsewhere = [word for word in argv if not word.startswith("data.cache_dir=")]
    alone = plan_of([*elsewhere, f"data.cache_dir={folder / 'nothing_yet'}"], processes)
    launcher = (
        ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"] if processes > 1 else []
    )
    command(*launcher, f"pipeline.{stage}", *argv, environment=environment)
    data = read_run(str(folder / argv[1].removeprefix("run.name=")))
    model, peak, wall = data.manifest["model"], data.manifest["peak_memory_bytes"], wall_s(data)
    memory = peak.get("device") if DEVICE == "cuda" else peak["host"]
    return {
        "parameters": ratio(with_probe.sizes.parameters()["total"] if with_probe.sizes else None, model["parameters"]),
        "tokens": ratio(with_probe.tokens, data.tokens()),
        "FLOPs": ratio(with_probe.flops, model["flops_per_token"] * data.tokens()),
        "memory_mib": round(memory / 2**20),
        "memory_by_arithmetic": ratio(alone.memory.total if alone.memory else None, memory),
        "memory_by_runs": ratio(by_runs.memory.total if by_runs.memory else None, memory),
        "memory_probed": ratio(with_probe.process_bytes, memory),
        "wall_s": wall,
        "hours_probed": ratio(total(with_probe).value, wall),
        "hours_by_runs": ratio(total(by_runs).value, wall),
        "range_by_runs": within(total(by_runs), wall),
        "range_by_arithmetic": within(total(alone), wall),
    }


def plan_of(argv: list[str], processes: int) -> Plan:
    recipe = read_recipe(argv)
    if start_folder(recipe) is not None:
        recipe = resolve_start(recipe)
    return make_plan(recipe, device_info(), processes=processes)


def total(plan: Plan) -> Span:
    assert plan.duration is not None
    return plan.duration.total


def ratio(planned: float | None, found: float | None) -> str:
    return "-" if not planned or not found else "exact" if planned == found else f"{planned / found:.3f}"


def within(span: Span, found: float | None) -> str:
    assert found is not None
    return f"{span.low:.0f}-{span.high:.0f} {'holds' if span.low <= found <= span.high else 'MISSES'}"


def command(*words: str, environment: dict[str, str]) -> None:
    """Run it to its end; its output is shown where it fails."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )


if __name__ == "__main__":
    main()
