"""The first screen of a run's report: is it healthy, what did it reach and take, two samples, and the next commands."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS, VAL_LOSS
from pipeline.process.commands import command, program, stage_command
from pipeline.process.progress import short_count
from pipeline.report.cost import paid, wall_s
from pipeline.report.curves import finite
from pipeline.report.diagnosis import verdict
from pipeline.report.diagnosis_rules import diagnose
from pipeline.report.markdown import cell, code, filled_table, joined, number, table
from pipeline.report.run_data import RunData
from pipeline.report.run_metrics import RunMetrics, median
from pipeline.report.samples import texts_of
from pipeline.report.scores import MEANS, Benchmark, Score, series_of, suite_of

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
        figures=[*filter(None, figures)],
        samples=_samples(data),
        commands=_commands(data),
    )


def summary_text(summary: Summary, *, picture: str = "") -> str:
    """Return the same in Markdown. picture: what is put where the page has the loss curve."""
    rows = [[figure.label, figure.value, figure.against or None, figure.detail or None] for figure in summary.figures]
    names = dict.fromkeys(name for sample in summary.samples for name, _ in sample.answers)
    samples = [[sample.prompt, *map(dict(sample.answers).get, names)] for sample in summary.samples]
    parts = [filled_table(["result", "value", "against", "of"], rows), picture, table(["prompt", *names], samples)]
    if summary.commands:
        parts.append(code("\n".join(f"{given.line}  # {given.purpose}" for given in summary.commands), "bash"))
    about = [cell(summary.about)] if summary.about else []
    head = [f"{line}\n" for line in [*about, *(notice.text for notice in summary.notices)]]
    return joined(*head, *parts)


def _about(data: RunData) -> str:
    kind, base, parameters = STAGES.get(str(data.stage)), _base_name(data), data.fact("model.parameters")
    if kind and base:
        kind = f"{kind} of {base}"
    size = f"{short_count(parameters)} parameters" if parameters else None
    created = str(data.manifest.get("created") or "")[:10]
    facts = [kind, size, data.trained_on, created, data.manifest.get("note")]
    return " \u00b7 ".join(shortened(str(fact)) for fact in facts if fact)


def _base_name(data: RunData) -> str | None:
    """Return the run or model whose weights this one began with."""
    return data.parent.name if data.parent else data.setting("model.start_from")


def _notices(data: RunData) -> list[Notice]:
    results = diagnose(data)
    levels = {result.level for result in results.values()}
    if not levels - {"unknown"}:
        judged = Notice("note", "**Not judged**: there are too few numbers for any rule of the diagnosis.")
    elif "trouble" in levels:
        judged = Notice("warn", verdict(results))
    else:
        judged = Notice("good", verdict(results))
    state = _state(data)
    return [state, judged] if state else [judged]


def _state(data: RunData) -> Notice | None:
    """Return what the run does, or why it has ended; None of one that has finished."""
    if data.failure:
        why = f"({cell(data.failure.get('class'))}): {cell(shortened(str(data.failure.get('message')), 400))}"
        return Notice("bad", f"**Stopped** with status {data.failure.get('status')} {why}")
    if data.is_training:
        text = f"**Training**: step {number(data.step())}"
        if planned := data.max_steps():
            text += f" of {number(planned)}"
        if left := data.last("perf/eta_s"):
            text += f", about {duration(left)} left"
        return Notice("note", f"{text}.")
    if data.manifest.get("status") == "finished":
        return None
    status = data.status()
    return Notice("warn", f"**{status[:1].upper()}{status[1:]}.**")


def _benchmark(data: RunData) -> Figure | None:
    """Return the newest benchmark, of a chat model the chat tasks: its mean, or where it has none its first task."""
    first = "chat" if data.stage == "sft" else "core"
    # Last is what the stage is trained for, then what was scored last.
    found = sorted(series_of(data.benchmarks()), key=lambda series: (series[-1].suite == first, series[-1].age))
    if not found:
        return None
    series = found[-1]
    newest, oldest = series[-1], series[0]
    rows = [*newest.means, *newest.whole_tasks()]
    if not rows:
        return None
    row = rows[0]
    name, against, of_base = row["name"], "", _of_base(data, row, newest)
    earlier = [other["value"] for other in oldest.rows if other["name"] == name]
    # Against the run's own first model, else against the base model under the same protocol.
    if len(series) > 1 and earlier:
        against = f"{_model_at(data, oldest.step)} {share(name, earlier[0])}"
    elif of_base is not None:
        against = f"base model {share(name, of_base.value)}"
    detail = []
    if row.get("items"):
        detail.append(f"{number(row['items'])} {'questions' if newest.suite == 'chat' else 'items'}")
    low, high = row.get("low"), row.get("high")
    if low is not None and high is not None:
        kind = "interval" if row in newest.means else "mid-P interval"
        detail.append(f"95 % {kind} {share(name, low)} to {share(name, high)}")
    return Figure(name, share(name, row["value"]), against, ", ".join(detail))


def _of_base(data: RunData, row: dict[str, Any], benchmark: Benchmark) -> Score | None:
    """Return the same figure of the run whose model this one began with, under the same protocol."""
    base = data.parent
    if base is None:
        return None
    return base.newest_scores.get((row["name"], row["protocol"], benchmark.items_of(row)))


def _model_at(data: RunData, step: int | None) -> str:
    if step is None:
        return "model/"
    if step:
        return f"step {number(step)}"
    return "base model" if _base_name(data) else "untrained"


def _validation(data: RunData) -> Figure | None:
    """Return the last number on held-out text, or where there is none the training loss."""
    names = [VAL_BPB, VAL_BPB_DOCUMENTS, SFT_BPB, VAL_LOSS]
    if data.stage == "sft":
        names.insert(0, SFT_BPB)
    validated = [name for name in names if len(finite(data, name)[0])]
    name = validated[0] if validated else data.loss_name()
    steps, values = finite(data, name)
    if not len(steps):
        return None
    first, last, lowest = values[0].item(), values[-1].item(), int(values.argmin())
    against = f"{_model_at(data, int(steps[0]))} {number(first)}" if len(steps) > 1 else ""
    if not validated:
        detail = "the training's: nothing was validated"
    elif lowest < len(steps) - 1:
        detail = f"lowest {number(values[lowest].item())} at step {number(int(steps[lowest]))}"
    else:
        detail = f"its lowest, at step {number(int(steps[lowest]))}"
    return Figure(name, number(last) or "", against, detail)


def share(name: str, value: float) -> str:
    """Return an accuracy in percent; bits per byte, and a mean of centred scores, which may be negative, as it is."""
    is_accuracy = suite_of(name) is not None and name not in MEANS
    return f"{100 * value:.1f} %" if is_accuracy else f"{value:.4f}"


def _time(data: RunData) -> Figure | None:
    seconds = wall_s(data)
    if not seconds:
        return None
    detail = f"{number(data.step())} steps"
    if data.tokens():
        detail += f", {short_count(data.tokens())} tokens"
    if len(data.running) > 1:
        detail += f", {len(data.running)} starts"
    return Figure("time so far" if data.is_training else "time", duration(seconds), detail=detail)


def _cost(data: RunData) -> Figure | None:
    """Return None where the recipe gives no price of an hour."""
    cost = paid(data)
    if cost is None:
        return None
    hours = (data.manifest.get("world_size") or 1) * (wall_s(data) or 0) / 3600
    detail = f"{number(hours)} device hours"
    energy = data.last("perf/energy_kwh")
    if energy is not None:
        detail += f", {number(energy)} kWh"
    return Figure("cost", f"{cost:,.2f}", detail=detail)


def _speed(data: RunData) -> Figure | None:
    run = RunMetrics(data)
    rates, mfu = run.timed("perf/tok_per_s").values, run.timed("perf/mfu_pct").values
    if not rates.size:
        return None
    detail = "median of the logged steps"
    if mfu.size:
        detail += f", MFU {median(mfu):.1f} %"
    return Figure("speed", f"{median(rates):,.0f} tokens/s", detail=detail)


def duration(seconds: float) -> str:
    """Return the two largest units: 3 d 4 h, 2 h 5 min, 1 min 56 s, 12 s."""
    whole = round(seconds)
    # The unit, its seconds, the next smaller unit and its seconds.
    for unit, size, smaller, of in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // of} {smaller}"
    return f"{whole} s"


def _samples(data: RunData) -> list[Sample]:
    texts = texts_of(data.samples)
    steps = sorted(set().union(*texts.values()))
    names = {}  # of the first step and the last: an untrained model's text, and the newest
    for step in steps[:1] + steps[-1:]:
        trained = "after SFT" if data.stage == "sft" else "trained"
        names[step] = f"{trained}, step {number(step)}" if step else _model_at(data, step)
    found = []
    for prompt, by_step in texts.items():
        answers = [(name, shortened(by_step[step])) for step, name in names.items() if step in by_step]
        found.append(Sample(shortened(prompt), answers))
    by_command = [entry for entry in data.evals if entry.get("samples")]
    if not found and by_command:
        whose = str(by_command[-1].get("subject"))
        for row in by_command[-1]["samples"]:
            found.append(Sample(shortened(row["prompt"]), [(whose, shortened(row["text"]))]))
    return found[:SHOWN_SAMPLES]


def shortened(text: str, count: int = LONGEST_TEXT) -> str:
    text = text.strip()
    return text if len(text) <= count else f"{text[:count].rstrip()} [...]"


def _commands(data: RunData) -> list[Command]:
    if data.is_imported:
        return []
    path = _typed_path(data)
    run = shlex.quote(path)
    chat = Command("talk to it", f"{program('chat')} {run}{_prompt(data)}")
    if data.stage == "sft":
        score = Command("score it on public tasks (downloads them)", f"{program('evals')} {run} chat")
        push = Command("publish it", f"{program('hub')} push {run} --id NAMESPACE/{shlex.quote(data.name)}")
        next_steps = [score, push]
    else:
        compare = Command("compare it with another run", f"{program('report')} {run} OTHER_RUN --output compared")
        recipe, settings = "own_chat", [f"model.start_from={path}", "data.sources=[{files: CHATS.jsonl}]"]
        if data.manifest.get("recipe_name") == "quickstart_pretrain":
            recipe, settings = "quickstart_sft", settings[:1]
        next_steps = [compare, Command("stage 2: teach it to chat", stage_command(recipe, "sft", settings))]
    if data.manifest.get("status") == "finished" and not data.failure:
        return [chat, *next_steps]
    if data.is_training:
        found = [Command("watch it: this page, made anew as it trains", f"{program('report')} {run} --serve")]
    else:
        again = command(data.stage or "pretrain", *(data.manifest.get("command") or [])[1:])
        console = shlex.quote(os.path.join(path, data.run.console.name))
        found = [
            Command("go on from the newest checkpoint", again),
            Command("read what it printed", f"less {console}"),
        ]
    return [*found, chat] if data.checkpoints else found


def _prompt(data: RunData) -> str:
    """Return an option with a text to go on from: a base model does not answer."""
    if data.stage == "sft":
        return ""
    short = [row["prompt"] for row in data.samples if len(row["prompt"]) <= 60 and row["prompt"].isprintable()]
    return f" -p {shlex.quote([*short, 'Once upon a time'][0])}"


def _typed_path(data: RunData) -> str:
    """Return the run's directory as run.directory and its name have it: the report of a run's end is made in another
    folder."""
    path = data.run.path
    # Given as runs/<name>, a relative path can be typed where the run was started.
    named = Path(str(data.setting("run.directory") or "runs")) / path.name
    if path.is_absolute() and not named.is_absolute() and path.parts[-len(named.parts) :] == named.parts:
        return str(named)
    return str(path)
