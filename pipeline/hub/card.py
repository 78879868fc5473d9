"""The model card: what the model is, how it came to be, how to load it. Every statement comes from the run's own files."""

from pathlib import Path
from typing import Any

import yaml

from pipeline.artifacts.atomic import read_json
from pipeline.hub.card_benchmarks import benchmarks_of_model, benchmarks_section, index_entries
from pipeline.report.run_data import RunData, Score
from pipeline.report.tables import code, number, table


def model_card(data: RunData, *, repo_id: str, model: Path | None = None, step: int | None = None) -> str:
    """README.md of the repository: metadata for the Hub's index, then Markdown. What the run does not record is left out.

    model, step: of a checkpoint's model; default the finished one.
    """
    config = read_json((model or data.run.model) / "config.json")
    own_code = bool(config.get("auto_map"))
    step = data.step() if step is None else step
    benchmarks = benchmarks_of_model(data, step=step, finished=model in (None, data.run.model))
    results = [*(_index_entry(score) for score in _last_scores(data)), *index_entries(benchmarks)]
    front = yaml.safe_dump(_metadata(data, repo_id, own_code, results), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{front}---\n",
        f"# {repo_id.split('/')[-1]}\n",
        _about(data, config),
        "## Use\n\n" + _use(data, repo_id, own_code),
        "## Training\n\n" + table(["what", "value"], _training(data, step)) + _picture(data),
        _scores(data),
        benchmarks_section(benchmarks, repo_id=repo_id),
        "## Files\n\n`recipe.yaml` is the resolved recipe of the run and can be run again; `run_manifest.json` holds versions, "
        "code state, data and tokenizer identities"
        + ("; `evals.json` holds every evaluation" if data.evals else "")
        + ("; `report.md` and `report.html` tell the run.\n" if (data.run.report / "report.md").exists() else ".\n"),
        "## Limits\n\nA small language model trained on the text named above: it states falsehoods fluently, repeats the biases "
        "of its text, and was not made safe for any use with consequences for people.\n",
    ]
    return "\n".join(section for section in sections if section)


def _picture(data: RunData) -> str:
    there = (data.run.report / "curves.png").exists()
    return "\n![the run's curves over its steps](curves.png)\n" if there else ""


def _metadata(data: RunData, repo_id: str, own_code: bool, results: list[dict[str, Any]]) -> dict[str, Any]:
    tags = ["tandem", *(["conversational"] if data.stage == "sft" else []), *(["custom_code"] if own_code else [])]
    tags += [tag for tag in (data.recipe.get("run") or {}).get("tags") or [] if tag not in tags]
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    datasets = [s["id"] for s in _sources(data) if s.get("id") and not str(s["id"]).startswith("tandem:")]
    if datasets:
        front["datasets"] = list(dict.fromkeys(datasets))
    start = (data.recipe.get("model") or {}).get("start_from")
    if start and start.count("/") == 1 and not Path(start).exists() and not start.startswith((".", "/", "~", "runs/")):
        front["base_model"] = start
    if results:
        front["model-index"] = [{"name": repo_id.split("/")[-1], "results": results}]
    return front


def _index_entry(score: Score) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation", "name": "Language modeling"},
        "dataset": {"type": "text", "name": f"held-out text, protocol {score.protocol}"},
        "metrics": [{"type": "bits_per_byte", "name": score.name, "value": round(score.value, 6), "verified": False}],
    }


def _sources(data: RunData) -> list[dict[str, Any]]:
    return (data.recipe.get("data") or {}).get("sources") or []


def _last_scores(data: RunData) -> list[Score]:
    """The newest figure per metric and protocol; one without a protocol says nothing to a stranger."""
    last = {(score.name, score.protocol): score for score in data.scores() if score.protocol is not None}
    return list(last.values())


def _about(data: RunData, config: dict[str, Any]) -> str:
    kind = (
        "chat model, fine-tuned on conversations,"
        if data.stage == "sft"
        else "base language model, trained on raw text,"
    )
    note = data.manifest.get("note") or (data.recipe.get("run") or {}).get("note")
    finished = "" if data.manifest.get("status") == "finished" else " The run had not finished when this was uploaded."
    return f"A {config.get('model_type')} {kind} with Tandem (run `{data.name}`).{finished}\n" + (
        f"\n{note}\n" if note else ""
    )


def _use(data: RunData, repo_id: str, own_code: bool) -> str:
    extra = ", trust_remote_code=True" if own_code else ""
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")',
        f'model = AutoModelForCausalLM.from_pretrained("{repo_id}"{extra})',
    ]
    if data.stage == "sft":
        lines += [
            'messages = [{"role": "user", "content": "What is the capital of France?"}]',
            'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
        ]
    else:
        # The training rows begin with BOS, which the tokenizer does not add on its own.
        lines += [
            'inputs = tokenizer((tokenizer.bos_token or "") + "The capital of France is", return_tensors="pt", add_special_tokens=False)'
        ]
    lines += [
        "outputs = model.generate(**inputs, max_new_tokens=64)",
        'print(tokenizer.decode(outputs[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
    ]
    why = "The repository carries the model's code, hence `trust_remote_code=True`.\n\n" if own_code else ""
    return why + code("\n".join(lines), "python")


def _training(data: RunData, step: int) -> list[list[Any]]:
    texts = [str(s.get("id") or s.get("files")) for s in _sources(data)]
    git = data.manifest.get("git") or {}
    rows: list[list[Any]] = [
        ["stage", data.stage],
        ["text", ", ".join(Path(text).name if Path(text).is_absolute() else text for text in texts) or None],
        ["optimizer steps", number(step)],
        ["tokens (row positions)", number(data.tokens())],
        ["optimizer", (data.recipe.get("optimizer") or {}).get("type")],
        ["last train/loss_ema", number(data.last("train/loss_ema"), 5)],
        ["code", f"{git['commit'][:12]}, {git.get('changed_files', 0)} files changed" if git.get("commit") else None],
        *(
            [name, version]
            for name, version in (data.manifest.get("versions") or {}).items()
            if name in ("torch", "transformers")
        ),
    ]
    return [row for row in rows if row[1] is not None]


def _scores(data: RunData) -> str:
    rows = [[s.name, f"{s.value:.6f}", s.step, s.protocol] for s in _last_scores(data)]
    return (
        "## Scores\n\nBits per byte of held-out text, lower is better.\n\n"
        + table(["metric", "value", "step", "protocol"], rows)
        if rows
        else ""
    )
