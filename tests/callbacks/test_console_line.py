"""The console line keeps the shape that people's parsers read."""

from pipeline.callbacks.log import step_line

ROW = {
    "train/loss_ema": 2.3369164,
    "optim/lrm": 0.05,
    "perf/step_s": 0.9974,
    "perf/tok_per_s": 1051311.9,
    "perf/bf16_mfu_pct": 63.45,
    "data/epoch": 1,
    "data/pq": 122,
    "data/rg": 80,
    "perf/total_s": 92.46 * 60,
    "perf/eta_s": 0.9974,
}


def test_the_line_has_exactly_the_agreed_shape():
    assert step_line(ROW, step=5567, max_steps=5568) == (
        "step 05567/05568 (99.98%) | loss: 2.336916 | lrm: 0.05 | dt: 997.40ms | tok/sec: 1,051,311 | bf16_mfu: 63.45 | "
        "epoch: 1 pq: 122 rg: 80 | total time: 92.46m | eta: 0.0m"
    )


def test_an_unknown_peak_reads_not_available_instead_of_a_number():
    row = {name: value for name, value in ROW.items() if name != "perf/bf16_mfu_pct"}
    assert "| bf16_mfu: n/a |" in step_line(row, step=0, max_steps=10)
