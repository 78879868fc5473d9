"""The page as a browser shows it: every plot drawn, nothing complained of, nothing asked for, no wider than the window."""

import json

import pytest

from pipeline.process.storage import write_text
from pipeline.report.run_data import read_run
from pipeline.report.single import write_report
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from tests.report.browser import CHROMIUM, UNFOLD, opened
from tests.report.test_report import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

# Of each plot: how many of its canvases have a pixel of any colour. Bokeh draws inside shadow trees.
INKED = """
[...document.querySelectorAll(".plot")].map((plot) => {
  const canvases = [], walk = (node) => {
    for (const child of node.querySelectorAll("*")) {
      if (child.tagName === "CANVAS") canvases.push(child);
      if (child.shadowRoot) walk(child.shadowRoot);
    }
  };
  walk(plot);
  return canvases.filter((c) => {
    if (!c.width) return false;
    const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", {willReadFrequently: true});  // else a warning
    copy.drawImage(c, 0, 0);
    return copy.getImageData(0, 0, c.width, c.height).data.some((v) => v);
  }).length;
})
"""
DRAWN = "document.documentElement.dataset.drawn"
LINES = "Bokeh.documents[0].roots().flatMap((plot) => plot.renderers)"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A run with all kinds of curves, a restart, a wide table and a hostile text."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "seen")
    run = RunDirectory(folder)
    write_text(run.recipe, "train: {max_grad_norm: 1.0, note: " + "w" * 500 + "}")
    for step in range(41, 90):
        numbers = {"perf/step_s": 0.5, "mem/allocated_gib": 3.0 + step, "gpu/power_w": 300.0, "gpu/util_pct": 97.0}
        numbers |= {"core/v1": 0.1, "val/bpb": 1.4, "train/loss": 3.0, "train/loss_ema": 3.1}
        append_row(run.metrics, {"step": step, "attempt": 2, "time": 1.79e9 + step, "tokens": step * 4096} | numbers)
    append_row(
        run.samples, {"step": 41, "attempt": 2, "prompt": "x" * 300, "text": "<script>document.title='no'</script>"}
    )
    return write_report(read_run(str(folder)))


@pytest.mark.parametrize("width", [1280, 360])
def test_every_plot_is_drawn_without_an_error_in_a_fitting_page(page, width):
    with opened(page, width=width) as shown:
        count = int(shown.until(DRAWN))
        assert count == page.read_text().count('class="plot"') == 10
        shown.run(UNFOLD)
        assert (
            len(
                shown.until(
                    f"(() => {{ const inked = {INKED.strip()}; return inked.every((canvases) => canvases > 0) && inked }})()"
                )
            )
            == count
        )
        assert shown.run("document.title") == "seen: report"
        assert shown.run("document.documentElement.scrollWidth") <= width
        assert shown.run(
            "[...document.querySelectorAll('.wide, pre')].some((box) => box.scrollWidth > box.clientWidth)"
        )
        assert shown.complaints() == []
        assert shown.asked_for() == []


def test_the_axis_of_all_plots_switches_and_a_curve_can_hide(page):
    with opened(page) as shown:
        shown.until(DRAWN)
        choose = "axis.value = 'tokens'; axis.dispatchEvent(new Event('change'))"
        shown.run(f"(() => {{ const axis = document.getElementById('axis'); {choose} }})()")
        assert set(shown.run(f"{LINES}.map((line) => line.glyph.x.field)")) == {"tokens"}
        ranges = "Bokeh.documents[0].roots().map((plot) => plot.x_range.end)"
        assert all(89 * 4096 <= end < 92 * 4096 for end in shown.run(ranges))
        shown.run(UNFOLD)
        shown.run("document.querySelector('[data-curve=\"train/loss\"]').click()")
        assert shown.run(f"{LINES}.filter((line) => !line.visible).map((line) => line.name)") == ["train/loss"]
        shown.until(f"{INKED}.every((canvases) => canvases > 0)")
        assert shown.complaints() == []


def test_log_scale_and_smoothing_change_every_plot_that_can(page):
    with opened(page) as shown:
        shown.until(DRAWN)
        shown.run(UNFOLD)
        scales = "Bokeh.documents[0].roots().map((plot) => plot.y_scale.type)"
        at_first = shown.run(scales)
        shown.run("document.getElementById('log').click()")
        assert at_first.count("LogScale") == 1 < shown.run(scales).count("LogScale")
        shown.until(f"{INKED}.every((canvases) => canvases > 0)")
        shown.run("document.getElementById('log').click()")
        assert shown.run(scales) == at_first
        losses = f"[...{LINES}.find((line) => line.name === 'train/loss').data_source.get('y')]"
        smooth = (
            "smoothing.value = {}; smoothing.dispatchEvent(new Event('input'))"  # an element's id is a global name
        )
        raw = shown.run(losses)
        shown.run(smooth.format(0.9))
        assert raw[-1] == 3.0 < shown.run(losses)[-1] < max(raw)
        shown.run(smooth.format(0))
        assert shown.run(losses) == raw
        assert shown.complaints() == []


def test_the_height_of_a_plot_follows_a_zoom_in_x(page):
    with opened(page) as shown:
        shown.until(DRAWN)
        height = "((y) => y.end - y.start)(Bokeh.documents[0].roots()[0].y_range)"
        whole = shown.until(height)
        shown.run("Bokeh.documents[0].roots()[0].x_range.setv({start: 60, end: 80})")
        shown.until(f"{height} < {whole / 3}")


def tooltip(shown, place):
    """The words beside the cursor in the middle of a plot."""
    box = json.loads(
        shown.run(
            f"(() => {{ const plot = document.getElementById('plot-{place}'); plot.scrollIntoView({{block: 'center'}});"
            " return JSON.stringify(plot.getBoundingClientRect()) })()"
        )
    )
    for move in range(3):
        x, y = box["x"] + box["width"] / 2 + move, box["y"] + box["height"] / 2
        shown.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    shown.until(f"document.querySelector('#plot-{place} + .tooltip:not([hidden])') !== null")
    words = shown.run(f"document.querySelector('#plot-{place} + .tooltip:not([hidden])').innerText.split(/[\\t\\n]+/)")
    return [word.strip() for word in words]


def test_a_value_under_the_cursor_is_shown_in_all_fitting_units(page):
    with opened(page) as shown:
        shown.until(DRAWN)
        shown.run(UNFOLD)
        shown.until(f"{INKED}.every((canvases) => canvases > 0)")
        words = tooltip(shown, 1)
        assert words[1:4] == ["value", "optimizer step", "tokens (row positions)"]
        assert words[4].startswith("hours running")
        assert [word for word in words if "val/" in word] == ["val/bpb"]
        assert "1.4" in words
        words = tooltip(shown, 0)  # half as wide, beside the samples
        assert words[1:4] == ["value", "optimizer step", "train/loss"]
        assert [word for word in words if "train/" in word] == ["train/loss", "train/loss_ema"]
        assert "3.1" in words
        shown.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        shown.until("document.querySelectorAll('.tooltip:not([hidden])').length === 0")
        assert shown.complaints() == []


def test_in_print_a_picture_stands_where_the_plots_were(page):
    with opened(page) as shown:
        shown.until(DRAWN)
        shown.send("Emulation.setEmulatedMedia", media="print")
        visible = "getComputedStyle(document.querySelector('{}')).display !== 'none'"
        assert shown.run(visible.format(".static img"))
        assert shown.run("document.querySelector('.static img').naturalWidth") > 500
        assert not shown.run(visible.format(".drawn"))
        shown.send("Emulation.setEmulatedMedia", media="screen")
        assert not shown.run(visible.format(".static"))
        assert shown.run(visible.format(".drawn"))
