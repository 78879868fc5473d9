"""Rules on the run as a whole: its end, what it can be resumed from, its attempts, its data."""

from pipeline.data.losses import fit_text
from pipeline.process.commands import program
from pipeline.report.diagnosis_finding import LONG_ENOUGH_S, Figures, Level, Verdict, graded, rule

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


@rule(
    "run reached its end",
    needs="a status in the manifest, or the number of planned steps",
    threshold="the status is finished, the last logged step is the last planned one, or a process is training it",
    reason=(
        "an unfinished run has not seen the low rates of its end, where much of the loss falls: its numbers are "
        "not those of the run that was planned"
    ),
    advice="Run the same command again: it goes on from the newest whole checkpoint. Without one it starts anew.",
)
def reached_its_end(figures: Figures) -> Verdict | None:
    data = figures.data
    step, planned = figures.step(), data.max_steps()
    of = f"step {step:,}" + (f" of {planned:,} ({step / planned:.1%})" if planned else "")
    if data.failure and data.failure.get("status") in (75, 130):
        return Verdict("note", "the run was interrupted and can go on", f"{of}: status {data.failure['status']}")
    if data.failure:
        return Verdict(
            "trouble",
            "the run was stopped by a failure",
            f"{of}: status {data.failure.get('status')}, {data.failure.get('class')}",
        )
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
    advice=(
        "Set train.save_steps so that a crash costs minutes (it is on by default here); an imported run: copy "
        "its checkpoints before anything else."
    ),
)
def can_be_resumed(figures: Figures) -> Verdict | None:
    data = figures.data
    step, sealed = figures.step(), [step for step, _, whole in data.checkpoints if whole]
    if sealed:
        newest = max(sealed)
        return Verdict(
            "healthy",
            "the run can be resumed",
            f"newest whole checkpoint at step {newest:,}, {max(step - newest, 0):,} steps before the last",
        )
    if data.run.model.is_dir():
        return Verdict("healthy", "the finished model is there", str(data.run.model.name))
    seconds = figures.seconds()
    lost = f"{step:,} steps" + (f", {seconds / 3600:.2g} h of steps" if seconds else "") + " cannot be continued"
    strategy, every = figures.recipe("train.save_strategy"), figures.recipe("train.save_steps")
    if strategy == "no":
        return Verdict(
            "trouble", "the run saves no checkpoint: it cannot be resumed", f"train.save_strategy is no; {lost}"
        )
    saves, was_whole = len(figures.series("ckpt/save_s")), figures.last("ckpt/last_good_step") is not None
    is_number = isinstance(every, (int, float))
    if data.is_training and is_number and not was_whole and (every >= step or saves == 1):
        return Verdict("healthy", "its first checkpoint is to come", f"train.save_steps is {every:g}; step {step:,}")
    if saves or was_whole:
        return Verdict("note", "checkpoints were written and are not here any more", lost)
    if not step or (every is None and data.manifest.get("status") == "finished"):
        return None
    is_late = is_number and every > step
    return Verdict(
        "trouble",
        "there is no checkpoint to resume from",
        (f"train.save_steps is {every:g}; " if is_late else "") + lost,
    )


@rule(
    "starts are few",
    needs="a logged step",
    threshold=(
        f"fewer than {RESTARTS} restarts, and steps made twice below {LOST_NOTE:.0%} (note) or {LOST_TROUBLE:.0%} "
        f"(trouble) of those that count; in runs of {LONG_ENOUGH_S / 60:.0f} minutes and more goodput at least "
        f"{GOODPUT_NOTE:.0f} % (note) or {GOODPUT_TROUBLE:.0f} % (trouble)"
    ),
    reason=(
        "every restart repeats start-up and the steps since the last checkpoint; a tenth of the rent lost that "
        "way is worth an afternoon's search"
    ),
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
        return Verdict(
            "healthy",
            "hardly any step was made twice; the rest is start-up, evaluations and saves of a short run",
            evidence,
        )
    return Verdict(
        "healthy", "hardly any step was made twice" if goodput is None else "hardly any time was lost", evidence
    )


@rule(
    "text is not repeated too often",
    needs="data/epoch",
    threshold=f"fewer than {PASSES_NOTE} (note) or {PASSES_TROUBLE} (trouble) whole passes over a source",
    reason=(
        "up to four passes teach nearly as much as new text, after about sixteen another one teaches nothing "
        "(Muennighoff et al. 2023)"
    ),
    advice=(
        "More text, a shorter run, or a smaller share for the small source (data.sources weight or epochs); "
        "watch validation."
    ),
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
    threshold=(
        f"padding below {PADDED_NOTE:.0%} (note) or {PADDED_TROUBLE:.0%} (trouble) of the positions; cropped "
        f"text below {CROPPED_NOTE:.0%} (note) or {CROPPED_TROUBLE:.0%} (trouble)"
    ),
    reason=(
        "padding is computed and teaches nothing: 5 % is 5 % of the cost; cropped text is lost, and "
        "best_fit_crop loses about a third where documents are long"
    ),
    advice=(
        "data.packing: cut_and_fit pads under 1 % and loses nothing; in SFT longer rows, or shorter "
        "conversations together; where each row holds one text (docs/isolation.md), rows no longer than these."
    ),
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
    threshold=(
        f"conversations longer than a row and left out below {DROPPED_NOTE:.0%} (note) or {DROPPED_TROUBLE:.0%} "
        "(trouble) of a source, those that lose their last turns and those without an answer of the assistant "
        f"below {DROPPED_NOTE:.0%} (note)"
    ),
    reason=(
        "what is left out is not chosen by chance: long answers go first, and the model learns to be short. One "
        "in a hundred is lost in any corpus"
    ),
    advice=(
        "Longer rows (data.row_tokens), as long as the evidence says; or conversations split in the files. Of a "
        "model that is there already its positions are the limit."
    ),
)
def conversations_fit(figures: Figures) -> Verdict | None:
    shares = {
        name: share
        for name, share in (figures.manifest("shares") or {}).items()
        if "too long" in (share.get("lost") or {})
    }
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
        return Verdict(
            "healthy", "conversations fit the rows", evidence + " (of the worst source)" * (len(shares) > 1)
        )
    level: Level = "trouble" if dropped >= DROPPED_TROUBLE else "note"
    return Verdict(level, "conversations are left out or cut", "; ".join(lines))


@rule(
    "every row is readable",
    needs="data/bad_rows",
    threshold=(
        f"no unreadable row; trouble from {BAD_ROWS_SHARE:.1%} of the documents (or rows) on; empty rows below "
        f"{EMPTY_NOTE:.0%} of a source (note)"
    ),
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
    return graded(
        bad / read if read else 0.0,
        note=0,
        trouble=BAD_ROWS_SHARE,
        titles=("", "rows are unreadable"),
        evidence=evidence,
    )
