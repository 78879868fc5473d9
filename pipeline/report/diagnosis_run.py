"""Rules on the run as a whole: its end, what it can be resumed from, its attempts, its data, its machine."""

import numpy as np

from pipeline.data.losses import fit_text
from pipeline.process.commands import program
from pipeline.report.diagnosis_finding import (
    LONG_ENOUGH_S,
    Figures,
    Level,
    Rule,
    Series,
    Verdict,
    error_of_difference,
    graded,
    median,
    noise,
    rule,
    windows,
)

PASSES_NOTE, PASSES_TROUBLE = 4, 16
RESTARTS = 3
LOST_NOTE, LOST_TROUBLE = 0.02, 0.10
GOODPUT_NOTE, GOODPUT_TROUBLE = 90.0, 70.0
PADDED_NOTE, PADDED_TROUBLE = 0.05, 0.20
CROPPED_NOTE, CROPPED_TROUBLE = 0.20, 0.50
LEFT_OUT = ("too long", "cut", "no target")
DROPPED_NOTE, DROPPED_TROUBLE = 0.01, 0.10
BAD_ROWS_SHARE = 0.001
EMPTY_NOTE = 0.01
RETRIES_SHARE = 0.01  # of the steps


@rule(
    "run reached its end",
    needs="a status in the manifest, or the number of planned steps",
    threshold="the status is finished, the last logged step is the last planned one, or a process is training it",
    reason="an unfinished run has not seen the low rates of its end, where much of the loss falls: its numbers are not those of the run that was planned",
    advice="Run the same command again: it goes on from the newest whole checkpoint. Without one it starts anew.",
)
def reached_its_end(figures: Figures) -> Verdict | None:
    data = figures.data
    step, planned = figures.step(), data.max_steps()
    of = f"step {step:,}" + (f" of {planned:,} ({step / planned:.1%})" if planned else "")
    if data.failure and data.failure.get("status") in (75, 130):
        return Verdict("note", "the run was interrupted and can go on", f"{of}: status {data.failure['status']}")
    if data.failure:
        return Verdict("trouble", "the run was stopped by a failure", f"{of}: status {data.failure.get('status')}, {data.failure.get('class')}")  # fmt: skip
    if data.manifest.get("status") == "finished" or (planned and step >= planned):
        return Verdict("healthy", "the run reached its end", of)
    if data.is_training:
        return Verdict("healthy", "the run is training", of)
    if planned:
        return Verdict("trouble", "the run is unfinished", of)
    return None


@rule(
    "run can be resumed",
    needs="checkpoints, a finished model or the recipe's saving",
    threshold="a whole checkpoint or a finished model is in the run directory, or the first save is to come",
    reason="what is not saved is lost with the process, and with it every hour that was paid",
    advice="Set train.save_steps so that a crash costs minutes (it is on by default here); an imported run: copy its checkpoints before anything else.",
)
def can_be_resumed(figures: Figures) -> Verdict | None:
    data = figures.data
    step, sealed = figures.step(), [step for step, _, whole in data.checkpoints if whole]
    if sealed:
        newest = max(sealed)
        return Verdict("healthy", "the run can be resumed", f"newest whole checkpoint at step {newest:,}, {max(step - newest, 0):,} steps before the last")  # fmt: skip
    if data.run.model.is_dir():
        return Verdict("healthy", "the finished model is there", str(data.run.model.name))
    seconds = figures.seconds()
    lost = f"{step:,} steps" + (f", {seconds / 3600:.2g} h of steps" if seconds else "") + " cannot be continued"
    strategy, every = figures.recipe("train.save_strategy"), figures.recipe("train.save_steps")
    if strategy == "no":
        return Verdict("trouble", "the run saves no checkpoint: it cannot be resumed", f"train.save_strategy is no; {lost}")  # fmt: skip
    if len(figures.series("ckpt/save_s")) or figures.last("ckpt/last_good_step"):
        return Verdict("note", "checkpoints were written and are not here any more", lost)
    if not step or (every is None and data.manifest.get("status") == "finished"):
        return None
    is_late = isinstance(every, (int, float)) and every > step
    if is_late and data.is_training:
        return Verdict("healthy", "its first checkpoint is to come", f"train.save_steps is {every:g}; step {step:,}")
    return Verdict("trouble", "there is no checkpoint to resume from", (f"train.save_steps is {every:g}; " if is_late else "") + lost)  # fmt: skip


@rule(
    "starts are few",
    needs="a logged step",
    threshold=(
        f"fewer than {RESTARTS} restarts, and steps made twice below {LOST_NOTE:.0%} (note) or {LOST_TROUBLE:.0%} (trouble) of those that count; "
        f"in runs of {LONG_ENOUGH_S / 60:.0f} minutes and more goodput at least {GOODPUT_NOTE:.0f} % (note) or {GOODPUT_TROUBLE:.0f} % (trouble)"
    ),
    reason="every restart repeats start-up and the steps since the last checkpoint; a tenth of the rent lost that way is worth an afternoon's search",
    advice="Read failure.json and the console around each end; save more often; move to steadier machines.",
)
def starts_are_few(figures: Figures) -> Verdict | None:
    goodput, made = figures.last("perf/goodput_pct"), figures.step()
    if not made:
        return None
    restarts, lost = figures.restarts()
    evidence = f"{restarts} restarts, {lost:,} steps made twice ({lost / made:.1%})"
    if goodput is not None:
        evidence += f", goodput {goodput:.1f} %"
    if lost >= LOST_TROUBLE * made:
        return Verdict("trouble", "many steps were made twice", evidence)
    # Start-up and the evaluations of a short run are a large share of it, and cost little.
    seconds = figures.seconds() or 0.0
    useful = goodput if goodput and seconds >= LONG_ENOUGH_S * goodput / 100 else 100.0
    if useful < GOODPUT_TROUBLE:
        return Verdict("trouble", "much of the time was spent on other things than steps that count", evidence)
    if lost >= LOST_NOTE * made or useful < GOODPUT_NOTE or restarts >= RESTARTS:
        return Verdict("note", "restarts or other things than steps cost time", evidence)
    if goodput is not None and goodput < GOODPUT_NOTE:
        return Verdict("healthy", "hardly any step was made twice; the rest is start-up, evaluations and saves of a short run", evidence)  # fmt: skip
    return Verdict("healthy", "hardly any step was made twice" if goodput is None else "hardly any time was lost", evidence)  # fmt: skip


@rule(
    "text is not repeated too often",
    needs="data/epoch",
    threshold=f"fewer than {PASSES_NOTE} (note) or {PASSES_TROUBLE} (trouble) whole passes over a source",
    reason="up to four passes teach nearly as much as new text, after about sixteen another one teaches nothing (Muennighoff et al. 2023)",
    advice="More text, a shorter run, or a smaller share for the small source (data.sources weight or epochs); watch validation.",
)
def few_passes(figures: Figures) -> Verdict | None:
    before = figures.passes().values
    if not before.size:
        return None
    passes = float(before.max())
    return graded(
        passes,
        note=PASSES_NOTE,
        trouble=PASSES_TROUBLE,
        titles=("the text was not repeated often", "the text was repeated often"),
        evidence=f"{passes:.0f} whole passes",
    )


@rule(
    "rows hold text",
    needs="shares in the manifest, or data/pad_frac",
    threshold=f"padding below {PADDED_NOTE:.0%} (note) or {PADDED_TROUBLE:.0%} (trouble) of the positions; cropped text below {CROPPED_NOTE:.0%} (note) or {CROPPED_TROUBLE:.0%} (trouble)",
    reason="padding is computed and teaches nothing: 5 % is 5 % of the cost; cropped text is lost, and best_fit_crop loses about a third where documents are long",
    advice="data.packing: cut_and_fit pads under 1 % and loses nothing; in SFT longer rows, or shorter conversations together.",
)
def rows_hold_text(figures: Figures) -> Verdict | None:
    shares = {name: share.get("lost") or {} for name, share in (figures.manifest("shares") or {}).items()}
    padded = max(
        [lost["padded"] for lost in shares.values() if "padded" in lost], default=figures.last("data/pad_frac")
    )
    cropped = max((lost["cropped"] for lost in shares.values() if "cropped" in lost), default=None)
    if padded is None and cropped is None:
        return None
    known = {"padded": padded, "cropped": cropped}
    parts = [f"{name} {share:.1%}" for name, share in known.items() if share is not None]
    evidence, lost = ", ".join(parts) + " (of the worst source)" * (len(shares) > 1), (padded or 0, cropped or 0)
    if lost[0] >= PADDED_TROUBLE or lost[1] >= CROPPED_TROUBLE:
        return Verdict("trouble", "much of the rows is padding, or much text is cropped", evidence)
    if lost[0] >= PADDED_NOTE or lost[1] >= CROPPED_NOTE:
        return Verdict("note", "rows are padded or text is cropped", evidence)
    return Verdict("healthy", "rows are full of text", evidence)


@rule(
    "conversations fit their rows",
    needs="shares of conversations in the manifest",
    threshold=f"conversations longer than a row and left out below {DROPPED_NOTE:.0%} (note) or {DROPPED_TROUBLE:.0%} (trouble) of a source, those that lose their last turns and those without an answer of the assistant below {DROPPED_NOTE:.0%} (note)",
    reason="what is left out is not chosen by chance: long answers go first, and the model learns to be short. One in a hundred is lost in any corpus",
    advice="Longer rows (data.row_tokens), as long as the evidence says; or conversations split in the files. Of a model that is there already its positions are the limit.",
)
def conversations_fit(figures: Figures) -> Verdict | None:
    shares = {name: share for name, share in (figures.manifest("shares") or {}).items() if "too long" in (share.get("lost") or {})}  # fmt: skip
    if not shares:
        return None
    lines, dropped, row_tokens = [], 0.0, figures.recipe("data.row_tokens")
    for name, share in shares.items():
        lost, facts = {what: share["lost"].get(what, 0.0) for what in LEFT_OUT}, share.get("conversations")
        dropped = max(dropped, lost["too long"])
        if max(lost["too long"], lost["cut"]) >= DROPPED_NOTE and facts and row_tokens:
            lines.append(f"{name}: {fit_text(facts, row_tokens)}")
        elif max(lost.values()) >= DROPPED_NOTE:
            lines.append(f"{name}: {', '.join(f'{what} {100 * part:.2f} %' for what, part in lost.items())}")
    if not lines:
        most = {what: max(share["lost"].get(what, 0.0) for share in shares.values()) for what in LEFT_OUT}
        evidence = ", ".join(f"{what} {100 * part:.2f} %" for what, part in most.items())
        return Verdict("healthy", "conversations fit the rows", evidence + " (of the worst source)" * (len(shares) > 1))
    level: Level = "trouble" if dropped >= DROPPED_TROUBLE else "note"
    return Verdict(level, "conversations are left out or cut", "; ".join(lines))


@rule(
    "every row is readable",
    needs="data/bad_rows",
    threshold=f"no unreadable row; trouble from {BAD_ROWS_SHARE:.1%} of the documents (or rows) on; empty rows below {EMPTY_NOTE:.0%} of a source (note)",
    reason="a few bad lines pass unnoticed in any crawl; one in a thousand is a broken file or a wrong format",
    advice=f"The run names each row: {program('data')} RECIPE shows them; correct or leave out the file.",
)
def rows_are_readable(figures: Figures) -> Verdict | None:
    bad = figures.last("data/bad_rows")
    if bad is None:
        return None
    read = figures.last("data/documents") or figures.last("data/samples")
    evidence = f"{bad:.0f} unreadable rows" + (f" beside {read:,.0f} that were read" if read else "")
    lost = {name: share.get("lost") or {} for name, share in (figures.manifest("shares") or {}).items()}
    empty, where = max(((of.get("empty", 0.0), name) for name, of in lost.items()), default=(0.0, ""))
    if empty:
        evidence += f", {empty:.1%} of the rows of {where} are empty"
    if not bad:
        if empty >= EMPTY_NOTE:
            return Verdict("note", "rows are empty", evidence)
        return Verdict("healthy", "every row was readable", evidence)
    return graded(bad / read if read else 0.0, note=0, trouble=BAD_ROWS_SHARE, titles=("", "rows are unreadable"), evidence=evidence)  # fmt: skip


@rule(
    "reading needs no retries",
    needs="data/retries",
    threshold=f"no retry; trouble from one in {1 / RETRIES_SHARE:.0f} steps on",
    reason="now and then a service hiccups; retries that keep pace with the steps are a failing disk, network or quota",
    advice="Copy the data to a local disk first; look at the quota of the Hub and at the network (net/received_mb_s).",
)
def no_retries(figures: Figures) -> Verdict | None:
    retries = figures.last("data/retries")
    if retries is None:
        return None
    if not retries:
        return Verdict("healthy", "nothing had to be read twice", "0 retries")
    made = max(figures.step(), 1)
    return graded(retries / made, note=0, trouble=RETRIES_SHARE, titles=("", "reading was retried"), evidence=f"{retries:.0f} retries in {made:,} steps")  # fmt: skip


RULES: list[Rule] = [
    reached_its_end,
    can_be_resumed,
    starts_are_few,
    few_passes,
    rows_hold_text,
    conversations_fit,
    rows_are_readable,
    no_retries,
]


# Rules on the machine: step time, utilisation, waiting, memory.

TIMED = 15  # logged step times: five for each third
DRIFT_NOTE, DRIFT_TROUBLE, DRIFT_WINDOWS = 0.10, 0.25, 5
UNSTEADY_NOTE, UNSTEADY_TROUBLE = 0.10, 0.30
UTIL_NOTE, UTIL_TROUBLE = 90.0, 50.0
MFU_NOTE, MFU_TROUBLE = 30.0, 10.0
WAIT_NOTE, WAIT_TROUBLE = 0.03, 0.10
SLOW_NOTE, SLOW_TROUBLE = 1.15, 1.5
THROTTLED_NOTE, THROTTLED_TROUBLE = 1.0, 10.0
SAVES_NOTE, SAVES_TROUBLE = 0.05, 0.10
EVALUATIONS_NOTE, EVALUATIONS_TROUBLE = 0.20, 0.50
GROWTH_NOTE, GROWTH_TROUBLE = 0.10, 0.20
MEMORY_SETTLED = 0.2  # of the run: before it memory grows for good reasons


def step_times(figures: Figures) -> Series:
    """Return seconds of a step without compilation; from tokens a second, in other units, where they are all there is."""
    times = figures.timed("perf/step_s")
    rates = figures.timed("perf/tok_per_s")
    if len(times) or not (rates.values > 0).all():
        return times
    return Series(rates.steps, 1 / rates.values)


@rule(
    "step time stays the same",
    needs=f"{TIMED} logged perf/step_s",
    threshold=f"from the first to the last third the median grows by less than {DRIFT_NOTE:.0%} (note) or {DRIFT_TROUBLE:.0%} (trouble, where {DRIFT_WINDOWS} windows grow one after the other); only growth from third to third beyond three standard errors counts, and no more than the fast steps' (the lowest tenth)",
    reason="a GPU run keeps its step time to 1 or 2 %; other programs on a shared machine come and go, and leave some steps as fast as ever; what leaks grows on and slows every step",
    advice="Look for what grows: a list that a callback keeps, open files, a fragmenting allocator, heat (gpu/sm_clock_mhz), a neighbour on the machine. Profile an early and a late step (monitor.profile_steps).",
)
def step_time_stays(figures: Figures) -> Verdict | None:
    times = step_times(figures).values
    if times.size < TIMED:
        return None
    first, middle, last = windows(times, 3)
    fast = [float(np.quantile(part, 0.1)) for part in np.array_split(times, 3)]
    growth = min(last / first, fast[2] / fast[0]) - 1
    grows_on = bool((np.diff(windows(times, DRIFT_WINDOWS)) > 0).all())
    evidence = f"medians of the thirds {first:.3g}, {middle:.3g}, {last:.3g} s ({last / first - 1:+.0%}), of the fast steps {fast[2] / fast[0] - 1:+.0%}"
    certain = first < middle < last and last - first > 3 * error_of_difference(times, times.size // 3)
    return graded(
        growth if certain else 0.0,
        note=DRIFT_NOTE,
        trouble=DRIFT_TROUBLE if grows_on else np.inf,
        titles=("the step time does not drift", "the step time drifts upward"),
        evidence=evidence,
    )


@rule(
    "throughput is stable",
    needs=f"{TIMED} logged perf/step_s",
    threshold=f"the robust standard deviation of step times around their trend is below {UNSTEADY_NOTE:.0%} (note) or {UNSTEADY_TROUBLE:.0%} (trouble) of their median",
    reason="with 10 % from log to log the forecast is good to a few percent after fifty logs; with 30 % it says little",
    advice="Look at what runs beside it, at data/wait_frac, at rows of uneven length, at other jobs on the disk and the network.",
)
def throughput_is_stable(figures: Figures) -> Verdict | None:
    times = step_times(figures).values
    if times.size < TIMED:
        return None
    spread, middle = noise(times) / median(times), median(times)
    slow = int((times > 2 * middle).sum())
    return graded(
        spread,
        note=UNSTEADY_NOTE,
        trouble=UNSTEADY_TROUBLE,
        titles=("throughput is stable enough to trust the forecast", "the step time jumps about"),
        evidence=f"step time median {middle:.3g} s, spread {spread:.1%}; {slow} of {times.size} logged values above twice the median",
    )


@rule(
    "the accelerator is used",
    needs="gpu/util_pct, perf/mfu_pct or perf/bf16_mfu_pct: 5 logged values",
    threshold=f"median utilisation at least {UTIL_NOTE:.0f} % (else a note, below {UTIL_TROUBLE:.0f} % trouble) and median MFU at least {MFU_NOTE:.0f} % (else a note, below {MFU_TROUBLE:.0f} % trouble)",
    reason="utilisation below 100 % is a GPU without work; published pretraining reaches 30 to 60 % of the dense peak, nothing worth its rent below 10 %",
    advice="Larger micro-batches, train.torch_compile, bf16, a faster attention; where utilisation is low too: data and host are the bottleneck.",
)
def accelerator_is_used(figures: Figures) -> Verdict | None:
    used = figures.timed("gpu/util_pct").values
    exact = figures.timed("perf/mfu_pct").values
    name, mfu = ("MFU", exact) if exact.size else ("bf16 MFU", figures.timed("perf/bf16_mfu_pct").values)
    verdicts = []
    if used.size >= 5:
        verdicts.append((median(used), UTIL_NOTE, UTIL_TROUBLE, f"median utilisation {median(used):.0f} %"))
    if mfu.size >= 5:
        verdicts.append((median(mfu), MFU_NOTE, MFU_TROUBLE, f"median {name} {median(mfu):.1f} %"))
    if not verdicts:
        return None
    evidence = ", ".join(text for *_, text in verdicts)
    if any(value < trouble for value, _, trouble, _ in verdicts):
        return Verdict("trouble", "the accelerator is mostly idle or badly used", evidence)
    if any(value < note for value, note, _, _ in verdicts):
        return Verdict("note", "the accelerator could do more", evidence)
    return Verdict("healthy", "the accelerator is used", evidence)


@rule(
    "data does not stall the steps",
    needs="data/wait_frac: 5 logged values",
    threshold=f"the steps waited for rows for less than {WAIT_NOTE:.0%} (note) or {WAIT_TROUBLE:.0%} (trouble) of their time, the first logged value left out",
    reason="rows are prepared ahead, so a sound run waits for under 1 %; a tenth of the time is a tenth of the rent",
    advice=f"Prepare the data before the run ({program('data')} RECIPE), copy it to a local disk, more data.num_proc, a cheaper format function.",
)
def data_does_not_stall(figures: Figures) -> Verdict | None:
    waits = figures.timed("data/wait_frac")
    if len(waits) < 5:
        return None
    # Each logged value stands for the steps since the one before, however many they were.
    lengths = np.diff(figures.series("data/wait_frac").steps)[-len(waits) :]
    times = figures.timed("perf/step_s")
    weights = lengths * times.values if np.array_equal(times.steps, waits.steps) else lengths
    share = float(np.average(waits.values, weights=weights))
    worst = int(waits.values.argmax())
    return graded(
        share,
        note=WAIT_NOTE,
        trouble=WAIT_TROUBLE,
        titles=("the steps do not wait for data", "the steps wait for data"),
        evidence=f"{share:.1%} of the time in steps; worst {waits.values[worst]:.0%} at step {waits.steps[worst]:.0f}",
    )


@rule(
    "no rank keeps the others waiting",
    needs="perf/slowest_rank (several processes): 5 logged values",
    threshold=f"the slowest rank's own time is in the median less than {SLOW_NOTE} (note) or {SLOW_TROUBLE} (trouble) times the others' mean",
    reason="every rank waits for the slowest; above 1.5 the run itself warns",
    advice="Look at that rank's GPU (clock, temperature), its host's load and its rows.",
)
def no_straggler(figures: Figures) -> Verdict | None:
    ratio = figures.timed("perf/slowest_rank")
    if len(ratio) < 5:
        return None
    ranks = figures.series("perf/slowest_rank_id").values
    often = int(np.bincount(ranks.astype(int)).argmax()) if ranks.size else None
    return graded(
        median(ratio.values),
        note=SLOW_NOTE,
        trouble=SLOW_TROUBLE,
        titles=("the ranks keep step", "a rank keeps the others waiting"),
        evidence=f"slowest / others: median {median(ratio.values):.2f}"
        + ("" if often is None else f", most often rank {often}"),
    )


@rule(
    "the GPU is not throttled",
    needs="gpu/throttled_pct: 5 logged values",
    threshold=f"throttled for less than {THROTTLED_NOTE:.0f} % (note) or {THROTTLED_TROUBLE:.0f} % (trouble) of the time",
    reason="a throttled GPU runs below its clock, and every rank waits for it",
    advice="Look at gpu/temp_c, gpu/power_pct and gpu/sm_clock_mhz: cooling and the power limit are the host's to fix; another machine may be cheaper.",
)
def not_throttled(figures: Figures) -> Verdict | None:
    throttled = figures.timed("gpu/throttled_pct").values
    if throttled.size < 5:
        return None
    hottest = figures.series("gpu/temp_c").values
    return graded(
        float(throttled.mean()),
        note=THROTTLED_NOTE,
        trouble=THROTTLED_TROUBLE,
        titles=("the GPU was not throttled", "the GPU was throttled"),
        evidence=f"{throttled.mean():.1f} % of the time"
        + (f", up to {hottest.max():.0f} deg C" if hottest.size else ""),
    )


def _share_of_time(figures: Figures, names: tuple[str, ...], limits: tuple[float, float], titles: tuple[str, str]) -> Verdict | None:  # fmt: skip
    """Return a verdict on the share of the whole time that these seconds are; in a short run nothing worse than a note."""
    in_steps, spent = figures.seconds(), figures.total(*names)
    count = sum(len(figures.series(name)) for name in names)
    if not in_steps or not count:
        return None
    whole = in_steps + figures.total("ckpt/save_s", "perf/eval_s", "core/eval_s", "chat/eval_s")
    evidence = f"{count} times, {spent:.3g} s in all, {spent / whole:.1%} of {whole:.4g} s"
    times = step_times(figures).values
    if times.size:
        evidence += f"; one takes as long as {spent / count / median(times):.1f} steps"
    trouble = limits[1] if whole >= LONG_ENOUGH_S else float("inf")
    return graded(spent / whole, note=limits[0], trouble=trouble, titles=titles, evidence=evidence)


@rule(
    "saves do not hold the training up",
    needs="ckpt/save_s and the time in steps",
    threshold=f"below {SAVES_NOTE:.0%} (note) or, in runs of {LONG_ENOUGH_S / 60:.0f} minutes and more, {SAVES_TROUBLE:.0%} (trouble) of the whole time",
    reason="checkpoints are copied in memory and written beside the training: a save costs a step or two, not minutes",
    advice="A faster disk for run.directory; a larger train.save_steps, as long as what a crash may cost stays bearable.",
)
def saves_are_cheap(figures: Figures) -> Verdict | None:
    titles = ("saves cost little time", "saves hold the training up")
    return _share_of_time(figures, ("ckpt/save_s",), (SAVES_NOTE, SAVES_TROUBLE), titles)


@rule(
    "evaluations leave time for training",
    needs="perf/eval_s and the time in steps",
    threshold=f"below {EVALUATIONS_NOTE:.0%} (note) or, in runs of {LONG_ENOUGH_S / 60:.0f} minutes and more, {EVALUATIONS_TROUBLE:.0%} (trouble) of the whole time",
    reason="what is measured is not trained; a fifth is already generous, half is a mistake in the cadence",
    advice="A larger train.eval_steps, evals.core.every_steps or evals.chat.every_steps, or smaller evals.bpb.tokens (another protocol).",
)
def evaluations_are_cheap(figures: Figures) -> Verdict | None:
    titles = ("evaluations cost little time", "evaluations take much of the time")
    names = ("perf/eval_s", "core/eval_s", "chat/eval_s")
    return _share_of_time(figures, names, (EVALUATIONS_NOTE, EVALUATIONS_TROUBLE), titles)


@rule(
    "memory does not grow",
    needs=f"mem/allocated_gib or mem/host_rss_gib: {TIMED} logged values",
    threshold=f"after the first fifth the medians of five windows do not all grow, or by less than {GROWTH_NOTE:.0%} (note) or {GROWTH_TROUBLE:.0%} (trouble) in all",
    reason="caches fill and then stand; what grows through five windows goes on until memory is full",
    advice="Look for tensors or texts that are kept from step to step (a callback's list, a loss that was not detached) and for caches without a limit.",
)
def memory_does_not_grow(figures: Figures) -> Verdict | None:
    verdicts = []
    for name in ("mem/allocated_gib", "mem/host_rss_gib"):
        series = figures.timed(name)
        if len(series) < TIMED:
            continue
        level = windows(series.values[int(MEMORY_SETTLED * len(series)) :], 5)
        growth = level[-1] / level[0] - 1 if level[0] > 0 and (np.diff(level) > 0).all() else 0.0
        verdicts.append((growth, f"{name} {level[0]:.3g} -> {level[-1]:.3g} GiB"))
    if not verdicts:
        return None
    return graded(
        max(growth for growth, _ in verdicts),
        note=GROWTH_NOTE,
        trouble=GROWTH_TROUBLE,
        titles=("memory does not grow", "memory grows steadily"),
        evidence=", ".join(text for _, text in verdicts),
    )


@rule(
    "device memory has room",
    needs="mem/alloc_retries",
    threshold="the allocator never had to free its cache and try again",
    reason="each retry waits for the device and hands memory back to the driver; the next step may not fit at all",
    advice="A smaller train.per_device_train_batch_size, gradient_checkpointing, or expandable segments.",
)
def device_memory_has_room(figures: Figures) -> Verdict | None:
    retries = figures.last("mem/alloc_retries")
    if retries is None:
        return None
    evidence = f"{retries:.0f} retries"
    if retries:
        return Verdict("note", "device memory was full at times", evidence)
    return Verdict("healthy", "the allocator never ran out", evidence)


SYSTEM_RULES: list[Rule] = [
    step_time_stays,
    throughput_is_stable,
    accelerator_is_used,
    data_does_not_stall,
    no_straggler,
    not_throttled,
    saves_are_cheap,
    evaluations_are_cheap,
    memory_does_not_grow,
    device_memory_has_room,
]
