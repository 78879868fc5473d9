"""Two ranks, killed; one rank goes on, killed; three go on to the end: the rows that were read, and the losses.

The rows are those that each rank's training was really given, by the hash of their tokens.
"""

import time

from faults import evidence
from faults.rows_read import rows_by_step
from faults.victim import SAVE_STEPS, Lab, Setting

WHAT = "2 -> 1 -> 3 ranks"
STEPS = 4 * SAVE_STEPS
CLOSE = {"modern": 1e-4, "gpt2": 1e-5}  # contract 1: Muon, AdamW
NO_DROPOUT = "model.options={resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}"


def trials(lab: Lab, times: int, seed: int) -> list[str]:
    return [f"{model}-{number}" for number in range(seed, seed + max(1, times // 2)) for model in CLOSE][:times]


def trial(lab: Lab, key: str) -> dict:
    model = key.split("-")[0]
    setting = Setting(model=model, ranks=2, accumulation=1, max_steps=STEPS)
    overrides = [NO_DROPOUT] if model == "gpt2" else []
    folder = lab.trial(f"elastic-{key}")
    whole, run = folder / "whole", folder / "run"
    wrong = []
    status, output = lab.finish(setting, whole, *overrides, environment={"FAULTS_ROWS": str(folder / "whole-rows")})
    if status != 0:
        wrong.append(f"the uncut run ended with {status}: {output[-1500:]}")
    for attempt, (ranks, until) in enumerate([(2, SAVE_STEPS + 1), (1, 2 * SAVE_STEPS + 2), (3, STEPS)]):
        shape = setting.with_ranks(ranks)
        read = {"FAULTS_ROWS": str(folder / f"rows-{attempt}")}
        process = lab.start(shape, run, *overrides, environment=read)
        while process.poll() is None and (until == STEPS or not _may_be_cut(run, attempt, until)):
            time.sleep(0.005)
        process.kill_everything()
        if until == STEPS and process.poll() != 0:
            wrong.append(f"{ranks} ranks ended with {process.poll()}: {process.output[-1500:]}")
    starts = [step for step, _ in evidence.attempts(run)]
    ends = [*starts[1:], STEPS]
    if len(starts) != 3 or starts[0] != 0 or 0 in starts[1:]:
        wrong.append(f"the starts went on from steps {starts}")
    spans = [(folder / f"rows-{i}", first, end) for i, (first, end) in enumerate(zip(starts, ends, strict=True))]
    read, expected = rows_by_step(spans), rows_by_step([(folder / "whole-rows", 0, STEPS)])
    repeated = sum(sum((read[step] - expected[step]).values()) for step in range(STEPS))
    skipped = sum(sum((expected[step] - read[step]).values()) for step in range(STEPS))
    rows = sum(sum(expected[step].values()) for step in range(STEPS))
    if repeated or skipped or not rows:
        wrong.append(f"of {rows} rows {repeated} repeated, {skipped} skipped")
    furthest = _furthest(_losses(run), _losses(whole))
    if furthest > CLOSE[model]:
        wrong.append(f"losses differ by up to {furthest:.2e}")
    return {"ok": not wrong, "wrong": wrong, "model": model, "rows": rows, "furthest": furthest, "starts": starts}


def _may_be_cut(run, attempt: int, until: int) -> bool:
    """Whether it has come to that step, and the checkpoint before it, which is written beside the training, is whole."""
    return (
        evidence.has_trained(run, attempt, until)
        and max(evidence.whole_steps(run), default=0) >= (attempt + 1) * SAVE_STEPS
    )


def _losses(run) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in evidence.metrics(run) if "train/loss" in row}


def _furthest(losses: dict[int, float], reference: dict[int, float]) -> float:
    """The largest relative difference of a step's loss."""
    assert losses.keys() == reference.keys()
    return max(abs(losses[step] / reference[step] - 1) for step in reference)


def figure(rows: list[dict]) -> str:
    by_model = "; ".join(
        f"{model}: losses within {max(r['furthest'] for r in rows if r['model'] == model):.1e} (allowed {CLOSE[model]:.0e})"
        for model in CLOSE
        if any(row["model"] == model for row in rows)
    )
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} runs: of {sum(row['rows'] for row in rows)} rows 0 repeated, 0 skipped; "
        f"{by_model}"
        if all(row["ok"] for row in rows)
        else f"{sum(row['ok'] for row in rows)} of {len(rows)} runs; {by_model}"
    )
