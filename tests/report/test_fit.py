"""A power law from one's own runs: the right line and interval, refused where the runs are not of one family."""

import math
import random
import re
import statistics

import pytest
import yaml

from pipeline.artifacts.atomic import read_json, write_text
from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.artifacts.rows import append_row
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.preflight.plan import known_sizes
from pipeline.recipe import read_recipe
from pipeline.recipe.identity import must_match
from pipeline.report.__main__ import main
from pipeline.report.fit import expected_bpb, fit_runs
from pipeline.report.power_law import fit_power_law, t_975
from pipeline.report.run_data import read_run

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

    def write(depth, *overrides, name=None, off=1.0, finished=True, protocol="p", text="f"):
        settled = recipe(depth, *overrides)
        sizes, tokens = known_sizes(settled), settled.train["max_steps"] * settled.data.batch_tokens
        per_token, run = sizes.flops_per_token("nanochat"), RunDirectory(tmp_path / "runs" / (name or f"d{depth}"))
        run.update_manifest(
            name=run.name,
            must_match=must_match(settled),
            inputs={"tokenizer": {"identity": "t"}, "sources": [{"fingerprint": text}], "protocols": {"val/bpb": protocol}},
            plan={"scaling_parameters": sizes.parameters()["scaling"]},
            model={"parameters": sizes.parameters()["total"], "flops_per_token": per_token},
            **({"finished": 1.0} if finished else {}),
        )  # fmt: skip
        write_text(run.recipe, "{}")
        bpb = off * 20 * (per_token * tokens) ** -0.1
        append_row(run.metrics, {"step": 9, "attempt": 1, "time": 1.0, "tokens": tokens, "val/bpb": bpb})
        return read_run(str(run.path))

    write.recipe = recipe
    return write


def test_a_line_through_three_points_is_the_regressions_and_its_interval_the_textbooks():
    x, y = [1e12, 1e13, 1e14], [1.9, 1.5, 1.25]
    law = fit_power_law(x, y)
    slope, intercept = statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y])
    assert (law.a, law.b, law.floor) == (pytest.approx(intercept), pytest.approx(slope), 0.0)
    # Mean at the middle, one degree of freedom: t = 12.7062, and s sqrt(1 + 1/n + d^2 / Sxx).
    residuals = [math.log(q) - intercept - slope * math.log(p) for p, q in zip(x, y, strict=True)]
    s, d = math.sqrt(sum(r * r for r in residuals)), math.log(1e15 / 1e13)
    half = 12.7062 * s * math.sqrt(1 + 1 / 3 + d * d / (2 * math.log(10) ** 2))
    value, low, high = law.predict(1e15)
    assert value == pytest.approx(math.exp(intercept + slope * math.log(1e15)))
    assert (math.log(value / low), math.log(high / value)) == (pytest.approx(half), pytest.approx(half))


def test_an_irreducible_term_is_found_where_six_points_show_one_and_left_out_where_there_is_none():
    noise = random.Random(0)
    x = [10.0**k for k in (12, 13, 14, 15, 16, 17)]
    with_floor = fit_power_law(x, [(0.7 + 100 * v**-0.17) * math.exp(noise.gauss(0, 1e-3)) for v in x])
    assert with_floor.floor == pytest.approx(0.7, abs=0.03)
    assert with_floor.freedom == 3
    noise = random.Random(1)  # whose best curve has a floor of 0.0008, no further from 0 than its error
    without = fit_power_law(x, [100 * v**-0.17 * math.exp(noise.gauss(0, 1e-3)) for v in x])
    assert without.floor == 0.0
    assert without.freedom == 4


def test_the_interval_holds_a_further_run_in_95_of_100_cases():
    noise, held = random.Random(1), 0
    for _ in range(600):
        law = fit_power_law([1e12, 4e12, 1e13], [20 * v**-0.1 * math.exp(noise.gauss(0, 0.01)) for v in (1e12, 4e12, 1e13)])  # fmt: skip
        _, low, high = law.predict(1e14)
        held += low <= 20 * 1e14**-0.1 * math.exp(noise.gauss(0, 0.01)) <= high
    assert 0.92 < held / 600 < 0.98  # 95 % within three standard errors of 600 trials


def test_more_degrees_of_freedom_than_the_table_has_err_on_the_wide_side():
    assert t_975(1) == 12.7062
    assert t_975(500) == t_975(20) > 1.96


def test_runs_of_a_family_are_fitted_and_the_next_depth_is_expected_where_the_law_puts_it(family, tmp_path, capsys):
    for depth in (2, 4, 6):
        family(depth, "train.seed=1" if depth == 4 else "train.seed=42")
    assert main(["--fit", "runs/d6", "runs/d2", "runs/d4"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"val/bpb = 20 x FLOPs\^-0\.1000, at (1\.9\d+|2) tokens per param", told)
    (file,) = (tmp_path / "runs").glob("fit-*.json")
    assert [point["run"] for point in read_json(file)["points"]] == ["d2", "d4", "d6"]
    recipe = family.recipe(8)
    sizes, tokens = known_sizes(recipe), recipe.train["max_steps"] * recipe.data.batch_tokens
    expected = expected_bpb(recipe, sizes, tokens=tokens)
    assert expected.value == pytest.approx(20 * (sizes.flops_per_token("nanochat") * tokens) ** -0.1, rel=1e-6)
    assert expected.low <= expected.value <= expected.high
    assert expected.beyond > 1
    assert expected.fit == file.name


@pytest.mark.parametrize(
    "overrides", [["data.packing=concat"], ["run.tokens_per_param=4"], ["optimizer.schedule.decay_fraction=0.5"]]
)
def test_a_recipe_of_another_family_or_horizon_is_not_expected_anything(family, overrides):
    for depth in (2, 4, 6):
        family(depth)
    fit_runs([read_run(f"runs/d{depth}") for depth in (2, 4, 6)])
    recipe = family.recipe(8, *overrides)
    tokens = recipe.train["max_steps"] * recipe.data.batch_tokens
    assert expected_bpb(recipe, known_sizes(recipe), tokens=tokens) is None


def test_unlike_runs_are_refused_with_every_key_that_differs(family):
    family(2)
    family(4, "data.packing=concat")
    family(6, "optimizer.schedule.decay_fraction=0.5", protocol="q", text="g")
    with pytest.raises(RecipeError) as told:
        fit_runs([read_run(f"runs/d{depth}") for depth in (2, 4, 6)])
    for line in (
        'd4 against d2: data.packing: "cut_and_fit" -> "concat"',
        "d6 against d2: optimizer.schedule.decay_fraction: 0.65 -> 0.5",
        'd6 against d2: protocol of val/bpb: "p" -> "q"',
        'd6 against d2: content of data.sources: ["f"] -> ["g"]',
    ):
        assert line in str(told.value)


def test_rates_may_differ_by_the_dial_alone(family):
    for depth in (2, 4, 6):
        family(depth, "model.depth=null", f"model.n_layer={depth}", "model.n_embd=32", "model.n_head=2", f"optimizer.groups.matrices.learning_rate=0.0{depth}")  # fmt: skip
    with pytest.raises(RecipeError, match=r"optimizer\.groups\.matrices\.learning_rate: 0\.02 -> 0\.04"):
        fit_runs([read_run(f"runs/d{depth}") for depth in (2, 4, 6)])


def test_runs_whose_horizons_follow_no_rule_are_refused_with_their_tokens(family):
    runs = [family(depth, f"run.tokens_per_param={depth}") for depth in (2, 4, 6)]
    with pytest.raises(RecipeError, match=r"follow no one rule.*\n  d2: [\d,]+ tokens, 2\.\d\d a scaling parameter"):
        fit_runs(runs)


def test_unfinished_runs_and_too_few_are_told_together(family):
    with pytest.raises(InputMissingError, match=r"(?s)d4 has not finished.*2 runs are given, and a line"):
        fit_runs([family(2), family(4, finished=False)])
    with pytest.raises(RecipeError, match="3 runs of 2 sizes"):
        fit_runs([family(2), family(4), family(4, "train.seed=3", name="again")])
