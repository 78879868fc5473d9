"""Write docs/code.md, the tree of pipeline/ with a line for each module: `python docs/code_page.py`."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pipeline"
PAGE = ROOT / "docs" / "code.md"
# In the order in which data pass them; a room imports rooms above it. tests/test_architecture.py holds the order.
ROOMS = {
    "process": "what any program needs: errors and exit statuses, files, network, child processes",
    "run_dir": "the run directory, whose file names no other room knows",
    "hardware": "what the processor and the accelerators can do",
    "recipe": "YAML and overrides become one typed recipe, with every default that follows from others",
    "monitor": "samples of the GPUs and the host",
    "metrics.py": "the registry of every number that is logged",
    "sources": "files and datasets become verified documents and conversations",
    "tokenizer": "text and chats become token ids",
    "data": "token ids become sealed shards, and rows that are a function of the step",
    "model": "the model; its files travel with every checkpoint and import nothing of ours",
    "generation": "texts that a model writes",
    "evals": "bits per byte, CORE, chat tasks, lm-evaluation-harness",
    "training": "the Trainer, optimizers, schedules, checkpoints, guards",
    "callbacks": "what acts on Trainer's events: console, metrics file, samples, benchmarks, trackers",
    "report": "a report of a run, from its directory alone",
    "hub": "publish, restore, export",
    "plan": "the plan of a run: parameters, steps, memory, disk, hours",
    "run": "the parts of a run: checks before step 1, opening, rows, end",
    "train.py": "the life of a run, for both stages: from its recipe to the finished model",
    "stage.py": "the command line of both stages",
    "preflight": "the former name of the command `python -m pipeline.plan`",
    "chat": "talk to a model: terminal, page, server",
    "launch": "start an entry on one or many processes; the command `tandem`",
    "sweep.py": "what other values do to a recipe",
    "pretrain.py": "the entry of stage 1",
    "sft.py": "the entry of stage 2",
    "contrib": "what only some runs need; the core imports it where a recipe's key or an option asks",
}
HEAD = """# The code, a line for each module

Written by `python docs/code_page.py` from the first sentence of each module. The rooms stand in the order in which data
pass them, and a room imports only rooms above it. Where to change what: [README](../README.md); how to add one of a
kind: [contributing](../CONTRIBUTING.md).
"""


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring; a full stop within a name ends none."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].rstrip(".:")


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for room, what in ROOMS.items():
        if not (PACKAGE / room).exists():
            continue
        lines += [f"## {room}", "", f"{what[0].upper()}{what[1:]}.", ""]
        if (PACKAGE / room).is_file():
            continue
        for path in sorted((PACKAGE / room).rglob("*.py")):
            sentence = first_sentence(path)
            if sentence:
                lines.append(f"- `{path.relative_to(PACKAGE)}`: {sentence}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
