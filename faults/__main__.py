"""The fault campaigns: `python -m faults NAME [--times N] [--seed S]`, or `all`.

Trials that were made stand in runs/faults/results/NAME.jsonl and are not made again (--again: they are). The figures go to
docs/reliability.md with --page.
"""

import argparse
import gc
import importlib
import os
import shutil
import sys
import time
import traceback
from pathlib import Path

from faults import injector, results
from faults.processes import import_everything
from faults.victim import Lab, default_folder

CAMPAIGNS = (
    "kill",
    "sharded",
    "calls",
    "sharded_calls",
    "corruption",
    "lost",
    "resume",
    "elastic",
    "cost",
    "signals",
    "disk",
    "clock",
    "soak",
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("campaign", choices=[*CAMPAIGNS, "all"])
    parser.add_argument("--times", type=int, default=20, help="trials; of the soak: minutes")
    parser.add_argument("--seed", type=int, default=0, help="number of the first trial")
    parser.add_argument("--only", nargs="+", metavar="TRIAL", help="these trials, by their names, and no others")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where runs and results lie")
    parser.add_argument("--again", action="store_true", help="make trials again that were made")
    parser.add_argument("--page", action="store_true", help="write the figures to docs/reliability.md")
    asked = parser.parse_args(argv)
    if injector.compiler() is None:
        print(
            "a C compiler (cc) is needed: the faults in file calls come from a small preloaded library",
            file=sys.stderr,
        )
        return 69
    folder = asked.folder.resolve()
    if not injector.is_preloaded():
        library = injector.build(folder)
        environment = {**os.environ, "LD_PRELOAD": str(library), "TOKENIZERS_PARALLELISM": "false"}
        os.execve(sys.executable, [sys.executable, "-m", "faults", *argv], environment)
    import_everything()
    gc.freeze()  # or each fork's collections would go through, and copy, all that was imported
    lab = Lab(folder)
    names = CAMPAIGNS if asked.campaign == "all" else (asked.campaign,)
    return max(run(lab, name, asked) for name in names)


def run(lab: Lab, name: str, asked: argparse.Namespace) -> int:
    """Make the trials that are missing; 1 when one of those asked for has failed."""
    campaign = importlib.import_module(f"faults.campaigns.{name}")
    kept = results.Results(lab.folder / "results" / f"{name}.jsonl")
    done = {row["trial"]: row for row in kept.rows()}
    made = set() if asked.again else set(done)
    keys = asked.only or campaign.trials(lab, asked.times, asked.seed)
    tried = []
    for number, key in enumerate(keys, 1):
        tried.append(key)
        if key in made:
            continue
        started = time.monotonic()
        try:
            row = campaign.trial(lab, key)
        except Exception:  # also a finding, and the other trials are still to be made
            row = {"ok": False, "wrong": [traceback.format_exc()]}
        row = {"trial": key, **row, "seconds": round(time.monotonic() - started, 1), "date": results.today()}
        kept.add(row)
        done[key] = row
        print(f"{name} {key} ({number}): {'ok' if row['ok'] else 'FAILED'}, {row['seconds']} s", flush=True)
        for line in row["wrong"]:
            print(f"  {line}", flush=True)
        if row["ok"]:  # what failed stays to be looked at
            shutil.rmtree(lab.trials / f"{name}-{key}", ignore_errors=True)
    rows = list(done.values())
    complete = [row for row in rows if set(row) > {"trial", "ok", "wrong", "seconds", "date"}]
    print(f"{name}: {campaign.figure(complete) if complete else 'no trial came to its end'}")
    if asked.page and complete:
        times = getattr(campaign, "minutes", len)(rows)
        command = f"python -m faults {name} --times {times} --seed {asked.seed}"
        results.write_to_page(
            name, results.summary(campaign.WHAT, campaign.figure(complete), rows, command, kept.made_again())
        )
    return int(any(not done[key]["ok"] for key in tried))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
