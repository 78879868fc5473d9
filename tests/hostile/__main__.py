"""The campaign of hostile things: `python -m tests.hostile campaign [--only NAME ...] [--page]`.

Trials that were made stand in runs/hostile/results.jsonl and are not made again (--again: they are). With --page the figures and the
table go to docs/reliability.md.
"""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from faults import results
from tests.conftest import ROOT
from tests.hostile.case import lay_whole
from tests.hostile.things import FAST, KINDS, all_things
from tests.hostile.trial import LIMIT_MIB, Thing, remove, run
from tests.hub.hub_stand_in import StandIn, hub_stand_in
from tests.warm_commands import WarmCommands

WHAT = "Hostile repositories, runs, recipes, models and rows through the real commands"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("campaign", choices=["campaign"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="things whose `kind: name` begins so")
    parser.add_argument("--fast", action="store_true", help="those that a normal test makes")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "hostile", help="where things and results lie")
    parser.add_argument("--again", action="store_true", help="make trials again that were made")
    parser.add_argument("--page", action="store_true", help="write the figures to docs/reliability.md")
    asked = parser.parse_args(argv)
    things = {name: thing for name, thing in all_things().items() if not asked.fast or name in FAST}
    if asked.only:
        things = {name: thing for name, thing in things.items() if name.startswith(tuple(asked.only))}
    rows = campaign(things, folder=asked.folder.resolve(), again=asked.again)
    kept = results.Results(asked.folder / "results.jsonl")
    print(f"{WHAT}: {figure(rows)}.\n{table(rows)}")
    if asked.page:
        text = results.summary(WHAT, figure(kept.rows()), kept.rows(), "python -m tests.hostile campaign", kept.made_again())  # fmt: skip
        results.write_to_page("hostile", f"{text}\n\n{table(kept.rows())}")
    return int(any(not row["ok"] for row in rows))


def campaign(things: dict[str, Thing], *, folder: Path, again: bool = False) -> list[dict]:
    """Return the rows of the things; those that are missing are made."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # fmt: skip
    kept = results.Results(folder / "results.jsonl")
    done = {row["trial"]: row for row in kept.rows()}
    whole, warm = folder / "whole", None
    remove(whole)
    lay_whole(whole)
    with hub_stand_in() as hub:
        for number, (name, thing) in enumerate(things.items(), 1):
            if name in done and not again:
                continue
            warm = warm or WarmCommands(folder)
            row = trial(name, thing, folder=folder / f"thing-{number}", whole=whole, warm=warm, hub=hub)
            kept.add(row)
            done[name] = row
            seconds = sum(one["seconds"] for one in row["commands"])
            print(
                f"{name} ({number} of {len(things)}): {'ok' if row['ok'] else 'FAILED'}, {seconds:.1f} s", flush=True
            )
            for line in row["wrong"]:
                print(f"  {line}", flush=True)
        if warm:
            warm.close()
    return [done[name] for name in things]


def trial(name: str, thing: Thing, *, folder: Path, whole: Path, warm: WarmCommands, hub: StandIn) -> dict:
    remove(folder)
    folder.mkdir()
    started = time.monotonic()
    try:
        row = run(thing, folder=folder, whole=whole, warm=warm, hub=hub)
    except Exception:  # also a finding, and the other things are still to be tried
        row = {"ok": False, "wrong": [traceback.format_exc()], "commands": []}
    if row["ok"]:  # what failed stays to be looked at
        remove(folder)
    return {"trial": name, **row, "all_s": round(time.monotonic() - started, 1), "date": results.today()}


def figure(rows: list[dict]) -> str:
    commands = [command for row in rows for command in row["commands"]]
    statuses = Counter(command["status"] for command in commands)
    return (
        f"{sum(row['ok'] for row in rows)} of {len(rows)} things through {len(commands)} commands: {_sum(commands, 'executed')} executed, "
        f"{_sum(commands, 'outside')} written or reached outside, {_sum(commands, 'traces')} tracebacks; statuses "
        + ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
        + f"; a command took {max((c['seconds'] for c in commands), default=0):.0f} s of CPU time and {max((c['peak_mib'] for c in commands), default=0):,} MiB "
        f"at most ({LIMIT_MIB:,} allowed, the interpreter itself {min((c['peak_mib'] for c in commands), default=0):,})"
    )


def table(rows: list[dict]) -> str:
    lines = ["| kind | things | commands | executed | outside | tracebacks | statuses | most CPU time | most memory |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for kind in KINDS:
        of_kind = [row for row in rows if row["trial"].startswith(f"{kind}: ")]
        commands = [command for row in of_kind for command in row["commands"]]
        if not commands:
            continue
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(Counter(c["status"] for c in commands).items()))  # fmt: skip
        programs = ", ".join(sorted({command["command"].split()[0] for command in commands}))
        lines.append(
            f"| {kind} | {len(of_kind)} | {len(commands)} ({programs}) | {_sum(commands, 'executed')} | {_sum(commands, 'outside')} | "
            f"{_sum(commands, 'traces')} | {statuses} | {max(c['seconds'] for c in commands):.0f} s | {max(c['peak_mib'] for c in commands):,} MiB |"
        )
    return "\n".join(lines)


def _sum(commands: list[dict], key: str) -> int:
    return sum(command[key] for command in commands)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
