"""The comparison says what differs, puts curves on common axes, and calls a difference real only beyond seed noise."""

import numpy as np
import pytest
import yaml

from pipeline.process.storage import write_text
from pipeline.report.__main__ import main
from pipeline.report.compared_curves import curve_over, flops_per_token, legends
from pipeline.report.comparison import changes, comparison, difference, differing, repeats
from pipeline.report.run_data import read_run, read_runs
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory

SHAPE = {"device": "NVIDIA H100 80GB HBM3", "processes": 8, "dtype": "bfloat16", "compiled": True, "attention": "sdpa", "micro_batch": 16}  # fmt: skip


def write_run(
    folder, *, bpb=1.0, step_s=2.0, memory=40.0, batch=1000, steps=40, recipe=None, shape=None, files=("aa", "bb"), tokenizer="feed",
    commit="abc", protocol="p1", loss=9.0, stage="pretrain", start=None,
):  # fmt: skip
    run = RunDirectory(folder)
    keys = {"train.seed": 1, "train.max_steps": steps, "train.bf16": True, "data.packing": "concat", "model.n_layer": 4, "optimizer.rate_scale": 1.0}  # fmt: skip
    nested: dict = {}
    for key, value in (keys | (recipe or {})).items():
        section, name = key.split(".", 1)
        nested.setdefault(section, {})[name] = value
    nested.setdefault("data", {})["sources"] = [{"files": f"{folder}/*.txt", "at_end": "repeat"}]
    write_text(run.recipe, yaml.safe_dump(nested))
    run.update_manifest(
        name=folder.name,
        stage=stage,
        status="finished",
        git={"commit": commit, "changed_files": 0},
        shape=SHAPE | (shape or {}),
        inputs={
            "protocols": {"val/bpb": protocol},
            "tokenizer": {"identity": tokenizer, "size": 512},
            "sources": [{"name": "a", "fingerprint": "".join(files), "files": [{"label": f, "sha256": f * 32} for f in files]}],
            "batch_tokens": batch,
            "max_steps": steps,
            "start_from": start,
        },
    )  # fmt: skip
    append_row(run.metrics, {"event": "attempt", "attempt": 1, "step": 0, "time": 1.0})
    append_row(run.metrics, {"step": 0, "attempt": 1, "time": 1.5, "tokens": 0, "val/bpb": bpb + 1})
    for step in range(1, steps + 1):
        rate = batch / step_s / (10 if step == 1 else 1)  # the first interval holds compilation
        numbers = {
            "train/loss": loss - step / 10,
            "train/loss_ema": loss - step / 20,
            "perf/step_s": batch / rate,
            "perf/total_s": step * step_s,
        }
        numbers |= {"perf/tok_per_s": rate, "perf/tok_per_s_per_gpu": rate / 8, "perf/tflops_per_gpu": 6e6 * rate / 8 / 1e12, "mem/peak_allocated_gib": memory}  # fmt: skip
        append_row(run.metrics, {"step": step, "attempt": 1, "time": 2.0 + step, "tokens": step * batch, **numbers})
    append_row(run.metrics, {"step": steps, "attempt": 1, "time": 99.0, "tokens": steps * batch, "val/bpb": bpb})
    return read_run(str(folder))


def cells(text, first):
    return next(line for line in text.splitlines() if line.startswith(f"| {first} | ")).strip("| ").split(" | ")[1:]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"files": ("aa", "cc")}, {"files of sources"}),
        ({"tokenizer": "beef"}, {"tokenizer"}),
        ({"recipe": {"model.n_layer": 5}}, {"model.n_layer"}),
        ({"batch": 2000}, {"tokens of a step"}),
        ({"steps": 41}, {"train.max_steps", "steps"}),
        ({"recipe": {"train.max_grad_norm": 1.0}}, {"train.max_grad_norm"}),
        ({"shape": {"dtype": "float8"}}, {"dtype"}),
        ({"recipe": {"train.seed": 2}}, {"train.seed"}),
        ({"files": ("bb", "aa")}, set()),  # the seed orders them
        ({"commit": "def"}, set()),
    ],
)
def test_each_setting_that_differs_is_found(tmp_path, change, names):
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", **change)
    assert set(differing(runs)) == names


def test_runs_from_other_weights_differ_by_every_file_of_these(tmp_path):
    def started(name, last):
        parts = {f"model-0000{n}-of-00002.safetensors": sha256 for n, sha256 in ((1, "aa"), (2, last))}
        return write_run(tmp_path / name, start={"from": name, **parts})

    first = started("a", "bb")
    assert "weights started from" in differing([first, started("b", "cc")])
    assert "weights started from" not in differing([first, started("c", "bb")])


def test_more_than_one_setting_that_differs_is_said(tmp_path):
    a = write_run(tmp_path / "a")
    text = comparison([a, write_run(tmp_path / "b", recipe={"model.n_layer": 5}, batch=2000, commit="def")])
    assert "More than one setting differs" in text
    assert cells(text, "model.n_layer") == ["4", "5"]
    assert cells(text, "tokens of a step") == ["1000", "2000"]
    assert cells(text, "git.commit") == ["abc", "def"]
    assert "No setting differs" in comparison([a, a])


def test_curves_lie_on_four_axes_under_legends_with_dtype_and_hardware(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", batch=2000, step_s=3.0)]
    assert legends(runs)[1] == "b (bfloat16, 8 x NVIDIA H100 80GB HBM3)"
    assert flops_per_token(runs[1]) == pytest.approx(6e6)
    for x, last in (("step", 40), ("tokens", 80_000), ("time", 2.0), ("flops", 80_000 * 6e6)):
        xs, ys = curve_over(runs[1], x, "train/loss")
        assert (xs[-1], ys[-1]) == (pytest.approx(last), pytest.approx(5.0))
        assert len(xs) == len(ys) == 40
    xs, ys = curve_over(runs[1], "tokens", "val/bpb")
    assert (xs.tolist(), ys.tolist()) == ([0, 80_000], [2.0, 1.0])


def test_losses_stand_side_by_side_at_common_points_of_the_axis(tmp_path):
    text = comparison([write_run(tmp_path / "a"), write_run(tmp_path / "b", batch=2000)])
    table = text.split("### train/loss by tokens (row positions)\n")[1].split("###")[0]
    assert cells(table, "2,000") == ["8.8000", "8.9000", "+0.1000"]
    assert cells(table, "40,000") == ["5.0000", "7.0000", "+2.0000"]
    assert cells(text.split("### train/loss by optimizer step\n")[1], "40") == ["5.0000", "5.0000", "+0.0000"]


def test_speed_and_memory_are_ratios_to_the_first_run(tmp_path):
    text = comparison([write_run(tmp_path / "a"), write_run(tmp_path / "b", step_s=1.0, memory=30.0)])
    assert cells(text, "perf/tok_per_s") == ["median", "500", "1,000", "2.000"]
    assert cells(text, "mem/peak_allocated_gib") == ["largest", "40", "30", "0.750"]


def test_no_ratio_is_made_of_numbers_that_only_share_a_name(tmp_path):
    write_run(tmp_path / "a")
    rows = "".join(f"{step},12.0,625.0\n" for step in range(5))
    (tmp_path / "fp8.csv").write_text("global_step,train_step_timing in s,TFLOPS_per_GPU\n" + rows)
    text = comparison(read_runs([str(tmp_path / "a"), str(tmp_path / "fp8.csv")]))
    assert cells(text, "perf/tflops_per_gpu")[2:] == ["625", "-"]
    assert cells(text, "perf/step_s")[1:] == ["2", "12", "6.000"]
    assert "- perf/tflops_per_gpu: attention counted in full, not causally." in text


def test_repeats_are_runs_that_differ_in_nothing_but_the_seed(tmp_path):
    runs = [
        write_run(tmp_path / "a1"),
        write_run(tmp_path / "b1", recipe={"model.n_layer": 5}),
        write_run(tmp_path / "a2", recipe={"train.seed": 2}),
        write_run(tmp_path / "a2_again", recipe={"train.seed": 2}),
        write_run(tmp_path / "other_code", recipe={"train.seed": 3}, commit="def"),
    ]
    assert [[data.name for data in group] for group in repeats(runs)] == [["a1", "a2"], ["b1"], ["other_code"]]


def test_a_difference_is_judged_by_welchs_test():
    # Standard error 0.08165, 4 degrees of freedom, t = 2.776 from tables of Student's distribution.
    assert difference([1.0, 1.1, 1.2], [0.7, 0.8, 0.9]) == ("-0.300000 [-0.526696, -0.073304]", "more than seed noise")
    assert difference([1.0, 1.1, 1.2], [1.05, 1.15, 1.0])[1] == "within seed noise"
    # One run against the spread of three: 2 degrees of freedom, t = 4.303, standard error 0.11547.
    assert difference([1.0, 1.1, 1.2], [3.0])[0] == "+1.900000 [+1.403172, +2.396828]"
    assert difference([1.0], [0.9]) == ("-0.100000", "not known")
    assert difference([1.0, 1.0], [0.9, 0.9])[1] == "not known"


def test_several_comparisons_share_the_chance_of_a_false_call():
    pair = [1.0, 1.1, 1.2], [0.7, 0.8, 0.9]  # p = 0.021
    assert difference(*pair, comparisons=2)[1] == "more than seed noise"
    assert difference(*pair, comparisons=3)[1] == "within seed noise"


@pytest.mark.parametrize("count", [2, 3])
def test_equal_runs_are_called_different_in_5_of_100_tables(count):
    draws, called = np.random.default_rng(0), 0
    for _ in range(200):
        said = [difference(draws.normal(1, 0.002, count), draws.normal(1, 0.002, count), comparisons=3)[1] for _ in range(3)]  # fmt: skip
        called += "more than seed noise" in said
    assert called <= 20  # 5 % and three standard errors


def test_figures_of_repeats_have_intervals_and_single_runs_advice(tmp_path):
    groups = {4: [1.00, 1.01, 1.02], 5: [0.90, 0.91, 0.92]}
    runs = [
        write_run(tmp_path / f"{layers}{seed}", bpb=bpb, recipe={"train.seed": seed, "model.n_layer": layers})
        for layers, values in groups.items()
        for seed, bpb in enumerate(values)
    ]
    text = comparison(runs)
    line = next(line for line in text.splitlines() if "| 50, 51, 52 | 3 |" in line)
    assert "0.9100 | 0.0100 | -0.100000 [-0.122670, -0.077330] | more than seed noise |" in line
    assert "1 differences, Bonferroni" in text
    text = comparison([runs[0], runs[3]])
    assert "| 0.9000 | -0.100000 | not known |" in text
    assert "train each recipe with three seeds (train.seed=1, 2, 3)" in text
    assert "**Nothing says which is better**" in comparison(runs[:3])  # which differ in the seed alone
    unlike = [runs[0], write_run(tmp_path / "other", protocol="p2")]
    assert "**Nothing says which is better**" in comparison(unlike)


def test_curves_of_bpb_are_put_side_by_side_only_under_one_protocol(tmp_path):
    other = write_run(tmp_path / "b", protocol="p2", bpb=1.25)
    assert "1.25" not in comparison([write_run(tmp_path / "a"), other])


def test_the_command_writes_page_and_picture(tmp_path, capsys):
    names = [str(write_run(tmp_path / name).run.path) for name in ("a", "b")]
    out = tmp_path / "out"
    assert main([*names, "--output", str(out)]) == 0
    assert (out / "comparison.md").read_text() == capsys.readouterr().out
    assert "![curves.png](curves.png)" in (out / "comparison.md").read_text()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_two_runs_of_one_name_are_distinguished(tmp_path):
    names = [str(write_run(tmp_path / part / "same").run.path) for part in ("x", "y")]
    assert [data.name for data in read_runs(names)] == ["same", "same #2"]


def test_a_line_of_the_results_names_what_differs_from_what_to_what(tmp_path):
    first = write_run(tmp_path / "first")
    other = write_run(tmp_path / "other", steps=41, recipe={"optimizer.rate_scale": 0.5, "train.seed": 2, "model.n_layer": 5, "data.packing": "best_fit"})  # fmt: skip
    assert changes(first, other) == [
        "data.packing concat -> best_fit",
        "model.n_layer 4 -> 5",
        "optimizer.rate_scale 1.0 -> 0.5",
        "3 more",
    ]
    assert changes(first, first) == []
