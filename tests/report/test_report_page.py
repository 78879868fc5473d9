"""The page: one file within its size, every text as text, the same sections as report.md; also where little is left of a run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.process.storage import read_json, write_json, write_text
from pipeline.report import run_data
from pipeline.report.__main__ import main
from pipeline.report.curves import panels_of, thin
from pipeline.report.page import html_of
from pipeline.report.run_data import read_run
from pipeline.report.single import SECTIONS, report, write_report
from pipeline.run_dir.checkpoints import seal
from pipeline.run_dir.columns import read_columns
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from tests.report.test_report import write_run

ROOT = Path(__file__).parents[2]
HOSTILE = (
    '<script>alert(1)</script> </table> ![x](http://a.example/x.png) [y](javascript:z) | `c` "q" \' &lt;b&gt; $x$'
)


def page_of(folder):
    return write_report(read_run(str(folder))).read_text(encoding="utf-8")


def test_the_command_reads_the_rows_of_a_run_once(tmp_path, monkeypatch):
    folder, read = write_run(tmp_path / "once"), []
    monkeypatch.setattr(run_data, "read_columns", lambda path: read.append(path) or read_columns(path))
    assert main([str(folder)]) == 0
    assert read == [folder / "metrics.jsonl"]


def add_row(folder, step, **numbers):
    append_row(
        RunDirectory(folder).metrics, {"step": step, "attempt": 2, "time": 1.79e9 + step, "tokens": 1} | numbers
    )


def test_the_page_folds_the_markdown_sections_in_their_order_manifest_last(tmp_path):
    folder = write_run(tmp_path / "a")
    text = page_of(folder)
    titles = re.findall(r"^## (.+)$", (folder / "report" / "report.md").read_text(), re.MULTILINE)
    assert re.findall(r"<h2 id=\"[^\"]+\">(.+)</h2>", text) == titles
    assert text.count("<details>") == len(titles) == text.count("</details>")
    assert [title for title in SECTIONS if title in titles] == titles
    assert titles == [
        "Diagnosis",
        "Curves",
        "Evaluations",
        "Samples",
        "Data",
        "Time, cost and energy",
        "System",
        "Recipe",
        "Manifest",
    ]


def test_hostile_texts_stay_texts_in_every_place_they_can_come_from(tmp_path):
    folder = write_run(tmp_path / "a")
    run = RunDirectory(folder)
    run.update_manifest(name=HOSTILE, note=HOSTILE, versions={HOSTILE: HOSTILE})
    write_text(run.recipe, json.dumps({"run": {"tags": [HOSTILE, "```\n" + HOSTILE]}}))
    append_row(run.samples, {"step": 41, "attempt": 2, "prompt": HOSTILE, "text": HOSTILE})
    write_json(run.failure, {"status": 1, "class": HOSTILE, "message": HOSTILE})
    for step in (41, 42):
        add_row(folder, step, **{f"optim/lr/{HOSTILE}": 1.0, f"mem/{HOSTILE}": 2.0, f"chat/{HOSTILE}": 0.5})
    text = page_of(folder)
    ours = text.count("<script")
    assert ours == page_of(write_run(tmp_path / "b")).count("<script")
    assert "<script>alert" not in text
    assert text.count("<img") == 1
    assert 'href="javascript' not in text
    assert 'src="http' not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &lt;/table&gt; ![x](http://a.example/x.png)" in text
    assert "&amp;lt;b&amp;gt;" in text


def test_lines_of_a_cell_are_broken_and_nothing_else_of_html_works():
    assert "one<br />" in html_of("| a |\n| --- |\n| one<br>two |\n")
    assert "<i>" not in html_of("<i>x</i>\n\n| a |\n| --- |\n| <i>x</i> |\n")


def test_an_oversized_page_stays_within_its_limit_and_says_what_is_cut(tmp_path):
    folder = write_run(tmp_path / "a")
    run = RunDirectory(folder)
    for n in range(200):
        append_row(run.samples, {"step": 41, "attempt": 2, "prompt": f"{n}", "text": '<"&>' * 3000})
    write_text(run.recipe, json.dumps({"run": {"tags": ["<&>" * 300 + str(n) for n in range(300)]}}))
    run.update_manifest(versions={f"package{n}": "1" * 50 for n in range(8000)})
    names = [f"mem/{n}" for n in range(30)] + [f"optim/lr/{n}" for n in range(30)] + [f"chat/{n}" for n in range(30)]
    noise = np.random.default_rng(0).random((3000, len(names))).tolist()
    with open(run.metrics, "a") as file:
        for step, values in enumerate(noise, 41):
            file.write(
                json.dumps(
                    {"step": step, "attempt": 2, "time": 1.79e9 + step, "tokens": step}
                    | dict(zip(names, values, strict=True))
                )
                + "\n"
            )
    text = page_of(folder)
    assert len(text.encode()) <= 2_000_000
    assert text.count("report.md has it whole") >= 3
    assert text.count("<pre>") == text.count("</pre>")
    assert text.rstrip().endswith("</html>")


def test_the_lowest_and_the_highest_value_and_both_ends_survive_thinning():
    values = np.random.default_rng(0).random(1_000_003)
    values[[777_777, 123_456]] = 9, -9
    steps = np.arange(len(values))
    at, kept = thin(steps, values, 800)
    assert len(at) <= 800
    assert {0, 777_777, 123_456, steps[-1]} <= set(at.tolist())
    assert (kept == values[at]).all()
    assert (np.diff(at) > 0).all()


def test_curves_are_those_that_count_with_their_restart_and_the_clip_line(tmp_path):
    folder = write_run(tmp_path / "a")
    write_text(RunDirectory(folder).recipe, "train: {max_grad_norm: 1.0}")
    panels = {panel.title: panel for panel in panels_of(read_run(str(folder)))}
    assert list(panels) == ["Loss", "Bits per byte", "Learning rate", "Gradient norm before clipping", "Throughput"]
    (loss,) = panels["Loss"].curves
    assert loss.x["step"].tolist() == [5, 10, 15, 20, 25, 30, 35, 40]
    assert loss.x["tokens"].tolist() == [4096 * step for step in loss.x["step"]]
    assert loss.y.max() < 10  # the values of the attempt that was lost are above 100
    assert panels["Loss"].marks["restart"]["step"].tolist() == [20]
    assert [curve.name for curve in panels["Gradient norm before clipping"].curves] == [
        "optim/grad_norm",
        "train.max_grad_norm",
    ]


def test_speed_is_drawn_without_the_first_step_of_each_start(tmp_path):
    run = RunDirectory(tmp_path / "a")
    for attempt, steps in ((1, (1, 2, 3)), (2, (4, 5, 6))):
        append_row(run.metrics, {"event": "attempt", "attempt": attempt, "step": steps[0] - 1, "time": 1.0})
        for step in steps:
            first = {"perf/step_s": 60.0, "perf/first_step_s": 60.0} if step == steps[0] else {"perf/step_s": 0.5}
            append_row(run.metrics, {"step": step, "attempt": attempt, "time": 2.0, "train/loss": 3.0} | first)
    panels = {panel.title: panel for panel in panels_of(read_run(str(run.path)))}
    assert panels["Step time"].curves[0].x["step"].tolist() == [2, 3, 5, 6]
    assert "compilation" in panels["Step time"].note


def test_two_points_of_every_task_are_bars_and_a_page_names_each(tmp_path):
    folder = write_run(tmp_path / "a")
    names = [f"chat/world/task{number}" for number in range(30)]
    for step, value in ((0, 0.0), (40, 0.5)):
        append_row(
            RunDirectory(folder).metrics,
            {"step": step, "attempt": 2, "time": 1.0} | dict.fromkeys(names, value) | {"chat/world/task7": 2 * value},
        )
    panels = {panel.title: panel for panel in panels_of(read_run(str(folder)))}
    assert panels["Benchmarks"].is_bars
    assert not panels["Loss"].is_bars
    page = page_of(folder)
    bars = page.split('<div class="bars">')[1].split("</div>")[0]
    drawn = re.findall(r"<span>(chat/world/task\d+)</span>", bars)
    assert drawn == names
    assert "0 \u2192 0.5" in bars
    assert page.count('class="plot"') == 5
    add_row(folder, 41, **dict.fromkeys(names, 0.1))
    (panel,) = (panel for panel in panels_of(read_run(str(folder))) if panel.title == "Benchmarks")
    assert [*(curve.name for curve in panel.curves), *re.findall(r"chat/world/task\d+", panel.note)] == names
    assert bars.count("width: 100.0%") == 1  # task7's last, the longest


def test_hours_go_on_over_a_restart_and_count_what_was_lost(tmp_path):
    run = RunDirectory(tmp_path / "a")
    for attempt, start, began, steps in ((1, 0, 0, (1, 2, 3)), (2, 2, 100_000, (3, 4))):
        append_row(run.metrics, {"event": "attempt", "attempt": attempt, "step": start, "time": began})
        for step in steps:
            row = {"step": step, "attempt": attempt, "time": began + 3600 * (step - start), "train/loss": 1.0 / step}
            append_row(run.metrics, row)
    (panel,) = panels_of(read_run(str(run.path)))
    assert panel.curves[0].x["hours"].tolist() == pytest.approx([1, 3, 4, 5])


def test_a_run_without_metrics_or_with_a_single_step_has_a_report(tmp_path):
    run = RunDirectory(tmp_path / "none")
    run.update_manifest(name="none")
    text = page_of(run.path)
    assert "No step was logged." in text
    assert text.count("<script") == 1
    assert "Bokeh" not in text
    assert not (run.report / "curves.png").exists()
    append_row(run.metrics, {"step": 1, "attempt": 1, "time": 1.0, "train/loss": 3.0})
    assert "3.0000" in page_of(run.path)


def test_a_copied_run_directory_reports_the_same_from_there(tmp_path):
    folder = write_run(tmp_path / "a")
    before = report(read_run(str(folder)))
    shutil.move(folder, tmp_path / "elsewhere" / "a")
    moved = report(read_run(str(tmp_path / "elsewhere" / "a")))
    assert moved == before.replace(str(folder), str(tmp_path / "elsewhere" / "a"))


def test_samples_of_the_run_before_stand_beside_those_of_its_fine_tuning(tmp_path):
    base, chat = (RunDirectory(write_run(tmp_path / "runs" / name)) for name in ("base", "chat"))
    append_row(base.samples, {"step": 40, "attempt": 2, "prompt": "The sky | is", "text": "said before"})
    base.model.mkdir(exist_ok=True)
    (base.model / "model.safetensors").write_bytes(b"weights")
    seal(base.model, step=40)
    files = read_json(base.model / "MANIFEST.json")["files"]
    start_from = {"from": "runs/base/model", "model.safetensors": files["model.safetensors"]["sha256"]}
    chat.update_manifest(stage="sft", inputs={"start_from": start_from})
    assert "| prompt | base, before this run | step 0 | step 40 |" in report(read_run(str(chat.path)))
    assert "said before" in page_of(chat.path)
    chat.update_manifest(inputs={"start_from": start_from | {"model.safetensors": "another"}})
    assert "said before" not in report(read_run(str(chat.path)))


def test_a_failed_start_leaves_its_report_and_its_error_is_reported_first(tmp_path):
    folder = write_run(tmp_path / "a", finished=False)
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from pipeline.run_dir.failures import exit_with_status, record_failures_in\n"
        "from pipeline.run_dir.run_directory import RunDirectory\n"
        "def main(argv):\n"
        f"    record_failures_in(RunDirectory(Path({str(folder)!r})))\n"
        "    raise RuntimeError('what went wrong')\n"
        "exit_with_status(main)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("RuntimeError: what went wrong")
    assert "RuntimeError: what went wrong" in (folder / "report" / "report.html").read_text()
    assert "stopped with status 1" in (folder / "report" / "report.md").read_text()
