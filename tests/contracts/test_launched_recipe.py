"""A shipped recipe made small by overrides alone, started, stopped and continued through `accelerate launch`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.run_dir.rows import read_rows

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SMALL = [
    "run.name=small",
    "tokenizer.vocab_size=512",
    "tokenizer.train_chars=200000",
    "data.row_tokens=64",
    "data.batch_tokens=512",
    "data.shard_rows=64",
    "data.packing_documents=64",
    "model.depth=2",
    "model.head_dim=16",
    "model.aspect_ratio=16",
    "train.per_device_train_batch_size=4",
    "train.max_steps=60",
    "train.logging_steps=1",
    "train.save_steps=20",
    "train.eval_steps=1000",
    "train.torch_compile=false",
    "evals.bpb.tokens=2048",
    "evals.bpb.document_bytes=2000",
    "evals.bpb.at_start=false",
    "samples.every_steps=0",
]


@pytest.fixture
def command(tmp_path, text_files):
    """The user's command, on local parquet."""
    files = []
    for path in text_files:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        pq.write_table(
            pa.table({"text": [row["text"] for row in rows]}), tmp_path / f"{path.stem}.parquet", row_group_size=100
        )
        files.append(str(tmp_path / f"{path.stem}.parquet"))
    sources = [f"data.sources=[{{files: [{files[0]}, {files[1]}]}}]", f"data.validation=[{{files: {files[2]}}}]"]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "accelerate_configs" / "cpu.yaml"),
    ]
    entry = [str(ROOT / "pipeline" / "pretrain.py"), str(ROOT / "recipes" / "fineweb_d24.yaml")]
    return [*launch, *entry, *SMALL, *sources, f"data.cache_dir={tmp_path / 'cache'}"]


def run(command, folder) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )


def test_fineweb_d24_runs_small_stops_continues_and_says_that_it_is_done(command, tmp_path):
    first = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    metrics = tmp_path / "runs" / "small" / "metrics.jsonl"
    while first.poll() is None and not any(
        row.get("step", 0) >= 3 and "event" not in row for row in read_rows(metrics)
    ):
        time.sleep(0.01)
    # The launcher dies of it and tells nobody; the rank sees that and saves.
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=120)
    assert "is whole" in output, output[-3000:]
    second = run(command, tmp_path)
    assert second.returncode == 0, second.stdout[-2000:] + second.stderr[-2000:]
    assert "going on from checkpoint-" in second.stdout
    assert "step 00059/00060" in second.stdout
    third = run(command, tmp_path)
    assert third.returncode == 0
    assert "the run has finished" in third.stdout
