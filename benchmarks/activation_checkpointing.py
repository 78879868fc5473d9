"""Time that recomputed activations cost: forward and backward with and without them in turns, and what they save by the plan's trial.

python benchmarks/activation_checkpointing.py --pairs 7
"""

from typing import Any

import torch
from common import DEVICE, arguments, in_turns, show
from memory_against_plan import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.model.build import use_chunked_loss
from pipeline.plan.step_memory import memory_of_config


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **FAMILIES[family]), dtype=torch.float32
    )
    use_chunked_loss(model)
    model.config.use_cache = False
    return model.to(DEVICE).train()


def compare(family: str, *, rows: int, row_tokens: int, pairs: int) -> dict[str, Any]:
    """Return seconds of a micro-step each way, their ratio, and planned MiB of activations."""
    kept, recomputed = model_of(family), model_of(family)
    recomputed.activation_checkpointing_enable()
    ids = torch.randint(1000, (rows, row_tokens), device=DEVICE)

    def micro_step(model: Any) -> None:
        model(
            input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=torch.tensor(float(ids.numel()))
        ).loss.backward()

    times = in_turns(lambda: micro_step(recomputed), lambda: micro_step(kept), pairs=pairs, warm_up=1)
    sizes = {}
    for name, checkpointing in (("kept_mib", None), ("recomputed_mib", {})):
        config = AutoConfig.for_model(family, **FAMILIES[family])
        step = memory_of_config(
            config,
            attention="sdpa",
            adapter=None,
            on_cpu=True,
            row_tokens=row_tokens,
            half=False,
            isolated=False,
            checkpointing=checkpointing,
        )
        assert step is not None
        peaks = step.peaks(rows)
        sizes[name] = round(max(peaks.blocks, peaks.at_head + peaks.logits) / 2**20)
    return {"model": family, **times, **sizes}


def main() -> None:
    options = arguments(__doc__, pairs=7, rows=2, row_tokens=256)
    rows = [
        compare(family, rows=options.rows, row_tokens=options.row_tokens, pairs=options.pairs)
        for family in ("llama", "qwen3", "gemma3_text")
    ]
    show(options, rows)


if __name__ == "__main__":
    main()
