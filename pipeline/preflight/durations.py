"""Expected duration of a run: by a probe of its steps, by finished runs of this device, else a range by arithmetic.

Every finished run leaves a line in the cache with what its steps, start, evaluations and saves took. One share of the peak
for all devices and models would be wrong for most: published runs reach 15 to 55 % of it, narrow models far less.
"""

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifacts.atomic import read_sealed_json, write_sealed_json
from pipeline.artifacts.cache import cache_dir
from pipeline.hardware.cpu import usable_cores
from pipeline.hardware.products import product_rates
from pipeline.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.preflight.plan import Plan
    from pipeline.report.run_data import RunData

# Shares of the peak that steps reach, from and to. A GPU's is the data sheet's; narrow blocks keep it idle between kernels.
GPU_MFU, FULL_WIDTH, LEAST_MFU = (0.15, 0.55), 768, 0.01
# A processor's peak is the measured rate of square products of one thread, times its threads.
CPU_MFU = (0.06, 0.70)
PROBED = 1.15  # a run's mean step against the median of a probe of the same steps
# A step of another model by a finished run's rate, and for each doubling of its FLOPs.
OTHER_MODEL, A_DOUBLING = 1.25, 1.15
FARTHEST = 6  # doublings: beyond, arithmetic is as good
FORWARD = (0.2, 0.33, 0.5)  # of a training step's time a token: what scoring takes
SAVE_BYTES_S = (5e9, 1e9, 2e8)
# Imports, model, compilation; report and model at the end.
START_S = {"cpu": (6.0, 25.0, 120.0), "other": (15.0, 60.0, 300.0)}
BYTES_A_TOKEN, BYTES_A_TOKEN_FACTOR = 3.5, 1.5  # by vocabulary and text; in SFT the questions come on top
LEAST_VALIDATION = 200_000  # bytes that are held out at least where the data have them
KEPT_RUNS = 200


@dataclass(frozen=True)
class Span:
    """A positive quantity: what is expected, and from where to where it may lie."""

    low: float
    value: float
    high: float

    @classmethod
    def around(cls, value: float, factor: float) -> "Span":
        return cls(value / factor, value, value * factor)

    def __add__(self, other: "Span") -> "Span":
        return Span(self.low + other.low, self.value + other.value, self.high + other.high)

    def __mul__(self, other: "Span | float") -> "Span":
        other = other if isinstance(other, Span) else Span(other, other, other)
        return Span(self.low * other.low, self.value * other.value, self.high * other.high)


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Seconds of one run without preparing its data: a step, and start and end, all steps, evaluations and saves."""

    step: Span
    start: Span
    steps: Span
    evaluations: Span
    saves: Span
    source: str  # "as probed", "by finished runs ...", "by arithmetic ..."

    @property
    def total(self) -> Span:
        return self.start + self.steps + self.evaluations + self.saves


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What a run took on this machine: seconds, and flops, the exact-causal FLOPs of a step in one process."""

    run: str
    time: float  # when it ended, since 1970
    machine: list[Any]
    flops: float
    step_s: float
    rest_s: float  # start and end
    save_s: float | None  # one checkpoint
    scored_token_share: float | None  # seconds of a scored token over those of a trained one


def expected_duration(plan: "Plan") -> Duration | None:
    """Return how long the planned run takes; None while its steps or the speed of its device are not known."""
    near = _nearest(plan)
    step, source = _step(plan, near)
    if plan.steps is None or step is None:
        return None
    train, forward = plan.recipe.train, Span(*FORWARD)
    if near is not None and near.scored_token_share:
        forward = Span.around(near.scored_token_share, OTHER_MODEL)
    if near is not None and near.save_s is not None:
        save = Span.around(near.save_s, 2)
    else:
        save = Span(*(1 / rate for rate in SAVE_BYTES_S)) * (plan.checkpoint_bytes or 0)
    rest = Span(*START_S["cpu" if plan.device.kind == "cpu" else "other"])
    if near is not None:
        rest = Span.around(near.rest_s, 1.5)
    elif plan.probe is not None:
        rest += Span.around(plan.probe.first_step_s, PROBED)
    saved = 0 if train["save_strategy"] == "no" else max(1, plan.steps // train["save_steps"])
    a_token = step * (1 / plan.batch_tokens)  # of all processes, which share the scoring too
    return Duration(
        step=step,
        start=rest,
        steps=step * plan.steps,
        evaluations=a_token * forward * plan.evaluation_tokens * evaluations_of(plan.recipe, plan.steps),
        saves=save * saved,
        source=source,
    )


def evaluations_of(recipe: Recipe, steps: int) -> int:
    """Return how often bits per byte are scored: before the first step, every train.eval_steps, and at the end."""
    every = recipe.train["eval_steps"] if recipe.train["eval_strategy"] != "no" else steps
    return int(recipe.evals.bpb.at_start) + math.ceil(steps / every)


def evaluation_tokens(recipe: Recipe, scored_bytes: int | None) -> Span:
    """Return the tokens of one scoring of bits per byte: by the bytes that are scored where they are known, else up to the
    recipe's limits."""
    if scored_bytes is not None:
        return Span.around(scored_bytes / BYTES_A_TOKEN, BYTES_A_TOKEN_FACTOR)
    least = LEAST_VALIDATION / BYTES_A_TOKEN
    rows, documents = recipe.evals.bpb.tokens, recipe.evals.bpb.document_bytes / BYTES_A_TOKEN
    low, high = min(rows, least) + min(documents, least), rows + documents
    return Span(low, math.sqrt(low * high), high)


def _step(plan: "Plan", near: FinishedRun | None) -> tuple[Span | None, str]:
    if plan.probe is not None:
        return Span.around(plan.probe.step_s, PROBED), "as probed"
    flops = _step_flops(plan)
    if flops is None:
        return None, ""
    if near is not None:
        factor = OTHER_MODEL * A_DOUBLING ** abs(math.log2(flops / near.flops))
        ended = time.strftime("%Y-%m-%d", time.gmtime(near.time))
        return Span.around(near.step_s * flops / near.flops, factor), f"by run {near.run} of {ended} on this device"
    if plan.device.kind == "cpu":
        rates = product_rates()
        peak = rates and max(1, usable_cores() // plan.processes) * (
            rates.bfloat16 if plan.compute_format == "bfloat16" else rates.float32
        )
        shares = CPU_MFU
    else:
        peak = (plan.device.peak_flops or {}).get(plan.compute_format)
        narrow = min(1.0, (plan.sizes.n_embd if plan.sizes else FULL_WIDTH) / FULL_WIDTH)
        shares = (max(LEAST_MFU, GPU_MFU[0] * narrow**2), GPU_MFU[1])
    if not peak:
        return None, ""
    low, high = shares
    step = Span(flops / (high * peak), flops / (math.sqrt(low * high) * peak), flops / (low * peak))
    return step, f"by arithmetic, {low:.0%} to {high:.0%} of the peak"


def _step_flops(plan: "Plan") -> float | None:
    """Exact-causal FLOPs of a step in one process, rows that only fill up micro-steps included."""
    flops = None if plan.sizes is None else plan.sizes.flops_per_token("exact_causal")
    return None if flops is None else flops * plan.batch_tokens / (1 - plan.padding_share) / plan.processes


def _machine(plan: "Plan") -> list[Any]:
    """What a finished run must share with a planned one, so that its speed says something."""
    optimizer = plan.recipe.optimizer.type
    if optimizer == "trainer":
        optimizer = f"trainer {plan.recipe.train.get('optim')}"
    return [plan.device.name, usable_cores(), plan.processes, plan.compute_format, plan.compiled, optimizer]


def _place(recipe: Recipe) -> Path:
    return cache_dir(recipe.data.cache_dir) / "finished_runs.json"


def finished_runs(recipe: Recipe) -> list[FinishedRun]:
    """Return what the finished runs that used this cache took, oldest first."""
    try:
        return [FinishedRun(**run) for run in read_sealed_json(_place(recipe))["runs"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def remember(plan: "Plan", data: "RunData") -> None:
    """Keep what a finished run took, for the plans to come; a cache that cannot be written is left as it is."""
    from pipeline.report.outcome import mean_step_s

    flops, step_s = _step_flops(plan), mean_step_s(data)
    if flops is None or step_s is None or not data.running:
        return
    _, began, last = data.running[-1]
    scored, saved = ([value for _, value in data.series(name)] for name in ("perf/eval_s", "ckpt/save_s"))
    trained_s = plan.evaluation_tokens.value * step_s / plan.batch_tokens  # on as many tokens as one scoring has
    found = FinishedRun(
        run=data.name,
        time=time.time(),
        machine=_machine(plan),
        flops=flops,
        step_s=step_s,
        rest_s=max(1.0, last - began - step_s * data.step() - sum(scored) - sum(saved)),
        save_s=sum(saved) / len(saved) if saved else None,
        scored_token_share=sum(scored) / len(scored) / trained_s if scored else None,
    )
    runs = [*finished_runs(plan.recipe), found][-KEPT_RUNS:]
    with suppress(OSError):
        write_sealed_json(_place(plan.recipe), {"runs": [asdict(one) for one in runs]})


def _nearest(plan: "Plan") -> FinishedRun | None:
    """Return the finished run of such a machine whose step is nearest in FLOPs, the newest of equals; None where all are far."""
    flops, machine = _step_flops(plan), _machine(plan)
    if flops is None:
        return None
    runs = [run for run in reversed(finished_runs(plan.recipe)) if run.machine == machine]
    near = min(runs, key=lambda run: abs(math.log2(run.flops / flops)), default=None)
    return near if near is not None and abs(math.log2(near.flops / flops)) <= FARTHEST else None
