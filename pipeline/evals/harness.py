"""`lm_eval:NAME,NAME`: tasks of lm-evaluation-harness, with its own prompts and metrics, on our model."""

import contextlib
import difflib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.evals.intervals import interval_of_error
from pipeline.metrics import Protocol, Results, digest
from pipeline.process.errors import DataError, InputMissingError, RecipeError, ServiceError, TandemError, raise_errors
from pipeline.tokenizer.coverage import coverage

PREFIX = "lm_eval"
RULE = 1  # raise it when the same prompts under the same window are put to the model in another way


def require_harness() -> None:
    """Raise InputMissingError when lm-evaluation-harness is not installed; imports nothing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputMissingError(
            f"command line: {PREFIX} needs the package lm-eval, which is not installed. Run pip install "
            '"tandem-llm[lm-eval]".'
        )


def harness_scores(
    tasks: list[str],
    model: Any,
    tokenizer: Any,
    *,
    batch_rows: int = 8,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: Path | None = None,
    chat: bool = False,
    system: str | None = None,
) -> Results:
    """Return one row per task and metric of the harness, groups after their tasks, from the model as it is in memory.

    Rows: name `lm_eval/<task>/<metric>` (`<metric>,<filter>` where the task has filters), value, stderr (None where
    the harness gives none), low, high (95 %, where there is one), n items, task_version, num_fewshot, filter, cut
    (items whose prompt was longer than the model's positions and lost its beginning behind the BOS), protocol and its
    parts. limit: first items of each task. num_fewshot: None for each task's own. include_path: a folder of task
    YAMLs; when it has all the names, the harness's own are not read. chat: prompts go through the chat template, after
    `system`. Raises InputMissingError, RecipeError, ServiceError or DataError before anything is scored.
    """
    require_harness()
    if chat and not tokenizer.chat_template:
        raise RecipeError(
            f"{PREFIX}: the tokenizer has no chat template, so no prompt can be put as a chat. Score it as a base "
            "model."
        )
    with _quiet():
        from lm_eval.evaluator import evaluate

        from pipeline.evals.harness_model import HarnessModel

        loaded = _load(tasks, include_path)
        lm = HarnessModel(model, tokenizer, batch_rows=batch_rows, chat=chat)
        for name, task in loaded["tasks"].items():
            _check(name, task, lm)
            _set_fewshot(task, num_fewshot)
            if lm.rank == 0 and _draws_the_question(task):
                print(
                    f"{PREFIX}:{name}: its examples are drawn from the rows that are scored, and may hold the question "
                    "with its answer. Name that split as test_split and as fewshot_split.",
                    file=sys.stderr,
                )
        found = evaluate(
            lm,
            task_dict=loaded,
            limit=limit,
            apply_chat_template=chat,
            system_instruction=system,
            fewshot_as_multiturn=True,
        )
    return _rows(found, tokenizer, cut=lm.cut, chat=chat, system=system, limit=limit, window=lm.max_length)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's advice on options that it does not have here."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _load(names: list[str], include_path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the harness's tasks and groups of these names, with their data. Raises for all names that cannot be
    had."""
    manager = _manager(names, include_path)
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    problems: list[TandemError] = []
    for name in names:
        try:
            found = manager.load([name])
        except ConnectionError as error:
            # The other tasks would wait for the same Hub, each with its own retries.
            raise ServiceError(
                f"{PREFIX}:{name}: its data cannot be fetched ({error}), so nothing was scored. Run it once where the "
                "Hub is within reach, or give tasks on files of your own with --include-path."
            ) from None
        except Exception as error:  # a task may run code of its own while it loads, and that may raise anything
            problems.append(_unloadable(name, error))
            continue
        loaded["tasks"] |= found["tasks"]
        loaded["groups"] |= found["groups"]
    raise_errors(problems)
    return loaded


def _manager(names: list[str], include_path: Path | None) -> Any:
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise InputMissingError(f"--include-path {include_path}: no such folder. Name one that holds task YAMLs.")
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager  # Reading the harness's own 14,000 names takes some ten seconds.
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = []
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            unknown.append(f"{name} (did you mean {' or '.join(near)}?)" if near else name)
    if unknown:
        raise RecipeError(
            f"command line: lm-evaluation-harness {_version()} has no task {', '.join(unknown)}, so nothing was "
            "scored. Give the name of one, or the folder of your own with --include-path."
        )
    return manager


def _unloadable(name: str, error: Exception) -> TandemError:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, ImportError):
        return InputMissingError(
            f"{PREFIX}:{name}: needs a package that is not here ({reason}), so nothing was scored. Install it, or "
            "leave the task out."
        )
    if isinstance(error, FileNotFoundError):
        return InputMissingError(
            f"{PREFIX}:{name}: its data is missing ({reason}), so nothing was scored. Check the task's dataset_path "
            "and data_files."
        )
    return DataError(
        f"{PREFIX}:{name}: cannot be loaded ({reason}), so nothing was scored. Fix the task, or leave it out."
    )


def _check(name: str, task: Any, lm: Any) -> None:
    """Raise for what the harness would end with an assertion or a traceback, maybe after hours."""
    from lm_eval.models.utils import normalize_gen_kwargs

    if getattr(task, "UNSAFE_CODE", False):
        raise RecipeError(
            f"{PREFIX}:{name}: runs programs that the model writes, unconfined, so it was not started. Leave it out."
        )
    if getattr(task, "MULTIMODAL", False):
        raise RecipeError(f"{PREFIX}:{name}: needs a model that sees or hears, and this one reads text. Leave it out.")
    if task.OUTPUT_TYPE == "generate_until":
        asked = normalize_gen_kwargs(dict(task.config.generation_kwargs or {}), lm.max_gen_toks)["max_gen_toks"]
        if asked >= lm.max_length:
            raise RecipeError(
                f"{PREFIX}:{name}: writes up to {asked} tokens, and the model has {lm.max_length} positions, so no "
                "prompt fits. Leave it out."
            )


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Set the few-shot settings as the harness's own command does: its seed, the task's own number unless another is
    asked for, else none."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


def _draws_the_question(task: Any) -> bool:
    """Return whether the harness (0.4.13) may show a question with its answer as an example of itself: it leaves the
    question out only where fewshot_split and test_split are one."""
    config, fewshot = task.config, getattr(task, "fewshot_cfg", None)
    if fewshot is None or not task.get_config("num_fewshot") or fewshot.split == config.test_split:
        return False
    if fewshot.split is None and fewshot.samples is not None:
        return False
    drawn = fewshot.split or config.training_split or config.validation_split or config.test_split
    return drawn == (config.test_split or config.validation_split)


def _rows(
    found: dict[str, Any],
    tokenizer: Any,
    *,
    cut: set[str],
    chat: bool,
    system: str | None,
    limit: int | None,
    window: int,
) -> Results:
    rows = []
    for task, numbers in found["results"].items():
        # 1. What the task's figures are of: its items, how they were put, and what the tokenizer kept of them.
        version, num_fewshot = str(found["versions"].get(task)), found["n-shot"].get(task)
        samples = [found["samples"].get(leaf, []) for leaf in _leaves(task, found.get("group_subtasks", {}))]
        num_cut = sum(_num_cut(of_leaf, cut) for of_leaf in samples)
        parts: dict[str, Any] = {
            "score": "lm_eval",
            "task": task,
            "version": version,
            "texts": digest(sorted(map(_hashes, samples))),
            "items": limit or "all",
            "num_fewshot": num_fewshot,
            "chat": chat,
        }
        if system:
            parts["system"] = digest(system)
        parts |= {
            "window": window if num_cut else "whole prompts",
            "bos": "as the template" if chat else "each prompt",
            "coverage": coverage(tokenizer, chain.from_iterable(map(_texts, samples))),
            "dtype": "float32",
            "harness": _version(),
            "rule": RULE,
        }
        protocol = Protocol(parts)

        # 2. A row for each metric, with its 95 % interval where the harness gives an error.
        for key, value in numbers.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            n = numbers.get("sample_count", {}).get(key, numbers["sample_len"])
            stderr = low = high = None
            given = numbers.get(f"{metric}_stderr,{chosen}")
            if isinstance(given, int | float):
                stderr = float(given)
                low, high = interval_of_error(value, stderr, n) or (None, None)
            shown = metric if chosen == "none" else key
            rows.append(
                {
                    "name": f"{PREFIX}/{task}/{shown}",
                    "value": float(value),
                    "stderr": stderr,
                    "low": low,
                    "high": high,
                    "n": n,
                    "task_version": version,
                    "num_fewshot": num_fewshot,
                    "filter": chosen,
                    "cut": num_cut,
                    **protocol.row(),
                }
            )
    return rows


def _leaves(task: str, children: dict[str, list[str]]) -> list[str]:
    if task not in children:
        return [task]
    leaves = []
    for child in children[task]:
        leaves += _leaves(child, children)
    return leaves


def _hashes(samples: Results) -> list[str]:
    """Return the harness's own hashes of items and answers, each once: of several filters an item has several
    samples."""
    return sorted({f"{sample.get('doc_hash')} {sample.get('target_hash')}" for sample in samples})


def _texts(samples: Results) -> Iterator[str]:
    """Yield prompts and their continuations, each once: of several filters an item has several samples."""
    requests = chain.from_iterable(sample["arguments"] for sample in samples)
    yield from dict.fromkeys(text for text in chain.from_iterable(requests) if isinstance(text, str))


def _num_cut(samples: Results, cut: set[str]) -> int:
    items = set()
    for sample in samples:
        if any(request[0] in cut for request in sample["arguments"]):
            items.add(sample["doc_id"])
    return len(items)


def _version() -> str:
    return importlib.metadata.version("lm_eval")


def print_rows(rows: Results) -> None:
    """Print a line for each row of `harness_scores`."""
    print(f"{'lm_eval metric':<48} {'value':>9} {'stderr':>8}  {'95 %':<15} {'items':>7} {'shots':>5}")
    for row in rows:
        stderr = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        ends = "" if row["low"] is None else f"{row['low']:.4f}-{row['high']:.4f}"
        line = (
            f"{row['name']:<48} {row['value']:>9.4f} {stderr:>8}  {ends:<15} {row['n']:>7,} {row['num_fewshot']!s:>5}"
        )
        if row["cut"]:
            line += f"  {row['cut']:,} prompts cut"
        print(line)
