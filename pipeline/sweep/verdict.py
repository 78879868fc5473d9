"""Whether a candidate is better than the baseline: paired by seed, corrected for the number of candidates; as table, page, JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from pipeline.evals.intervals import student_t, two_sided
from pipeline.process.storage import write_json, write_text
from pipeline.report.comparison import CHANCE, SECTION, comparison_panels
from pipeline.report.run_data import RunData, table

EQUAL = {
    "tokens": "the same tokens",
    "flops": "the same training FLOPs (nanochat's formula)",
    "time": "the same time in steps by a probe",
    "none": "its own horizon",
}


@dataclass(frozen=True)
class Figure:
    """What one run came to. value: of the metric, None where it has none, for the reason `status`."""

    run: str
    seed: int
    status: str
    value: float | None = None
    protocol: str | None = None  # two figures compare only under the same one


@dataclass(frozen=True)
class Paired:
    """Candidate minus baseline over the seeds that both have: mean, 95 % interval, and the chance of it by seeds alone."""

    difference: float
    interval: tuple[float, float] | None = None
    p: float | None = None


def paired(differences: Sequence[float]) -> Paired:
    """Return the paired t test of the differences; of one of them, or of equal ones, no chance is known."""
    if len(differences) < 2 or not (error := stdev(differences) / math.sqrt(len(differences))):
        return Paired(mean(differences))
    freedom = len(differences) - 1
    reach = student_t(CHANCE, freedom) * error
    centre = mean(differences)
    return Paired(centre, (centre - reach, centre + reach), two_sided(centre / error, freedom))


def holm(chances: Sequence[float]) -> list[float]:
    """Return each chance corrected for their number: below 0.05 then means that any of these is a false call in 5 % of tables.

    Source: Holm, A simple sequentially rejective multiple test procedure (1979).
    """
    corrected, largest = [0.0] * len(chances), 0.0
    for place, n in enumerate(sorted(range(len(chances)), key=lambda n: chances[n])):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[n]))
        corrected[n] = largest
    return corrected


def judge_all(
    baseline: Sequence[Figure], candidates: Sequence[Sequence[Figure]], *, better: Literal["lower", "higher"]
) -> list[dict[str, Any]]:
    """Return difference, interval, p, p_holm and verdict of each candidate, None where they are not known."""
    tests = [_test(baseline, figures) for figures in candidates]
    chances = [test.p for test in tests if isinstance(test, Paired) and test.p is not None]
    corrected = iter(holm(chances))
    found = []
    for test in tests:
        if isinstance(test, str):
            found.append(dict.fromkeys(("difference", "interval", "p", "p_holm")) | {"verdict": test})
            continue
        p = None if test.p is None else next(corrected)
        is_better = (test.difference < 0) == (better == "lower")
        verdict = "not shown" if p is None or p >= CHANCE else "better" if is_better else "worse"
        found.append(
            {
                "difference": test.difference,
                "interval": test.interval and list(test.interval),
                "p": test.p,
                "p_holm": p,
                "verdict": verdict,
            }
        )
    return found


def _test(baseline: Sequence[Figure], figures: Sequence[Figure]) -> Paired | str:
    """Return the test, or why there is none."""
    values = {figure.seed: figure for figure in baseline if figure.value is not None}
    both = [(values[one.seed], one) for one in figures if one.value is not None and one.seed in values]
    if not both:
        return next((figure.status for figure in figures if figure.status != "finished"), "not run")
    if any(one.protocol != other.protocol for one, other in both):
        return "not comparable"
    return paired([other.value - one.value for one, other in both if one.value is not None and other.value is not None])


def least_difference(values: Sequence[float]) -> float | None:
    """Return the difference of one candidate that so many pairs would just tell if pairing took no noise away; None of one run."""
    if len(values) < 2:
        return None
    return student_t(CHANCE, len(values) - 1) * stdev(values) * math.sqrt(2 / len(values))


# The record as people and programs read it.


def noise_text(record: dict[str, Any]) -> str:
    """Return what the baseline's seeds alone do."""
    values = [run["value"] for run in record["baseline"]["runs"] if run["value"] is not None]
    if len(values) < 2:
        return "One seed: the noise is not known, and nothing can be shown. Give --seeds 3 or more."
    least = record["baseline"]["least_difference"]
    return (
        f"Noise: {record['metric']} of the baseline over {len(values)} seeds is {mean(values):.6g}, standard deviation {stdev(values):.2g}. "
        f"So many seeds tell a difference of about {least:.2g} or more, less where candidate and baseline move together."
    )


def markdown(record: dict[str, Any]) -> str:
    """Return the table and what stands beside it. It holds no times: a sweep that was interrupted has the same bytes."""
    timed = record["equal"] == "time"
    head = ["", "steps", *(["ms a step"] if timed else []), "seeds", record["metric"], "difference", "95 % interval", "p", "p (Holm)", "verdict"]  # fmt: skip
    rows = []
    for entry in [record["baseline"], *record["candidates"]]:
        values = [run["value"] for run in entry["runs"] if run["value"] is not None]
        low_high = entry.get("interval")
        interval = f"{low_high[0]:+.5f} to {low_high[1]:+.5f}" if low_high else None
        rows.append(
            [
                label(entry["values"]),
                entry["steps"],
                *([f"{1000 * entry['step_s']:.1f}" if entry["step_s"] else None] if timed else []),
                len(values),
                f"{mean(values):.5f}" if values else None,
                None if entry.get("difference") is None else f"{entry['difference']:+.5f}",
                interval,
                *(None if entry.get(name) is None else f"{entry[name]:.2g}" for name in ("p", "p_holm")),
                entry.get("verdict", "baseline"),
            ]
        )
    tested = sum(entry["p"] is not None for entry in record["candidates"])
    notes = [
        noise_text(record),
        f"Each candidate has {EQUAL[record['equal']]}. {record['better'].capitalize()} is better. The test is a paired t test by seed; better and worse are called below "
        f"p = {CHANCE} after Holm's correction for the {tested} candidates that could be tested. The intervals are of one candidate each.",
    ]
    if not record["complete"]:
        notes.append("The sweep has not ended: the same command goes on.")
    return f"# {record['name']}\n\n{table(head, rows)}\n" + "".join(f"{note}\n\n" for note in notes).rstrip() + "\n"


def label(values: dict[str, str]) -> str:
    """Return what a candidate is called: its keys without their sections where those are clear."""
    return ", ".join(f"{key}={value}" for key, value in values.items()) or "baseline"


def write_results(record: dict[str, Any], folder: Path) -> str:
    """Write sweep.json and sweep.md; return the Markdown."""
    text = markdown(record)
    write_json(folder / "sweep.json", json.loads(json.dumps(record)))  # NaN would be no JSON: there is none
    write_text(folder / "sweep.md", text)
    return text


def write_page(record: dict[str, Any], runs: dict[str, RunData], folder: Path) -> Path:
    """Write sweep.html: the table, curves of one seed of each candidate, and all runs. runs: by the paths in the record."""
    from pipeline.report.page import page  # Bokeh takes a second

    entries = [record["baseline"], *record["candidates"]]
    drawn, rows = [], []
    for entry in entries:
        name = label(entry["values"])
        of_entry = [runs[run["run"]] for run in entry["runs"] if run["run"] in runs]
        drawn += [replace(data, manifest={**data.manifest, "name": name}) for data in of_entry[:1]]
        rows += [[name, run["seed"], run["run"], run["value"], run["status"]] for run in entry["runs"]]
    panels, axes = comparison_panels(drawn) if drawn else ([], {})
    _, _, head = markdown(record).partition("\n\n")
    sections = {SECTION: "One seed of each.\n", "Runs": table(["", "seed", "run", record["metric"], "status"], rows)}
    html = page(
        record["name"],
        sections,
        kind="sweep",
        head=head,
        panels=panels,
        axes=axes,
        picture=None,
        unfolded=(SECTION,),
        one_legend=True,
    )
    write_text(folder / "sweep.html", html)
    return folder / "sweep.html"
