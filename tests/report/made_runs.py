"""Runs made of numbers: what a report would read, without a training."""

from typing import Any

import numpy as np

from pipeline.report.diagnosis_rules import Result, diagnose
from pipeline.report.run_data import RunData
from pipeline.run_dir.run_directory import RunDirectory


def made_run(
    series: dict[str, Any],
    *,
    steps: Any = None,
    recipe: dict | None = None,
    manifest: dict | None = None,
    events: list[dict] | None = None,
    failure: dict | None = None,
    checkpoints: list[tuple[int, int, bool]] | None = None,
    path: str = "nowhere",
) -> RunData:
    """A run with one row a logged step. A series is a list of values, one a logged step, or {step: value}.

    steps: the logged steps; default 1, 2, ... as many as the longest list.
    """
    longest = max((len(values) for values in series.values() if not isinstance(values, dict)), default=0)
    steps = list(range(1, longest + 1)) if steps is None else list(steps)
    rows: dict[int, dict[str, Any]] = {}
    for name, values in series.items():
        points = values.items() if isinstance(values, dict) else zip(steps, values, strict=False)
        for step, value in points:
            rows.setdefault(int(step), {"step": int(step), "attempt": 1})[name] = value
    every = [*(events or []), *(rows[step] for step in sorted(rows))]
    return RunData(
        run=RunDirectory(path),
        recipe=recipe or {},
        manifest=manifest or {},
        rows=every,
        all_rows=every,
        samples=[],
        evals=[],
        failure=failure,
        checkpoints=checkpoints or [],
    )


def found(data: RunData, rule: str) -> Result:
    """What the rule of that name says of the run."""
    return diagnose(data)[rule]


def noisy(values: Any, *, share: float = 0.02, seed: int = 0) -> list[float]:
    """The values with normal noise of that share of each, none of which turns its sign."""
    values = np.asarray(values, dtype=float)
    return (values * np.maximum(1 + share * np.random.default_rng(seed).standard_normal(values.size), 0.05)).tolist()


def falling(count: int, *, start: float = 8.0, end: float = 3.0) -> np.ndarray:
    """A loss as they fall: fast, then slowly, from start to near end."""
    return end + (start - end) * np.exp(-np.linspace(0, 5, count))


STARTED = [{"event": "attempt", "attempt": 1, "step": 0, "time": 0.0}]
SCHEDULE = {"warmup_steps": 40, "decay_fraction": 0.65, "decay": "linear", "final_fraction": 0.05}


def sound_run(count: int = 400, **changes: Any) -> RunData:
    """A run as it should be, of `count` steps, each logged; changes: series that are other ones,
    from which those follow that must."""
    from pipeline.recipe.schema import Schedule
    from pipeline.training.schedules import learning_rate_multiplier

    steps = range(1, count + 1)
    rate = [learning_rate_multiplier(Schedule(**SCHEDULE), step - 1, count) for step in steps]
    loss = falling(count)
    norms = changes.get("optim/grad_norm") or noisy(np.linspace(0.9, 0.5, count), share=0.25)
    step_s = changes.get("perf/step_s") or noisy([0.5] * count)
    series = {
        "train/loss": noisy(loss),
        "optim/lr": [0.01 * r for r in rate],
        "optim/lrm": rate,
        "optim/lr/matrices": [0.01 * r for r in rate],
        "optim/grad_norm": norms,
        "optim/clip_frac": [float(norm > 1.0) for norm in norms],
        "val/loss": {step: loss[step - 1] * 1.03 for step in range(50, count + 1, 50)},
        "val/bpb": {step: loss[step - 1] / 2.7 for step in range(50, count + 1, 50)},
        "perf/step_s": step_s,
        "perf/total_s": np.cumsum(step_s).tolist(),
        "perf/eval_s": dict.fromkeys(range(50, count + 1, 50), 1.0),
        "perf/mfu_pct": [45.0] * count,
        "perf/slowest_rank": [1.02] * count,
        "perf/slowest_rank_id": [1] * count,
        "perf/goodput_pct": [97.0] * count,
        "data/wait_frac": [0.001] * count,
        "data/epoch": [1] * count,
        "data/samples": [8 * step for step in steps],
        "data/bad_rows": [0] * count,
        "data/retries": [0] * count,
        "gpu/util_pct": [99.0] * count,
        "gpu/throttled_pct": [0.0] * count,
        "mem/allocated_gib": [10.0] * count,
        "mem/alloc_retries": [0] * count,
        "mem/host_rss_gib": [3.0] * count,
        "ckpt/save_s": {count // 2: 0.2, count: 0.2},
    } | changes
    return made_run(
        {name: values for name, values in series.items() if values is not None},
        recipe={
            "data": {"row_tokens": 256, "batch_tokens": 2048},
            "optimizer": {"type": "muon_adamw", "groups": {"matrices": {"learning_rate": 0.01}}, "schedule": SCHEDULE},
            "train": {"max_steps": count, "max_grad_norm": 1.0, "save_steps": count // 2},
        },
        manifest={
            "status": "finished",
            "attempts": 1,
            "model": {"parameters": 1_000_000},
            "plan": {"parameters": 1_000_000},
            "shares": {"books": {"lost": {"padded": 0.004, "cropped": 0.0, "too long": 0.0}}},
            "inputs": {"validation_bytes": {"val/bpb": 1_000_000}},
        },
        events=STARTED,
        checkpoints=[(count, 1000, True)],
    )
