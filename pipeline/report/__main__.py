"""python -m pipeline.report RUN [RUN ...]: writes a run's report, or serves it with --serve; of several prints a
comparison, and writes its page with --output."""

import argparse
import sys
from pathlib import Path

from pipeline.process.commands import program
from pipeline.report.comparison import comparison, write_comparison
from pipeline.report.run_data import read_runs
from pipeline.report.serve import serve
from pipeline.report.single import report, write_report
from pipeline.run_dir.failures import exit_with_status


def main(argv: list[str]) -> int:
    options = _options(argv)
    if options.serve:
        serve(options.runs[0], port=options.port)
        return 0
    runs = read_runs(options.runs)
    for data in runs:
        for number, line in data.lost_lines:
            lost = f"{data.run.path}:{number}: looks like a measured step and cannot be read: {line[:120]!r}"
            print(lost, file=sys.stderr)
    if len(runs) > 1:
        print(write_comparison(runs, options.output) if options.output else comparison(runs), end="")
    elif runs[0].is_imported:
        print(report(runs[0]), end="")  # a log has no directory of its own to write into
    else:
        print(write_report(runs[0], options.output))
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("report"),
        description=(
            "One run: write report.md, report.html and curves.png into its directory. Several: print a "
            "comparison in Markdown, and write it as a page with --output."
        ),
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help=(
            "a run directory, the name of one under runs/, or a log: console lines of nanochat, picoLLM or a run "
            "of ours, a metrics.jsonl, or metrics exported as CSV or JSON (docs/metrics.md)"
        ),
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=(
            "of a run: write the report there instead; of a comparison: write it there as a page "
            "(comparison.html, opens offline: curves of all runs over each other by steps, tokens, time or "
            "FLOPs), as comparison.md and curves.png"
        ),
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="of a run, also while it trains: show its page on this machine and follow the run; prints the address",
    )
    parser.add_argument("--port", type=int, help="of --serve (default 8765, or one that is free)")
    options = parser.parse_args(argv)
    if options.serve and (len(options.runs) > 1 or Path(options.runs[0]).is_file()):
        parser.error("--serve follows one run directory: name one")
    return options


if __name__ == "__main__":
    exit_with_status(main)
