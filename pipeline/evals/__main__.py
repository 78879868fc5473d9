"""python -m pipeline.evals RUN_OR_MODEL [bpb core chat samples lm_eval:TASKS]: score a run, a checkpoint, a folder or
a Hub id."""

import argparse
import math
import os
import sys
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.evals.core_bundle import TASKS as CORE_TASKS
from pipeline.evals.core_bundle import open_bundle
from pipeline.evals.subject import Subject, code_of_command, find_subject, load
from pipeline.metrics import Results
from pipeline.process.commands import program
from pipeline.process.errors import DataError, RecipeError
from pipeline.process.progress import progress
from pipeline.process.storage import NOT_WRITABLE, cache_of_run, write_json
from pipeline.process.user_code import allow_task_folder
from pipeline.recipe.located_yaml import load_mapping
from pipeline.run_dir.failures import exit_with_status
from pipeline.run_dir.rows import read_rows

BUILT_IN = ("bpb", "core", "chat", "samples")
EXAMPLES = {"core": "copa,piqa", "chat": "arc_easy,gsm8k", "lm_eval": "hellaswag,arc_easy"}
WITH_PARTS = tuple(EXAMPLES)  # core:copa,piqa: some of its tasks
DEFAULT = ("bpb", "samples")


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the arguments; `tasks` by name, with the parts asked for (None: all). Raises RecipeError for an unknown
    one."""
    parser = argparse.ArgumentParser(
        prog=program("evals"),
        description=(
            "Score a run, a checkpoint, a local model folder or a Hub id. A run's results go to its report/evals.json."
        ),
        epilog="On several devices: accelerate launch --module pipeline.evals RUN_OR_MODEL TASK ...",
    )
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="of a run its model/ is scored, else its newest whole checkpoint"
    )
    parser.add_argument(
        "tasks",
        nargs="*",
        default=[],
        metavar="TASK",
        help=(
            "bpb (bits per byte), core (core:copa,piqa: some of it), chat (chat:gsm8k), samples (continuations "
            "of fixed prompts), lm_eval:TASK,TASK (lm-evaluation-harness), or your own as module:attr; default "
            "bpb and samples"
        ),
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the results there alone, as JSON (without it a run's are kept in its report/evals.json)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help=(
            "run what the run's recipe names as module:attr, code files that come with the model, and installed "
            "modules named here"
        ),
    )
    parser.add_argument(
        "--batch-rows",
        type=int,
        default=8,
        help="rows of one forward pass; does not change any figure (default %(default)s)",
    )
    bpb = parser.add_argument_group("bpb")
    bpb.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="score these txt, jsonl or parquet files or globs instead of the run's validation",
    )
    bpb.add_argument(
        "--chat",
        nargs="+",
        metavar="FILE",
        help="score what the assistant says in these jsonl or parquet files of messages",
    )
    bpb.add_argument(
        "--max-bytes", type=int, default=4_000_000, help="of --text, in whole documents (default %(default)s)"
    )
    bpb.add_argument("--max-conversations", type=int, default=500, help="of --chat (default %(default)s)")
    bpb.add_argument(
        "--window",
        type=int,
        help="most tokens the model sees at once for --text and --chat (default its positions, at most 2048)",
    )
    bpb.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="compute in it (default for a run's own validation what it was trained in, else float32)",
    )
    tasks = parser.add_argument_group("core, chat and lm_eval")
    tasks.add_argument(
        "--bundle",
        metavar="PATH",
        help="folder of the eval_bundle (default: the published files, fetched once)",
    )
    tasks.add_argument(
        "--max-per-task",
        type=int,
        metavar="N",
        help="only the first N items of each task, in an order that never changes",
    )
    tasks.add_argument(
        "--long-prompts",
        choices=("fewer_shots", "crop"),
        help=(
            "core prompts beyond the model's positions: leave whole examples out, or keep the last tokens as "
            "nanochat does (default the recipe's, else fewer_shots)"
        ),
    )
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--chat-data",
        nargs="+",
        metavar="PATH",
        help=(
            "folders or files in which the tasks' files are found by their names (default the recipe's, else the "
            "Hub's)"
        ),
    )
    chat.add_argument(
        "--own-task",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="score conversations of your own too, whose last message is the right answer; may be given again",
    )
    chat.add_argument(
        "--checker",
        default="exact",
        help=(
            "of --own-task: exact, contains, or module:attr of a function (messages, text) -> bool (default "
            "%(default)s)"
        ),
    )
    chat.add_argument(
        "--execute",
        action="store_true",
        help="run the programs that the model writes for humaneval, each in a sandbox",
    )
    chat.add_argument(
        "--unsafe-exec", action="store_true", help="with --execute: run them also where no sandbox is to be had"
    )
    chat.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="longest answer (default the recipe's, else 512)"
    )
    harness = parser.add_argument_group("lm_eval")
    harness.add_argument("--shots", type=int, metavar="N", help="examples in a prompt (default each task's own)")
    harness.add_argument(
        "--include-path",
        metavar="FOLDER",
        help="a folder of task YAMLs of your own, which are code: with --trust-code",
    )
    parser.add_argument_group("samples and lm_eval").add_argument(
        "--as-chat",
        action="store_true",
        help="give the prompts as a user's message through the chat template; a chat run's are anyway",
    )
    arguments = parser.parse_intermixed_args(argv)
    arguments.own_task = _own_tasks(arguments.own_task)
    arguments.defaults = not (arguments.tasks or arguments.own_task)
    arguments.tasks = _tasks(list(DEFAULT) if arguments.defaults else arguments.tasks)
    if arguments.own_task and "chat" not in arguments.tasks:
        arguments.tasks["chat"] = []
    if arguments.output and not Path(arguments.output).absolute().parent.is_dir():
        raise RecipeError(
            f"command line: --output {arguments.output} is in no folder that exists, so the results could not be "
            "kept. Make the folder first."
        )
    for name in ("batch_rows", "max_per_task", "max_new_tokens", "max_bytes", "max_conversations", "window"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            raise RecipeError(
                f"command line: --{name.replace('_', '-')} {number} leaves nothing to score. Give at least 1."
            )
    return arguments


def _own_tasks(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, _, file = text.partition("=")
        if not (name and file):
            raise RecipeError(
                f"command line: --own-task {text} names no file, so it cannot be scored. Write NAME=FILE."
            )
        if name in found:
            raise RecipeError("command line: two of --own-task have the same name. Give each a name of its own.")
        found[name] = file
    return found


def _tasks(names: list[str]) -> dict[str, list[str] | None]:
    """Return by evaluation the parts requested by all words that name it; None: all of it."""
    found: dict[str, list[str] | None] = {}
    for name in names:
        head, colon, listed = name.partition(":")
        if name in BUILT_IN:
            found[name] = None
        elif head in WITH_PARTS:
            parts = [part.strip() for part in listed.split(",")]
            if not all(parts):
                raise RecipeError(
                    f"command line: {name} names no task, so nothing was scored. Write {head}:{EXAMPLES[head]}."
                )
            before = found.get(head, [])
            found[head] = None if before is None else list(dict.fromkeys([*before, *parts]))
        elif colon and listed and head not in BUILT_IN:
            found[name] = None
        else:
            what = f"command line: there is no evaluation called {name}, so nothing was scored."
            if near := get_close_matches(name, BUILT_IN, n=1):
                what += f" Did you mean {near[0]}?"
            raise RecipeError(f"{what} Use {', '.join(BUILT_IN)}, lm_eval:TASKS or module:attr.")
    known = [task.name for task in CORE_TASKS]
    if unknown := [part for part in found.get("core") or [] if part not in known]:
        raise RecipeError(
            f"command line: CORE has no task called {', '.join(unknown)}, so nothing was scored. Its tasks: "
            f"{', '.join(known)}."
        )
    return found


def main(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    subject = find_subject(arguments.model, trust_code=arguments.trust_code)
    command = EvalsCommand(arguments, subject)
    command.open_inputs()  # before the model: what is wrong with them is reported at once

    from pipeline.evals.tasks import entry_of
    from pipeline.hardware.device import device_info
    from pipeline.hardware.processor import initialize_vector_functions

    device = device_info()
    initialize_vector_functions()
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = join_ranks(on_cpu=device.kind == "cpu")
    model, tokenizer = load(subject, device=where["device"], revision=arguments.revision)
    try:
        command.score(model, tokenizer, where)
        command.refuse_nonfinite()
    finally:  # what was scored before an error is not lost
        if where["rank"] == 0 and (command.results or command.samples):
            entry = entry_of(
                subject=subject.name,
                step=subject.step,
                device=device.name,
                results=command.results,
                samples=command.samples,
                command=["python", "-m", "pipeline.evals", *argv],
            )
            command.record(entry)
    return 0


def join_ranks(*, on_cpu: bool) -> dict[str, Any]:
    """Return device, rank and world_size of this process, joined to the others that accelerate started."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        from pipeline.hardware.device import device_info

        return {"device": device_info().kind, "rank": 0, "world_size": 1}
    from accelerate import PartialState

    state = PartialState(cpu=on_cpu)
    if state.process_index:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # every rank has the same to say
    return {"device": str(state.device), "rank": state.process_index, "world_size": state.num_processes}


class EvalsCommand:
    """Options of the command line, with the run's own recipe for what they leave open."""

    def __init__(self, arguments: argparse.Namespace, subject: Subject):
        self.arguments, self.subject, self.tasks = arguments, subject, arguments.tasks
        if arguments.defaults and subject.run is None and not (arguments.text or arguments.chat):
            del self.tasks["bpb"]  # a folder or Hub id has no text of its own
        run = subject.run
        self.recipe = load_mapping(run.recipe) if run is not None and run.recipe.exists() else {}
        self.own = [task for task in self.tasks if task not in (*BUILT_IN, "lm_eval")]
        self.results: Results = []
        self.samples: Results = []

    def open_inputs(self) -> None:
        """Open everything but the model; raise what is wrong with it."""
        if "bpb" in self.tasks:
            from pipeline.evals.texts import require_text

            require_text(self.subject, self.arguments)
        if "lm_eval" in self.tasks:
            from pipeline.evals.harness import require_harness

            if self.arguments.include_path:
                code = code_of_command(self.arguments)
                allow_task_folder(self.arguments.include_path, code=code, where="command line: --include-path")
            require_harness()
        if self.own:
            from pipeline.evals.tasks import load_tasks

            self.functions = load_tasks(self.own, folder=code_of_command(self.arguments), where="command line")
        cache = str(cache_of_run((self.recipe.get("data") or {}).get("cache_dir")))
        if "core" in self.tasks:
            path = self.arguments.bundle or self._of_recipe("core").get("bundle")
            self.bundle = open_bundle(path, wanted=self.tasks["core"], cache=cache).only(self.tasks["core"])
        if "chat" in self.tasks:
            from pipeline.evals.chat import benchmark_of_command

            settings = self._of_recipe("chat")
            self.chat = benchmark_of_command(self.tasks["chat"], self.arguments, settings=settings, cache=cache)

    def _of_recipe(self, group: str) -> dict[str, Any]:
        return (self.recipe.get("evals") or {}).get(group) or {}

    def score(self, model: Any, tokenizer: Any, where: dict[str, Any]) -> None:
        """Fill results and samples, and print them as they come."""
        from pipeline.evals.tasks import in_precision

        if "chat" in self.tasks:
            self.chat.require_ready(tokenizer)
        if "bpb" in self.tasks:
            from pipeline.evals.texts import bpb_results, print_figures

            figures = bpb_results(self.subject, model, tokenizer, self.arguments, **where)
            print_figures(figures)
            self.results += figures
        if "core" in self.tasks:
            self.results += self._print_contamination(in_precision(self._core(model, tokenizer, where), "float32"))
        if "chat" in self.tasks:
            watched = partial(progress, name="chat", shown=where["rank"] == 0)
            scored = self.chat.score(model, tokenizer, findings=self._findings(), watched=watched, **where)
            self.results += self._print_contamination(in_precision(scored, "float32"))
        if "lm_eval" in self.tasks:
            self.results += self._harness(model, tokenizer)
        if "samples" in self.tasks and where["rank"] == 0:
            self.samples += self._samples(model, tokenizer)
        if self.own:
            from pipeline.evals.tasks import score_tasks

            numbers = score_tasks(self.functions, model, tokenizer)
            for name, value in numbers.items():
                print(f"{name:<20} {value:>10.6f}")
            self.results += [{"name": name, "value": value, "protocol": None} for name, value in numbers.items()]

    def refuse_nonfinite(self) -> None:
        """Raise DataError where a score is no number: what was scored is recorded all the same."""
        wrong = []
        for row in self.results:
            if isinstance(row["value"], float) and not math.isfinite(row["value"]):
                wrong.append(row["name"])
        if wrong:
            raise DataError(
                f"{self.subject.path}: {', '.join(wrong)} is no finite number, so the model computes nothing there. "
                "Take another checkpoint."
            )

    def record(self, entry: dict[str, Any]) -> None:
        """Keep the entry where --output says, else in the run's evals.json."""
        from pipeline.evals.tasks import append_entry

        if self.arguments.output:
            write_json(Path(self.arguments.output), entry)
            print(f"recorded in {self.arguments.output}")
        elif self.subject.run is not None:
            try:
                append_entry(self.subject.run, entry)
                print(f"recorded in {self.subject.run.evals}")
            except OSError as error:
                if error.errno not in NOT_WRITABLE:
                    raise
                print(
                    f"not recorded: {self.subject.run.evals} cannot be written ({error.strerror}). "
                    "--output FILE keeps the figures elsewhere."
                )

    def _core(self, model: Any, tokenizer: Any, where: dict[str, Any]) -> Results:
        from pipeline.evals.core import closing_lines, core_results, heading, score_core, task_line

        print(heading())
        score = score_core(
            self.bundle,
            model,
            tokenizer,
            max_per_task=self.arguments.max_per_task,
            long_prompts=self.arguments.long_prompts or self._of_recipe("core").get("long_prompts") or "fewer_shots",
            watched=partial(progress, name="core", shown=where["rank"] == 0),
            report=lambda task: print(task_line(task), flush=True),
            **where,
        )
        print("\n".join(closing_lines(score)))
        return core_results(score, self._findings())

    def _findings(self) -> dict[str, Any] | None:
        from pipeline.contrib.contaminated_items import findings_of

        return findings_of(self.subject.run) if self.subject.run is not None else None

    def _print_contamination(self, results: Results) -> Results:
        from pipeline.contrib.contaminated_items import contamination_line

        if self.subject.run is not None:
            print(contamination_line(results))
        return results

    def _harness(self, model: Any, tokenizer: Any) -> Results:
        from pipeline.evals.harness import harness_scores, print_rows

        folder = self.arguments.include_path
        rows = harness_scores(
            self.tasks["lm_eval"] or [],
            model,
            tokenizer,
            batch_rows=self.arguments.batch_rows,
            limit=self.arguments.max_per_task,
            num_fewshot=self.arguments.shots,
            include_path=None if folder is None else Path(folder),
            chat=self._as_chat(),
        )
        print_rows(rows)
        return rows

    def _as_chat(self) -> bool:
        return self.arguments.as_chat or self.subject.stage == "sft"

    def _samples(self, model: Any, tokenizer: Any) -> Results:
        from pipeline.evals.texts import sample_texts

        prompts = (self.recipe.get("samples") or {}).get("prompts")
        if not prompts and self.subject.run is not None:  # its prompts may be those of held-out texts
            found = dict.fromkeys(row.get("prompt") for row in read_rows(self.subject.run.samples))
            prompts = [prompt for prompt in found if isinstance(prompt, str)]
        samples = sample_texts(model, tokenizer, chat=self._as_chat(), prompts=prompts)
        for row in samples:
            how = "greedy" if row["temperature"] == 0 else "sampled"
            print(f"[{how}] {row['prompt']!r} -> {row['text']!r}")
        return samples


if __name__ == "__main__":
    exit_with_status(main)
