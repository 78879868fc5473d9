"""The comparison says what differs, puts curves on common axes, and calls a difference real only beyond seed noise."""

import csv
import re

import numpy as np
import pytest
import yaml

from pipeline.process.storage import write_text
from pipeline.report.__main__ import main
from pipeline.report.comparison import changes, comparison, differing_majors, repeats, verdict
from pipeline.report.curves import curve_over, flops_per_token, legends
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
    ("change", "group"),
    [
        ({"files": ("aa", "cc")}, "data"),
        ({"tokenizer": "beef"}, "tokenizer"),
        ({"recipe": {"model.n_layer": 5}}, "model shape"),
        ({"batch": 2000}, "batch and horizon"),
        ({"steps": 41}, "batch and horizon"),
        ({"recipe": {"optimizer.rate_scale": 0.5}}, "optimizer and rates"),
        ({"recipe": {"train.max_grad_norm": 1.0}}, "optimizer and rates"),
        ({"shape": {"dtype": "float8"}}, "precision and kernels"),
        ({"shape": {"device": "NVIDIA A100"}}, "hardware"),
        ({"recipe": {"train.seed": 2}}, "seed"),
        ({"recipe": {"train.save_steps": 5, "monitor.project": "x"}}, None),
        ({"files": ("bb", "aa")}, None),  # the seed orders them
        ({"commit": "def"}, None),
    ],
)
def test_each_major_variable_is_found_and_nothing_else_is_one(tmp_path, change, group):
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", **change)
    assert differing_majors(*runs) == ([group] if group else [])


def test_a_tokenizer_that_another_seed_trained_is_no_variable_of_its_own(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", tokenizer="beef", recipe={"train.seed": 2})
    assert differing_majors(a, b) == ["seed"]


def test_runs_are_known_to_start_from_other_weights_by_every_file_of_these(tmp_path):
    def started(name, path, last):
        parts = {f"model-0000{n}-of-00002.safetensors": sha256 for n, sha256 in ((1, "aa"), (2, last))}
        return write_run(tmp_path / name, start={"from": path, **parts}, recipe={"model.start_from": path})

    first = started("a", "runs/base/checkpoint-10", "bb")
    assert differing_majors(first, started("b", "runs/base/checkpoint-10", "cc")) == ["model shape"]
    assert differing_majors(first, started("c", "a/copy/of/it", "bb")) == []


def test_more_than_one_major_variable_is_warned_of_and_one_is_not(tmp_path):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", recipe={"model.n_layer": 5}, batch=2000)
    text = comparison([a, b])
    assert "**Warning: more than one major variable differs from a** (b: batch and horizon, model shape)" in text
    assert "### Differs: model shape\n\n|  | a | b |\n| --- | --- | --- |\n| model.n_layer | 4 | 5 |" in text
    assert cells(text, "tokens of a step") == ["1000", "2000"]
    text = comparison([a, write_run(tmp_path / "c", recipe={"model.n_layer": 5}, commit="def")])
    assert "Warning" not in text
    assert (
        "One major variable differs from a (c: model shape). Not every recipe has repeats with other seeds here"
        in text
    )
    assert "is its effect" not in text
    assert cells(text, "git.commit") == ["abc", "def"]
    assert "No major variable differs" in comparison([a, a])


def test_curves_lie_on_steps_tokens_minutes_and_flops_under_legends_with_dtype_and_hardware(tmp_path):
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
    assert cells(text, "perf/tflops_per_gpu")[2:] == [r"625 \*", "-"]
    assert cells(text, "perf/step_s")[1:] == ["2", "12", "6.000"]
    assert "- perf/tflops_per_gpu: attention counted in full, not causally." in text
    assert "Imported: fp8. What their logs do not tell stands as - and counts as equal." in text


def test_repeats_are_runs_that_differ_in_nothing_but_the_seed(tmp_path):
    runs = [
        write_run(tmp_path / "a1"),
        write_run(tmp_path / "b1", recipe={"model.n_layer": 5}),
        write_run(tmp_path / "a2", recipe={"train.seed": 2}),
        write_run(tmp_path / "a2_again", recipe={"train.seed": 2}),
        write_run(tmp_path / "other_code", recipe={"train.seed": 3}, commit="def"),
    ]
    assert [[data.name for data in group] for group in repeats(runs)] == [["a1", "a2"], ["b1"], ["other_code"]]


def test_a_difference_is_judged_by_welchs_test(tmp_path):
    # t = 8.2 / 0.9798, 7.95 degrees of freedom by hand; p from tables of Student's distribution.
    assert "-0.300000, 3.67 standard errors (Welch, 4.0 degrees of freedom, p = 0.021): more than seed noise" in verdict([1.0, 1.1, 1.2], [0.7, 0.8, 0.9])  # fmt: skip
    assert "cannot be distinguished from seed noise" in verdict([1.0, 1.1, 1.2], [1.05, 1.15, 1.0])
    assert "one run against the spread of the other's repeats, 2.0 degrees of freedom" in verdict(
        [1.0, 1.1, 1.2], [3.0]
    )
    assert "cannot be distinguished" in verdict([1.0], [0.9])
    assert "do not differ at all" in verdict([1.0, 1.0], [0.9, 0.9])


def test_a_verdict_names_the_smallest_difference_that_so_many_repeats_tell():
    first, other = [1.0, 1.1, 1.2], [1.05, 1.15, 1.0]
    said = verdict(first, other)
    least = float(re.search(r"tell differences from ([\d.]+) on", said)[1])
    assert "more than seed noise" in verdict(
        first, [v + 1.05 * least + 1 / 30 for v in other]
    )  # the means lie 1/30 apart
    assert "cannot be distinguished" in verdict(first, [v + 0.95 * least + 1 / 30 for v in other])
    # One degree of freedom: 12.71 standard errors, however many a difference seems to be.
    assert "cannot be distinguished from seed noise; so many repeats tell differences from 0.22 on" in verdict(
        [1.0, 1.02], [0.9]
    )


def test_several_comparisons_share_the_chance_of_a_false_call(tmp_path):
    pair = [1.0, 1.1, 1.2], [0.7, 0.8, 0.9]  # p = 0.021
    assert "more than seed noise" in verdict(*pair, comparisons=2)
    assert "cannot be distinguished from seed noise" in verdict(*pair, comparisons=3)
    runs = [write_run(tmp_path / f"{n}{seed}", bpb=1 + seed / 100, recipe={"train.seed": seed, "model.n_layer": n}) for n in (4, 5, 6) for seed in (0, 1)]  # fmt: skip
    text = comparison(runs)
    assert "2 comparisons stand here, so each is called a difference below p = 0.05/2 = 0.025 only" in text
    assert "comparisons stand here" not in comparison(runs[:4])


def test_a_difference_is_laid_to_a_variable_only_where_each_recipe_has_repeats(tmp_path):
    runs = [write_run(tmp_path / f"{n}{seed}", recipe={"train.seed": seed, "model.n_layer": n}) for n in (4, 5) for seed in (0, 1)]  # fmt: skip
    text = comparison(runs)
    assert (
        "One major variable differs from 40 (50: model shape; 51: model shape): what the figures show beyond the noise of the seed is its effect."
        in text
    )
    assert "Warning" not in text  # that the seeds differ as well is what repeats are for
    assert "is its effect" not in comparison(runs[:3])
    assert "(41: seed): how far the figures lie apart is what another seed does" in comparison(runs[:2])


@pytest.mark.parametrize("count", [2, 3])
def test_runs_that_are_as_good_are_called_different_in_5_of_100_tables(count):
    draws = np.random.default_rng(0)
    tables = [[verdict(draws.normal(1, 0.002, count), draws.normal(1, 0.002, count), comparisons=3) for _ in range(3)] for _ in range(200)]  # fmt: skip
    called = sum(any("more than seed noise" in said for said in table) for table in tables)
    assert called <= 20  # 5 % and three standard errors


def test_bpb_of_repeats_is_compared_with_its_spread_and_single_runs_are_told_what_to_do(tmp_path):
    groups = {"a": [1.00, 1.01, 1.02], "b": [0.90, 0.91, 0.92]}
    runs = [
        write_run(tmp_path / f"{name}{seed}", bpb=bpb, recipe={"train.seed": seed, "model.n_layer": len(name + str(values[0]))})
        for name, values in groups.items()
        for seed, bpb in enumerate(values)
    ]  # fmt: skip
    for data in runs[3:]:
        data.recipe["model"]["n_layer"] = 6
    text = comparison(runs)
    line = next(line for line in text.splitlines() if "| b0, b1, b2 | 3 |" in line)
    assert "0.910000 | 0.010000 | -0.100000, 12.25 standard errors (Welch, 4.0 degrees of freedom" in line
    assert line.endswith("more than seed noise; so many repeats tell differences from 0.023 on |")
    text = comparison([runs[0], runs[3]])
    assert "one run each: cannot be distinguished from seed noise" in text
    assert "Run each recipe at least three times with other seeds (train.seed=1, 2, 3)" in text


def test_curves_of_bpb_are_put_side_by_side_only_under_one_protocol(tmp_path):
    other = write_run(tmp_path / "b", protocol="p2", bpb=1.25)
    assert "1.25" not in comparison([write_run(tmp_path / "a"), other])


def test_the_command_writes_page_picture_and_table_and_reads_the_table_back(tmp_path, capsys):
    names = [str(write_run(tmp_path / name).run.path) for name in ("a", "b")]
    out, table = tmp_path / "out", tmp_path / "rows.csv"
    assert main([*names, "--output", str(out), "--csv", str(table)]) == 0
    assert (out / "comparison.md").read_text() == capsys.readouterr().out
    assert "![curves.png](curves.png)" in (out / "comparison.md").read_text()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    with open(table) as file:
        assert len(list(csv.DictReader(file))) == 84
    for data, again in zip(read_runs(names), read_runs([str(table)]), strict=True):
        assert again.name == data.name
        assert again.rows == [row for row in data.rows if "event" not in row]


def test_two_runs_of_one_name_are_distinguished(tmp_path):
    names = [str(write_run(tmp_path / part / "same").run.path) for part in ("x", "y")]
    assert [data.name for data in read_runs(names)] == ["same", "same #2"]


def test_what_won_is_called_shown_only_beyond_the_noise_of_the_seed(tmp_path):
    def runs(name, rate, figures):
        seeds = range(1, len(figures) + 1)
        changed = [{"optimizer.rate_scale": rate, "train.seed": seed} for seed in seeds]
        return [write_run(tmp_path / f"{name}{n}", bpb=bpb, recipe=new) for n, (bpb, new) in enumerate(zip(figures, changed, strict=True))]  # fmt: skip

    low, high = runs("low", 0.5, [1.0, 1.001, 1.002]), runs("high", 1.0, [1.1, 1.101, 1.102])
    near = runs("near", 2.0, [0.99, 1.0, 1.012])
    text = comparison([*high, *low])
    assert (
        "**low0, low1, low2 (mean)** has the lower val/bpb: 1.0010 against high0, high1, high2 (mean) 1.1010. **Shown**: more than seed noise.\n"
        in text
    )
    assert "**near0, near1, near2 (mean)** has the lower val/bpb" in (text := comparison([*low, *near]))
    assert "**Not shown**: it cannot be distinguished from seed noise." in text
    assert "Judged is against high0, high1, high2 (mean), the first." in comparison([*high, *low, *near])
    assert "**low0** has the lower val/bpb: 1.0000 against high0 1.1000. **Not shown**: one run each" in comparison(
        [high[0], low[0]]
    )
    assert "**Nothing says which is better**" in comparison(low)  # which differ in the seed alone
    unlike = [low[0], write_run(tmp_path / "other", protocol="p2")]
    assert "**Nothing says which is better**" in comparison(unlike)


def test_a_line_of_the_results_names_what_differs_from_what_to_what(tmp_path):
    first = write_run(tmp_path / "first")
    other = write_run(tmp_path / "other", steps=41, recipe={"optimizer.rate_scale": 0.5, "train.seed": 2, "model.n_layer": 5, "data.packing": "best_fit"})  # fmt: skip
    assert changes(first, other) == [
        "train.seed 1 -> 2",
        "train.max_steps 40 -> 41",
        "data.packing concat -> best_fit",
        "2 more",
    ]
    assert changes(first, first) == []
