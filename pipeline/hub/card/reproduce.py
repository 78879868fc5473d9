"""What it takes to train the model again: code, command, data and tokenizer by identity, and the files with the rest."""

from pipeline.hub.card.published import Published
from pipeline.report.inputs import tokenizer_text
from pipeline.report.metadata import DATA_HEAD, data_rows
from pipeline.report.tables import cell, code, filled_table, number


def reproduce_text(card: Published) -> str:
    """Each part as far as the run recorded it."""
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
        told = ", ".join(f"{cell(name)} {cell(version)}" for name, version in versions.items())
        lines.append(f"Versions: {told}.\n")
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
    told = {
        "recipe.yaml": (run.recipe, "the run's recipe with every key"),
        "run_manifest.json": (run.manifest, "versions, code, data and tokenizer by hash, results"),
        "evals.json": (run.evals, "every evaluation"),
        "report.md": (run.report / "report.md", "the run's report"),
        "report.html": (run.report / "report.html", "the same with interactive plots, to be downloaded"),
    }
    lines = [f"- [{name}]({name}): {what}" for name, (path, what) in told.items() if path.exists()]
    return "\n".join(["In this repository:\n", *lines]) + "\n" if lines else ""
