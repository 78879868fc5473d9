"""python -m pipeline.report RUN [RUN ...]: one run: writes its report; several: prints a comparison."""

import argparse

from pipeline.artifacts.failures import exit_with_status
from pipeline.report.comparison import comparison
from pipeline.report.fit import fit_runs
from pipeline.report.run_data import read_run
from pipeline.report.single import write_report


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.report",
        description="One run: write report/report.md into its directory. Several: print a comparison as a Markdown table.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or the name of one under runs/")
    parser.add_argument("--fit", action="store_true", help="fit val/bpb over FLOPs of at least 3 runs of one family")
    options = parser.parse_args(argv)
    runs = [read_run(name) for name in options.runs]
    if options.fit:
        path, text = fit_runs(runs)
        print(text, path, sep="\n")
        return 0
    if len(runs) > 1:
        print(comparison(runs), end="")
        return 0
    print(write_report(runs[0].run))
    return 0


if __name__ == "__main__":
    exit_with_status(main)
