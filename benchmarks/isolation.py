"""Which causal language models of transformers keep the texts of a row apart, by the probe that a training makes.

    python benchmarks/isolation.py [TYPE ...] [--write docs/isolation.md]

Each type is built small with random weights (normal, 0.1) and tried on two short texts (training/isolation.py); of a type that has a
text part and others the text part is small, and the others are as small as their sizes can be set. A child process tries them; a
type that ends it or takes more than two minutes is noted as such. About three minutes on one core.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # else some types ask the Hub for kernels, for a minute each
import torch
from transformers import AutoModelForCausalLM, __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from pipeline.model.build import build_model
from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import model_fields
from pipeline.training.isolation import LENGTHS, SEEN, STD, try_isolation

LIMIT_S = 120
MOST_PARAMETERS = 300_000_000
RECIPE = """
run: {{stage: pretrain}}
tokenizer: {{vocab_size: 320}}
data: {{sources: [{{files: a.txt}}], row_tokens: 128, batch_tokens: 128}}
train: {{max_steps: 10}}
model: {{type: {kind}, n_layer: 4, n_embd: 64, n_head: 4, options: {options}}}
"""
# What a small model of a type needs that its class does not take over from the other sizes.
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_state": 16, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_ssm": 64, "mamba_d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": 64, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_state": 16, "layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 2, "expert_ffn_hidden_size": 64},
    "mimo_v2_flash": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "qwen3_next": {"num_experts": 16},
    "qwen4_exp_text": {"num_experts": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4, "ngram_vocab_size_base": 1000, "split_ngram_parts": 8},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
# Types whose sizes the keys of `model:` do not set.
WIDTHS: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 320,
}
FIELDS: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "num_hidden_layers": 2, "vocab_size": 320},
    "nemotron_h": WIDTHS | {"head_dim": 16, "hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    "reformer": {"hidden_size": 64, "attn_layers": ["local", "local"], "axial_pos_embds": False, "is_decoder": True, "num_attention_heads": 4, "attention_head_size": 16},
    "zamba": WIDTHS | {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": WIDTHS | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 16},
}  # fmt: skip
SMALL = {
    "hidden_size": 32, "embed_dim": 32, "d_model": 32, "num_hidden_layers": 2, "depth": 1, "num_layers": 2, "encoder_layers": 1,
    "num_attention_heads": 2, "num_heads": 2, "intermediate_size": 64, "image_size": 28, "patch_size": 14, "vocab_size": 320,
}  # fmt: skip
STATES = (
    "mamba",
    "ssm",
    "linear_attn",
    "delta",
    "recurrent",
    "conv1d",
    "short_conv",
    "conv.conv",
    "rwkv",
    "lstm",
    "rg_lru",
)
KIND_OF = {
    ("isolates", None): "isolates",
    ("leaks", "state"): "state",
    ("leaks", "positions"): "positions",
    ("looks_ahead", None): "looks ahead",
    ("not built", None): "not built",
}
PAGE = """# Which models keep the texts of a row apart

Rows of SFT hold several conversations; with `data.isolate_documents` rows of pretraining hold several documents. Each text begins
again at position 0, and attention ends where the text does. Only a model that reads this from the positions keeps the texts apart.
So Tandem tries it on the run's model before rows are made: a short text that follows another one must have the logits that it has
alone. Where it has not, the start of the run says so.

| answer | why | what Tandem does | types |
|---|---|---|---|
| isolates | a text's logits are those that it has alone | rows hold several texts | {isolates} |
| state | a recurrence or a convolution carries something of a text into the next one | each row holds one text and padding | {state} |
| positions | the attention mask, or a bias by distance, does not see that positions begin again | each row holds one text and padding | {positions} |
| looks ahead | a token's logits depend on later tokens | refused before step 1 (status 64) | {looks ahead} |
| not built | no small model of the type can be made here | tried on the model itself | {not built} |

Padding follows the text, is no target, and changes nothing before it. Validation rows (`val/bpb` of an isolated pretraining,
`val/bpb_documents`, `sft/assistant_bpb`) are made the same way. The start, `python -m pipeline.data` and the plan say how much of the rows is
padding; rows little longer than the texts (`data.row_tokens`) waste least. A run that began with several texts in a row, before
this was tried, continues with them and says so. Tandem's own models and GPT-2 are tested by `tests/contracts/`.

## The types of transformers {version}

All {count} types of its causal language models, built small with random weights (normal, {std}) by
`python benchmarks/isolation.py --write docs/isolation.md`, which also prints why a type could not be built. A type's other options
may change its answer: what counts is what the start of a run finds.
"""


def small_model(kind: str) -> Any:
    """Return a small model of a type with random weights. Raises what its classes raise."""
    config_class = CONFIG_MAPPING[kind]
    if kind in FIELDS:
        model = AutoModelForCausalLM.from_config(config_class(**FIELDS[kind]))
    elif "text_config" in getattr(config_class, "sub_configs", {}):
        model = AutoModelForCausalLM.from_config(_small_parts(config_class))
    else:
        fields = _fields(kind)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in build_model(kind, fields, seed=0).parameters())
        if count > MOST_PARAMETERS:
            raise MemoryError(f"{count:,} parameters with the sizes that can be set")
        model = build_model(kind, fields, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.normal_(0.0, STD, generator=generator)
    return model


def _fields(kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(RECIPE.format(kind=kind, options=json.dumps(OPTIONS.get(kind, {}))))
        return model_fields(
            read_recipe([str(path)]).model, vocab_size=320, bos_token_id=0, eos_token_id=1, pad_token_id=2
        )


def _small_parts(config_class: Any) -> Any:
    """Return a config whose parts are small: the text part as that of its type, of the others what SMALL names."""
    parts: dict[str, Any] = {}
    for name in config_class.sub_configs:
        default = getattr(config_class(), name)
        if name == "text_config":
            parts[name] = type(default)(**_fields(type(default).model_type))
        elif default is not None:
            known = {key: value for key, value in SMALL.items() if isinstance(getattr(default, key, None), int)}
            parts[name] = type(default)(**known)
    return config_class(**parts)


def answer(kind: str) -> dict[str, Any]:
    """Return what was found of a type: answer and reason."""
    started = time.perf_counter()
    found: dict[str, Any] = {"type": kind}
    try:
        model = small_model(kind).eval()
        found["answer"] = try_isolation(model)
        if found["answer"] == "leaks":
            found["reason"] = "state" if keeps_a_state(model) else "positions"
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found |= {"answer": "not built", "reason": f"{type(error).__name__}: {lines[-1].strip()}"[:160]}
    return found | {"seconds": round(time.perf_counter() - started, 1)}


@torch.no_grad()
def keeps_a_state(model: Any) -> bool:
    """Return whether a text sees the one before it though attention is masked by hand; by the names of its parameters where the
    model takes no such mask."""
    first, second = LENGTHS
    ids = torch.randint(40, 160, (2, first + second), generator=torch.Generator().manual_seed(0))
    ids[1, first:] = ids[0, first:]
    text = (torch.arange(first + second) >= first).long()
    visible = (text[:, None] == text[None]).tril()
    hidden = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    model.config._attn_implementation, model.config.use_cache = "eager", False
    try:
        logits = model(input_ids=ids, attention_mask=hidden.expand(2, 1, -1, -1)).logits
    except Exception:  # of any class
        return any(part in name for name, _ in model.named_parameters() for part in STATES)
    return bool((logits[0, first:] - logits[1, first:]).abs().max() > SEEN * logits.abs().max())


def answers(kinds: list[str]) -> list[dict[str, Any]]:
    """Return what was found of each type, by a child process; a new one where a type ends it or takes more than LIMIT_S."""
    found: list[dict[str, Any]] = []
    while len(found) < len(kinds):
        command = [sys.executable, __file__, "--child", *kinds[len(found) :]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            while len(found) < len(kinds):
                watch = threading.Timer(LIMIT_S, child.kill)
                watch.start()
                line = child.stdout.readline()
                watch.cancel()
                if not line:
                    reason = f"its process ended, or it took more than {LIMIT_S} s"
                    found.append({"type": kinds[len(found)], "answer": "not built", "reason": reason})
                    break
                found.append(json.loads(line))
                print(line, end="", flush=True)
    return found


def page(found: list[dict[str, Any]]) -> str:
    """Return docs/isolation.md."""
    types: dict[str, list[str]] = {kind: [] for kind in KIND_OF.values()}
    for one in found:
        reason = one["reason"] if one["answer"] == "leaks" else None
        types[KIND_OF[one["answer"], reason]].append(f"`{one['type']}`")
    counts = {kind: len(names) for kind, names in types.items()}
    text = PAGE.format(version=__version__, count=len(found), std=STD, **counts)
    for kind, names in types.items():
        text += f"\n**{kind[0].upper()}{kind[1:]}**: {', '.join(names)}.\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all of transformers")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the page of all types")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if options.child:
        warnings.filterwarnings("ignore")
        logging.set_verbosity_error()
        torch.set_num_threads(1)
        for kind in kinds:
            print(json.dumps(answer(kind)), flush=True)
        return
    found = answers(kinds)
    if options.write:
        options.write.write_text(page(found))


if __name__ == "__main__":
    main()
