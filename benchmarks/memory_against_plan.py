"""Peak memory of training steps on this CPU against what the plan says: models of families with weights drawn at random.

Each case is a process of its own (run/probing.py) that makes three steps of two micro-steps, with a C library that gives
freed blocks back at once: its peak beyond the imports is that of the tensors. --process: as trainings run, where freed
memory is kept, and the plan counts the whole process.

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
    "llama": {**GATED, "vocab_size": 16_384, "tie_word_embeddings": True},
    "qwen3": {**GATED, "head_dim": 64, "vocab_size": 16_384, "tie_word_embeddings": True},
    "gemma3_text": {**GATED, "head_dim": 128, "vocab_size": 32_768, "sliding_window": 512},
}
RECOMPUTE = ["train.activation_checkpointing=true"]
ADAPTER = ["model.adapter={type: lora}"]
BF16 = ["train.bf16=true"]


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    rows: int
    row_tokens: int
    overrides: list[str] = field(default_factory=list)
    isolated: bool = False  # documents of a row


CASES = [
    Case("llama", "llama", 1, 512),
    Case("llama, recomputed", "llama", 2, 512, RECOMPUTE),
    Case("qwen3, bf16", "qwen3", 1, 512, BF16),
    Case("qwen3, documents isolated", "qwen3", 1, 512, isolated=True),
    Case("gemma3", "gemma3_text", 1, 512),
    Case("gemma3, recomputed", "gemma3_text", 1, 1024, RECOMPUTE),
    Case("llama, adapters", "llama", 2, 256, ADAPTER),
    Case("qwen3, bf16, adapters, recomputed", "qwen3", 1, 1024, [*BF16, *ADAPTER, *RECOMPUTE]),
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
    isolated = "true" if case.isolated else "false"
    path.write_text(
        "run: {stage: pretrain}\ntrain: {max_steps: 10, save_strategy: 'no'}\n"
        f"data: {{isolate_documents: {isolated}}}\n"
    )
    return [
        str(path),
        "data.sources=[{id: tandem:quickstart_text}]",
        f"data.cache_dir={folder / 'cache'}",
        f"data.row_tokens={case.row_tokens}",
        f"data.batch_tokens={2 * case.rows * case.row_tokens}",
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


def compare(case: Case, folder: Path, *, base: int, process: bool) -> dict[str, Any]:
    """Return planned and measured MiB of a case, of tensors alone, or of the whole process. base: of the imports."""
    if not (folder / case.family).exists():
        write_model(case.family, folder / case.family)
    given = recipe_lines(case, folder)
    memory = make_plan(read_recipe(given), device_without_torch(), processes=1).memory
    assert memory is not None
    assert memory.optimizer is not None
    assert memory.total is not None
    activations, planned = memory.activations / KEPT_FREED, memory.total
    measured = peak_of(given, keeps=process)
    if not process:
        measured -= base
        planned = memory.weights + memory.gradients + memory.optimizer + round(activations)
    numbers = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "states": memory.optimizer,
        "activations": activations,
        "planned": planned,
        "measured": measured,
    }
    mib = {name: round(value / 2**20) for name, value in numbers.items()}
    return {
        "case": case.name,
        "rows": f"{case.rows} x {case.row_tokens}",
        **mib,
        "ratio": round(planned / measured, 3),
    }


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="", help="only cases whose names hold this")
    parser.add_argument("--process", action="store_true", help="whole processes, as trainings run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, base = [], baseline()
        for case in CASES:
            if options.name in case.name:
                rows.append(compare(case, Path(folder), base=base, process=options.process))
                print(rows[-1], file=sys.stderr, flush=True)
    show(options, rows)


if __name__ == "__main__":
    main()
