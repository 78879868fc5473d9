"""Logs of other programs and of our own become runs under our names and units, without a lost line."""

import csv
import json
import math
import re
from pathlib import Path

import pytest

from pipeline.contrib.imported_logs import read_log
from pipeline.process.errors import DataError
from pipeline.report.__main__ import main
from pipeline.report.run_data import read_runs
from pipeline.report.single import report

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
NANOCHAT_HEAD = """\
GPU: NVIDIA H100 80GB HBM3 | Peak FLOPS (BF16): 9.89e+14
COMPUTE_DTYPE: torch.bfloat16 (auto-detected: CUDA SM 90)
Vocab size: 32,768
Model config:
{
  "sequence_len": 2048,
  "vocab_size": 32768,
  "n_layer": 12,
  "n_head": 6,
  "n_kv_head": 6,
  "n_embd": 768,
  "window_pattern": "SSSL"
}
Estimated FLOPs per token: 7.597000e+08
Tokens / micro-batch / rank: 16 x 2048 = 32,768
Tokens / micro-batch: 65,536
Total batch size 524,288 => gradient accumulation steps: 8
"""


def base_line(step, steps=30, *, loss=9.5, dt=500.0, batch=524288, eta=True):
    """A line of nanochat's base_train, which picoLLM's has the shape of."""
    tail = f" | eta: {(steps - step) * dt / 6e4:.1f}m" if eta and step > 10 else ""
    return (
        f"step {step:05d}/{steps:05d} ({100 * step / steps:.2f}%) | loss: {loss:.6f} | lrm: 1.00 | dt: {dt:.2f}ms | "
        f"tok/sec: {int(batch / dt * 1000):,} | bf16_mfu: 43.21 | epoch: 1 pq: 3 rg: 7 | total time: {max(step - 10, 0) * dt / 6e4:.2f}m{tail}\n"
    )


def old_base_line(step, steps):
    return f"step {step:05d}/{steps:05d} ({100 * step / steps:.2f}%) | loss: {8 - step / 9:.6f} | grad norm: 0.4321 | lrm: 1.00 | dt: 1217.40ms | tok/sec: 430,600 | mfu: 43.80 | total time: {step / 60:.2f}m\n"


def mid_line(step):
    return f"step {step:05d} ({step / 9:.2f}%) | loss: 2.081234 | lrm: 1.00 | dt: 1179.30ms | tok/sec: 444,576 | mfu: 45.22 | total time: 0.00m\n"


def sft_line(step):
    return mid_line(step).replace(" | total time", " | epoch: 1 | total time")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def one(path):
    (data,) = read_log(path)
    assert not data.lost_lines
    return data


def test_a_whole_nanochat_log_gives_every_number_under_our_name_and_unit(tmp_path):
    text = NANOCHAT_HEAD + "Step 00000 | Validation bpb: 3.123456\n"
    text += "".join(base_line(step, loss=9 - step / 10, dt=500 + step) for step in range(30))
    text += "Step 00030 | Validation bpb: 1.876543\nStep 00030 | CORE metric: 0.1614\nThe capital of France is Paris\n"
    text += "Peak memory usage: 28481.00MiB\nTotal training time: 0.25m\nMinimum validation bpb: 1.876543\n"
    data = one(write(tmp_path / "d12.log", text))
    assert (data.name, data.step(), data.max_steps(), data.status()) == ("d12", 30, 30, "finished")
    assert [step for step, _ in data.series("train/loss_ema")] == list(range(1, 31))
    assert data.series("val/bpb") == [(0, 3.123456), (30, 1.876543)]
    assert (data.last("core/v1"), data.tokens()) == (0.1614, 30 * 524288)
    row = next(row for row in data.rows if row["step"] == 30 and "optim/lrm" in row)
    assert row["perf/step_s"] == pytest.approx(0.529)
    assert row["perf/total_s"] == pytest.approx(60 * round(19 * 529 / 6e4, 2))
    assert (row["data/epoch"], row["data/pq"], row["data/rg"], row["perf/bf16_mfu_pct"]) == (1, 3, 7, 43.21)
    assert data.last("mem/run_peak_allocated_gib") == pytest.approx(28481 / 1024)
    assert data.manifest["shape"] == {"device": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16", "processes": 2}
    assert data.recipe["model"] == {"n_layer": 12, "n_embd": 768, "n_head": 6, "n_kv_head": 6}
    assert "rank 0's last micro-batch" in data.meaning_of("train/loss_ema")
    assert data.meaning_of("perf/step_s") is None


def test_lines_of_older_shapes_are_read_with_gradient_norm_and_mfu(tmp_path):
    data = one(write(tmp_path / "old.log", "".join(old_base_line(step, 9) for step in range(9))))
    assert data.last("optim/grad_norm") == 0.4321
    assert data.last("perf/bf16_mfu_pct") == 43.8
    assert "H100" in data.meaning_of("perf/bf16_mfu_pct")
    assert len(data.series("train/loss_ema")) == 9


def test_an_mfu_of_zero_is_one_that_was_not_known(tmp_path):
    data = one(write(tmp_path / "cpu.log", base_line(0).replace("bf16_mfu: 43.21", "bf16_mfu: 0.00")))
    assert "perf/bf16_mfu_pct" not in data.rows[0]


def test_sft_and_mid_logs_count_from_one_and_keep_assistant_bpb(tmp_path):
    text = "".join(sft_line(step) for step in range(1, 8)) + "Step 00007 | Validation bpb: 0.5123\n"
    text += "Step 00007 | ChatCORE: 0.1000 | ChatCORE_cat: 0.0900\n"
    sft = one(write(tmp_path / "sft.log", text))
    assert (sft.stage, sft.step(), sft.last("sft/assistant_bpb"), sft.last("chat/core_part")) == (
        "sft",
        7,
        0.5123,
        0.1,
    )
    assert not sft.series("val/bpb")
    mid = one(write(tmp_path / "mid.log", "".join(mid_line(step) for step in range(1, 814))))
    assert (mid.stage, mid.step(), len(mid.rows)) == (None, 813, 813)


def test_the_first_sft_script_logged_an_unsmoothed_loss(tmp_path):
    lines = [f"Step {step:05d}/00009 | Training loss: {2 - step / 9:.6f}| lrm: {1 - step / 9:.6f}| num_tokens: 12,345\n" for step in range(9)]  # fmt: skip
    data = one(
        write(tmp_path / "a.log", "".join([*lines[:5], "Step 00005 | Validation loss: 1.234567\n", *lines[5:]]))
    )
    assert data.loss_name() == "train/loss"
    assert "last micro-batch" in data.meaning_of("train/loss")
    assert (data.step(), data.series("val/loss")) == (9, [(5, 1.234567)])


def test_a_step_line_that_cannot_be_read_is_reported_by_number(tmp_path, capsys):
    garbled = base_line(5).replace("loss: 9.500000", "loss: 9.5x0|0")
    lines = [base_line(step) for step in range(5)] + [garbled, "step 00006/00030 (20.00%) | lo\n"]
    lines += ["At step 2000 (15.6 %) it crashed.\n", "- step 3: look at the loss: 2.5 | and dt\n"]
    lines += ["[rank0]: " + base_line(7), "\x1b[32m" + base_line(8), "2025-12-21 08:16:00 " + base_line(9)]
    path = write(tmp_path / "a.log", "".join(lines) + base_line(10)[:60])
    (data,) = read_log(path)
    assert [number for number, _ in data.lost_lines] == [6, 7, 13]
    assert [step for step, _ in data.series("train/loss_ema")] == [1, 2, 3, 4, 5, 8, 9, 10]
    assert main([str(path)]) == 0
    assert f"{path}:6: looks like a measured step and cannot be read: 'step 00005/00030" in capsys.readouterr().err


def test_a_number_not_finite_is_dropped_and_its_step_marked(tmp_path):
    lines = [base_line(step, loss=math.nan if step == 3 else 2.0) for step in range(5)]
    data = one(write(tmp_path / "a.log", "".join(lines)))
    assert [step for step, _ in data.series("train/loss_ema")] == [1, 2, 3, 5]
    events = [row for row in data.rows if row.get("event") == "nonfinite"]
    assert [(row["step"], row["metrics"]) for row in events] == [(4, ["train/loss_ema"])]


def test_steps_that_start_again_replace_the_lost_ones_as_another_attempt(tmp_path):
    first = [base_line(step, loss=9) for step in range(8)]
    again = ["Step 00005 | Validation bpb: 2.500000\n", *(base_line(step, loss=5) for step in range(5, 12))]
    data = one(write(tmp_path / "a.log", "".join([*first, *again])))
    assert [value for _, value in data.series("train/loss_ema")] == [9] * 5 + [5] * 7
    assert data.series("val/bpb") == [(5, 2.5)]
    assert {row["attempt"] for row in data.all_rows} == {1, 2}


def test_a_line_that_was_printed_twice_counts_once(tmp_path):
    data = one(write(tmp_path / "a.log", "".join(base_line(step) * 2 for step in range(4))))
    assert ({row["attempt"] for row in data.all_rows}, len(data.rows)) == ({1}, 4)


def test_the_stages_of_one_log_are_runs_of_their_own(tmp_path):
    stages = [base_line(step) for step in range(30)], [mid_line(step) for step in range(1, 5)], [sft_line(step) for step in range(1, 7)]  # fmt: skip
    between = "Peak memory usage: 100.00MiB\n", "Step 00000 | Validation bpb: 0.700000\n", ""
    text = "".join("".join(lines) + end for lines, end in zip(stages, between, strict=True))
    found = read_log(write(tmp_path / "speedrun.log", text))
    assert [data.name for data in found] == ["speedrun 1 base", "speedrun 2 mid", "speedrun 3 sft"]
    assert [data.step() for data in found] == [30, 4, 6]
    assert found[2].series("sft/assistant_bpb") == [(0, 0.7)]


@pytest.mark.skipif(not SEEDS.exists(), reason="the seed documents are not here")
def test_the_line_of_a_written_analysis_is_found_inside_its_text(tmp_path):
    (document,) = SEEDS.glob("000_*")
    data = one(document)
    (row,) = data.rows
    assert row["step"] == 5568
    assert row["train/loss_ema"] == 2.336916
    assert row["perf/step_s"] == pytest.approx(0.9974)
    assert row["perf/total_s"] == pytest.approx(92.46 * 60)
    assert (row["data/pq"], row["data/rg"], row["perf/tok_per_s"]) == (122, 80, 1051311)


@pytest.mark.skipif(not SEEDS.exists(), reason="the seed documents are not here")
def test_the_dev_logs_columns_and_figures_are_those_that_are_read(tmp_path):
    (document,) = SEEDS.glob("002_*")
    page_text = document.read_text()
    columns = re.search(r"with columns: (step, loss[\w, ]+)", page_text)[1].split(", ")
    path = tmp_path / "training_20251221.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for step, loss in re.findall(r"^ +(\d+) \| +([\d.]+)", page_text, re.MULTILINE):
            writer.writerow(dict.fromkeys(columns, 1) | {"step": step, "loss": loss, "dt_ms": 1217, "tok_per_sec": 430600, "mfu": 43.8})  # fmt: skip
    data = one(path)
    assert data.series("train/loss_ema")[:2] == [(1, 11.0904), (1001, 3.4627)]
    assert (data.last("perf/step_s"), data.last("perf/bf16_mfu_pct")) == (1.217, 43.8)


NEMO = {
    "reduced_train_loss": [11.9, 7.5, 6.25], "train_step_timing in s": [14.5, 12.25, 12.0], "TFLOPS_per_GPU": [500.0, 624.0, 625.5],
    "peak_memory_usage": [64.5e9] * 3, "memory_allocated": [43e9, 44e9, 44.2e9], "num_zeros_in_grad": [3.2e8] * 3,
    "lr": [1.5e-7, 3e-7, 4.5e-7], "consumed_samples": [128, 256, 384], "grad_norm": [0.008, 0.0075, 0.007],
}  # fmt: skip


def nemo_rows():
    return [{"trainer/global_step": step, **{name: v[step] for name, v in NEMO.items()}} for step in range(3)]


def check_nemo(data):
    assert not data.lost_lines
    assert data.series("train/loss") == [(1, 11.9), (2, 7.5), (3, 6.25)]  # global_step counts from zero
    assert data.last("data/samples") == 384
    assert data.last("mem/run_peak_allocated_gib") == pytest.approx(60.07, abs=0.01)
    assert data.last("mem/allocated_gib") == pytest.approx(41.16, abs=0.01)
    assert (data.last("perf/step_s"), data.last("optim/grad_norm"), data.last("optim/lr")) == (12.0, 0.007, 4.5e-7)
    assert data.last("optim/num_zeros_in_grad") == 3.2e8
    assert data.last("perf/tflops_per_gpu") == 625.5
    assert data.meaning_of("perf/tflops_per_gpu") == "attention counted in full, not causally"


def test_a_nemo_history_from_wandb_is_read_as_csv_and_json(tmp_path):
    rows = nemo_rows()
    text = ",".join(rows[0]) + "\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows)
    for name, content in (
        ("a.csv", text), ("b.json", json.dumps(rows)), ("c.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    ):  # fmt: skip
        data = one(write(tmp_path / name, content))
        check_nemo(data)
        assert data.last("perf/total_s") == pytest.approx(38.75)  # every step is there, so their sum is


def test_charts_of_two_nemo_runs_a_file_each_become_two_runs(tmp_path):
    runs = ("bf16_run - long", "fp8_run")
    for metric, values in NEMO.items():
        head = ["trainer/global_step"] + [f'"{run} - {metric}{end}"' for run in runs for end in ("", "__MIN", "__MAX")]
        lines = [",".join([str(step), *map(str, [values[step]] * 3), *(["", "", ""] if step == 2 else [str(values[step])] * 3)]) for step in range(3)]  # fmt: skip
        write(tmp_path / f"wandb_export_{metric.replace(' ', '_')}.csv", "\n".join([",".join(head), *lines, ""]))
    found = read_runs([str(path) for path in sorted(tmp_path.glob("*.csv"))])
    assert [data.name for data in found] == list(runs)
    check_nemo(found[0])
    assert found[1].step() == 2


def test_scalars_from_tensorboard_a_file_each_become_one_run(tmp_path):
    for metric, values in NEMO.items():
        tag = metric.replace(" ", "_")
        if metric == "lr":
            write(tmp_path / f"run-fp8-tag-{tag}.json", json.dumps([[1.7e9 + s, s, v] for s, v in enumerate(values)]))
        else:
            rows = "".join(f"{1.7e9 + s},{s},{v}\n" for s, v in enumerate(values))
            write(tmp_path / f"run-fp8-tag-{tag}.csv", "Wall time,Step,Value\n" + rows)
    (data,) = read_runs([str(path) for path in sorted(tmp_path.iterdir())])
    assert data.name == "fp8"
    check_nemo(data)
    assert data.rows[0]["time"] == 1.7e9


def test_an_unreadable_cell_is_reported_and_a_nan_cell_left_out(tmp_path):
    text = "global_step,reduced_train_loss,lr\n0,11.9,1e-4\n1,seven,1e-4\n2,NaN,2e-4\n,5.0,2e-4\n"
    (data,) = read_log(write(tmp_path / "a.csv", text))
    assert [number for number, _ in data.lost_lines] == [3, 5]
    assert data.series("train/loss") == [(1, 11.9)]
    assert data.series("optim/lr") == [(1, 1e-4), (3, 2e-4)]


def test_wandbs_history_of_nanochat_keeps_the_smoothed_loss_apart_from_ours(tmp_path):
    rows = [{"_step": 7, "step": 0, "val/bpb": 3.1}] + [
        {"_step": 8 + s, "step": s, "train/loss": 9.0 - s, "train/dt": 0.5, "train/mfu": 40.0, "train/tok_per_sec": 1000} for s in (0, 100)
    ]  # fmt: skip
    data = one(write(tmp_path / "a.json", json.dumps(rows)))
    assert data.series("train/loss_ema") == [(1, 9.0), (101, -91.0)]
    assert not data.series("train/loss")
    assert data.series("val/bpb") == [(0, 3.1)]


def test_a_trainer_state_is_a_run_named_after_its_folder(tmp_path):
    history = [{"step": s, "epoch": s / 10, "loss": 3.0 - s, "learning_rate": 1e-3, "grad_norm": 0.5} for s in (1, 2)]
    state = {
        "global_step": 2,
        "log_history": [*history, {"step": 2, "epoch": 0.2, "eval_loss": 1.5, "eval_runtime": 9.0}],
    }
    data = one(write(tmp_path / "checkpoint-2" / "trainer_state.json", json.dumps(state)))
    assert (data.name, data.series("train/loss"), data.last("val/loss")) == ("checkpoint-2", [(1, 2.0), (2, 1.0)], 1.5)
    assert data.meaning_of("val/loss") == "mean of batch means"


def test_a_file_without_a_measured_step_is_refused_with_a_hint(tmp_path):
    for name, text in (
        ("a.log", "hello\nworld\n"),
        ("b.csv", "name,age\nx,1\n"),
        ("c.json", "[1, 2]"),
        ("d.jsonl", "{}\n"),
    ):
        with pytest.raises(DataError, match="no line is a measured step"):
            read_log(write(tmp_path / name, text))


def test_the_report_of_a_log_is_printed_and_writes_no_file(tmp_path, capsys):
    path = write(tmp_path / "a.log", "".join(base_line(step) for step in range(30)))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.startswith("# a\n\nStatus: finished.")
    assert list(tmp_path.iterdir()) == [path]
    assert report(one(path))
