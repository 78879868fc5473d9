"""What a report and a comparison answer before anything is unfolded or scrolled, and that nothing of them is cut off at 1400 and 390 px."""

import pytest
import yaml

from pipeline.evals.tasks import append_entry, entry_of
from pipeline.process.storage import write_json, write_text
from pipeline.report.comparison import write_comparison
from pipeline.report.run_data import read_run
from pipeline.report.single import write_report
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from tests.report.browser import CHROMIUM, CUT_OFF, UNFOLD, looks, opened
from tests.report.evaluated_run import chat_rows
from tests.report.test_page_in_browser import DRAWN
from tests.report.test_report import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

PROMPTS = ("Where is the cup? " * 30, "What is 2 + 3?", "A third one")
LOWEST = "Math.max(...[...document.querySelectorAll('{}')].map((node) => node.getBoundingClientRect().bottom))"
PAPER = "getComputedStyle(document.body).backgroundColor"


def write_sft(folder, *, rate=0.02, right=0.6):
    """A chat run with a price and a restart, that began as another model, and was scored and sampled before and after."""
    run = RunDirectory(write_run(folder, learning_rate=rate))
    recipe = {
        "run": {"gpu_hour_cost": 2.5, "note": "w" * 400},
        "model": {"start_from": "runs/base/model"},
        "train": {"max_steps": 40, "learning_rate": rate, "max_grad_norm": 1.0},
    }
    write_text(run.recipe, yaml.safe_dump(recipe))
    run.update_manifest(stage="sft", world_size=2, model={"parameters": 1_157_714}, note="a note | " * 20)
    for step in range(41, 90):
        numbers = {"val/loss": 3.3, "train/loss": 3.0, "train/loss_ema": 3.1, "sft/assistant_bpb": 2 - step / 100}
        append_row(run.metrics, {"step": step, "attempt": 2, "time": 1.79e9 + step, "tokens": step * 4096} | numbers)
    run.samples.unlink()
    for step, text in ((0, "base " * 400), (89, "chat " * 400)):
        for prompt in PROMPTS:
            append_row(run.samples, {"step": step, "attempt": 2, "prompt": prompt, "text": text, "chat": True})
    for step, value in ((0, 0.2), (89, right)):
        rows = chat_rows(value, names=("spelling_bee",))
        append_entry(run, entry_of(subject=f"step {step}", step=step, device="cpu", results=rows, command=["x" * 300]))
    return run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(read_run(str(write_sft(tmp_path_factory.mktemp("runs") / "chat").path)))


def test_the_first_screen_of_a_report_answers_what_is_asked_first(report):
    with opened(report, width=1400, height=900) as page:
        page.until(DRAWN)
        seen = page.run("document.body.innerText")
        for asked in (
            "Healthy",
            "60.0 %",
            "base model 20.0 %",
            "1.11",
            "lowest",
            "time",
            "cost",
            "after SFT, step 89",
        ):
            assert asked in seen, asked
        order = ["h1", ".notice", ".figures", "#plot-0", ".sample", ".commands", "details"]
        tops = [page.run(f"document.querySelector('{name}').getBoundingClientRect().top") for name in order]
        assert tops[:3] == sorted(tops[:3])
        assert max(tops[3:5]) < tops[5] < tops[6]
        for name in ("h1", ".notice", ".figures .card", "#plot-0", ".answers > div", ".commands code"):
            assert page.run(LOWEST.format(name)) < 900, name
        count = "document.querySelectorAll('{}').length"
        assert page.run(count.format(".sample")) == 2
        assert page.run(count.format(".answers > div")) == 4
        assert page.run("[...document.querySelectorAll('.commands code')].map((node) => node.innerText.split(/[ .]/).includes('chat'))") == [True, True, False]  # fmt: skip
        assert page.run("document.querySelectorAll('details[open]').length") == 0
        assert page.run("[...document.querySelectorAll('h2')].at(-1).innerText") == "Manifest"
        curves = "Bokeh.documents[0].roots()[0].renderers.filter((line) => line.visible).map((line) => line.name)"
        assert {"train/loss", "train/loss_ema", "val/loss"} <= set(page.run(curves))
        page.run("location.hash = 'diagnosis'")
        page.until("document.getElementById('diagnosis').closest('details').open")


def test_nothing_of_a_report_is_cut_off_and_it_never_scrolls_sideways(report):
    with opened(report) as page:
        page.until(DRAWN)
        papers = set()
        for look in looks(page):
            assert page.run(CUT_OFF) == [], look
            papers.add(page.run(PAPER))
        page.run(UNFOLD)
        for look in looks(page):
            assert page.run(CUT_OFF) == [], look
        assert len(papers) == 2
        assert page.complaints() == []


def test_a_failed_run_says_so_first_and_how_to_go_on(tmp_path):
    run = RunDirectory(write_run(tmp_path / "failed", finished=False))
    run.update_manifest(command=["pipeline/pretrain.py", "recipes/mine.yaml", "train.seed=2"])
    write_json(run.failure, {"status": 76, "class": "DivergedError", "message": "step 31: nan " + "w" * 3000})
    with opened(write_report(read_run(str(run.path))), width=1400, height=900) as page:
        page.until(DRAWN)
        first = "document.querySelector('.notice').innerText"
        assert page.run(first).startswith("Stopped with status 76 (DivergedError): step 31: nan")
        assert page.run("document.querySelector('.commands code').innerText").endswith(
            " recipes/mine.yaml train.seed=2"
        )
        assert page.run(LOWEST.format(".commands code")) < 900
        assert page.run("document.querySelector('h2').innerText") == "Failure"
        page.run(UNFOLD)
        assert page.run(CUT_OFF) == []


def test_the_first_comparison_screen_says_what_won_and_whether_proven(tmp_path):
    runs = [
        read_run(str(write_sft(tmp_path / name, rate=rate, right=right).path))
        for name, rate, right in (("slow", 0.02, 0.6), ("fast", 0.04, 0.7), ("fastest", 0.08, 0.5))
    ]
    write_comparison(runs, tmp_path)
    with opened(tmp_path / "comparison.html", width=1400, height=900) as page:
        page.until(DRAWN)
        tables = page.run("[...document.querySelectorAll('.results table')].map((node) => node.innerText)")
        scored = next(line for line in tables[0].splitlines() if "spelling_bee" in line and "fast" in line)
        assert scored.split("\t")[1:] == ["fast", "1", "70.0 %", "+0.100000", "not known"]
        assert "No run has a repeat" in page.run("document.querySelector('.results').innerText")
        assert tables[1].splitlines()[0].split("\t") == ["run", "what differs from slow", "train/loss", "time", "cost"]
        assert tables[1].count("train.learning_rate 0.02 -> 0.0") == 2
        assert tables[2].splitlines()[0].split("\t") == ["prompt", "slow", "fast", "fastest"]
        assert page.run(LOWEST.format(".results td")) < 900
        opened_first = "[...document.querySelectorAll('details')].map((section) => section.open)"
        assert page.run(opened_first)[:2] == [True, False]
        for look in looks(page):
            assert page.run(CUT_OFF) == [], look
        page.run(UNFOLD)
        for look in looks(page):
            assert page.run(CUT_OFF) == [], look
        assert page.complaints() == []
