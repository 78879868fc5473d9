"""python -m pipeline.hub push RUN | pull ID | export RUN | space RUN: publish a finished run, restore one, write its
model for others, make its page."""

import argparse
from pathlib import Path

from pipeline.process.commands import program
from pipeline.report.run_data import read_run
from pipeline.run_dir.failures import exit_with_status
from pipeline.run_dir.run_directory import RunDirectory


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=program("hub"),
        description=(
            "Publish a finished run with verification, restore one, or write its model for other programs. The "
            "token comes from HF_TOKEN or `hf auth login`."
        ),
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
    push_arguments.add_argument(
        "--with-state", action="store_true", help="also the newest checkpoint, from which a pulled run continues"
    )
    push_arguments.add_argument(
        "--trust-code", action="store_true", help="load what was published also with code that is not this program's"
    )
    pull_arguments = commands.add_parser("pull", help="download a pushed run into runs/<its name>")
    pull_arguments.add_argument("id", metavar="ID", help="NAMESPACE/NAME of the repository")
    pull_arguments.add_argument("--revision", help="branch, tag or commit; default the newest")
    pull_arguments.add_argument("--runs", default="runs", help="folder of the run directories")
    space_arguments = commands.add_parser("space", help="write the folder of a Space that chats with pushed runs")
    space_arguments.add_argument("runs", nargs=1, metavar="RUN", help="a pushed run")
    space_arguments.add_argument("--output", default="space", help="the new folder (default %(default)s)")
    export_arguments = commands.add_parser(
        "export", help="write the model for llama.cpp, Ollama, onnxruntime, or in shards and another type"
    )
    export_arguments.add_argument("model", metavar="RUN_OR_MODEL", help="a run, a checkpoint or a model folder")
    export_arguments.add_argument("--to", choices=("gguf", "ollama", "onnx", "safetensors"))
    export_arguments.add_argument(
        "--output", metavar="PATH", help="default next to the model, named by run and format"
    )
    export_arguments.add_argument(
        "--type",
        metavar="TYPE",
        help=("f32, f16, bf16; of gguf and ollama also q8_0; onnx is f32"),
    )
    export_arguments.add_argument(
        "--merge", action="store_true", help="of an adapter: the whole model that it makes of its base"
    )
    export_arguments.add_argument("--max-shard-size", default="5GB", help="of one file of safetensors (default 5GB)")
    export_arguments.add_argument("--trust-code", action="store_true", help="run code files that come with the model")
    beside_arguments = commands.add_parser("beside")  # a run's own; without help it is not listed
    beside_arguments.add_argument("run", metavar="RUN")
    beside_arguments.add_argument("--trainer", type=int, required=True, help="process id of the run's first rank")
    arguments = parser.parse_args(argv)
    if arguments.command == "beside":
        from pipeline.hub.publisher import publish_checkpoints

        publish_checkpoints(RunDirectory(arguments.run), trainer=arguments.trainer)
        return 0
    if arguments.command == "pull":
        from pipeline.hub.pull import pull, what_it_can

        print(what_it_can(pull(arguments.id, runs=arguments.runs, revision=arguments.revision)))
        return 0
    if arguments.command == "space":
        return _write_space(arguments)
    if arguments.command == "export":
        from pipeline.contrib.export import export

        how = {"dtype": arguments.type, "max_shard_size": arguments.max_shard_size, "trust_code": arguments.trust_code}
        to = arguments.to or "safetensors"
        if not arguments.to and not arguments.merge:
            parser.error("export needs --to gguf, ollama, onnx or safetensors, or --merge")
        print(export(arguments.model, to=to, output=arguments.output, merge=arguments.merge, **how))
        return 0
    from pipeline.hub.push import push

    push(
        read_run(arguments.run).run,
        repo_id=arguments.id,
        private=False if arguments.public else None,
        with_state=arguments.with_state,
        trust_code=arguments.trust_code,
    )
    return 0


def _write_space(arguments: argparse.Namespace) -> int:
    from pipeline.contrib.space import write_space

    write_space([read_run(name).run for name in arguments.runs], output=Path(arguments.output))
    print(
        f"{arguments.output}: written. Try it: cd {arguments.output} && python app.py. "
        f"Publish it: hf upload NAMESPACE/NAME {arguments.output} . --repo-type space"
    )
    return 0


if __name__ == "__main__":
    exit_with_status(main)
