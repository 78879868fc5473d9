"""The first screen of a run's report: is it healthy, what did it reach and take, two samples, and the next commands."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS, VAL_LOSS
from pipeline.process.progress import short_count
from pipeline.report.cost import paid, wall_s
from pipeline.report.curves import finite, trained_on
from pipeline.report.diagnosis import verdict
from pipeline.report.diagnosis_rules import diagnose
from pipeline.report.run_data import (
    MEANS,
    Benchmark,
    RunData,
    Score,
    cell,
    code,
    filled_table,
    joined,
    number,
    series_of,
    suite_of,
    table,
)
from pipeline.report.run_metrics import RunMetrics, median
from pipeline.report.samples import texts_of

LONGEST_TEXT = 220  # characters of a prompt or an answer on the first screen; the section on samples has more
SHOWN_SAMPLES = 2
STAGES = {"pretrain": "Pretraining", "sft": "Chat SFT"}
Level = Literal["good", "note", "warn", "bad"]


@dataclass(frozen=True)
class Notice:
    """A sentence in Markdown on the state of the run."""

    level: Level
    text: str


@dataclass(frozen=True)
class Figure:
    """One number; against: what it is compared with; detail: what it depends on."""

    label: str
    value: str
    against: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Sample:
    """A prompt, and (whose, answer) from the first model to the last."""

    prompt: str
    answers: list[tuple[str, str]]


@dataclass(frozen=True)
class Command:
    purpose: str
    line: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    about: str
    notices: list[Notice]
    figures: list[Figure]
    samples: list[Sample]
    commands: list[Command]


def summary_of(data: RunData) -> Summary:
    figures = [_benchmark(data), _validation(data), _time(data), _cost(data) or _speed(data)]
    return Summary(
        about=_about(data),
        notices=_notices(data),
        figures=[figure for figure in figures if figure is not None],
        samples=_samples(data),
        commands=_commands(data),
    )


def summary_text(summary: Summary, *, picture: str = "") -> str:
    """Return the same in Markdown. picture: what is put where the page has the loss curve."""
    rows = [[figure.label, figure.value, figure.against or None, figure.detail or None] for figure in summary.figures]
    names = list(dict.fromkeys(name for sample in summary.samples for name, _ in sample.answers))
    samples = [[s.prompt, *(dict(s.answers).get(name) for name in names)] for s in summary.samples]
    commands = "\n".join(f"{command.line}  # {command.purpose}" for command in summary.commands)
    return joined(
        f"{cell(summary.about)}\n" if summary.about else "",
        *(f"{notice.text}\n" for notice in summary.notices),
        filled_table(["result", "value", "against", "of"], rows),
        picture,
        table(["prompt", *names], samples),
        code(commands, "bash") if commands else "",
    )


def _about(data: RunData) -> str:
    base, kind = _base_name(data), STAGES.get(str(data.stage))
    parameters = data.fact("model.parameters")
    facts = [
        f"{kind} of {base}" if kind and base else kind,
        f"{short_count(parameters)} parameters" if parameters else None,
        trained_on(data),
        str(data.manifest.get("created") or "")[:10] or None,
        data.manifest.get("note"),
    ]
    return " \u00b7 ".join(shortened(str(fact)) for fact in facts if fact)


def _base_name(data: RunData) -> str | None:
    """Return the run or model whose weights this one began with."""
    if base := data.parent:
        return base.name
    start = data.setting("model.start_from")
    return str(start) if start else None


def _notices(data: RunData) -> list[Notice]:
    found = []
    if data.failure:
        why = f"({cell(data.failure.get('class'))}): {cell(shortened(str(data.failure.get('message')), 400))}"
        found.append(Notice("bad", f"**Stopped** with status {data.failure.get('status')} {why}"))
    elif data.is_training:
        left = data.last("perf/eta_s")
        of = f" of {number(data.max_steps())}" if data.max_steps() else ""
        about = f", about {duration(left)} left" if left else ""
        found.append(Notice("note", f"**Training**: step {number(data.step())}{of}{about}."))
    elif data.manifest.get("status") != "finished":
        status = data.status()
        found.append(Notice("warn", f"**{status[:1].upper()}{status[1:]}.**"))
    results = diagnose(data)
    levels = {result.level for result in results.values()}
    if levels - {"unknown"}:
        level: Level = "warn" if "trouble" in levels else "good"
        found.append(Notice(level, verdict(results)))
    else:
        found.append(Notice("note", "**Not judged**: there are too few numbers for any rule of the diagnosis."))
    return found


def _benchmark(data: RunData) -> Figure | None:
    """Return the newest benchmark, of a chat model the chat tasks: its mean, or where it has none its first task."""
    first = "chat" if data.stage == "sft" else "core"
    series = sorted(series_of(data.benchmarks()), key=lambda found: (found[-1].suite == first, found[-1].age))
    if not series:
        return None
    newest, oldest = series[-1][-1], series[-1][0]
    if not (rows := [*newest.means, *newest.whole_tasks()]):
        return None
    row = rows[0]
    earlier = next((r["value"] for r in [*oldest.means, *oldest.tasks] if r["name"] == row["name"]), None)
    against, of_base = "", _of_base(data, row, newest)
    if oldest is not newest and earlier is not None:
        against = f"{_model_at(data, oldest.step)} {share(row['name'], earlier)}"
    elif of_base is not None:
        against = f"base model {share(row['name'], of_base.value)}"
    unit = "questions" if newest.suite == "chat" else "items"
    detail = [f"{number(row['items'])} {unit}"] if row.get("items") else []
    if row.get("low") is not None and row.get("high") is not None:
        kind = "interval" if row in newest.means else "mid-P interval"
        detail.append(f"95 % {kind} {share(row['name'], row['low'])} to {share(row['name'], row['high'])}")
    return Figure(row["name"], share(row["name"], row["value"]), against, ", ".join(detail))


def _of_base(data: RunData, row: dict[str, Any], benchmark: Benchmark) -> Score | None:
    """Return the same figure of the run whose model this one began with, under the same protocol."""
    base = data.parent
    if base is None:
        return None
    return base.newest_scores.get((row["name"], row["protocol"], benchmark.items_of(row)))


def _model_at(data: RunData, step: int | None) -> str:
    if step == 0:
        return "base model" if _base_name(data) else "untrained"
    return f"step {number(step)}" if step is not None else "model/"


def _validation(data: RunData) -> Figure | None:
    """Return the last number on held-out text, or where there is none the training loss."""
    names = [SFT_BPB] if data.stage == "sft" else []
    names += [VAL_BPB, VAL_BPB_DOCUMENTS, SFT_BPB, VAL_LOSS]
    name = next((name for name in names if len(finite(data, name)[0])), data.loss_name())
    steps, values = finite(data, name)
    if not len(steps):
        return None
    against = f"{_model_at(data, int(steps[0]))} {number(float(values[0]))}" if len(steps) > 1 else ""
    lowest = int(np.argmin(values))
    if name == data.loss_name():
        detail = "the training's: nothing was validated"
    elif lowest < len(steps) - 1:
        detail = f"lowest {number(float(values[lowest]))} at step {number(int(steps[lowest]))}"
    else:
        detail = f"its lowest, at step {number(int(steps[lowest]))}"
    return Figure(name, number(float(values[-1])) or "", against, detail)


def share(name: str, value: float) -> str:
    """Return an accuracy in percent; bits per byte, and a mean of centred scores, which may be negative, as it is."""
    is_accuracy = suite_of(name) is not None and name not in MEANS
    return f"{100 * value:.1f} %" if is_accuracy else f"{value:.4f}"


def _time(data: RunData) -> Figure | None:
    seconds = wall_s(data)
    if not seconds:
        return None
    tokens = f", {short_count(data.tokens())} tokens" if data.tokens() else ""
    starts = f", {len(data.running)} starts" if len(data.running) > 1 else ""
    label = "time so far" if data.is_training else "time"
    return Figure(label, duration(seconds), detail=f"{number(data.step())} steps{tokens}{starts}")


def _cost(data: RunData) -> Figure | None:
    """Return None where the recipe gives no price of an hour."""
    cost = paid(data)
    if cost is None:
        return None
    energy = data.last("perf/energy_kwh")
    hours = f"{number((data.manifest.get('world_size') or 1) * (wall_s(data) or 0) / 3600)} device hours"
    return Figure("cost", f"{cost:,.2f}", detail=hours + (f", {number(energy)} kWh" if energy is not None else ""))


def _speed(data: RunData) -> Figure | None:
    run = RunMetrics(data)
    rates, mfu = run.timed("perf/tok_per_s").values, run.timed("perf/mfu_pct").values
    if not rates.size:
        return None
    beside = f", MFU {median(mfu):.1f} %" if mfu.size else ""
    return Figure("speed", f"{median(rates):,.0f} tokens/s", detail=f"median of the logged steps{beside}")


def duration(seconds: float) -> str:
    """Return the two largest units: 3 d 4 h, 2 h 5 min, 1 min 56 s, 12 s."""
    whole = round(seconds)
    for unit, size, smaller, of in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // of} {smaller}"
    return f"{whole} s"


def _samples(data: RunData) -> list[Sample]:
    texts = texts_of(data.samples)
    steps = sorted({step for by_step in texts.values() for step in by_step})
    shown = steps[:1] + steps[-1:] if len(steps) > 1 else steps
    if shown:
        trained = "after SFT" if data.stage == "sft" else "trained"
        names = {step: f"{trained}, step {number(step)}" if step else _model_at(data, step) for step in shown}
        found = [(prompt, [(names[s], by[s]) for s in shown if s in by]) for prompt, by in texts.items()]
    else:
        entry: dict[str, Any] = next((entry for entry in reversed(data.evals) if entry.get("samples")), {})
        found = [(row["prompt"], [(str(entry.get("subject")), row["text"])]) for row in entry.get("samples", [])]
    return [
        Sample(shortened(prompt), [(name, shortened(text)) for name, text in answers])
        for prompt, answers in found[:SHOWN_SAMPLES]
    ]


def shortened(text: str, count: int = LONGEST_TEXT) -> str:
    text = text.strip()
    return text if len(text) <= count else f"{text[:count].rstrip()} [...]"


def _commands(data: RunData) -> list[Command]:
    if data.is_imported:
        return []
    run = shlex.quote(_typed_path(data))
    chat = Command("talk to it", f"{_program('chat')} {run}{_prompt(data)}")
    if data.is_training:
        return [
            Command("watch it: this page, made anew as it trains", f"{_program('report')} {run} --serve"),
            *([chat] if data.checkpoints else []),
        ]
    if data.manifest.get("status") != "finished" or data.failure:
        arguments = [shlex.quote(word) for word in (data.manifest.get("command") or [])[1:]]
        again = Command("go on from the newest checkpoint", " ".join([_program(data.stage or "pretrain"), *arguments]))
        read = Command(
            "read what it printed", f"less {shlex.quote(os.path.join(_typed_path(data), data.run.console.name))}"
        )
        return [again, read, *([chat] if data.checkpoints else [])]
    if data.stage == "sft":
        score = Command("score it on public tasks (downloads them)", f"{_program('evals')} {run} chat")
        push = Command("publish it", f"{_program('hub')} push {run} --id NAMESPACE/{shlex.quote(data.name)}")
        return [chat, score, push]
    if data.manifest.get("recipe_name") == "quickstart_pretrain":
        teach = f"{_program('sft')} {_recipe('quickstart_sft')} model.start_from={run}"
    else:
        teach = (
            f"{_program('sft')} {_recipe('own_chat')} model.start_from={run} 'data.sources=[{{files: CHATS.jsonl}}]'"
        )
    compare = Command("compare it with another run", f"{_program('report')} {run} OTHER_RUN --output compared")
    return [chat, compare, Command("stage 2: teach it to chat", teach)]


def _prompt(data: RunData) -> str:
    """Return an option with a text to go on from: a base model does not answer."""
    if data.stage == "sft":
        return ""
    short = (row["prompt"] for row in data.samples if len(row["prompt"]) <= 60 and row["prompt"].isprintable())
    return f" -p {shlex.quote(next(short, 'Once upon a time'))}"


def _is_installed() -> bool:
    found = shutil.which("tandem")
    return found is not None and Path(found).parent == Path(sys.executable).parent


def _program(command: str) -> str:
    """Return `tandem COMMAND` where this environment's is the one that a shell would start, else what does the
    same."""
    if _is_installed():
        return f"tandem {command}"
    return f"bash run_{command}.sh" if command in STAGES else f"python -m pipeline.{command}"


def _recipe(name: str) -> str:
    return name if _is_installed() else f"recipes/{name}.yaml"


def _typed_path(data: RunData) -> str:
    """Return the run's directory as run.directory and its name have it: the report of a run's end is made in another
    folder."""
    path = data.run.path
    named = Path(str(data.setting("run.directory") or "runs")) / path.name
    if path.is_absolute() and not named.is_absolute() and path.parts[-len(named.parts) :] == named.parts:
        return str(named)
    return str(path)
