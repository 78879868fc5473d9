"""The audit of a run's own numbers: `python -m faults.audit RUN [RUN ...]`.

Numbers that follow from one another must agree before any of them is believed. Arithmetic, not judgement: each rule holds in
every run of this package, sound or sick. What another program logged is measured otherwise (docs/metrics.md), so of an import
only what holds anywhere is compared. It reads run directories, prints what contradicts and leaves with 1 if anything does.
"""

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pipeline.metrics import SFT_BPB, VAL_BPB, VALIDATION
from pipeline.recipe.batch import StepRows
from pipeline.recipe.dial import MATRIX_GROUP
from pipeline.report.markdown import number
from pipeline.report.run_data import RunData, read_run
from pipeline.report.run_metrics import RunMetrics, Series, median
from pipeline.run_dir.columns import Columns
from pipeline.run_dir.rows import first_start
from pipeline.training.schedules import learning_rate_multiplier

EXACT = 1e-6  # relative: both numbers were made of the same ones
STAND = 10  # times as long as ever before the data's position may stay where it is
STANDS = 5  # changes of the position before that is asked
# Special targets are in val/loss alone: a few of text, an end of every answer.
BPB_DRIFT = {VAL_BPB: 0.05, SFT_BPB: 0.15}
BPB_AGAINST_TRAINING = 1.35  # as far as drawn text differs in bytes a token
TIME_SHARE, TIME_S = 0.02, 2.0  # rows are written a moment after what they measure
GOODPUT_SHARE = 0.02
MOST_PADDED_ROWS = 256
RATE_TOLERANCE = 0.006  # imported lines round the multiplier to two decimals
COMPARED = 10_000  # logged multipliers of a long run: a moment
PARAMETERS_SHARE = 0.01  # of a file's tensors: an architecture may keep buffers beside its parameters

OF_THE_RUN = (
    "tokens", "data/tokens", "data/samples", "data/documents", "data/bad_rows", "perf/total_s", "perf/lost_steps", "perf/energy_kwh",
    "optim/skipped_steps", "optim/nonfinite_steps",
)  # fmt: skip
OF_A_START = ("data/retries", "mem/alloc_retries", "mem/ooms")
SHARES = ("optim/clip_frac", "data/wait_frac", "data/pad_frac")
PERCENT = ("perf/mfu_pct", "perf/bf16_mfu_pct", "perf/goodput_pct", "gpu/util_pct", "gpu/mem_busy_pct", "gpu/throttled_pct", "mem/host_used_pct")  # fmt: skip
NOT_NEGATIVE = (
    "train/loss", "train/loss_ema", "train/bpb", "train/assistant_bpb", *VALIDATION,
    "optim/lr", "optim/lrm", "optim/grad_norm", "optim/grad_norm_median", "optim/param_norm", "optim/update_ratio", "perf/step_s", "perf/tok_per_s", "perf/total_s",
    "perf/eta_s", "perf/eval_s", "ckpt/save_s", "data/wait_s", "data/tokens", "data/samples", "data/documents", "mem/allocated_gib", "mem/host_rss_gib",
)  # fmt: skip
NARROW_TO_WIDE = (
    ("mem/allocated_gib", "mem/peak_allocated_gib"),
    ("mem/peak_allocated_gib", "mem/run_peak_allocated_gib"),
    ("mem/allocated_gib", "mem/reserved_gib"),
    ("optim/grad_norm_median", "optim/grad_norm"),
)


class Audit:
    """Numbers that were compared, and those that did not agree."""

    def __init__(self) -> None:
        self.compared: list[str] = []
        self.wrong: list[str] = []

    def equal(
        self, what: str, steps: np.ndarray, found: Any, wanted: Any, *, share: float = EXACT, why: str = ""
    ) -> None:
        """Compare values by step. share: of the wanted value, by which they may differ. why: what the wanted value is."""
        found, wanted = np.asarray(found, np.float64), np.broadcast_to(np.asarray(wanted, np.float64), np.shape(found))
        self.at(what, steps, found, np.abs(found - wanted) <= share * np.abs(wanted) + 1e-12, wanted=wanted, why=why)

    def at(self, what: str, steps: np.ndarray, found: Any, agrees: Any, *, wanted: Any = None, why: str = "") -> None:
        """Note the first step at which the values do not agree, and at how many they do not."""
        if not len(steps):
            return
        self.compared.append(what)
        wrong = np.flatnonzero(~np.asarray(agrees))
        if not wrong.size:
            return
        first = int(wrong[0])
        text = f"{what} is {_shown(found[first])} at step {steps[first]:,.0f}"
        text += f", where {why or 'it must be'} {_shown(wanted[first])}" if wanted is not None else why
        self.wrong.append(text + (f" (and at {wrong.size - 1:,} more of {len(steps):,})" if wrong.size > 1 else ""))


def _shown(value: float) -> str:
    return str(number(float(value), 6))


def both(run_metrics: RunMetrics, first: str, second: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (steps, values, values) of the steps that have both metrics."""
    a, b = run_metrics.series(first), run_metrics.series(second)
    steps, of_a, of_b = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    return steps, a.values[of_a], b.values[of_b]


def is_ours(run_metrics: RunMetrics) -> bool:
    return not run_metrics.manifest("imported")


def column(data: RunData, name: str) -> Series:
    """Return a number of every row that has it, in the order of the rows, as it was written: curve() keeps one value a step."""
    rows, values = data.columns.column(name)
    return Series(data.columns.beside("step", rows, missing=0), values.astype(np.float64))


# ---- counts ----


def tokens_at(run_metrics: RunMetrics, steps: np.ndarray, batch: int) -> np.ndarray:
    """Return row positions of the first so many steps of `batch` each, of which the first ones may have been smaller."""
    schedule = run_metrics.schedule()
    if schedule is None or not schedule.batch_warmup_steps:
        return steps * batch
    rows = StepRows(batch, schedule.batch_warmup_steps, schedule.batch_halvings)
    return np.array([rows.before(int(step)) for step in steps], np.float64)


def tokens_are_counted(run_metrics: RunMetrics) -> Audit | None:
    """Compare `tokens` with step x data.batch_tokens (fewer where a batch warm-up begins with smaller batches).

    data/samples is tokens / data.row_tokens, data/tokens at most `tokens`, and the sources add up to the run.
    """
    batch = run_metrics.manifest("inputs.batch_tokens") or run_metrics.recipe("data.batch_tokens")
    width, own = run_metrics.recipe("data.row_tokens"), run_metrics.recipe("data.batch_tokens")
    if not is_ours(run_metrics) or not isinstance(batch, int):
        return None
    audit = Audit()
    if isinstance(own, int) and own != batch:
        audit.wrong.append(f"data.batch_tokens is {own:,} in the recipe and {batch:,} in the manifest")
    tokens = column(run_metrics.data, "tokens")
    audit.equal(
        "tokens", tokens.steps, tokens.values, tokens_at(run_metrics, tokens.steps, batch), why=f"step x {batch:,} is"
    )
    samples, targets = run_metrics.series("data/samples"), run_metrics.series("data/tokens")
    if width:
        audit.equal("data/samples", samples.steps, samples.values, tokens_at(run_metrics, samples.steps, batch) / width, why=f"step x {batch / width:g} rows is")  # fmt: skip
    most = tokens_at(run_metrics, targets.steps, batch)
    audit.at("data/tokens", targets.steps, targets.values, targets.values <= most, wanted=most, why="the rows hold")
    for count in ("tokens", "samples", "documents"):
        _sources_add_up(audit, run_metrics, count)
    return audit


def _sources_add_up(audit: Audit, run_metrics: RunMetrics, count: str) -> None:
    """Compare the sum over the sources where every source of the mixture has the number."""
    names = [f"data/source/{name}/{count}" for name in run_metrics.manifest("shares") or {}]
    whole = run_metrics.series(f"data/{count}")
    parts = [run_metrics.series(name) for name in names]
    if len(parts) < 2 or not all(len(part) for part in parts):
        return
    steps = whole.steps
    for part in parts:
        steps = np.intersect1d(steps, part.steps)
    summed = sum(part.values[np.isin(part.steps, steps)] for part in parts)
    audit.equal(f"the sum of data/source/*/{count}", steps, summed, whole.values[np.isin(whole.steps, steps)], why=f"data/{count} is")  # fmt: skip


def counters_grow(run_metrics: RunMetrics) -> Audit | None:
    """Check that no count of the run ever falls, none of a start within it, nor the rows' steps, attempts and times."""
    audit, data = Audit(), run_metrics.data
    sources = [name for name in data.columns.names() if name.startswith("data/source/")]
    for name in (*OF_THE_RUN, *sources):
        _grows(audit, name, run_metrics.series(name))
    for name in OF_A_START:
        rows, values = data.columns.column(name)
        steps, attempts = (data.columns.beside(key, rows, missing=0) for key in ("step", "attempt"))
        for attempt in np.unique(attempts):
            _grows(audit, name, Series(steps[attempts == attempt], values[attempts == attempt]))
    if is_ours(run_metrics):
        for name, back in (("attempt", 0.0), ("time", 1.0)):  # a background writer's row may be a moment late
            _grows(audit, f"{name} of the rows", column(data, name), back=back)
        rows = data.columns.column("step")[0]
        spikes = [row for row, _ in data.columns.events("spike")]  # told when their interval is logged
        _grows(audit, "step of the rows", column(data, "step").where(~np.isin(rows, spikes)))
    return audit


def _grows(audit: Audit, name: str, series: Series, *, back: float = 0.0) -> None:
    if len(series) > 1:
        before, values = series.values[:-1], series.values[1:]
        audit.at(name, series.steps[1:], values, values >= before - back, wanted=before, why="before it was")


def data_moves(run_metrics: RunMetrics) -> Audit | None:
    """Check that rows and targets grow from row to row and that the position does not stay where it is.

    A step that takes no new rows trains on the old ones again, which no loss tells apart from learning.
    """
    audit = Audit()
    for name in ("data/samples", "data/tokens"):
        series = run_metrics.series(name)
        if len(series) >= 3:
            before, values = series.values[:-1], series.values[1:]
            audit.at(name, series.steps[1:], values, values > before, wanted=before, why="before it was")
    if is_ours(run_metrics):
        _position(audit, run_metrics)
    return audit


def _position(audit: Audit, run_metrics: RunMetrics) -> None:
    """Compare the place (epoch, file, row group) of a step's last row with the one before; of a mixture that of whichever source gave it."""
    parts = [run_metrics.series(f"data/{name}") for name in ("epoch", "pq", "rg")]
    steps = parts[0].steps
    if len(steps) < 3 or not all(np.array_equal(part.steps, steps) for part in parts):
        return
    places = np.stack([part.values for part in parts])
    moved = np.diff(places, axis=1)
    if len(run_metrics.manifest("shares") or {}) <= 1:
        _grows(audit, "data/epoch", parts[0])
    changes = steps[1:][np.any(moved != 0, axis=0)]
    if changes.size >= STANDS:
        longest, last = int(np.diff(np.append(steps[0], changes)).max()), int(steps[-1] - changes[-1])
        audit.compared.append("the position")
        if last > STAND * longest:
            audit.wrong.append(f"the position (epoch, file, row group) stands still since step {changes[-1]:,.0f}, {last:,} steps, where it never stood longer than {longest:,} before")  # fmt: skip


# ---- rates and losses ----


def rates_are_the_recipes(run_metrics: RunMetrics) -> Audit | None:
    """Compare each rate with its peak times the schedule: the recipe's rate x optimizer.rate_scale x optim/lrm. optim/lr is one of
    the groups' rates."""
    kind, audit = run_metrics.recipe("optimizer.type"), Audit()
    if not is_ours(run_metrics):
        return None
    if kind == "trainer" and (peak := run_metrics.recipe("train.learning_rate")):
        steps, rate, multiplier = both(run_metrics, "optim/lr", "optim/lrm")
        audit.equal("optim/lr", steps, rate, peak * multiplier, why="recipe x optim/lrm is")
    if kind in MATRIX_GROUP:
        scale, groups = run_metrics.recipe("optimizer.rate_scale"), run_metrics.recipe("optimizer.groups") or {}
        for name, group in groups.items():
            group = group or {}
            peak = group.get("learning_rate")
            steps, rate, multiplier = both(run_metrics, f"optim/lr/{name}", "optim/lrm")
            if peak is not None:
                wanted = peak * (1.0 if scale is None else scale) * multiplier
                audit.equal(f"optim/lr/{name}", steps, rate, wanted, why="recipe x schedule is")
        rates = [run_metrics.series(f"optim/lr/{name}") for name in groups]
        first = run_metrics.series("optim/lr")
        own = [group.values for group in rates if np.array_equal(group.steps, first.steps)]
        if own and len(first):
            agrees = np.any([np.isclose(first.values, values, rtol=EXACT) for values in own], axis=0)
            audit.at("optim/lr", first.steps, first.values, agrees, why=", which is no group's rate")
    return audit


def rate_follows_its_schedule(run_metrics: RunMetrics) -> Audit | None:
    """Compare optim/lrm with the recipe's schedule at every logged step (of a long run at COMPARED of them).

    What skipped steps hold back is the optimizer's count of updates, not a mistake.
    """
    multiplier, steps, schedule = run_metrics.series("optim/lrm"), run_metrics.data.max_steps(), run_metrics.schedule()
    if len(multiplier) < 5 or not schedule or not steps or run_metrics.last("optim/skipped_steps"):
        return None
    compared = np.linspace(0, len(multiplier) - 1, min(len(multiplier), COMPARED)).round().astype(int)
    multiplier = multiplier.where(compared)
    wanted = np.array([learning_rate_multiplier(schedule, int(step) - 1, steps) for step in multiplier.steps])
    agrees = np.abs(multiplier.values - wanted) <= RATE_TOLERANCE
    audit = Audit()
    audit.at("optim/lrm", multiplier.steps, multiplier.values, agrees, wanted=wanted, why="the schedule has")
    return audit


def bpb_follows_loss(run_metrics: RunMetrics) -> Audit | None:
    """Compare val/bpb / val/loss with its median: both are sums over the same targets, so it is tokens a byte.

    In SFT the end of each answer is in the loss alone, and no base model knows it: from the first step on. Where validation
    is drawn from the training sources, the ratio is near that of training.
    """
    audit = Audit()
    if not is_ours(run_metrics):
        return None
    for name, training in ((VAL_BPB, "train/bpb"), (SFT_BPB, "train/assistant_bpb")):
        steps, bpb, loss = both(run_metrics, name, "val/loss")
        known = (loss > 0) & ((steps > 0) | (name != SFT_BPB))
        steps, ratio = steps[known], bpb[known] / loss[known]
        if len(steps) >= 2:
            audit.equal(f"{name} / val/loss", steps, ratio, median(ratio), share=BPB_DRIFT[name], why="the median over the evaluations is")  # fmt: skip
        _, train_bpb, train_loss = both(run_metrics, training, "train/loss")
        if (
            len(steps)
            and len(train_bpb) >= 10
            and run_metrics.recipe("data.validation") is None
            and (train_loss > 0).all()
        ):
            of_training, level = median(train_bpb / train_loss), median(ratio)
            audit.compared.append(f"{name} / val/loss beside {training} / train/loss")
            if of_training > 0 and not 1 / BPB_AGAINST_TRAINING <= level / of_training <= BPB_AGAINST_TRAINING:
                audit.wrong.append(f"{name} / val/loss is {level:.4g} and {training} / train/loss {of_training:.4g}, of text from the same sources")  # fmt: skip
    return audit


def derived_numbers_agree(run_metrics: RunMetrics) -> Audit | None:
    """Compare each derived number with its parts: perplexity, smoothed loss, speed, FLOPs, clipping, shares."""
    audit = Audit()
    for name in SHARES + PERCENT:
        series, most = run_metrics.series(name), 1.0 if name in SHARES else 100.0
        within = (series.values >= 0) & (series.values <= most * 1.001)
        audit.at(name, series.steps, series.values, within, why=f", beyond 0 to {most:g}")
    for name in NOT_NEGATIVE:
        series = run_metrics.series(name)
        audit.at(name, series.steps, series.values, series.values >= 0, why=", below 0")
    if not is_ours(run_metrics):
        return audit
    _of_a_step(audit, run_metrics)
    _speed(audit, run_metrics)
    for narrow, wide in NARROW_TO_WIDE:
        steps, inner, outer = both(run_metrics, narrow, wide)
        audit.at(narrow, steps, inner, inner <= outer * 1.001, wanted=outer, why=f"{wide} is")
    return audit


def _of_a_step(audit: Audit, run_metrics: RunMetrics) -> None:
    steps, perplexity, loss = both(run_metrics, "train/perplexity", "train/loss")
    audit.equal(
        "train/perplexity", steps, perplexity, np.exp(np.minimum(loss, 700)), share=1e-4, why="exp(train/loss) is"
    )
    losses = run_metrics.loss()
    # Smoothed by step, it may leave the means of longer intervals.
    # Rows with a median norm cover steps that were all measured.
    beyond_means = np.isin(losses.steps, run_metrics.series("optim/grad_norm_median").steps) & (losses.intervals() > 1)
    if not run_metrics.recipe("run.fork_from") and not beyond_means.any():
        steps, smoothed, loss = both(run_metrics, "train/loss_ema", "train/loss")
        lowest, highest = np.minimum.accumulate(loss), np.maximum.accumulate(loss)
        # A hundredth: rows that a crash took with it were smoothed, too.
        agrees = (smoothed >= lowest * 0.99) & (smoothed <= highest * 1.01)
        audit.at("train/loss_ema", steps, smoothed, agrees, why=", beyond all losses up to there")
    limit = run_metrics.recipe("train.max_grad_norm")
    attempts = Columns.of(run_metrics.data.all_rows).column("attempt")[1]
    if limit and attempts.max(initial=1) <= 1:  # a later start may have another limit
        steps, norm, share = both(run_metrics, "optim/grad_norm", "optim/clip_frac")
        audit.at("optim/clip_frac", steps, share, (norm <= limit * (1 + EXACT)) | (share > 0), why=f", and the norm of that step above the limit {limit:g}")  # fmt: skip
    age, good = run_metrics.series("ckpt/age_steps"), run_metrics.series("ckpt/last_good_step")
    known = np.isin(age.steps, good.steps)
    if known.sum() == len(good):
        audit.equal("ckpt/age_steps", good.steps, age.values[known], good.steps - good.values, why="step - ckpt/last_good_step is")  # fmt: skip


def _speed(audit: Audit, run_metrics: RunMetrics) -> None:
    batch = run_metrics.manifest("inputs.batch_tokens") or run_metrics.recipe("data.batch_tokens")
    steps, rate, step_s = both(run_metrics, "perf/tok_per_s", "perf/step_s")
    if isinstance(batch, int):
        since = np.concatenate([[0], steps[:-1]])
        whole = tokens_at(run_metrics, steps, batch) - tokens_at(run_metrics, since, batch) == (steps - since) * batch
        audit.equal("perf/tok_per_s x perf/step_s", steps[whole], (rate * step_s)[whole], batch, share=1e-4, why="data.batch_tokens is")  # fmt: skip
    steps, share, wait_s = both(run_metrics, "data/wait_frac", "data/wait_s")
    if np.array_equal(steps, run_metrics.series("perf/step_s").steps):
        wanted = np.minimum(wait_s / np.maximum(run_metrics.series("perf/step_s").values, 1e-12), 1.0)
        audit.at("data/wait_frac", steps, share, np.abs(share - wanted) <= 1e-4, wanted=wanted, why="data/wait_s / perf/step_s is")  # fmt: skip
    attempts = run_metrics.data.columns
    if run_metrics.manifest("stage") == "sft" or run_metrics.recipe("data.isolate_documents"):
        return  # pairs are of conversations there, which differ from step to step
    for top, bottom, what in (
        ("perf/tflops_per_gpu", "perf/tok_per_s_per_gpu", "FLOPs a token (perf/tflops_per_gpu / perf/tok_per_s_per_gpu)"),
        ("perf/mfu_pct", "perf/tflops_per_gpu", "perf/mfu_pct / perf/tflops_per_gpu"),
    ):  # fmt: skip
        steps, above, below = both(run_metrics, top, bottom)
        rows, _ = attempts.column(top)
        known = below > 0
        if len(rows) != len(steps) or not known.all():
            continue
        of = attempts.beside("attempt", rows, missing=1)
        for attempt in np.unique(of):
            own = of == attempt
            ratio = above[own] / below[own]
            audit.equal(what, steps[own], ratio, median(ratio), share=1e-3, why="the median of the start is")


# ---- time ----


def times_add_up(run_metrics: RunMetrics) -> Audit | None:
    """Compare perf/total_s with the steps' own time, the clock and goodput: time is spent once.

    A machine whose clock was set while the run trained fails here, too.
    """
    if not is_ours(run_metrics):
        return None
    audit = Audit()
    _intervals(audit, run_metrics)
    _clock(audit, run_metrics)
    return audit


def _intervals(audit: Audit, run_metrics: RunMetrics) -> None:
    """Compare perf/total_s from row to row. Left out: the first row of a start, and one before which rows are missing."""
    steps, total, step_s = both(run_metrics, "perf/total_s", "perf/step_s")
    if len(steps) < 3:
        return
    length = np.diff(steps)
    usual = (length <= median(length)) & ~np.isin(steps[1:], run_metrics.series("perf/first_step_s").steps)
    passed, made = np.diff(total)[usual], (step_s[1:] * length)[usual]
    agrees = np.abs(passed - made) <= 0.005 * made + 1e-3
    audit.at("the growth of perf/total_s", steps[1:][usual], passed, agrees, wanted=made, why="the steps took")


def _clock(audit: Audit, run_metrics: RunMetrics) -> None:
    columns = run_metrics.data.columns
    rows, total = columns.column("perf/total_s")
    rows, of_total = np.intersect1d(rows, columns.column("time")[0], return_indices=True)[:2]
    if not len(rows):
        return
    total = total[of_total]
    steps, attempts, times = (columns.beside(name, rows, missing=0) for name in ("step", "attempt", "time"))
    beside = [columns.column(name) for name in ("perf/eval_s", "core/eval_s", "chat/eval_s", "ckpt/save_s")]
    for attempt in np.unique(attempts):
        own = np.flatnonzero(attempts == attempt)
        first, last = own[0], own[-1]
        within = sum(float(values[(at > rows[first]) & (at < rows[last])].sum()) for at, values in beside)
        spent, passed = total[last] - total[first] + within, times[last] - times[first]
        audit.at(f"time in steps, evaluations and saves of attempt {attempt:.0f}", steps[[last]], [spent], [spent <= passed * (1 + TIME_SHARE) + TIME_S], wanted=[passed], why="the clock went on by")  # fmt: skip
    began, goodput = (
        first_start(row for _, row in run_metrics.data.columns.events("attempt")),
        run_metrics.series("perf/goodput_pct"),
    )
    if began is None or run_metrics.recipe("run.fork_from") or not np.array_equal(goodput.steps, steps):
        return
    since = times - began
    wanted = 100 * total / np.maximum(since, 1e-9)
    agrees = np.abs(goodput.values - wanted) <= GOODPUT_SHARE * wanted + 100 / np.maximum(since, 1.0) * 0.1
    audit.at("perf/goodput_pct", steps, goodput.values, agrees, wanted=wanted, why="perf/total_s over the time since the first start is")  # fmt: skip


# ---- manifest ----


def parameters_are_the_models(run_metrics: RunMetrics) -> Audit | None:
    """Compare the plan's parameters with the built model's, and those with the finished model's files."""
    audit, built, planned = Audit(), run_metrics.manifest("model.parameters"), run_metrics.manifest("plan.parameters")
    if not isinstance(built, int):
        return None
    if isinstance(planned, int):
        audit.compared.append(f"planned {planned:,}")
        if planned != built:
            audit.wrong.append(f"the plan counts {planned:,} parameters, the model that was built has {built:,}")
    shapes = _saved_shapes(run_metrics.data.run.model)
    saved = None if shapes is None else sum(map(math.prod, shapes))
    if shapes is not None and saved is not None:
        audit.compared.append(f"model/ {saved:,}")
        of_an_id = sum(
            shape[1]
            for shape in shapes
            if len(shape) == 2 and shape[0] == run_metrics.manifest("inputs.tokenizer.size")
        )
        # A finished model is written without the rows that model.options.vocab_multiple adds to its vocabulary.
        padded = (
            of_an_id > 0 and (built - saved) % of_an_id == 0 and 0 < (built - saved) // of_an_id < MOST_PADDED_ROWS
        )
        if abs(saved - built) > PARAMETERS_SHARE * built and not padded:
            audit.wrong.append(f"model/ holds {saved:,} numbers, the model that was trained had {built:,} parameters")
    if planned is None and saved is None:
        return None
    return audit


def _saved_shapes(folder: Path) -> list[list[int]] | None:
    """Return the shapes of a folder's weights by the heads of their files; None where there are none that can be read."""
    shapes: list[list[int]] = []
    files = sorted(folder.glob("model*.safetensors")) if folder.is_dir() else []
    for path in files:
        try:
            with safe_open(path, framework="np") as tensors:
                shapes += [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
    return shapes if files else None


def manifest_agrees(run_metrics: RunMetrics) -> Audit | None:
    """Compare the manifest with the rows: results, last step, planned steps, attempts, checkpoints."""
    data, audit = run_metrics.data, Audit()
    planned, results = data.max_steps(), data.manifest.get("results") or {}
    step = int(column(data, "step").values.max(initial=0))  # also of a row without numbers of a step
    if not step or not is_ours(run_metrics):
        return None
    if planned:
        audit.compared.append("planned steps")
        if step > planned:
            audit.wrong.append(f"the last row is of step {step:,}, and the run had {planned:,}")
        if data.manifest.get("status") == "finished" and "step" not in results and step < planned:
            audit.wrong.append(f"the run is finished, and the last row is of step {step:,} of {planned:,}")
    audit.wrong += list(_results_differ(data, results, step))
    audit.compared += ["results"] * bool(results)
    begun, attempts = data.manifest.get("attempts"), data.columns.column("attempt")[1]
    if isinstance(begun, int) and len(attempts):
        audit.compared.append("attempts")
        if attempts.max() > begun:
            audit.wrong.append(f"a row is of attempt {attempts.max():.0f}, and {begun} were begun")
    sealed, every = [at for at, _, whole in data.checkpoints if whole], run_metrics.recipe("train.logging_steps", 10)
    if sealed:
        audit.compared.append("checkpoints")
        if max(sealed) > step + every:
            audit.wrong.append(f"a checkpoint is of step {max(sealed):,}, and the last row of step {step:,}")
    return audit


def _results_differ(data: RunData, results: dict[str, Any], step: int) -> Iterable[str]:
    """Yield a line for each of the manifest's results that is not the rows' last value."""
    for name, value in results.items():
        if name.endswith("/first") or not isinstance(value, (int, float)):
            continue
        found = step if name == "step" else data.tokens() if name == "tokens" else data.last(name)
        if found is None:
            yield f"{name} ended at {_shown(value)} by the manifest, and no row has it"
        elif abs(found - value) > EXACT * abs(value):
            yield f"{name} ended at {_shown(value)} by the manifest and at {_shown(found)} by the rows"


# ---- the program ----

RULES = {
    "tokens are steps times the batch": tokens_are_counted,
    "counters only grow": counters_grow,
    "the data moves on": data_moves,
    "every rate is its peak times the schedule": rates_are_the_recipes,
    "learning rate follows its schedule": rate_follows_its_schedule,
    "bits per byte follow the loss": bpb_follows_loss,
    "derived numbers agree with their parts": derived_numbers_agree,
    "times add up": times_add_up,
    "parameters are the model's own": parameters_are_the_models,
    "the manifest agrees with the rows": manifest_agrees,
}


def audit(data: RunData) -> dict[str, Audit]:
    """Return what each rule compared; a rule without its numbers is left out."""
    run_metrics = RunMetrics(data)
    found = {name: compare(run_metrics) for name, compare in RULES.items()}
    return {name: of_rule for name, of_rule in found.items() if of_rule and (of_rule.compared or of_rule.wrong)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.audit", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    contradictions = 0
    for name in parser.parse_args(argv).runs:
        found = audit(read_run(name))
        wrong = [f"{rule}: {text}" for rule, of_rule in found.items() for text in of_rule.wrong]
        contradictions += len(wrong)
        print(f"{name}: {len(found)} of {len(RULES)} rules could be tried; contradictions: {len(wrong)}")
        for text in wrong:
            print(f"  {text}")
    return int(contradictions > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
