"""comparison.html: the Markdown's sections and all runs' curves in one page of 2 MB, whatever the runs are called and however long they are."""

import re
from dataclasses import replace

import numpy as np
import pytest

from pipeline.report.compared_curves import comparison_panels, curve_over, legends
from pipeline.report.comparison import write_comparison
from pipeline.report.curves import LOOKS
from pipeline.report.run_data import read_runs
from pipeline.run_dir.columns import Columns
from tests.contrib.test_imported_logs import NANOCHAT_HEAD, base_line
from tests.report.made_runs import made_run
from tests.report.test_comparison import write_run
from tests.report.test_report_page import HOSTILE


def long_run(name, *, rows, seed=0):
    """A run of that many noisy rows with every number that is drawn, and the device named."""
    noise = np.random.default_rng(seed)
    steps = np.arange(1, rows + 1)
    fallen = 3 + seed / 10 + 6 * np.exp(-5 * steps / rows)
    series = {
        "step": steps,
        "tokens": 524288 * steps,
        "perf/total_s": 0.5 * steps,
        "optim/lr": 1 / steps,
        "optim/lrm": 1 / steps,
    }
    series |= {
        "train/loss": fallen + noise.normal(0, 0.15, rows),
        "train/loss_ema": fallen,
        "optim/grad_norm": noise.random(rows),
    }
    series |= {
        "perf/tok_per_s": noise.random(rows),
        "val/bpb": noise.random(rows),
        "val/bpb_documents": noise.random(rows),
    }
    series |= {"perf/tok_per_s_per_gpu": np.ones(rows), "perf/tflops_per_gpu": np.ones(rows)}
    manifest = {"shape": {"dtype": "bfloat16", "device": "NVIDIA H100 80GB HBM3", "processes": 8}}
    manifest["inputs"] = {"protocols": {"val/bpb": "p", "val/bpb_documents": "q"}}
    columns = Columns.of([dict(zip(series, row, strict=True)) for row in np.array(list(series.values())).T.tolist()])
    run = made_run({}, manifest={"name": name, "status": "finished", **manifest}, recipe={"train": {"seed": seed}})
    return replace(run, rows=columns, all_rows=columns)


def written(runs, folder):
    write_comparison(runs, folder)
    return (folder / "comparison.html").read_text(encoding="utf-8"), (folder / "comparison.md").read_text(
        encoding="utf-8"
    )


def test_the_page_has_the_markdowns_sections_in_its_order(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", recipe={"model.n_layer": 5}, batch=2000, bpb=1.1)]
    html, text = written(runs, tmp_path)
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles == ["Curves", "What differs", "Evaluations", "Runs", "Speed and memory"]
    assert re.findall(r"<h2 id=\"[^\"]+\">(.+)</h2>", html) == titles
    for whole, below in ((html, "<h2"), (text, "## Curves")):
        assert whole.index("seed noise?") < whole.index("what differs from a") < whole.index(below)
    first_cells = re.findall(r"^\| (?!---)(\S[^|]*?) \|", text, re.MULTILINE)
    assert {"train/loss (last)", "model.n_layer", "tokens of a step", "perf/step_s"} < set(first_cells)
    assert [cell for cell in first_cells if f"<td>{cell}</td>" not in html and f"<th>{cell}</th>" not in html] == []


@pytest.mark.full
def test_a_name_is_text_in_every_place_of_page_and_markdown(tmp_path):
    names = ["<b>x", HOSTILE, "_x_ *y* $z^", "</script><!--"]
    runs = [replace(long_run("", rows=30, seed=n), manifest={"name": name}) for n, name in enumerate(names)]
    html, text = written(runs, tmp_path)
    assert "<b>" not in html
    assert "<script>alert" not in html
    assert "<!--" not in html
    assert 'href="javascript' not in html
    assert html.count("<script") == html.count("</script>") == 3
    assert html.count('data-curve="&lt;b&gt;x"') == 1
    assert html.count("<img") == 1
    assert "<b>" not in text


@pytest.mark.full
def test_a_run_looks_the_same_everywhere_and_no_two_look_alike():
    runs = [long_run(f"run{n}", rows=50, seed=n) for n in range(30)]
    runs[1] = replace(runs[1], rows=Columns.of({"step": n, "train/loss": 1.0 + n} for n in range(9)))
    panels, _ = comparison_panels(runs)
    places = {(curve.name, curve.place) for panel in panels for curve in panel.curves}
    assert places == {(legend, place) for place, legend in enumerate(legends(runs)[:LOOKS])}
    assert len({(curve.colour, curve.dash) for curve in panels[0].curves}) == LOOKS
    assert len(panels[0].curves) == len(panels[1].curves) + 1 == LOOKS
    assert panels[1].note == "Not recorded by run1."


@pytest.mark.full
@pytest.mark.parametrize(("count", "rows"), [(2, 60), (12, 20_000), (40, 3000)])
def test_the_page_holds_its_size_however_many_runs_and_rows(tmp_path, count, rows):
    runs = [long_run(f"run {n} " + "w" * 60, rows=rows, seed=n) for n in range(count)]
    html, _ = written(runs, tmp_path)
    assert len(html.encode()) <= 2_000_000
    assert ("Drawn are the first 24 of the 40 runs" in html) == (count == 40)
    assert ("is left out here for its length" in html) <= (count == 40)


@pytest.mark.full
def test_a_curve_lies_where_the_comparison_puts_it_and_keeps_its_minimum():
    runs = [long_run(name, rows=50_000, seed=n) for n, name in enumerate("ab")]
    runs[1].columns.column("train/loss")[1][31_313] = -7.0
    panels, axes = comparison_panels(runs)
    assert list(axes) == ["step", "tokens", "time", "flops"]
    assert axes["flops"] == "training FLOPs, in 10^21"
    curve = panels[0].curves[1]
    assert curve.y.min() == -7
    for axis, unit in {"step": 1, "tokens": 1, "time": 1, "flops": 1e21}.items():
        xs, ys = curve_over(runs[1], axis, "train/loss")
        drawn = np.isin(ys, curve.y)
        assert curve.x[axis] * unit == pytest.approx(xs[drawn])
        assert (curve.y == ys[drawn]).all()


@pytest.mark.full
def test_a_log_without_tokens_or_flops_is_drawn_or_named_as_absent(tmp_path):
    ours = write_run(tmp_path / "ours", steps=20)
    (tmp_path / "bare.csv").write_text(
        "global_step,reduced_train_loss\n" + "".join(f"{n},{9 - n / 9}\n" for n in range(20))
    )
    (tmp_path / "nanochat.log").write_text(
        NANOCHAT_HEAD + "".join(base_line(n, 20, loss=9 - n / 9) for n in range(20))
    )
    runs = [ours, *read_runs([str(tmp_path / "bare.csv"), str(tmp_path / "nanochat.log")])]
    panels, _ = comparison_panels(runs)
    assert [sorted(curve.x) for curve in panels[0].curves] == [
        ["flops", "step", "time", "tokens"],
        ["step"],
        ["flops", "step", "time", "tokens"],
    ]
    assert panels[0].title == "Training loss"
    assert "nanochat: train/loss_ema. " in panels[0].note
    html, _ = written(runs, tmp_path)
    assert html.count('"absent": ["bare"]') == 3


@pytest.mark.full
def test_runs_without_a_curve_have_a_page_without_plots(tmp_path):
    html, _ = written([made_run({}, manifest={"name": name}) for name in "ab"], tmp_path)
    assert html.count("<script") == 1
    assert "Bokeh" not in html
    assert "No loss of two runs has a common stretch" in html
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.full
def test_a_step_without_tokens_lies_between_its_neighbours_or_nowhere():
    rows = [{"step": n, "train/loss": 9.0 - n} | ({"tokens": 100 * n} if n in (1, 3, 4) else {}) for n in range(1, 7)]
    panels, _ = comparison_panels([replace(made_run({}, manifest={"name": name}), rows=rows) for name in "ab"])
    at = panels[0].curves[0].x["tokens"]
    assert at == pytest.approx([100, 200, 300, 400, np.nan, np.nan], nan_ok=True)
