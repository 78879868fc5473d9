"""The model card, README.md of a published repository: every statement comes from the run's own files.

`card.md.jinja` is the page; this module reads what is on it, and writes the metadata as huggingface_hub's
ModelCardData.
"""

import math
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from pipeline.metrics import METRICS, SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS
from pipeline.process.storage import read_json
from pipeline.recipe.sizes import LLAMA_NAMES
from pipeline.report.benchmarks import protocols_text, scores_text, suite_name
from pipeline.report.cost import spent
from pipeline.report.markdown import cell, code, date, facts_table, filled_table, joined, number, visible
from pipeline.report.run_data import RunData
from pipeline.report.scores import Benchmark, Score, series_of, task_name
from pipeline.report.sections import DATA_HEAD, data_rows, tokenizer_text
from pipeline.run_dir.checkpoints import SEAL, read_seal
from pipeline.run_dir.parents import name_of_model

HUB = "https://huggingface.co"
SIZES = {
    "n_layer": "{} layers", "n_embd": "width {}", "n_head": "{} heads", "n_positions": "{} positions",
    "vocab_size": "{} token ids",
}  # fmt: skip
BPB_TEXTS = {
    VAL_BPB: "packed into rows",
    VAL_BPB_DOCUMENTS: "whole documents",
    SFT_BPB: "what the assistant says",
}
MOST_SAMPLES = 5
MOST_SAMPLE_CHARS = 600


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


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The model that another one began with: its run's name or Hub id, and where it is published, if known."""

    name: str
    repo_id: str | None = None
    commit: str | None = None


def parent_of_model(data: RunData) -> Parent | None:
    """Return the run or Hub model whose weights this one began with; None for one trained from scratch."""
    begun = data.fact("inputs.start_from") or {}
    start = begun.get("from")
    if not start:
        return None
    if run := data.parent:
        at = run.manifest.get("hub") or run.manifest.get("pulled_from") or {}
        return Parent(name=run.name, repo_id=at.get("id"), commit=at.get("commit"))
    is_from_hub = set(begun) <= {"from", "commit"}  # of a folder the weights' hashes are recorded
    if is_from_hub and is_repo_id(start) and not Path(start).exists():
        return Parent(name=start, repo_id=start, commit=begun.get("commit"))
    return Parent(name=name_of_model(Path(start)))


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
    def has_code(self) -> bool:
        """Return whether the repository carries the model's code, because transformers does not have it."""
        return bool(self.config.get("auto_map"))

    @property
    def is_adapter(self) -> bool:
        return "adapter" in self.config

    @property
    def parameters(self) -> int | None:
        return self.data.fact("model.parameters")

    @property
    def datasets(self) -> list[str]:
        """Return the sources that are data sets of the Hub."""
        ids = [source.get("id") for source in self.recipe("data").get("sources") or []]
        return list(dict.fromkeys(name for name in ids if is_repo_id(name)))

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
        sizes = {words: self.size(name) for name, words in SIZES.items()}
        return [words.format(number(size)) for words, size in sizes.items() if size]

    @property
    def made_from(self) -> list[str]:
        """Return links to the data sets and the model that have terms of their own."""
        links = [f"[{cell(name)}]({HUB}/datasets/{name})" for name in self.datasets]
        if self.parent and self.parent.repo_id:
            links.append(link(self.parent.repo_id))
        return links

    @property
    def records(self) -> dict[str, str]:
        """Return the files of the run that are published with the model, and what they hold."""
        run = self.data.run
        files = {
            run.recipe: "the run's recipe with every key",
            run.manifest: "versions, code, data and tokenizer by hash, results",
            run.evals: "every evaluation, with its command",
            run.report / "report.md": "the run's report",
            run.report / "report.html": "the same with interactive plots, to be downloaded",
        }
        return {path.name: meaning for path, meaning in files.items() if path.exists()}

    def is_scored(self, *, subject: str | None, step: int | None) -> bool:
        """Return whether a score of that subject and step is of this model."""
        if subject == "model/":
            return self.finished and step in (None, self.step)
        return step == self.step


def bpb_of_model(card: Published) -> list[Score]:
    """Return the newest score of each metric and protocol, of the published files before others; none without a
    protocol, which nobody could compare."""
    # A later score of the same metric and protocol takes the place of an earlier one.
    own: dict[tuple[str, str], Score] = {}
    for score in sorted(card.data.scores(), key=lambda score: score.of == "model/"):
        is_scored = card.is_scored(subject=score.of, step=score.step)
        if is_scored and score.protocol is not None and math.isfinite(score.value):
            own[score.name, score.protocol] = score
    return list(own.values())


def bpb_text(card: Published) -> str:
    scores = bpb_of_model(card)
    if not scores:
        return ""
    rows = [[s.name, BPB_TEXTS.get(s.name), f"{s.value:.6f}", s.protocol] for s in scores]
    intro = (
        f"{str(METRICS[VAL_BPB].better).capitalize()} is better. A protocol names what was scored and how: compare "
        "figures of equal protocol only.\n\n"
    )
    shown = filled_table(["metric", "of held-out text", "value", "protocol"], rows)
    return joined(intro + shown, protocols_text(scores))


def benchmarks_of_model(card: Published) -> list[Benchmark]:
    """Return the newest of each series of equal measurements of this model; of the published files themselves where
    those were scored."""
    # The Hub's index cannot hold NaN and infinities: such a row is left out, and a suite without another row.
    own = []
    for benchmark in card.data.benchmarks():
        finite = replace(benchmark, means=_finite(benchmark.means), tasks=_finite(benchmark.tasks))
        is_scored = card.is_scored(subject=benchmark.subject, step=benchmark.step)
        if is_scored and finite.rows:
            own.append(finite)
    own.sort(key=lambda benchmark: (benchmark.subject == "model/", *benchmark.age))
    return [series[-1] for series in series_of(own)]


def _finite(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without NaN and infinities, which the Hub's index cannot hold."""
    return [row for row in rows if math.isfinite(row["value"])]


def benchmarks_text(card: Published) -> str:
    """Return the same tables as in the report."""
    benchmarks = benchmarks_of_model(card)
    if not benchmarks:
        return ""
    parts = ["Compare figures of equal protocol only. [evals.json](evals.json) has the command of each.\n"]
    for benchmark in benchmarks:
        part = f", first {benchmark.first_items:,} items of each task" if benchmark.first_items else ""
        parts += [f"### {suite_name(benchmark)}{part}\n", scores_text(benchmark), benchmark.protocols_text()]
        protocols = benchmark.protocols()
        if len(protocols) == 1:
            parts.append(f"Protocol {cell(protocols[0])}.\n")
    return joined(*parts)


def eval_results(card: Published) -> list[EvalResult]:
    """Return what model-index holds. The protocol, which tells two figures of one metric apart, is the
    configuration."""
    found = []
    for score in bpb_of_model(card):
        row = {"name": score.name, "value": score.value, "protocol": score.protocol}
        found.append(_result(row, dataset="held-out text", kind="text", metric="bits_per_byte"))
    for benchmark in benchmarks_of_model(card):
        for row in benchmark.rows:
            # lm_eval/<task>/<metric> names its metric itself.
            metric = "centred_accuracy" if row in benchmark.means else "accuracy"
            if benchmark.suite == "lm_eval":
                metric = task_name(row).partition("/")[2] or metric
            found.append(_result(row, dataset=suite_name(benchmark), kind=benchmark.suite, metric=metric))
    return found


def _result(row: dict[str, Any], *, dataset: str, kind: str, metric: str) -> EvalResult:
    interval = {key: row[key] for key in ("low", "high", "stderr") if row.get(key) is not None}
    return EvalResult(
        task_type="text-generation",
        task_name="Text generation",
        dataset_type=kind,
        dataset_name=f"{dataset}, protocol {row['protocol']}",
        dataset_config=str(row["protocol"]),
        metric_type=metric,
        metric_name=row["name"],
        metric_value=row["value"],
        metric_args=interval or None,
        verified=False,
    )


def metadata(card: Published) -> str:
    """Return the YAML that the Hub indexes. Unknown fields are left out: an empty list would be shown as one."""
    results, base = eval_results(card), card.parent.repo_id if card.parent else None
    relation = "adapter" if card.is_adapter else "finetune"
    tags = ["tandem"]
    if card.is_adapter:
        tags.append("lora")
    if card.is_chat:
        tags.append("conversational")
    if card.has_code:
        tags.append("custom_code")
    tags += map(str, card.recipe("run").get("tags") or [])
    data = ModelCardData(
        license=card.recipe("hub").get("license"),
        language=card.recipe("hub").get("language") or None,
        library_name="peft" if card.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(tags)),
        datasets=card.datasets or None,
        base_model=base,
        base_model_relation=relation if base else None,
        model_name=card.name if results else None,
        eval_results=results or None,
    )
    return yaml.safe_dump(data.to_dict(), sort_keys=False)  # ASCII, unlike to_yaml()


def samples_text(card: Published) -> str:
    """Return the first of the fixed prompts with what was written last; "" for a run that sampled nothing."""
    samples = [row for row in card.data.samples if "prompt" in row and "text" in row]
    if not samples:
        return ""
    step = max(row.get("step", 0) for row in samples)
    newest = {row["prompt"]: row["text"] for row in samples if row.get("step", 0) == step}
    asked = "Asked" if card.is_chat else "Prompt"
    parts = [f"The run's fixed prompts in their order, not selected, written at step {number(step)}.\n"]
    for prompt, text in islice(newest.items(), MOST_SAMPLES):
        if len(text) > MOST_SAMPLE_CHARS:
            text = f"{text[:MOST_SAMPLE_CHARS]} [... {len(text) - MOST_SAMPLE_CHARS:,} characters more]"
        answer = code(visible(text), "text") if text.strip() else "It ended at once.\n"
        parts += [f"{asked}: {no_formula(cell(prompt))}\n", answer]
    return "\n".join(parts)


def training_text(card: Published) -> str:
    """Return the table of facts and costs, and the run's curves where its report drew them."""
    data, manifest = card.data, card.data.manifest
    sources = [str(source.get("name")) for source in data.fact("inputs.sources") or []]
    rows: list[list[Any]] = [
        ["recipe", manifest.get("recipe_name")],
        ["text", ", ".join(sources) or None],
        ["optimizer steps", number(card.step)],
        ["tokens (row positions)", number(data.tokens() or None)],
        ["tokens of a step", number(data.fact("inputs.batch_tokens"))],
        ["optimizer", card.recipe("optimizer").get("type")],
        ["precision and hardware", data.trained_on],
        *spent(data),
        ["ended", date(manifest.get("ended")) if card.finished else None],
        ["training loss at the end, smoothed, nats per token", number(data.last("train/loss_ema"), 5)],
    ]
    picture = card.finished and (data.run.report / "curves.png").exists()
    return joined(facts_table("what", rows), "![The run's curves over its steps](curves.png)\n" if picture else "")


def config_of(folder: Path) -> dict[str, Any]:
    """Return config.json of a model's folder; of an adapter's that of its base, with `adapter`: adapter_config.json."""
    if (folder / "config.json").exists():
        return read_json(folder / "config.json")
    from transformers import PreTrainedConfig

    adapter = read_json(folder / "adapter_config.json")
    base, revision = adapter["base_model_name_or_path"], adapter.get("revision")
    return PreTrainedConfig.get_config_dict(base, revision=revision)[0] | {"adapter": adapter}


def model_card(data: RunData, *, repo_id: str, model: Path | None = None, step: int | None = None) -> str:
    """Return README.md of the repository: metadata, then Markdown. What the run does not record is left out.

    model, step: the folder of a model or an adapter and the step of its model; default the run's finished model.
    """
    folder = model or data.run.model
    finished = folder == data.run.model
    if step is None:
        step = read_seal(folder)["step"] if (folder / SEAL).exists() else data.step()
    card = Published(
        data=data if finished else data.up_to(step),
        repo_id=repo_id,
        config=config_of(folder),
        step=step,
        finished=finished,
        parent=parent_of_model(data),
    )
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
