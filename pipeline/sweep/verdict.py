"""Verdicts of better or worse than the baseline: paired by seed, corrected for the number of candidates; as table, page, JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipeline.evals.intervals import student_t, two_sided
from pipeline.process.storage import write_json, write_text
from pipeline.report.comparison import CHANCE, SECTION, comparison_panels
from pipeline.report.run_data import RunData, filled_table, number, table

EQUAL = {
    "tokens": "the same tokens",
    "flops": "the same training FLOPs (nanochat's formula)",
    "time": "the same time in steps by a probe",
    "none": "its own horizon",
}


@dataclass(frozen=True)
class Figure:
    """The result of one run. value: of the metric, None where it has none, for the reason `status`."""

    run: str
    seed: int
    status: str
    value: float | None = None
    protocol: str | None = None  # two figures compare only under the same one


def paired(differences: Sequence[float]) -> dict[str, Any]:
    """Return mean difference, its 95 % interval and p by the paired t test; of one difference, or of equal ones, the mean alone."""
    centre, count = mean(differences), len(differences)
    if count < 2 or not (error := stdev(differences) / math.sqrt(count)):
        return {"difference": centre, "interval": None, "p": None}
    reach = student_t(CHANCE, count - 1) * error
    return {
        "difference": centre,
        "interval": [centre - reach, centre + reach],
        "p": two_sided(centre / error, count - 1),
    }


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
    baseline: Sequence[Figure], candidates: Sequence[Sequence[Figure]], *, better: str
) -> list[dict[str, Any]]:
    """Return difference, interval, p, p_holm and verdict of each candidate, None where they are not known. better: lower or higher."""
    found = [_test(baseline, figures) for figures in candidates]
    tested = [one for one in found if one["p"] is not None]
    for one, p in zip(tested, holm([one["p"] for one in tested]), strict=True):
        is_better = (one["difference"] < 0) == (better == "lower")
        one |= {"p_holm": p, "verdict": "not shown" if p >= CHANCE else "better" if is_better else "worse"}
    return found


def _test(baseline: Sequence[Figure], figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the paired test over the seeds that both have; its verdict says why where there is none."""
    none = dict.fromkeys(("difference", "interval", "p", "p_holm"))
    values = {one.seed: one for one in baseline if one.value is not None}
    both = [(values[one.seed], one) for one in figures if one.value is not None and one.seed in values]
    if not both:
        return none | {"verdict": next((one.status for one in figures if one.status != "finished"), "not run")}
    if any(one.protocol != other.protocol for one, other in both):
        return none | {"verdict": "not comparable"}
    return none | {"verdict": "not shown"} | paired([other.value - one.value for one, other in both])  # type: ignore[operator]  # both have one


def least_difference(spread: float | None, count: int) -> float | None:
    """Return the difference that so many pairs would just tell if pairing took no noise away. spread: standard deviation over seeds."""
    return None if spread is None else student_t(CHANCE, count - 1) * spread * math.sqrt(2 / count)


# The record as people and programs read it.


def count_of(entry: dict[str, Any]) -> int:
    """Return how many of its runs have a figure."""
    return sum(run["value"] is not None for run in entry["runs"])


def noise_text(record: dict[str, Any]) -> str:
    """Return what the baseline's seeds alone do."""
    base = record["baseline"]
    if base["stdev"] is None:
        return "One seed: the noise is not known, and nothing can be shown. Give --seeds 3 or more."
    return (
        f"Noise: {record['metric']} of the baseline over {count_of(base)} seeds is {base['mean']:.6g}, standard deviation {base['stdev']:.2g}. "
        f"So many seeds tell a difference of about {base['least_difference']:.2g} or more, less where candidate and baseline move together."
    )


def markdown(record: dict[str, Any]) -> str:
    """Return the table and what is beside it. It holds no times of runs: a sweep that was interrupted has the same bytes."""
    head = ["", "steps", "ms a step", "seeds", record["metric"], "difference", "95 % interval", "p", "p (Holm)", "verdict"]  # fmt: skip
    rows = []
    for entry in [record["baseline"], *record["candidates"]]:
        low_high = entry.get("interval")
        rows.append(
            [
                label(entry["values"]),
                entry["steps"],
                number(entry["step_s"] and 1000 * entry["step_s"]),
                count_of(entry),
                None if entry["mean"] is None else f"{entry['mean']:.5f}",
                None if entry.get("difference") is None else f"{entry['difference']:+.5f}",
                f"{low_high[0]:+.5f} to {low_high[1]:+.5f}" if low_high else None,
                *(number(entry.get(name), 3) for name in ("p", "p_holm")),
                entry.get("verdict", "baseline"),
            ]
        )
    tested = sum(entry["p"] is not None for entry in record["candidates"])
    notes = [
        noise_text(record),
        f"Each candidate has {EQUAL[record['equal']]}. {record['better'].capitalize()} is better. The test is a paired t test by seed; better and worse are called below "
        f"p = {CHANCE} after Holm's correction for the {tested} candidates that could be tested. The intervals are of one candidate each.",
        "" if record["complete"] else "The sweep has not ended: the same command goes on.",
    ]
    return f"# {record['name']}\n\n{filled_table(head, rows)}\n" + "\n\n".join(filter(None, notes)) + "\n"


def label(values: dict[str, str]) -> str:
    """Return what a candidate is called."""
    return ", ".join(f"{key}={value}" for key, value in values.items()) or "baseline"


def write_results(record: dict[str, Any], folder: Path) -> str:
    """Write sweep.json and sweep.md; return the Markdown."""
    text = markdown(record)
    write_json(folder / "sweep.json", record)
    write_text(folder / "sweep.md", text)
    return text


def write_page(record: dict[str, Any], runs: dict[str, RunData], folder: Path) -> Path:
    """Write sweep.html: the table, curves of one seed of each candidate, and all runs. runs: by the paths in the record."""
    from pipeline.report.page import page  # Bokeh takes a second

    drawn, rows = [], []
    for entry in [record["baseline"], *record["candidates"]]:
        name = label(entry["values"])
        of_entry = [runs[run["run"]] for run in entry["runs"] if run["run"] in runs]
        drawn += [replace(data, manifest={**data.manifest, "name": name}) for data in of_entry[:1]]
        rows += [[name, run["seed"], run["run"], run["value"], run["status"]] for run in entry["runs"]]
    panels, axes = comparison_panels(drawn) if drawn else ([], {})
    _, _, head = markdown(record).partition("\n\n")
    sections = {SECTION: "One seed of each.\n", "Runs": table(["", "seed", "run", record["metric"], "status"], rows)}
    looks: dict[str, Any] = {"picture": None, "unfolded": (SECTION,), "one_legend": True}
    html = page(record["name"], sections, kind="sweep", head=head, panels=panels, axes=axes, **looks)
    write_text(folder / "sweep.html", html)
    return folder / "sweep.html"
