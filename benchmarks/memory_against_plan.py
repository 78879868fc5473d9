"""Peak memory of training steps on this CPU against what the plan says: models of families with weights drawn at random.

Each case is a process of its own (run/probing.py) that makes three steps of two micro-steps. It runs twice: with a C
library that gives freed blocks back at once, where the peak beyond the imports is that of the tensors; and as trainings
run, where freed memory is kept and the plan counts the whole process.

python benchmarks/memory_against_plan.py            all cases
python benchmarks/memory_against_plan.py llama      those whose names hold that
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, show

from pipeline.hardware.accelerators import device_without_torch
from pipeline.plan.memory import KEPT_FREED
from pipeline.plan.plan import make_plan
from pipeline.recipe import read_recipe

GATED = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GATED, "vocab_size": 32_768, "tie_word_embeddings": True},
    "qwen3": {**GATED, "head_dim": 64, "vocab_size": 49_152, "tie_word_embeddings": True},
    "gemma3_text": {**GATED, "head_dim": 128, "vocab_size": 49_152, "sliding_window": 512},
    "gpt2": {"n_embd": 384, "n_layer": 6, "n_head": 6, "vocab_size": 32_768, "n_positions": 1024},
}
RECOMPUTE = ["train.activation_checkpointing=true"]
BF16 = ["train.bf16=true"]


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    rows: int
    row_tokens: int
    overrides: list[str] = field(default_factory=list)


CASES = [
    Case("llama", "llama", 2, 512),
    Case("llama, recomputed", "llama", 4, 512, RECOMPUTE),
    Case("qwen3, bf16", "qwen3", 1, 1024, BF16),
    Case("qwen3, bf16, recomputed", "qwen3", 2, 1024, [*BF16, *RECOMPUTE]),
    Case("gemma3", "gemma3_text", 2, 512),
    Case("gemma3, long rows, recomputed", "gemma3_text", 1, 2048, RECOMPUTE),
    Case("qwen3, documents isolated", "qwen3", 1, 1024, ["data.isolate_documents=true"]),
    Case("llama, short rows", "llama", 4, 128),
]


def write_model(family: str, folder: Path) -> None:
    """Write a model of the family with random weights, and a tokenizer of as many ids."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.run.probing import tokenizer_of_size

    config = AutoConfig.for_model(family, **FAMILIES[family], bos_token_id=1, eos_token_id=2, pad_token_id=3)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer_of_size(FAMILIES[family]["vocab_size"]).save_pretrained(folder)


def recipe_lines(case: Case, folder: Path) -> list[str]:
    """Return the command line of a continued pretraining with two micro-steps."""
    path = folder / "recipe.yaml"
    path.write_text("run: {stage: pretrain}\ntrain: {max_steps: 10, save_strategy: 'no'}\n")
    return [
        str(path),
        "data.sources=[{id: tandem:quickstart_text}]",
        f"data.cache_dir={folder / 'cache'}",
        f"data.row_tokens={case.row_tokens}",
        f"data.batch_tokens={2 * case.rows * case.row_tokens}",
        "data.isolate_documents=false",
        f"model.start_from={folder / case.family}",
        "optimizer.type=adamw",
        f"train.per_device_train_batch_size={case.rows}",
        *case.overrides,
    ]


def peak_of(given: list[str], *, keeps: bool) -> int:
    """Return the peak of resident memory of a process that makes steps. keeps: as trainings run, where the C library
    keeps what is freed (hardware/processor.py); else it returns every large block at once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not keeps:
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "pipeline.run.probing", "0.01", *given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"step_s"')]
    if not lines:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(lines[-1])["peak_bytes"]


def baseline() -> int:
    """Return the peak of a process that only imports what the others do."""
    code = "import pipeline.run.probing, transformers.models.qwen3.modeling_qwen3; from pipeline.hardware.processor "
    code += "import peak_bytes; print(peak_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return int(done.stdout)


def compare(case: Case, folder: Path, *, base: int) -> dict[str, Any]:
    """Return planned and measured MiB of a case: of tensors alone, and of the whole process. base: of the imports."""
    if not (folder / case.family).exists():
        write_model(case.family, folder / case.family)
    given = recipe_lines(case, folder)
    memory = make_plan(read_recipe(given), device_without_torch(), processes=1).memory
    assert memory is not None
    assert memory.optimizer is not None
    assert memory.total is not None
    activations = memory.activations / KEPT_FREED
    tensors = memory.weights + memory.gradients + memory.optimizer + activations
    live, kept = peak_of(given, keeps=False) - base, peak_of(given, keeps=True)
    mib = 2**20
    return {
        "case": case.name,
        "rows": f"{case.rows} x {case.row_tokens}",
        "weights": round(memory.weights / mib),
        "gradients": round(memory.gradients / mib),
        "states": round(memory.optimizer / mib),
        "activations": round(activations / mib),
        "tensors": round(tensors / mib),
        "measured": round(live / mib),
        "plan/measured": round(tensors / live, 3),
        "process": round(memory.total / mib),
        "process measured": round(kept / mib),
        "process ratio": round(memory.total / kept, 3),
    }


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="", help="only cases whose names hold this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, base = [], baseline()
        for case in CASES:
            if options.name in case.name:
                rows.append(compare(case, Path(folder), base=base))
                print(rows[-1], file=sys.stderr, flush=True)
    show(options, rows)


if __name__ == "__main__":
    main()
