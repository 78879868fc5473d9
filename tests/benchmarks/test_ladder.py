"""A power law from one's own runs: the right line and interval, refused where the runs are not of one family."""

import math
import re
import statistics

import numpy as np
import pytest
import yaml

from benchmarks.ladder import fit_power_law, fit_runs, main
from pipeline.plan.plan import planned_sizes
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.process.storage import write_text
from pipeline.recipe import read_recipe
from pipeline.recipe.identity import resume_keys
from pipeline.report.run_data import read_run
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory

RECIPE = {
    "tokenizer": {"vocab_size": 512},
    "data": {"sources": [{"files": "a.txt"}], "row_tokens": 64, "batch_tokens": 512},
    "model": {"preset": "modern", "depth": 2, "aspect_ratio": 16, "head_dim": 16},
    "optimizer": {"type": "muon_adamw"},
    "run": {"stage": "pretrain", "tokens_per_param": 2.0},
}


@pytest.fixture
def family(tmp_path, monkeypatch):
    """write(depth, ...) makes a finished run of a recipe, as its files would tell it; its BPB lies on 20 FLOPs^-0.1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE))

    def recipe(depth, *overrides):
        given = "" if any(override.startswith("model.depth=") for override in overrides) else f"model.depth={depth}"
        return read_recipe(["r.yaml", *([given] if given else []), *overrides])

    def write(depth, *overrides, name=None, off=1.0, finished=True, protocol="p", parts=None, text="f"):
        settled = recipe(depth, *overrides)
        sizes, tokens = planned_sizes(settled)[0], settled.train["max_steps"] * settled.data.batch_tokens
        per_token, run = sizes.flops_per_token("nanochat"), RunDirectory(tmp_path / "runs" / (name or f"d{depth}"))
        run.update_manifest(
            name=run.name,
            must_match=resume_keys(settled),
            inputs={"tokenizer": {"identity": "t"}, "sources": [{"fingerprint": text}], "batch_tokens": settled.data.batch_tokens, "protocols": {"val/bpb": protocol}, "protocol_parts": {"val/bpb": parts} if parts else {}},
            plan={"scaling_parameters": sizes.parameters()["scaling"]},
            model={"parameters": sizes.parameters()["total"], "flops_per_token": per_token},
            **({"finished": 1.0} if finished else {}),
        )  # fmt: skip
        write_text(run.recipe, "{}")
        bpb = off * 20 * (per_token * tokens) ** -0.1
        append_row(
            run.metrics,
            {"step": settled.train["max_steps"], "attempt": 1, "time": 1.0, "tokens": tokens, "val/bpb": bpb},
        )
        return read_run(str(run.path))

    write.recipe = recipe
    return write


X = [1e12 * 10 ** (1.5 * k / 5) for k in range(6)]


def law_at(x, floor, exponent):
    return floor + 1.8 * (x / 1e12) ** -exponent


def test_without_a_floor_the_fit_is_the_textbook_regression_with_its_interval():
    noise = np.random.default_rng(1)
    x = np.geomspace(1e9, 1e15, 40)  # six decades of 40 points leave no doubt of floor and noise
    y = 20 * x**-0.1 * np.exp(noise.normal(0, 0.005, 40))
    law = fit_power_law(x.tolist(), y.tolist())
    slope, intercept = statistics.linear_regression(np.log(x), np.log(y))
    floor, factor, exponent = law.likeliest()
    assert (floor, math.log(factor), exponent) == (0.0, pytest.approx(intercept), pytest.approx(slope))
    s = math.sqrt(sum((np.log(y) - intercept - slope * np.log(x)) ** 2) / 38)
    half = 2.02 * s * math.sqrt(1 + 1 / 40 + math.log(1e16 / 1e12) ** 2 / sum((np.log(x) - math.log(1e12)) ** 2))
    value, low, high = law.predict(1e16)
    assert value == pytest.approx(math.exp(intercept + slope * math.log(1e16)), rel=5e-3)
    assert math.log(high / low) / 2 == pytest.approx(half, rel=0.25)  # what doubt of a small floor is left


def test_many_points_show_a_floor_and_few_points_only_bound_it():
    noise = np.random.default_rng(0)
    x = np.geomspace(1e9, 1e15, 40)
    shown = fit_power_law(x.tolist(), ((0.7 + 100 * x**-0.17) * np.exp(noise.normal(0, 1e-3, 40))).tolist())
    assert shown.likeliest()[0] == pytest.approx(0.7, abs=0.05)
    none = fit_power_law(X[:3], [20 * v**-0.1 for v in X[:3]])
    assert none.likeliest()[0] == 0.0
    assert none.highest_floor() > 0.1
    assert fit_power_law(X, [20 * v**-0.1 for v in X]).highest_floor() < none.highest_floor()


def chance_below(law, y, x):
    return law._chance_below(math.log(y), *law._further_run(x))


def test_the_prediction_interval_leaves_2_5_percent_beyond_each_end():
    law = fit_power_law(X, [law_at(v, 0.6, 0.12) for v in X])
    middle, low, high = law.predict(3e14)
    assert low < middle < high
    assert [chance_below(law, y, 3e14) for y in (low, middle, high)] == pytest.approx([0.025, 0.5, 0.975], abs=1e-6)


@pytest.mark.parametrize(
    ("sizes", "floor", "exponent", "spread"),
    [(3, 0.6, 0.12, 0.004), (4, 0.6, 0.12, 0.004), (5, 0.6, 0.12, 0.001), (6, 0.6, 0.12, 0.004), (6, 0.0, 0.12, 0.004), (6, 1.5, 0.3, 0.001)],
)  # fmt: skip
def test_the_interval_covers_new_runs_at_ten_times_the_compute(sizes, floor, exponent, spread):
    draws, held = np.random.default_rng(1), 0
    x = np.geomspace(X[0], X[-1], sizes)
    for _ in range(200):
        law = fit_power_law(x.tolist(), [law_at(v, floor, exponent) * math.exp(draws.normal(0, spread)) for v in x])
        y = law_at(10 * X[-1], floor, exponent) * math.exp(draws.normal(0, spread))
        held += 0.025 <= chance_below(law, y, 10 * X[-1]) <= 0.975
    assert held >= 180  # 95 % less three standard errors of 200


def test_points_without_a_law_are_refused_and_scatter_widens_the_interval():
    with pytest.raises(ValueError, match="takes an exponent"):
        fit_power_law(X[:3], [1.0, 1.1, 1.2])
    with pytest.raises(ValueError, match="2 different x"):
        fit_power_law([1e12, 1e12, 1e13], [1.2, 1.2, 1.1])
    _, low, high = fit_power_law(X, [law_at(v, 0.6, 0.12) * (1.1 if n % 2 else 0.9) for n, v in enumerate(X)]).predict(
        X[-1]
    )
    assert high / low > 1.4


def test_runs_of_a_family_are_fitted_by_the_command(family, capsys):
    for depth in (2, 4, 6):
        family(depth, "train.seed=1" if depth == 4 else "train.seed=42")
    assert main(["runs/d6", "runs/d2", "runs/d4"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"val/bpb = 20 x FLOPs\^-0\.1000, at (1\.9\d+|2) tokens per param", printed)
    assert "by these 3 sizes an irreducible term may be up to" in printed
    assert "3 sizes are few" in printed
    assert re.findall(r"^\| (d\d) ", printed, re.MULTILINE) == ["d2", "d4", "d6"]


def test_a_law_through_short_runs_prints_a_warning_naming_them(family, capsys):
    steps = {depth: family.recipe(depth).train["max_steps"] for depth in (2, 4, 6)}
    assert steps[2] < 200 < steps[6]
    for depth in (2, 4, 6):
        family(depth)
    main(["runs/d6", "runs/d2", "runs/d4"])
    (warning,) = re.findall("warning: .*", capsys.readouterr().out)
    assert f"fewer than 200 steps in d2 ({steps[2]})" in warning
    assert "d6" not in warning
    for depth in (6, 8, 10):
        family(depth)
    main(["runs/d6", "runs/d8", "runs/d10"])
    assert "warning" not in capsys.readouterr().out


def test_runs_whose_bpb_rises_with_their_size_are_refused(family):
    runs = [family(depth, off=depth) for depth in (2, 4, 6)]
    with pytest.raises(RecipeError, match="the runs lie on no power law"):
        fit_runs(runs)


def test_unlike_runs_are_refused_with_every_key_that_differs(family):
    family(2, parts={"score": "rows", "window": 64, "dtype": "float32"})
    family(4, "data.packing=concat")
    parts = {"score": "rows", "window": 32, "dtype": "float32"}
    family(6, "optimizer.schedule.decay_fraction=0.5", protocol="q", parts=parts, text="g")
    with pytest.raises(RecipeError) as caught:
        fit_runs([read_run(f"runs/d{depth}") for depth in (2, 4, 6)])
    for line in (
        'd4 against d2: data.packing: "cut_and_fit" -> "concat"',
        "d6 against d2: optimizer.schedule.decay_fraction: 0.65 -> 0.5",
        "d6 against d2: protocol of val/bpb: p -> q, window 64 against 32\n",
        'd6 against d2: content of data.sources: ["f"] -> ["g"]',
    ):
        assert line in str(caught.value)


def test_rates_may_differ_by_the_dial_alone(family):
    for depth in (2, 4, 6):
        family(depth, "model.depth=null", f"model.n_layer={depth}", "model.n_embd=32", "model.n_head=2", f"optimizer.groups.matrices.learning_rate=0.0{depth}")  # fmt: skip
    with pytest.raises(RecipeError, match=r"optimizer\.groups\.matrices\.learning_rate: 0\.02 -> 0\.04"):
        fit_runs([read_run(f"runs/d{depth}") for depth in (2, 4, 6)])


def test_runs_whose_horizons_follow_no_rule_are_refused_with_their_tokens(family):
    runs = [family(depth, f"run.tokens_per_param={depth}") for depth in (2, 4, 6)]
    with pytest.raises(RecipeError, match=r"follow no one rule.*\n  d2: [\d,]+ tokens, 2\.\d\d a scaling parameter"):
        fit_runs(runs)


def test_a_horizon_that_whole_steps_make_shorter_is_of_the_same_rule(family):
    runs = [family(depth, "run.tokens_per_param=0.21") for depth in (2, 4, 6)]
    shares = [run.tokens() / run.manifest["plan"]["scaling_parameters"] for run in runs]
    assert max(shares) > 1.02 * min(shares)
    assert f"at {max(shares):,.4g} tokens per param" in fit_runs(runs)


def test_unfinished_runs_and_too_few_are_told_together(family):
    with pytest.raises(InputMissingError, match=r"(?s)d4 has not finished.*2 runs are given, and a line"):
        fit_runs([family(2), family(4, finished=False)])
    with pytest.raises(RecipeError, match="3 runs of 2 sizes"):
        fit_runs([family(2), family(4), family(4, "train.seed=3", name="again")])
