"""python -m pipeline.hub push RUN | pull ID: publish a finished run, or restore a published one."""

import argparse

from pipeline.artifacts.failures import exit_with_status


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.hub",
        description="Publish a finished run with verification, or restore one. The token comes from HF_TOKEN or `hf auth login`.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    push_arguments = commands.add_parser(
        "push", help="upload model/, recipe, manifest and a model card, then compare what was stored"
    )
    push_arguments.add_argument("run", metavar="RUN", help="a run directory, or the name of one under runs/")
    push_arguments.add_argument("--id", help="NAMESPACE/NAME of the repository; default the recipe's hub.id")
    push_arguments.add_argument(
        "--public", action="store_true", help="create the repository as public; default the recipe's hub.private"
    )
    pull_arguments = commands.add_parser("pull", help="download a pushed run into runs/<its name>")
    pull_arguments.add_argument("id", metavar="ID", help="NAMESPACE/NAME of the repository")
    pull_arguments.add_argument("--revision", help="branch, tag or commit; default the newest")
    pull_arguments.add_argument("--runs", default="runs", help="folder of the run directories")
    beside_arguments = commands.add_parser("beside", help="what a run starts by itself to publish its checkpoints")
    beside_arguments.add_argument("run", metavar="RUN")
    beside_arguments.add_argument("--trainer", type=int, required=True, help="process id of the run's first rank")
    arguments = parser.parse_args(argv)
    if arguments.command == "beside":
        from pipeline.artifacts.run_directory import RunDirectory
        from pipeline.hub.publisher import publish_beside

        publish_beside(RunDirectory(arguments.run), trainer=arguments.trainer)
        return 0
    if arguments.command == "pull":
        from pipeline.hub.pull import pull

        run = pull(arguments.id, runs=arguments.runs, revision=arguments.revision)
        print(f"{run.path}: restored. Talk to it: python -m pipeline.chat {run.path}")
        return 0
    from pipeline.hub.push import push
    from pipeline.report.run_data import read_run

    push(read_run(arguments.run).run, repo_id=arguments.id, private=False if arguments.public else None)
    return 0


if __name__ == "__main__":
    exit_with_status(main)
