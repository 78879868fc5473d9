"""comparison.html as a browser shows it: all runs over each other on every axis, a run hidden everywhere at once."""

from dataclasses import replace

import pytest

from pipeline.report.comparison import write_comparison
from pipeline.report.run_data import read_runs
from tests.contrib.test_imported_logs import NANOCHAT_HEAD, base_line
from tests.report.browser import CHROMIUM, opened
from tests.report.test_comparison import write_run
from tests.report.test_page_in_browser import DRAWN, INKED, LINES

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

VISIBLE = f"{LINES}.filter((line) => line.visible).map((line) => line.name)"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A run whose name is HTML, a run of another batch, nanochat's log, and losses without tokens, time or FLOPs."""
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "a")
    (folder / "nanochat.log").write_text(NANOCHAT_HEAD + "".join(base_line(n, 30, loss=9 - n / 9) for n in range(30)))
    rows = "".join(f"{n},{9 - n / 9}\n" for n in range(30))
    (folder / "bare.csv").write_text("global_step,reduced_train_loss\n" + rows)
    logs = read_runs([str(folder / "nanochat.log"), str(folder / "bare.csv")])
    named = replace(first, manifest=first.manifest | {"name": "<b>x", "note": "w" * 300})
    write_comparison([named, write_run(folder / "b", batch=2000, recipe={"model.n_layer": 5}), *logs], folder)
    return folder / "comparison.html"


def choose(shown, axis):
    shown.run(
        f"(() => {{ const axis = document.getElementById('axis'); axis.value = '{axis}'; axis.dispatchEvent(new Event('change')) }})()"
    )


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_every_plot_is_drawn_cleanly_and_no_page_is_too_wide(page, width, dark):
    with opened(page, width=width, dark=dark) as shown:
        count = int(shown.until(DRAWN))
        # loss, smoothed loss, throughput; bits per byte, of two points a run, are bars
        assert count == page.read_text().count('class="plot"') == 3
        shown.until(f"{INKED}.every((canvases) => canvases > 0)")
        assert shown.run("document.title") == "<b>x and b and nanochat and bare: comparison"
        assert shown.run("document.querySelector('h1').textContent") == "<b>x and b and nanochat and bare"
        assert shown.run("document.querySelectorAll('b').length") == 0
        assert shown.run("document.documentElement.scrollWidth") <= width
        assert shown.run("document.querySelector('h2').offsetTop > document.querySelector('.results table').offsetTop")
        assert shown.complaints() == []
        assert shown.asked_for() == []


def test_each_axis_shows_the_runs_with_a_place_and_names_others(page):
    with opened(page) as shown:
        shown.until(DRAWN)
        everyone = ["<b>x (bfloat16, 8 x NVIDIA H100 80GB HBM3)", "b (bfloat16, 8 x NVIDIA H100 80GB HBM3)", "nanochat (bfloat16, 2 x NVIDIA H100 80GB HBM3)", "bare"]  # fmt: skip
        assert sorted(set(shown.run(VISIBLE))) == sorted(everyone)
        assert shown.run("document.getElementById('absent').hidden")
        for axis, end in (("tokens", 30 * 524288), ("time", 80 / 60), ("flops", None), ("step", 40)):
            choose(shown, axis)
            assert set(shown.run(f"{LINES}.filter((line) => line.visible).map((line) => line.glyph.x.field)")) == {
                axis
            }
            assert sorted(set(shown.run(VISIBLE))) == sorted(everyone if axis == "step" else everyone[:3])
            assert shown.run("document.getElementById('absent').hidden") == (axis == "step")
            if end:
                assert 0.95 * end < shown.run("Bokeh.documents[0].roots()[0].x_range.end") < 1.05 * end
        choose(shown, "tokens")
        assert shown.run("document.getElementById('absent').innerText") == "Without a place on this axis: bare."
        shown.until(f"{INKED}.every((canvases) => canvases > 0)")
        assert shown.complaints() == []


def test_a_run_keeps_one_look_and_is_hidden_in_all_plots(page):
    with opened(page) as shown:
        shown.until(DRAWN)
        looks = shown.run(
            f"""(() => {{ const looks = {LINES}.filter((line) => line.tags.length).map((line) => [line.name, line.glyph.line_color.value]);
            const boxes = [...document.querySelectorAll("[data-curve]")];
            const swatch = (box) => box.nextElementSibling.getAttribute("style").match(/#[0-9a-f]+/)[0];
            return [looks, boxes.map((box) => [box.dataset.curve, swatch(box)])] }})()"""
        )
        assert {tuple(pair) for pair in looks[0]} == {tuple(pair) for pair in looks[1]}
        assert len({colour for _, colour in looks[1]}) == len(looks[1]) == 4
        shown.run("document.querySelectorAll('[data-curve]')[1].click()")
        shown.until("Bokeh.documents[0].is_idle")
        hidden = shown.run(f"{LINES}.filter((line) => !line.visible).map((line) => line.name)")
        assert len(hidden) == 3
        assert set(hidden) == {"b (bfloat16, 8 x NVIDIA H100 80GB HBM3)"}
        choose(shown, "tokens")
        assert "b (bfloat16, 8 x NVIDIA H100 80GB HBM3)" not in shown.run(VISIBLE)
        choose(shown, "step")
        shown.until(f"{INKED}.every((canvases) => canvases > 0)")
        box = shown.run(
            "(() => { const plot = document.getElementById('plot-0'); plot.scrollIntoView({block: 'center'});"
            " const box = plot.getBoundingClientRect(); return [box.x, box.y, box.width, box.height] })()"
        )
        for move in range(3):
            x, y = box[0] + box[2] / 3 + move, box[1] + box[3] / 2
            shown.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        shown.until("document.querySelector('#plot-0 + .tooltip:not([hidden])') !== null")
        tooltip = shown.run(
            "[...document.querySelectorAll('#plot-0 + .tooltip tr')].map((row) => row.cells[0].innerText.trim().split(' (')[0])"
        )
        assert tooltip == ["", "<b>x", "nanochat", "bare"]
        assert shown.run("document.querySelectorAll('#plot-0 + .tooltip .swatch').length") == 3
        assert shown.run("document.documentElement.scrollWidth") <= 1280
        assert shown.complaints() == []


def test_in_print_the_picture_of_all_runs_stands_where_the_plots_were(page):
    with opened(page) as shown:
        shown.until(DRAWN)
        shown.send("Emulation.setEmulatedMedia", media="print")
        visible = "getComputedStyle(document.querySelector('{}')).display !== 'none'"
        assert shown.run(visible.format(".static img"))
        assert shown.run("document.querySelector('.static img').naturalWidth") > 500
        assert not shown.run(visible.format(".drawn"))
        assert not shown.run(visible.format(".bar"))
