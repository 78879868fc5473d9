"""Tandem from Python: train, open a run, score it and talk to it, in one process. docs/python.md shows each.

    import tandem

    run = tandem.train("own_text", "train.max_steps=200", files="my_folder")
    run.metrics, run.model, run.tokenizer, run.report()
    tandem.evaluate(run, "bpb")
    talk = tandem.chat(run)
    talk("What is in the kitchen?")

These functions do what the commands do, with the same recipes, files and errors (TandemError, whose `status` is that of
the command). For several GPUs start the command `tandem pretrain`, which starts a process for each.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipeline

if not hasattr(pipeline, "__path__"):
    raise ImportError(f"{pipeline.__file__}: hides Tandem's package `pipeline`. Rename the file, or start elsewhere.")

from pipeline.process.errors import InputMissingError, RecipeError, TandemError
from pipeline.process.storage import cache_dir, read_json, sha256_file
from pipeline.run_dir.run_directory import RunDirectory, find_run, release_runs

if TYPE_CHECKING:
    import datasets
    import pandas
    from transformers import TrainerCallback

__all__ = ["Run", "TandemError", "chat", "evaluate", "load_run", "train"]


class Run:
    """A run on disk: `path`, `name`, and what it holds, read when it is asked for."""

    def __init__(self, directory: RunDirectory):
        self.path, self.name = directory.path, directory.name
        self._directory = directory

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def model(self) -> Any:
        """Return the finished model, else that of the newest whole checkpoint, in fp32 on the first device.

        Raises InputMissingError when there is neither.
        """
        return self._loaded[0]

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of `model`, with its chat template."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from pipeline.evals.subject import find_subject, load
        from pipeline.hardware.device import device_info

        return load(find_subject(str(self.path)), device=device_info().kind)

    @property
    def metrics(self) -> "pandas.DataFrame":
        """Return the numbers of metrics.jsonl: a row for each logged step, a column for each name (docs/metrics.md).

        Rows that a later attempt made again are left out. A number that a step does not have is NaN.
        """
        import pandas

        from pipeline.run_dir.columns import read_columns

        rows = [row for row in read_columns(self._directory.metrics).that_count() if "event" not in row]
        table = pandas.DataFrame(rows, columns=None if rows else ["step"])
        return table.groupby("step").last()

    def report(self) -> Path:
        """Write report.html, report.md and curves.png into the run's report/; return the page's path."""
        from pipeline.report.run_data import read_run
        from pipeline.report.single import write_report

        return write_report(read_run(str(self.path)))


def train(
    recipe: str,
    *overrides: str,
    files: str | Path | Sequence[str | Path] | None = None,
    dataset: "datasets.Dataset | pandas.DataFrame | Sequence[dict] | None" = None,
    callbacks: "Sequence[TrainerCallback]" = (),
) -> Run:
    """Train a recipe to its end, from its newest checkpoint where it has begun, and return the run.

    recipe: a path or the name of a shipped one; overrides: "section.key=value". files: files or folders in place of the
    recipe's sources. dataset: rows in memory in their place; they are kept as parquet in the cache, so that the same
    rows continue the same run. callbacks: act after the recipe's own.
    Ctrl-C in training saves a whole checkpoint first. Raises RecipeError, DataError ... with what to do.
    """
    from pipeline.hardware.processor import training_is_called
    from pipeline.recipe import read_recipe
    from pipeline.run_dir.earlier_runs import EarlierRuns

    if files is not None and dataset is not None:
        raise RecipeError("tandem.train: files and dataset are both given, and one would be left out. Give one.")
    given = list(overrides)
    if dataset is not None:
        files = _kept(dataset)
    if files is not None:
        paths = [files] if isinstance(files, (str, Path)) else files
        sources = [{"files": str(Path(path).expanduser().absolute())} for path in paths]
        given.append(f"data.sources={json.dumps(sources, ensure_ascii=False)}")
    resolved = read_recipe([recipe, *given], earlier=EarlierRuns())

    from transformers.utils import is_in_notebook

    from pipeline.run_dir.failures import KeyboardSignals
    from pipeline.train import train as train_recipe

    if is_in_notebook():
        from tandem.notebook import NotebookTable

        callbacks = [*callbacks, NotebookTable()]
    training_is_called()
    environment = dict(os.environ)  # train.use_cpu and its like set variables for the rest of a process
    try:
        with KeyboardSignals() as signals:
            train_recipe(resolved, signals, callbacks=callbacks)
    finally:
        release_runs()
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    return Run(RunDirectory.of(resolved.run))


def _kept(dataset: Any) -> Path:
    """Return a parquet file of the cache with the rows, named by its content."""
    import datasets

    if not isinstance(dataset, datasets.Dataset):
        make = datasets.Dataset.from_list if isinstance(dataset, Sequence) else datasets.Dataset.from_pandas
        dataset = make(dataset)
    datasets.disable_progress_bars()
    folder = cache_dir() / "datasets"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        written = Path(temporary) / "dataset.parquet"  # its name is the source's
        dataset.to_parquet(written)
        kept = folder / sha256_file(written)[:32]
        kept.mkdir(exist_ok=True)
        return written.replace(kept / written.name)


def load_run(name: str | Path) -> Run:
    """Return the run of that path or name under runs/, or that `latest:RECIPE` means.

    Raises InputMissingError when there is no such run.
    """
    directory = find_run(str(name))
    if directory is None:
        raise InputMissingError(f"{name}: there is no such run here. Name a folder with run_manifest.json.")
    return Run(directory)


def evaluate(model: Run | str | Path, *tasks: str, **options: Any) -> dict[str, float]:
    """Return the scores of a run, a model folder or a Hub id by name.

    tasks and options are those of `tandem evals`: evaluate(run, "core:copa", max_per_task=100). A run's scores are
    also kept in its report/evals.json, with protocol, bytes and command.
    """
    from pipeline.evals.__main__ import main

    name = str(model.path if isinstance(model, Run) else model)
    arguments = [name, *tasks]
    for option, value in options.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{option.replace('_', '-')}")
        if value is not True:
            arguments += [str(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    run = find_run(name)
    if run is not None and "output" not in options:
        _run(main, arguments)
        results = read_json(run.evals)["entries"][-1]["results"]
    else:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(options.get("output") or Path(folder) / "evals.json")
            _run(main, [*arguments, "--output", str(output)])
            results = read_json(output)["results"]
    return {row["name"]: row["value"] for row in results}


def _run(main: Callable[[list[str]], int], arguments: list[str]) -> None:
    try:
        main(arguments)
    except SystemExit:  # argparse has printed what is wrong
        raise RecipeError(f"tandem.evaluate: cannot be read as a command: {' '.join(arguments)}.") from None


class Talk:
    """A conversation: each call answers a message and remembers it. `messages` are those so far."""

    def __init__(self, name: str, *, system: str | None, **sampling: Any):
        from pipeline.chat.conversation import Conversation, Sampling, open_chat_model

        self._sampling = Sampling(**sampling)
        self._conversation = Conversation(open_chat_model(name), system=system)

    @property
    def messages(self) -> list[dict]:
        return self._conversation.messages

    def __call__(self, text: str) -> str:
        return "".join(self._conversation.answer(text, self._sampling))

    def clear(self) -> None:
        """Begin anew."""
        self._conversation.clear()


def chat(model: Run | str | Path, *, system: str | None = None, **sampling: Any) -> Talk:
    """Return a conversation with a run, a model folder or a Hub id; a base model continues each text.

    sampling: temperature (0.8; 0 takes the likeliest token), top_k (50), top_p, max_new_tokens (512), seed (0).
    """
    name = str(model.path if isinstance(model, Run) else model)
    return Talk(name, system=system, **sampling)
