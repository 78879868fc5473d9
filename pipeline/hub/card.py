"""The model card: what was trained, on what, what it reaches, and how to use it."""

import math
import re
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.evals.chat.tasks import BUILT_IN
from pipeline.evals.core.bundle import TASKS
from pipeline.metrics import METRICS, SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS
from pipeline.process.storage import read_json
from pipeline.recipe.sizes import LLAMA_NAMES
from pipeline.report.aligned import trained_on
from pipeline.report.benchmarks import protocols_text, scores_text, suite_name
from pipeline.report.run_data import (
    Benchmark,
    RunData,
    Score,
    cell,
    code,
    date,
    filled_table,
    number,
    percent,
    read_run,
    series_of,
    table,
    task_name,
    visible,
)
from pipeline.report.sections import DATA_HEAD, data_rows, spent, tokenizer_text, total_kwh
from pipeline.run_dir.checkpoints import SEAL, read_seal
from pipeline.run_dir.run_directory import forked_run, name_of_model

# What a model began as, and where on the Hub that stands: a base model and those made from it link to each other.

HUB = "https://huggingface.co"


@dataclass(frozen=True, kw_only=True)
class Parent:
    """name: of its run, or its Hub id. repo_id, commit: where it is published, as far as that is known."""

    name: str
    repo_id: str | None = None
    commit: str | None = None


def parent_of_model(data: RunData) -> Parent | None:
    """Return the run or Hub model whose weights this one began with; None for one trained from scratch."""
    found = [parent for parent in (_forked(data), _started(data)) if parent is not None]
    return next((parent for parent in found if parent.repo_id), found[0] if found else None)


def link(repo_id: str) -> str:
    return f"[{cell(repo_id)}]({HUB}/{repo_id})"


def descendants_link(repo_id: str) -> str:
    """Return the Hub's own list of what names the model as its base: it is right also for what is published later."""
    return f"[the Hub's list]({HUB}/models?other=base_model:finetune:{repo_id})"


def is_repo_id(name: Any) -> bool:
    """Return whether the Hub would take it for a model's or data set's id; it refuses a card that names another."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not isinstance(name, str) or not name.isascii():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _started(data: RunData) -> Parent | None:
    begun = (data.manifest.get("inputs") or {}).get("start_from") or {}
    if not (start := begun.get("from")):
        return None
    if run := data.parent:
        return _published(run)
    if set(begun) <= {"from", "commit"} and is_repo_id(start) and not Path(start).exists():
        return Parent(name=start, repo_id=start)  # of a folder the weights' hashes are recorded
    return Parent(name=name_of_model(Path(start)))


def _forked(data: RunData) -> Parent | None:
    if not (name := (data.manifest.get("forked_from") or {}).get("run")):
        return None
    parent = forked_run(data.run.path, data.manifest)
    return Parent(name=Path(name).name) if parent is None else _published(read_run(str(parent.path)))


def _published(run: RunData) -> Parent:
    at = run.manifest.get("hub") or run.manifest.get("pulled_from") or {}
    return Parent(name=run.name, repo_id=at.get("id"), commit=at.get("commit"))


# The model that a card is about.


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
        return (self.data.manifest.get("model") or {}).get("parameters")

    @property
    def sources(self) -> list[dict[str, Any]]:
        return self.recipe("data").get("sources") or []

    @property
    def datasets(self) -> list[str]:
        """Those of the sources that the Hub has."""
        return list(dict.fromkeys(source["id"] for source in self.sources if is_repo_id(source.get("id"))))

    @property
    def branch(self) -> str | None:
        """Return where it is published, None on main."""
        named = self.recipe("hub").get("revision")
        return named.replace("{run}", self.data.name) if named else None

    def recipe(self, section: str) -> dict[str, Any]:
        return self.data.recipe.get(section) or {}

    def size(self, name: str) -> int | None:
        """Return a size of the model by GPT-2's name for it."""
        return self.config.get(name, self.config.get(LLAMA_NAMES.get(name, name)))

    def is_scored(self, *, subject: str | None, step: int | None) -> bool:
        """Return whether a figure of that subject and step is one of this model."""
        if subject == "model/":
            return self.finished and step in (None, self.step)
        return step == self.step


def published(data: RunData, *, repo_id: str, model: Path | None, step: int | None) -> Published:
    """model: a folder with config.json, default the run's model/. step: default as the folder's seal has it."""
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


# What the model is, what it is not, and under which terms.

SIZES = {"n_layer": "{} layers", "n_embd": "width {}", "n_head": "{} heads", "n_positions": "{} positions", "vocab_size": "{} token ids"}  # fmt: skip


def about_text(card: Published) -> str:
    """Kind and size, what it began as, and whether it is the run's last; then the publisher's note."""
    counts = [words.format(number(size)) for name, words in SIZES.items() if (size := card.size(name))]
    of = f" of {number(card.parameters)} parameters" if card.parameters else ""
    kind = "chat model" if card.is_chat else "base language model"
    lines = [f"A {kind}{of} ({', '.join([cell(card.config.get('model_type')), *counts])}).", _origin(card)]
    if card.is_chat:
        lines.append("It answers in turns, by the chat template that comes with it.")
    else:
        lines.append("It continues a text; it was not taught to answer.")
        lines.append(f"Published models made from it: {descendants_link(card.repo_id)}.")
    if not card.finished:
        steps = card.data.max_steps()
        of_all = f" of {number(steps)}" if steps else ""
        lines.append(f"This is the model after step {number(card.step)}{of_all}: the run had not finished.")
    note = card.data.manifest.get("note") or card.recipe("run").get("note")
    # Two dollar signs would begin a formula on the Hub.
    return " ".join(lines) + "\n" + (f"\nNote: {cell(note).replace('$', '&#36;')}\n" if note else "")


def _origin(card: Published) -> str:
    parent, on = card.parent, " on conversations" if card.is_chat else ""
    if parent is None:
        return f"It was trained from scratch{on} with Tandem."
    name = link(parent.repo_id) if parent.repo_id else f"the model of run {cell(parent.name)}, which is not published"
    return f"It began as {name}, and was trained further{on} with Tandem."


def limits_text(card: Published) -> str:
    lines = [
        "It states falsehoods as readily as facts, and repeats the biases of the text it was trained on. Nothing here tests "
        "whether it is safe: do not use it where what it says has consequences for people."
    ]
    if positions := card.size("n_positions"):
        lines.append(f"It sees at most {number(positions)} tokens, its own among them.")
    return " ".join(lines) + "\n"


def license_text(card: Published) -> str:
    """Return what the publisher says. Nothing is concluded from the terms of the data."""
    stated = card.recipe("hub").get("license")
    lines = [
        f"Stated by the publisher: {cell(stated)}." if stated else "The publisher states none: ask before you use it."
    ]
    others = [f"[{cell(name)}]({HUB}/datasets/{name})" for name in card.datasets]
    others += [link(card.parent.repo_id)] if card.parent and card.parent.repo_id else []
    if others:
        lines.append(f"What it was made from has terms of its own: {', '.join(others)}.")
    return " ".join(lines) + "\n"


# Bits per byte of the published model.

TEXTS = {
    VAL_BPB: "packed into rows",
    VAL_BPB_DOCUMENTS: "whole documents",
    SFT_BPB: "what the assistant says",
}


def bpb_of_model(card: Published) -> list[Score]:
    """Return the newest figure of each metric and protocol, one of the published files before others. One without a protocol says
    nothing to a stranger."""
    own = [s for s in card.data.scores() if card.is_scored(subject=s.of, step=s.step) and s.protocol is not None]
    own.sort(key=lambda score: score.of == "model/")
    return list({(score.name, score.protocol): score for score in own if math.isfinite(score.value)}.values())


def bpb_text(card: Published) -> str:
    rows = [[s.name, TEXTS.get(s.name), f"{s.value:.6f}", s.protocol] for s in bpb_of_model(card)]
    if not rows:
        return ""
    intro = f"{str(METRICS[VAL_BPB].better).capitalize()} is better. A protocol names what was scored and how: compare figures of equal protocol only.\n\n"
    shown = filled_table(["metric", "of held-out text", "value", "protocol"], rows)
    return "\n".join(part for part in (intro + shown, protocols_text(bpb_of_model(card))) if part)


# Benchmarks of the published model on its card, for readers and for the Hub's index.


def benchmarks_of_model(card: Published) -> list[Benchmark]:
    """Return the newest of each series of equal measurements of this model; of the published files themselves where those were scored."""
    found = [b for b in card.data.benchmarks() if card.is_scored(subject=b.subject, step=b.step)]
    own = [replace(b, means=_numbers(b.means), tasks=_numbers(b.tasks)) for b in found]
    own.sort(key=lambda benchmark: (benchmark.subject == "model/", *benchmark.age))
    return [series[-1] for series in series_of([b for b in own if b.means or b.tasks])]


def _numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what a function of one's own gave that is no number: the Hub's index could not hold it."""
    return [row for row in rows if math.isfinite(row["value"])]


def benchmarks_text(card: Published) -> str:
    """Return the same tables as in the report, and how to make them again."""
    if not (benchmarks := benchmarks_of_model(card)):
        return ""
    parts = [
        "Compare figures of equal protocol only. [evals.json](evals.json) has the command of each, with versions, device and files.\n"
    ]
    for benchmark in benchmarks:
        protocols = benchmark.protocols()
        part = f", first {benchmark.first_items:,} items of each task" if benchmark.first_items else ""
        parts += [f"### {suite_name(benchmark)}{part}\n", scores_text(benchmark)]
        parts += ["".join(f"{line}\n" for line in benchmark.protocol_lines())] if benchmark.protocol_lines() else []
        parts.append((f"Protocol {cell(protocols[0])}. " if len(protocols) == 1 else "") + "To repeat it:\n")
        parts.append(code(repeat_command(benchmark, card.repo_id), "bash"))
    return "\n".join(parts)


def repeat_command(benchmark: Benchmark, repo_id: str) -> str:
    """Return the command that measures the same on the published model. The recorded one may name paths of this machine."""
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
    names = list(
        dict.fromkeys(task_name(task).partition("/")[0] for task in benchmark.tasks)
    )  # of a task and its subjects
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


def model_index(card: Published) -> list[dict[str, Any]]:
    """Results of metadata's model-index. Two of one protocol are one entry, so that no reader takes them for each other's."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for dataset, metric in [*map(_bpb, bpb_of_model(card)), *_benchmarks(card)]:
        task = {"type": "text-generation", "name": "Text generation"}
        entry = found.setdefault(tuple(dataset.values()), {"task": task, "dataset": dataset, "metrics": []})
        entry["metrics"].append(metric)
    return list(found.values())


def _bpb(score: Score) -> tuple[dict[str, str], dict[str, Any]]:
    dataset = {"type": "text", "name": f"held-out text, protocol {score.protocol}", "config": str(score.protocol)}
    return dataset, {"type": "bits_per_byte", "name": score.name, "value": score.value, "verified": False}


def _benchmarks(card: Published) -> list[tuple[dict[str, str], dict[str, Any]]]:
    return [
        (_dataset(benchmark, row), _metric(benchmark, row))
        for benchmark in benchmarks_of_model(card)
        for row in [*benchmark.means, *benchmark.tasks]
    ]


def _dataset(benchmark: Benchmark, row: dict[str, Any]) -> dict[str, str]:
    """As the Hub knows it where it came from there. The protocol, which tells two figures apart, is the configuration."""
    known = BUILT_IN.get(task_name(row)) if benchmark.suite == "chat" else None
    from_hub = known is not None and row.get("revision") is not None
    return {
        "type": str(known.source.id) if known and from_hub else benchmark.suite,
        "name": f"{SUITES[benchmark.suite]}, protocol {row['protocol']}",
        "config": str(row["protocol"]),
    } | ({"split": known.source.split, "revision": row["revision"]} if known and from_hub else {})


def _metric(benchmark: Benchmark, row: dict[str, Any]) -> dict[str, Any]:
    metric = {"type": _type(benchmark, row), "name": row["name"], "value": row["value"]}
    args = {key: row[key] for key in ("low", "high", "stderr") if row.get(key) is not None}
    return metric | ({"args": args} if args else {}) | {"verified": False}


def _type(benchmark: Benchmark, row: dict[str, Any]) -> str:
    if any(row is mean for mean in benchmark.means):
        return "centred_accuracy"
    return task_name(row).partition("/")[2] or "accuracy" if benchmark.suite == "lm_eval" else "accuracy"


# The card's metadata, which the Hub indexes: YAML between two lines of three dashes.


def front_matter(card: Published) -> str:
    text = yaml.dump(metadata(card), Dumper=_Dumper, sort_keys=False, width=float("inf"))
    return f"---\n{text}---\n"


def metadata(card: Published) -> dict[str, Any]:
    """Return what is not known is left out: an empty list would be shown as one."""
    hub, base = card.recipe("hub"), card.parent.repo_id if card.parent else None
    results = model_index(card)
    fields = {
        "license": hub.get("license"),
        "language": hub.get("language"),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": _tags(card),
        "datasets": card.datasets,
        "base_model": base,
        "base_model_relation": "finetune" if base else None,
        "model-index": [{"name": card.name, "results": results}] if results else None,
    }
    return {name: value for name, value in fields.items() if value}


def _tags(card: Published) -> list[str]:
    own = card.recipe("run").get("tags") or []
    tags = ["tandem", *(["conversational"] if card.is_chat else []), *(["custom_code"] if card.own_code else []), *own]
    return list(dict.fromkeys(map(str, tags)))


class _Dumper(yaml.SafeDumper):
    """Quotes text that some reader of YAML might take for something else: 1e5 is text to PyYAML and a number to the Hub."""


def _quoted(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if re.fullmatch(r"[A-Za-z][A-Za-z0-9 _./-]*", text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


# What it takes to train the model again: code, command, data and tokenizer by identity, and the files with the
# rest.


def reproduce_text(card: Published) -> str:
    """Return each part as far as the run recorded it."""
    parts = [*_lines(card), _command(card), filled_table(DATA_HEAD, data_rows(card.data)), *_private(card)]
    return "\n".join(part for part in [*parts, tokenizer_text(card.data), _files(card)] if part)


def _lines(card: Published) -> list[str]:
    git, versions = card.data.manifest.get("git") or {}, card.data.manifest.get("versions") or {}
    lines = []
    if git.get("commit"):
        changed = git.get("changed_files")
        unknown = f", with {number(changed)} files changed against it, which are not published" if changed else ""
        lines.append(f"Code: Tandem at commit {cell(git['commit'])}{unknown}.\n")
    if versions:
        versions_text = ", ".join(f"{cell(name)} {cell(version)}" for name, version in versions.items())
        lines.append(f"Versions: {versions_text}.\n")
    return [*lines, _weights(card)]


def _command(card: Published) -> str:
    if not card.data.run.recipe.exists():
        return ""
    processes = (card.data.manifest.get("shape") or {}).get("processes") or 1
    launch = "accelerate launch" + (f" --num_processes {processes}" if processes > 1 else "")
    stage = "sft" if card.is_chat else "pretrain"
    lines = [
        f"hf download {card.repo_id} recipe.yaml --local-dir .",
        " ".join([f"{launch} pipeline/{stage}.py recipe.yaml", *_overrides(card)]),
    ]
    return code("\n".join(lines), "bash")


def _overrides(card: Published) -> list[str]:
    """In the place of what only the publisher has: the parent's folder, and the right to write to the repository."""
    own = ["hub.id=null"] if card.recipe("hub").get("id") else []
    start, parent = card.recipe("model").get("start_from"), card.parent.repo_id if card.parent else None
    if not start or parent in (None, start):
        return own
    names = ["model.start_from"] + (["tokenizer.path"] if card.recipe("tokenizer").get("path") == start else [])
    return [*(f"{name}={parent}" for name in names), *own]


def _weights(card: Published) -> str:
    if (parent := card.parent) is None:
        return ""
    begun = (card.data.manifest.get("inputs") or {}).get("start_from") or {}
    sums = [f"{cell(name)} {cell(value)}" for name, value in begun.items() if name != "from"]
    at = f" at commit {cell(parent.commit)}" if parent.commit else ""
    where = "" if parent.repo_id else ", not published"
    hashes = f"; sha256 of {', '.join(sums)}" if sums else ""
    return f"Weights it began with: {cell(parent.repo_id or parent.name)}{at}{where}{hashes}.\n"


def _private(card: Published) -> list[str]:
    """Text that is not to be fetched anywhere."""
    sources = (card.data.manifest.get("inputs") or {}).get("sources") or []
    local = [cell(source.get("name")) for source in sources if not source.get("id")]
    made = [cell(source.get("name")) for source in sources if str(source.get("id")).startswith("tandem:")]
    lines = []
    if local:
        lines.append(f"Not published: the files of {', '.join(local)}; run_manifest.json has their sha256.\n")
    if made:
        lines.append(f"Made by Tandem on the machine that trains: {', '.join(made)}.\n")
    return lines


def _files(card: Published) -> str:
    run = card.data.run
    records = {
        "recipe.yaml": (run.recipe, "the run's recipe with every key"),
        "run_manifest.json": (run.manifest, "versions, code, data and tokenizer by hash, results"),
        "evals.json": (run.evals, "every evaluation"),
        "report.md": (run.report / "report.md", "the run's report"),
        "report.html": (run.report / "report.html", "the same with interactive plots, to be downloaded"),
    }
    lines = [f"- [{name}]({name}): {what}" for name, (path, what) in records.items() if path.exists()]
    return "\n".join(["In this repository:\n", *lines]) + "\n" if lines else ""


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
    """Return the step and the rows, each with how it was chosen: of the training, else of an evaluation of this very model."""
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
    # Two dollar signs would begin a formula on the Hub.
    prompt = cell(row["prompt"]).replace("$", "&#36;")
    text = row["text"].replace("\r\n", "\n")
    if len(text) > SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS]} [... {len(text) - SHOWN_CHARS:,} characters more]"
    if not text.strip():
        return f"{asked}: {prompt}\n\nIt ended at once.\n"
    lines = (_wrapped(line) for line in visible(text).split("\n"))
    return f"{asked}: {prompt}\n\n" + code("\n".join(lines), "text")


def _wrapped(line: str) -> str:
    """Return every character stays; a block of code does not wrap by itself."""
    return "\n".join(textwrap.wrap(line, COLUMNS, drop_whitespace=False, replace_whitespace=False, expand_tabs=False))


# How the model was trained, and what that took.


def training_text(card: Published) -> str:
    """Facts, costs, and the run's curves where its report drew them."""
    data, manifest = card.data, card.data.manifest
    rows: list[list[Any]] = [
        ["recipe", manifest.get("recipe_name")],
        ["text", _text_read(card)],
        ["optimizer steps", number(card.step)],
        ["tokens (row positions)", number(data.tokens()) if data.tokens() else None],
        ["tokens of a step", number((manifest.get("inputs") or {}).get("batch_tokens"))],
        ["optimizer", card.recipe("optimizer").get("type")],
        ["precision and hardware", trained_on(data)],
        *spent(data),
        ["energy of the GPUs, kWh", _sampled_energy(card)],
        ["ended", date(manifest.get("ended")) if card.finished else None],
        ["training loss at the end, smoothed, nats per token", number(data.last("train/loss_ema"), 5)],
    ]
    picture = card.finished and (data.run.report / "curves.png").exists()
    return table(["what", "value"], [row for row in rows if row[1] is not None]) + (
        "\n![The run's curves over its steps](curves.png)\n" if picture else ""
    )


def _sampled_energy(card: Published) -> str | None:
    """Return that of a run on several hosts, which logs none; while it goes on, the samples are already those of later steps."""
    logged = card.data.last("perf/energy_kwh")
    return number(total_kwh(card.data)) if logged is None and card.finished else None


def _text_read(card: Published) -> str | None:
    """Return the sources, each with its share of the rows where there are several."""
    shares = card.data.manifest.get("shares") or {}
    named = [source.get("name") for source in (card.data.manifest.get("inputs") or {}).get("sources") or []]
    texts = []
    for place, source in enumerate(card.sources):
        files = source.get("files")
        listed = files if isinstance(files, list) else [files]
        text = str(source.get("id") or ", ".join(Path(str(file)).name for file in listed))
        text = Path(text).name if text.startswith((".", "/", "~")) else text  # a folder on the machine that trained
        share = (shares.get(named[place]) or {}).get("share") if place < len(named) else None
        texts.append(f"{text} ({percent(share)})" if share is not None and len(card.sources) > 1 else text)
    return ", ".join(texts) or None


# How to use the published model: with transformers alone, and with the commands of this program.

QUESTION = "What is the capital of France?"
TEXT = "The capital of France is"


def use_text(card: Published) -> str:
    why = "The repository carries the model's code, hence `trust_remote_code=True`.\n\n" if card.own_code else ""
    return (
        f"With transformers alone:\n\n{why}{code(_example(card), 'python')}\n"
        f"With Tandem, the program that trained it, in a clone of it:\n\n{code(_commands(card), 'bash')}"
    )


def _example(card: Published) -> str:
    branch = f', revision="{card.branch}"' if card.branch else ""
    trust = ", trust_remote_code=True" if card.own_code else ""
    if card.is_chat:
        inputs = [
            f'messages = [{{"role": "user", "content": "{QUESTION}"}}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
        ]
    else:
        inputs = [
            "# As in training, a text begins with BOS, which the tokenizer does not add by itself.",
            f'text = (tokenizer.bos_token or "") + "{TEXT}"',
            'inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")',
        ]
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{card.repo_id}"{branch})',
        f'model = AutoModelForCausalLM.from_pretrained("{card.repo_id}"{branch}{trust})',
        *inputs,
        "outputs = model.generate(**inputs, max_new_tokens=64)",
        'print(tokenizer.decode(outputs[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
    ]
    return "\n".join(lines)


def _commands(card: Published) -> str:
    name = card.repo_id
    at = f"{name}@{card.branch}" if card.branch else name
    revision = f" --revision {card.branch}" if card.branch else ""
    talk = (
        ["# Talk to it, in the terminal or a browser; serve it to OpenAI clients"]
        if card.is_chat
        else ["# Let it continue a text, in the terminal or a browser"]
    )
    talk += [
        f"python -m pipeline.chat {at}" + ("" if card.is_chat else f' -p "{TEXT}"'),
        f"python -m pipeline.chat {at} --web",
    ]
    talk += [f"python -m pipeline.chat.serve {at}"] if card.is_chat else []
    further = [
        "# Score it: bits per byte of a text of yours, benchmarks",
        f"python -m pipeline.evals {name} bpb --text my.txt{revision}",
        f"python -m pipeline.evals {name} {'chat' if card.is_chat else 'core'}{revision}",
        "# Fine-tune it on conversations of yours (rows of messages)",
        "accelerate launch pipeline/sft.py recipes/quickstart_sft.yaml \\",
        f"    model.start_from={name} 'data.sources=[{{files: my.jsonl}}]'",
        "# Fetch the whole run: model, recipe, results",
        f"python -m pipeline.hub pull {name}{revision}",
    ]
    return "\n".join([*talk, *further])


# The card as a page: which sections it has and in which order.

# Each function gives Markdown, "" when there is nothing to say.
SECTIONS: list[tuple[str, Callable[[Published], str]]] = [
    ("Use", use_text),
    ("Samples", samples_text),
    ("Training", training_text),
    ("Bits per byte", bpb_text),
    ("Benchmarks", benchmarks_text),
    ("Limits", limits_text),
    ("License", license_text),
    ("Reproduce", reproduce_text),
]


def model_card(data: RunData, *, repo_id: str, model: Path | None = None, step: int | None = None) -> str:
    """README.md of the repository: metadata for the Hub's index, then Markdown. What the run does not record is left out.

    model, step: of a checkpoint's model; default the finished one.
    """
    card = published(data, repo_id=repo_id, model=model, step=step)
    texts = {title: text(card) for title, text in SECTIONS}
    parts = [front_matter(card), f"# {cell(card.name)}\n", about_text(card)]
    return "\n".join([*parts, *(f"## {title}\n\n{text}" for title, text in texts.items() if text)])


# The model card, README.md of a published repository: every statement comes from the run's own files.

__all__ = ["model_card"]
