"""The model card, README.md of a published repository: every statement comes from the run's own files.

`card.md.jinja` is the page; this module reads what is on it, and writes the metadata as huggingface_hub's
ModelCardData.
"""

import math
import re
import shlex
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from pipeline.evals.chat_tasks import BUILT_IN
from pipeline.evals.core_bundle import TASKS
from pipeline.metrics import METRICS, SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS
from pipeline.process.storage import read_json
from pipeline.recipe.sizes import LLAMA_NAMES
from pipeline.report.benchmarks import protocols_text, scores_text, suite_name
from pipeline.report.cost import spent, total_kwh
from pipeline.report.curves import trained_on
from pipeline.report.run_data import (
    Benchmark,
    RunData,
    Score,
    cell,
    code,
    date,
    facts_table,
    filled_table,
    joined,
    number,
    percent,
    read_run,
    series_of,
    task_name,
    visible,
)
from pipeline.report.sections import DATA_HEAD, data_rows, tokenizer_text
from pipeline.run_dir.checkpoints import SEAL, read_seal
from pipeline.run_dir.parents import forked_run, name_of_model

# The base model and where it is on the Hub: a base model and those made from it link to each other.

HUB = "https://huggingface.co"


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The model that another one began with. name: of its run, or its Hub id. repo_id, commit: where it is published,
    if known."""

    name: str
    repo_id: str | None = None
    commit: str | None = None


def parent_of_model(data: RunData) -> Parent | None:
    """Return the run or Hub model whose weights this one began with; None for one trained from scratch."""
    found = [parent for parent in (_forked(data), _started(data)) if parent is not None]
    return next((parent for parent in found if parent.repo_id), found[0] if found else None)


def link(repo_id: str) -> str:
    return f"[{cell(repo_id)}]({HUB}/{repo_id})"


def no_formula(text: str) -> str:
    """Return Markdown in which two dollar signs do not begin a formula, as they would on the Hub."""
    return text.replace("$", "&#36;")


def is_repo_id(name: Any) -> bool:
    """Return whether the Hub would take it for a model's or data set's id; it refuses a card that names another."""
    if not isinstance(name, str) or not name.isascii():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _started(data: RunData) -> Parent | None:
    begun = data.fact("inputs.start_from", {})
    if not (start := begun.get("from")):
        return None
    if run := data.parent:
        return _published(run)
    if set(begun) <= {"from", "commit"} and is_repo_id(start) and not Path(start).exists():
        return Parent(name=start, repo_id=start)  # of a folder the weights' hashes are recorded
    return Parent(name=name_of_model(Path(start)))


def _forked(data: RunData) -> Parent | None:
    if not (name := data.fact("forked_from.run")):
        return None
    parent = forked_run(data.run.path, data.manifest)
    return Parent(name=Path(name).name) if parent is None else _published(read_run(str(parent.path)))


def _published(run: RunData) -> Parent:
    at = run.manifest.get("hub") or run.manifest.get("pulled_from") or {}
    return Parent(name=run.name, repo_id=at.get("id"), commit=at.get("commit"))


# The model that a card is about.

SIZES = {
    "n_layer": "{} layers", "n_embd": "width {}", "n_head": "{} heads", "n_positions": "{} positions",
    "vocab_size": "{} token ids",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model of a run. data: the run as it was at `step`; finished: the run's last model, not a checkpoint's."""

    data: RunData
    repo_id: str
    config: dict[str, Any]
    step: int
    finished: bool
    parent: Parent | None

    @property
    def name(self) -> str:
        return self.repo_id.split("/")[-1]

    @property
    def is_chat(self) -> bool:
        return self.data.stage == "sft"

    @property
    def own_code(self) -> bool:
        """Return whether the repository carries the model's code, because transformers does not have it."""
        return bool(self.config.get("auto_map"))

    @property
    def parameters(self) -> int | None:
        return self.data.fact("model.parameters")

    @property
    def sources(self) -> list[dict[str, Any]]:
        return self.recipe("data").get("sources") or []

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Return the same sources as the manifest recorded them."""
        return self.data.fact("inputs.sources", [])

    @property
    def datasets(self) -> list[str]:
        """Return the sources that are data sets of the Hub."""
        return list(dict.fromkeys(source["id"] for source in self.sources if is_repo_id(source.get("id"))))

    @property
    def branch(self) -> str | None:
        """Return the branch where it is published, None for main."""
        named = self.recipe("hub").get("revision")
        return named.replace("{run}", self.data.name) if named else None

    def recipe(self, section: str) -> dict[str, Any]:
        return self.data.recipe.get(section) or {}

    def size(self, name: str) -> int | None:
        """Return a size of the model by GPT-2's name for it."""
        return self.config.get(name, self.config.get(LLAMA_NAMES.get(name, name)))

    @property
    def sizes(self) -> list[str]:
        return [words.format(number(size)) for name, words in SIZES.items() if (size := self.size(name))]

    @property
    def weights(self) -> dict[str, str]:
        """Return the sha256 of the files that it began with."""
        return {name: value for name, value in self.data.fact("inputs.start_from", {}).items() if name != "from"}

    @property
    def made_from(self) -> list[str]:
        """Return links to the data sets and the model that have terms of their own."""
        datasets = [f"[{cell(name)}]({HUB}/datasets/{name})" for name in self.datasets]
        return datasets + ([link(self.parent.repo_id)] if self.parent and self.parent.repo_id else [])

    @property
    def unpublished_sources(self) -> list[Any]:
        return [source.get("name") for source in self.inputs if not source.get("id")]

    @property
    def generated_sources(self) -> list[Any]:
        return [source.get("name") for source in self.inputs if str(source.get("id")).startswith("tandem:")]

    @property
    def command(self) -> str | None:
        """Return what trains it again from its recipe, without what only the publisher has: the parent's folder, and
        the right to write to the repository."""
        if not self.data.run.recipe.exists():
            return None
        processes = self.data.fact("shape.processes") or 1
        launch = ["accelerate launch", *([f"--num_processes {processes}"] if processes > 1 else [])]
        start, parent = self.recipe("model").get("start_from"), self.parent.repo_id if self.parent else None
        changed = {}
        if start and parent not in (None, start):
            changed["model.start_from"] = parent
            if self.recipe("tokenizer").get("path") == start:
                changed["tokenizer.path"] = parent
        if self.recipe("hub").get("id"):
            changed["hub.id"] = "null"
        overrides = [f"{name}={value}" for name, value in changed.items()]
        return " ".join([*launch, f"pipeline/{'sft' if self.is_chat else 'pretrain'}.py recipe.yaml", *overrides])

    @property
    def records(self) -> dict[str, str]:
        """Return the files of the run that are published with the model, and what they hold."""
        run = self.data.run
        files = {
            run.recipe: "the run's recipe with every key",
            run.manifest: "versions, code, data and tokenizer by hash, results",
            run.evals: "every evaluation",
            run.report / "report.md": "the run's report",
            run.report / "report.html": "the same with interactive plots, to be downloaded",
        }
        return {path.name: meaning for path, meaning in files.items() if path.exists()}

    def is_scored(self, *, subject: str | None, step: int | None) -> bool:
        """Return whether a score of that subject and step is of this model."""
        if subject == "model/":
            return self.finished and step in (None, self.step)
        return step == self.step


def published(data: RunData, *, repo_id: str, model: Path | None, step: int | None) -> Published:
    """Return what the card is about. model: a folder with config.json, default the run's model/. step: default as the
    folder's seal has it."""
    folder = model or data.run.model
    finished = folder == data.run.model
    if step is None:
        step = read_seal(folder)["step"] if (folder / SEAL).exists() else data.step()
    return Published(
        data=data if finished else data.up_to(step),
        repo_id=repo_id,
        config=read_json(folder / "config.json"),
        step=step,
        finished=finished,
        parent=parent_of_model(data),
    )


# Bits per byte of the published model.

TEXTS = {
    VAL_BPB: "packed into rows",
    VAL_BPB_DOCUMENTS: "whole documents",
    SFT_BPB: "what the assistant says",
}


def bpb_of_model(card: Published) -> list[Score]:
    """Return the newest score of each metric and protocol, of the published files before others; none without a
    protocol, which nobody could compare."""
    own = [s for s in card.data.scores() if card.is_scored(subject=s.of, step=s.step) and s.protocol is not None]
    own.sort(key=lambda score: score.of == "model/")
    return list({(score.name, score.protocol): score for score in own if math.isfinite(score.value)}.values())


def bpb_text(card: Published) -> str:
    if not (scores := bpb_of_model(card)):
        return ""
    rows = [[s.name, TEXTS.get(s.name), f"{s.value:.6f}", s.protocol] for s in scores]
    intro = (
        f"{str(METRICS[VAL_BPB].better).capitalize()} is better. A protocol names what was scored and how: compare "
        "figures of equal protocol only.\n\n"
    )
    shown = filled_table(["metric", "of held-out text", "value", "protocol"], rows)
    return joined(intro + shown, protocols_text(scores))


# Benchmarks of the published model on its card, for readers and for the Hub's index.


def benchmarks_of_model(card: Published) -> list[Benchmark]:
    """Return the newest of each series of equal measurements of this model; of the published files themselves where
    those were scored."""
    found = [b for b in card.data.benchmarks() if card.is_scored(subject=b.subject, step=b.step)]
    own = [replace(b, means=_numbers(b.means), tasks=_numbers(b.tasks)) for b in found]
    own.sort(key=lambda benchmark: (benchmark.subject == "model/", *benchmark.age))
    return [series[-1] for series in series_of([b for b in own if b.means or b.tasks])]


def _numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without NaN and infinities, which a user's own function may give and the Hub's index cannot
    hold."""
    return [row for row in rows if math.isfinite(row["value"])]


def benchmarks_text(card: Published) -> str:
    """Return the same tables as in the report, and how to make them again."""
    if not (benchmarks := benchmarks_of_model(card)):
        return ""
    parts = [
        (
            "Compare figures of equal protocol only. [evals.json](evals.json) has the command of each, with versions, "
            "device and files.\n"
        )
    ]
    for benchmark in benchmarks:
        protocols = benchmark.protocols()
        part = f", first {benchmark.first_items:,} items of each task" if benchmark.first_items else ""
        parts += [f"### {suite_name(benchmark)}{part}\n", scores_text(benchmark), benchmark.protocols_text()]
        parts.append((f"Protocol {cell(protocols[0])}. " if len(protocols) == 1 else "") + "To repeat it:\n")
        parts.append(code(repeat_command(benchmark, card.repo_id), "bash"))
    return joined(*parts)


def repeat_command(benchmark: Benchmark, repo_id: str) -> str:
    """Return the command that measures the same on the published model. The recorded one may name paths of this
    machine."""
    of_suite = {"core": _core_words, "chat": _chat_words, "lm_eval": _harness_words}[benchmark.suite]
    capped = ["--max-per-task", str(benchmark.first_items)] if benchmark.first_items else []
    words = ["python", "-m", "pipeline.evals", repo_id, *of_suite(benchmark), *capped]
    return visible(shlex.join(words))


def _core_words(benchmark: Benchmark) -> list[str]:
    names = [task_name(task) for task in benchmark.tasks]
    words = ["core" if len(names) == len(TASKS) else f"core:{','.join(names)}"]
    if any(task.get("published") is False for task in benchmark.tasks):
        words += ["--bundle", "FOLDER"]  # the reader's own copy of these files
    return [*words, "--long-prompts", "crop"] if benchmark.part("long_prompts") == "crop" else words


def _chat_words(benchmark: Benchmark) -> list[str]:
    names = list(dict.fromkeys(task_name(task).partition("/")[0] for task in benchmark.tasks))  # not of their subjects
    words = [f"chat:{','.join(name for name in names if name in BUILT_IN)}"] if set(names) & set(BUILT_IN) else []
    for name in names:
        if name not in BUILT_IN:
            words += ["--own-task", f"{name}=FILE"]
    checkers = list(dict.fromkeys(task["checker"] for task in benchmark.tasks if task.get("checker")))
    words += ["--checker", checkers[0]] if checkers else []
    longest = benchmark.part("max_new_tokens")
    words += ["--max-new-tokens", str(longest)] if longest else []
    return [*words, "--execute"] if "humaneval" in names else words


def _harness_words(benchmark: Benchmark) -> list[str]:
    names = dict.fromkeys(task_name(row).split("/")[0] for row in benchmark.tasks)  # a row is a task and a metric
    shots = {row.get("num_fewshot") for row in benchmark.tasks}
    words = [f"lm_eval:{','.join(names)}"]
    if len(shots) == 1 and None not in shots:
        words += ["--shots", str(shots.pop())]
    return [*words, "--as-chat"] if benchmark.part("chat") else words


# The model's results as the Hub's index reads them: one entry for each protocol, its figures unrounded.

SUITES = {"core": "tasks of CORE", "chat": "chat task", "lm_eval": "lm-evaluation-harness"}


def eval_results(card: Published) -> list[EvalResult]:
    """Return what model-index holds. The protocol, which tells two figures of one metric apart, is the
    configuration."""
    task: dict[str, Any] = {"task_type": "text-generation", "task_name": "Text generation"}
    found = [
        EvalResult(
            **task,
            dataset_type="text",
            dataset_name=f"held-out text, protocol {score.protocol}",
            dataset_config=str(score.protocol),
            metric_type="bits_per_byte",
            metric_name=score.name,
            metric_value=score.value,
            verified=False,
        )
        for score in bpb_of_model(card)
    ]
    for benchmark in benchmarks_of_model(card):
        for row in [*benchmark.means, *benchmark.tasks]:
            known = BUILT_IN.get(task_name(row)) if benchmark.suite == "chat" and row.get("revision") else None
            args = {key: row[key] for key in ("low", "high", "stderr") if row.get(key) is not None}
            found.append(
                EvalResult(
                    **task,
                    dataset_type=str(known.source.id) if known else benchmark.suite,
                    dataset_name=f"{SUITES[benchmark.suite]}, protocol {row['protocol']}",
                    dataset_config=str(row["protocol"]),
                    dataset_split=known.source.split if known else None,
                    dataset_revision=row["revision"] if known else None,
                    metric_type=_type(benchmark, row),
                    metric_name=row["name"],
                    metric_value=row["value"],
                    metric_args=args or None,
                    verified=False,
                )
            )
    return found


def _type(benchmark: Benchmark, row: dict[str, Any]) -> str:
    if any(row is mean for mean in benchmark.means):
        return "centred_accuracy"
    return task_name(row).partition("/")[2] or "accuracy" if benchmark.suite == "lm_eval" else "accuracy"


# The card's metadata, which the Hub indexes: YAML between two lines of three dashes.


def metadata(card: Published) -> str:
    """Return the YAML. Unknown fields are left out: an empty list would be shown as one."""
    results, base = eval_results(card), card.parent.repo_id if card.parent else None
    data = ModelCardData(
        license=card.recipe("hub").get("license"),
        language=card.recipe("hub").get("language") or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=_tags(card),
        datasets=card.datasets or None,
        base_model=base,
        base_model_relation="finetune" if base else None,
        model_name=card.name if results else None,
        eval_results=results or None,
    )
    return yaml.dump(data.to_dict(), Dumper=_Dumper, sort_keys=False, width=float("inf"))


def _tags(card: Published) -> list[str]:
    own = card.recipe("run").get("tags") or []
    tags = ["tandem", *(["conversational"] if card.is_chat else []), *(["custom_code"] if card.own_code else []), *own]
    return list(dict.fromkeys(map(str, tags)))


class _Dumper(yaml.SafeDumper):
    """Quote text that some YAML readers take for another type: 1e5 is text to PyYAML, and so to ModelCardData.to_yaml,
    but a number to the Hub."""


def _quoted(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if re.fullmatch(r"[A-Za-z][A-Za-z0-9 _./-]*", text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


# Some texts that the published model wrote, as text that nothing in them can break out of.

SHOWN = 5  # samples
SHOWN_CHARS = 600  # of a text
COLUMNS = 100


def samples_text(card: Published) -> str:
    """Return the first of the fixed prompts with what was written last; "" for a run that sampled nothing."""
    step, rows = _newest(card)
    if not rows:
        return ""
    rule = _rule(rows[0])
    rows = [row for row in rows if _rule(row) == rule]
    at = "" if step == card.step else f", written at step {number(step)}"
    intro = f"The run's fixed prompts in their order, not selected{at}; long lines are wrapped. {rule}\n"
    asked = "Asked" if card.is_chat else "Prompt"
    return "\n".join([intro, *(_sample(asked, row) for row in rows[:SHOWN])])


def _newest(card: Published) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the step and the rows, each with how it was chosen: of the training, else of an evaluation of this very
    model."""
    by_step: dict[int, dict[str, dict[str, Any]]] = {}
    for row in card.data.samples:
        if "prompt" in row and "text" in row:
            by_step.setdefault(row.get("step", 0), {})[row["prompt"]] = row
    if by_step:
        settings = card.recipe("samples")
        chosen = {"temperature": settings.get("temperature", 0.0), "top_k": settings.get("top_k")}
        return max(by_step), [row | chosen for row in by_step[max(by_step)].values()]
    own = [e for e in card.data.evals if card.is_scored(subject=e.get("subject"), step=e.get("step"))]
    found = [entry["samples"] for entry in own if entry.get("samples")]
    return card.step, found[-1] if found else []


def _rule(row: dict[str, Any]) -> str:
    if not row.get("temperature"):
        return "Each token is the likeliest one."
    top_k = f" from the {row['top_k']} likeliest ones" if row.get("top_k") else ""
    return f"Each token is drawn{top_k} at temperature {row['temperature']:g}."


def _sample(asked: str, row: dict[str, Any]) -> str:
    prompt = no_formula(cell(row["prompt"]))
    text = row["text"].replace("\r\n", "\n")
    if len(text) > SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS]} [... {len(text) - SHOWN_CHARS:,} characters more]"
    if not text.strip():
        return f"{asked}: {prompt}\n\nIt ended at once.\n"
    lines = (_wrapped(line) for line in visible(text).split("\n"))
    return f"{asked}: {prompt}\n\n" + code("\n".join(lines), "text")


def _wrapped(line: str) -> str:
    """Return the line in parts of COLUMNS characters, without losing one: a block of code does not wrap by itself."""
    return "\n".join(textwrap.wrap(line, COLUMNS, drop_whitespace=False, replace_whitespace=False, expand_tabs=False))


# Training: facts and costs.


def training_text(card: Published) -> str:
    """Return the table of facts and costs, and the run's curves where its report drew them."""
    data, manifest = card.data, card.data.manifest
    rows: list[list[Any]] = [
        ["recipe", manifest.get("recipe_name")],
        ["text", _text_read(card)],
        ["optimizer steps", number(card.step)],
        ["tokens (row positions)", number(data.tokens() or None)],
        ["tokens of a step", number(data.fact("inputs.batch_tokens"))],
        ["optimizer", card.recipe("optimizer").get("type")],
        ["precision and hardware", trained_on(data)],
        *spent(data),
        ["energy of the GPUs, kWh", _sampled_energy(card)],
        ["ended", date(manifest.get("ended")) if card.finished else None],
        ["training loss at the end, smoothed, nats per token", number(data.last("train/loss_ema"), 5)],
    ]
    picture = card.finished and (data.run.report / "curves.png").exists()
    return joined(facts_table("what", rows), "![The run's curves over its steps](curves.png)\n" if picture else "")


def _sampled_energy(card: Published) -> str | None:
    """Return the energy of a finished run on several hosts, which logs none; of an unfinished one the samples are of
    later steps too."""
    logged = card.data.last("perf/energy_kwh")
    return number(total_kwh(card.data)) if logged is None and card.finished else None


def _text_read(card: Published) -> str | None:
    """Return the sources, each with its share of the rows where there are several."""
    shares = card.data.manifest.get("shares") or {}
    named = [source.get("name") for source in card.inputs]
    texts = []
    for place, source in enumerate(card.sources):
        files = source.get("files")
        listed = files if isinstance(files, list) else [files]
        text = str(source.get("id") or ", ".join(Path(str(file)).name for file in listed))
        text = Path(text).name if text.startswith((".", "/", "~")) else text  # a folder on the machine that trained
        share = (shares.get(named[place]) or {}).get("share") if place < len(named) else None
        texts.append(f"{text} ({percent(share)})" if share is not None and len(card.sources) > 1 else text)
    return ", ".join(texts) or None


# The page.


def model_card(data: RunData, *, repo_id: str, model: Path | None = None, step: int | None = None) -> str:
    """Return README.md of the repository: metadata, then Markdown. What the run does not record is left out.

    model, step: of a checkpoint's model; default the finished one.
    """
    card = published(data, repo_id=repo_id, model=model, step=step)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": cell, "code": code, "link": link, "number": number, "no_formula": no_formula}
    page = environment.get_template("card.md.jinja").render(
        card=card,
        metadata=metadata(card),
        measured={
            "Samples": samples_text(card),
            "Training": training_text(card),
            "Bits per byte": bpb_text(card),
            "Benchmarks": benchmarks_text(card),
        },
        data_table=filled_table(DATA_HEAD, data_rows(card.data)),
        tokenizer_table=tokenizer_text(card.data),
    )
    return page.strip() + "\n"
