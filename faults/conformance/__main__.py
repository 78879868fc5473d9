"""Drive trainers on rows that carry their number, kill them, start them again, and say whether they continue exactly.

SUBJECT: the name of an adapter of faults/conformance/subjects, or the path of your own; docs/conformance.md says how
to write one.
"""

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from faults.conformance import adapters, page
from faults.conformance.cuts import BY_NAME, CUTS
from faults.conformance.driver import BATCH, EPOCHS, LIMIT_S, ROWS, NotStarted, Subject, Trainings


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m faults.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "subject", nargs="*", help=f"of {', '.join(adapters.names())}, or a path; all when none is given"
    )
    parser.add_argument("--cut", action="append", choices=BY_NAME, metavar="NAME", help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--command", help="a command that takes the arguments of an adapter, as the one subject")
    parser.add_argument("--offers", nargs="*", default=[], choices=["workers", "ranks"], help="what --command can do")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--python", default=sys.executable, metavar="PATH", help="the interpreter of the subjects")
    where.add_argument("--install", action="store_true", help="make an environment for each subject, with pip")
    parser.add_argument("--cache", type=Path, default=adapters.CACHE, help="where --install makes them (%(default)s)")
    parser.add_argument("--cold", action="store_true", help="start a program each time instead of forking one")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of one start (%(default)s)")
    parser.add_argument("--folder", type=Path, help="keep the trainings here (a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the details; other subjects in it are kept")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of the docs")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="name the cells that differ from an earlier --json"
    )
    parser.add_argument("--show", action="store_true", help="run nothing: table and page of what --json holds")
    given = parser.parse_args(argv)
    if given.show and given.json is None:
        parser.error("--show needs --json FILE, the results to show.")
    results = {}
    if given.json is not None and given.json.exists():
        results = json.loads(given.json.read_text())
    shown = set(results)
    if not given.show:
        subjects = chosen(given, parser)
        shown = {subject.name for subject in subjects}
        with tempfile.TemporaryDirectory() as temporary:
            folder = (given.folder or Path(temporary)).resolve()
            for subject in subjects:
                results[subject.name] = judged(subject, given, folder, results.get(subject.name, {}))
                if given.json is not None:
                    given.json.parent.mkdir(parents=True, exist_ok=True)
                    given.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print()
    print(page.table({name: results[name] for name in sorted(shown)}, list(BY_NAME)))
    if given.page is not None:
        for name in {*results} & {*adapters.names()}:
            results[name] |= described(adapters.subject(name))  # as the heads are now
        given.page.write_text(page.page(results, rows=ROWS, epochs=EPOCHS, batch=BATCH))
    if given.compare is None:
        return 0
    different = page.differences(results, json.loads(given.compare.read_text()))
    print("\n".join(["", *different]) if different else f"\nthe same as in {given.compare}")
    return int(bool(different))


def chosen(given: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Subject]:
    if given.command:
        return [Subject("command", command=shlex.split(given.command), offers=set(given.offers))]
    subjects = []
    for name in given.subject or adapters.names():
        try:
            subjects.append(adapters.subject(name))
        except FileNotFoundError:
            parser.error(f"{name}: no adapter has this name. Write one of {', '.join(adapters.names())}, or a path.")
    return subjects


def described(subject: Subject) -> dict:
    """Return what an adapter's head says of it on the page."""
    return {"what": subject.what, "docs": subject.docs, "notes": subject.notes}


def judged(subject: Subject, given: argparse.Namespace, folder: Path, before: dict) -> dict:
    """Return what is known of a subject: versions and a cell for each cut. before: cells that are not made now."""
    subject.cold = subject.cold or given.cold
    subject.python = given.python
    subject.limit_s = given.limit
    if given.install and subject.packages:
        try:
            subject.python = adapters.installed_python(subject, given.cache)
        except subprocess.CalledProcessError:  # pip has said why; what is missing is named below
            print(f"{subject.name}: pip could not install it", flush=True)
    versions, missing = adapters.versions(subject)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {**described(subject), "versions": versions, "date": today, "cells": {}}
    if missing:
        print(f"{subject.name}: not installed: {', '.join(missing)}", flush=True)
        return before or {**result, "not_installed": missing}
    result["cells"] = dict(before.get("cells", {}))
    wanted = [cut for cut in CUTS if cut.name in (given.cut or BY_NAME)]
    try:
        trainings = Trainings(subject, folder / subject.name)
    except NotStarted as error:
        print(f"{subject.name}: error: {error}", flush=True)
        result["cells"] |= {cut.name: {"word": "error", "message": str(error)} for cut in wanted}
        return result
    try:
        for cut in wanted:
            verdict = trainings.verdict(cut)
            result["cells"][cut.name] = verdict.as_json()
            detail = page.sentence(verdict.as_json())
            print(f"{subject.name} {cut.name}: {verdict.word} ({detail})", flush=True)
    finally:
        trainings.close()
    return result


if __name__ == "__main__":
    sys.exit(main())
