"""Benchmarks in the report and beside each other: every figure with what it stands on, and none under a wrong name."""

import json

from pipeline.evals.chat import CHAT_CORE
from pipeline.evals.tasks import append_entry, entry_of
from pipeline.process.storage import write_json
from pipeline.report.__main__ import main
from pipeline.report.comparison import comparison
from pipeline.report.run_data import read_run
from pipeline.report.single import report
from pipeline.run_dir.rows import append_row
from tests.report.evaluated_run import chat_rows, contaminated, core_rows, lm_eval_row, write_evaluated_run


def section(run, name="Evaluations"):
    return report(read_run(str(run.path))).split(f"## {name}\n")[1].split("\n## ")[0]


def cells(text, first):
    """The cells of the table row that begins with that one, by the table's head."""
    lines = text.splitlines()
    number = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} | "))
    head = next(line for n, line in reversed(list(enumerate(lines[:number]))) if lines[n + 1].startswith("| ---"))
    return dict(zip(head.strip("| ").split(" | "), lines[number].strip("| ").split(" | "), strict=True))


def test_the_report_shows_core_with_intervals_scores_and_how_to_repeat(tmp_path):
    rows = core_rows(right=3)
    text = section(write_evaluated_run(tmp_path / "a", ("model/", 20, rows)))
    assert "### CORE: model/, step 20\n" in text
    mean = cells(text, "core/v1")
    assert (mean["value"], mean["tasks"]) == (f"{rows[0]['value']:.6f}", "22")
    assert mean["95 % interval"] == f"{rows[0]['low']:.4f} to {rows[0]['high']:.4f}"
    piqa = cells(text, "piqa")
    assert (piqa["accuracy"], piqa["items"], piqa["shots"]) == ("0.7500", "4", "10")
    assert (piqa["centred v1"], piqa["notes"]) == ("0.5000", "prompts shortened: 2")
    assert "This is not CORE" not in text
    assert "At most the first 4 items of each task were scored." in text
    assert "The interval of a share is mid-P, of the exact binomial tails." in text
    assert f"```bash\npython -m pipeline.evals {tmp_path}/a core\n```" in text
    entry = json.loads((tmp_path / "a" / "report" / "evals.json").read_text())["entries"][0]
    assert f"| versions | torch {entry['versions']['torch']}, " in text
    for fact in ("| device | cpu |", f"| protocol | {rows[0]['protocol']} |", f"| bundle | {rows[0]['bundle']} |"):
        assert fact in text


def test_a_partial_core_is_never_called_core_and_says_why(tmp_path):
    some = core_rows(names=["copa", "piqa"], items=2, published=False)
    text = section(write_evaluated_run(tmp_path / "a", ("model/", 20, some)))
    assert "### core_partial: model/, step 20\n" in text
    why = text.split("This is not CORE: ")[1].splitlines()[0]
    assert why.startswith("missing hellaswag_zeroshot, ")
    assert why.endswith("; none of the files is the published one.")
    assert cells(text, "copa")["items"] == "2"
    assert "| core/v" not in text
    assert "### CORE" not in text


def test_the_report_shows_chat_tasks_with_notes_and_source_files(tmp_path):
    rows = chat_rows()
    text = section(write_evaluated_run(tmp_path / "a", ("model/", 20, rows)))
    assert "### Chat tasks: model/, step 20\n" in text
    mean = cells(text, "chat/core_part")
    assert (mean["value"], mean["tasks"], mean["protocol"]) == ("0.400000", "5", rows[0]["protocol"])
    why = text.split("chat/core_part is not chat/core: ")[1].splitlines()[0]
    assert why.startswith("asked were not all items of arc_easy (20 of 40 items), arc_challenge ")
    assert "spelling_bee" not in why
    mmlu = cells(text, "mmlu")
    assert (mmlu["accuracy"], mmlu["95 % interval"], mmlu["centred"]) == ("0.5000", "0.4500 to 0.5500", "0.4000")
    assert mmlu["items"] == "20 of 40"
    (row,) = (row for row in rows if row["name"] == "chat/mmlu")
    assert row["protocol_parts"]["items"] == 20
    assert mmlu["protocol"] == row["protocol"]
    assert f"- protocol {row['protocol']}: task mmlu, texts " in text
    assert mmlu["notes"] == "questions too long, counted as wrong: 3; not the whole test set"
    assert cells(text, "humaneval")["notes"].endswith("programs run behind landlock+seccomp")
    assert "| seconds | 12 |" in text
    whole = section(write_evaluated_run(tmp_path / "b", ("model/", 20, chat_rows(items=40, complete=True))))
    assert "is not chat/core" not in whole
    assert "| chat/core | 0.400000 |" in whole


def test_other_tasks_do_not_keep_the_chat_core_five_from_comparing(tmp_path):
    runs = [
        write_evaluated_run(tmp_path / "five", ("model/", 20, chat_rows(names=CHAT_CORE))),
        write_evaluated_run(tmp_path / "six", ("model/", 20, chat_rows(0.75))),
    ]
    text = comparison([read_run(str(run.path)) for run in runs])
    assert "; 5 tasks, 100 items) | 0.400000 | 0.650000 |" in text


def test_the_report_shows_lm_eval_rows_with_their_standard_error(tmp_path):
    text = section(write_evaluated_run(tmp_path / "a", ("model/", 20, [lm_eval_row()])))
    row = cells(text, "piqa/acc_norm")
    assert (row["value"], row["standard error"], row["items"], row["shots"]) == ("0.2500", "0.0125", "200", "5")
    assert row["notes"] == "items whose prompt was cut: 7"


def test_contaminated_items_are_reported_with_the_score_without_them(tmp_path):
    rows = [
        row | {"contamination": {"items": 88, "contaminated": 1, "score_without": 0.125}}
        if row["name"] == "core/v1"
        else contaminated(row, 1, 0.2345)
        if row["name"] == "core/copa"
        else row
        for row in core_rows()
    ]
    text = section(write_evaluated_run(tmp_path / "a", ("model/", 20, rows)))
    mean, copa = cells(text, "core/v1"), cells(text, "copa")
    assert (mean["contaminated"], mean["value without them"]) == ("1 of 88", "0.125000")
    assert (copa["contaminated"], copa["accuracy without them"]) == ("1 of 4 (33.33 %)", "0.2345")
    assert copa["notes"] == "items too short to look for: 1"
    assert cells(text, "piqa")["contaminated"] == "-"
    assert "6 of 8 shards of that text were searched" in text
    assert "; the text of the\\|base, which this model comes from, was not." in text


def test_several_steps_make_a_series_and_only_the_newest_shows_tasks(tmp_path):
    scored = [(f"step {step}", step, core_rows(right)) for step, right in ((4, 1), (8, 2), (12, 3))]
    run = write_evaluated_run(tmp_path / "a", *scored, ("checkpoint-8", 8, core_rows(2)))
    text = section(run)
    assert text.count("| copa | ") == 1
    assert "### CORE: step 12\n" in text
    values = [next(row["value"] for row in rows if row["name"] == "core/v1") for _, _, rows in scored]
    series = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith(("| step ", "| checkpoint-8"))]
    assert series == [
        ["| step 4", f"{values[0]:.6f}"],
        ["| step 8", f"{values[1]:.6f}"],
        ["| checkpoint-8, step 8", f"{values[1]:.6f}"],
        ["| step 12", f"{values[2]:.6f}"],
    ]


def test_a_later_look_at_a_few_tasks_does_not_hide_core(tmp_path):
    run = write_evaluated_run(
        tmp_path / "a", ("model/", 20, core_rows()), ("model/", 20, core_rows(names=["copa"], max_per_task=None))
    )
    text = section(run)
    assert "### CORE: model/, step 20\n" in text
    assert "### core_partial: model/, step 20\n" in text
    assert text.count("| copa | ") == 2


def test_scores_from_steps_that_the_run_went_back_behind_are_ignored(tmp_path):
    run = write_evaluated_run(tmp_path / "a", ("step 4", 4, core_rows(1)), ("step 12", 12, core_rows(4)), steps=8)
    assert "### CORE: step 12\n" in section(run)
    append_row(run.metrics, {"event": "attempt", "attempt": 2, "step": 8, "time": 9e9})  # after those were written
    assert "### CORE: step 4\n" in section(run)


def test_an_evaluation_that_failed_is_reported_with_its_reason(tmp_path):
    run = write_evaluated_run(tmp_path / "a")
    append_row(
        run.metrics,
        {"event": "evaluation_failed", "name": "chat", "step": 20, "attempt": 1, "reason": "MemoryError: no | room"},
    )
    assert "| 20 | chat | MemoryError: no \\| room |" in section(run)


def test_older_files_with_fewer_keys_are_reported_as_far_as_they_go(tmp_path):
    run = write_evaluated_run(tmp_path / "a")
    rows = [row for make in (core_rows(), core_rows(names=["copa"]), chat_rows(), [lm_eval_row()]) for row in make]
    kept = [{key: row[key] for key in ("name", "value", "protocol")} for row in rows]
    others = [
        {"name": "core/v1", "value": 0.5},
        {"name": "spelling/accuracy", "value": 0.75},
    ]
    write_json(run.evals, {"entries": [{"results": kept}, {"subject": "model/", "results": others}, {}, {"step": 3}]})
    text = section(run)
    assert "### CORE: a model\n" in text
    assert cells(text, "piqa/acc_norm") == {"task, metric": "piqa/acc_norm", "value": "0.2500"}
    assert "| spelling/accuracy | - | 0.75 | model/ |" in section(run, "Other evaluations")
    assert "| core/v1 | - | 0.5 | model/ |" in section(run, "Other evaluations")  # nobody can say what it stands on
    comparison([read_run(str(run.path))] * 2)
    for broken in ("{", '{"entries": null}'):
        run.evals.write_text(broken)
        assert "## Evaluations" not in report(read_run(str(run.path)))


def test_samples_by_command_stand_beside_those_of_the_training(tmp_path):
    run = write_evaluated_run(tmp_path / "a")
    rows = [
        {"prompt": "The sky | is", "text": "blue\nand", "chat": False, "temperature": 0.0},
        {"prompt": "The sky | is", "text": "red", "chat": True, "temperature": 0.8, "top_k": 50},
    ]
    append_entry(run, entry_of(subject="model/", step=20, device="cpu", results=[], samples=rows))
    text = section(run, "Samples")
    assert "By command, model/, step 20:" in text
    assert "| The sky \\| is | the likeliest | blue<br>and |" in text
    assert "| The sky \\| is | sampled, temperature 0.8, top_k 50, as a chat | red |" in text


def test_means_of_equal_protocol_tasks_and_items_stand_side_by_side(tmp_path, capsys):
    runs = [
        write_evaluated_run(tmp_path / name, ("step 10", 10, core_rows(1)), ("model/", 20, core_rows(right)))
        for name, right in (("a", 2), ("b", 3))
    ]
    values = [f"{core_rows(right)[0]['value']:.6f}" for right in (2, 3)]
    assert main([str(run.path) for run in runs]) == 0
    line = f"| core/v1 (last; protocol {core_rows()[0]['protocol']}; 22 tasks, 88 items) | {values[0]} | {values[1]} |"
    assert line in capsys.readouterr().out


def test_unlike_means_are_not_compared_and_the_page_says_so(tmp_path):
    base = write_evaluated_run(tmp_path / "base", ("model/", 20, core_rows(2, names=["copa", "piqa"])))
    others = {
        "crop": core_rows(3, names=["copa", "piqa"], long_prompts="crop"),
        "tasks": core_rows(3, names=["copa", "winograd"]),
        "items": core_rows(3, names=["copa", "piqa"], items=3, max_per_task=3),
    }
    for name, rows in others.items():
        other = write_evaluated_run(tmp_path / name, ("model/", 20, rows))
        text = comparison([read_run(str(run.path)) for run in (base, other)])
        assert "| core_partial/v1" not in text
        assert (
            "core_partial/v1 of base is not compared: no other of these runs was scored on the same 2 tasks, 8 items"
            in text
        )
        assert f"core_partial/v1 of {name} is not compared" in text


def test_more_tasks_than_models_are_written_downwards(tmp_path):
    names = [f"chat/world/{kind}" for kind in "abcdef"]
    scored = []
    for step in (0, 8):
        scored.append(
            (f"step {step}", step, [{"name": name, "value": step / 8, "n": 4, "protocol": "p"} for name in names])
        )
    text = section(write_evaluated_run(tmp_path / "a", *scored, stage="sft"))
    assert "| metric | step 0 | step 8 |" in text
    assert "| chat/world/f | 0.000000 | 1.000000 |" in text
