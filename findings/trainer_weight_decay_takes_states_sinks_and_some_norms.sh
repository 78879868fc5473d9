#!/usr/bin/env bash
# Title: Trainer's weight decay also takes Mamba's A_log and D, attention sinks and some RMSNorms, but not other norms.
# Packages: transformers==5.23.0 torch==2.13.0 accelerate==1.15.0
# Guess: weight_decay goes to matrices; norms, biases and the one-dimensional state parameters (which Mamba's
#   authors mark for no decay) are left out, for each model alike.
# Seen: parameters are left out by class (LayerNorm) and by name (bias, layernorm, rmsnorm, norm, ..._norm) alone.
#   So Mamba-2's A_log, D and its last RMSNorm (norm_f) are decayed and its other norms are not; so are gpt-oss's
#   sinks and RWKV's time_decay and time_first. After 50 steps with decay 1.0 norm_f has lost over 10 percent of its
#   size, the norm of a layer under 3. Llama's norms are all left out. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: decay pulls each forgetting rate of a state-space model towards exp(0) = 1 and each sink to 0, and two runs
#   of models of the same kind differ by how a norm was named.
# Tandem: its own optimizers have a decay for each group of parameters (recipe `optimizer.groups`); with
#   `optimizer.type: trainer` and a weight_decay it is Trainer's choice.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Mamba2Config, RwkvConfig
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

logging.set_verbosity_error()
WIDTH = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 2}
SIZES = {
    LlamaConfig: {"intermediate_size": 128, "num_attention_heads": 4},
    Mamba2Config: {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    GptOssConfig: {"intermediate_size": 64, "num_attention_heads": 4, "num_local_experts": 4},
    RwkvConfig: {"attention_hidden_size": 64, "context_length": 64},
}
numbers = torch.randint(3, 128, (64, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in numbers]


def trainer_of(config_class, decay=1.0):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**WIDTH, **SIZES[config_class]))
    arguments = TrainingArguments(
        "out", use_cpu=True, report_to=[], weight_decay=decay, learning_rate=5e-3, max_steps=50, disable_tqdm=True,
        lr_scheduler_type="constant", save_strategy="no", per_device_train_batch_size=4, log_level="error",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return trainer


taken, left_out = {}, {}
for config_class in SIZES:
    trainer = trainer_of(config_class)
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    vectors = [name for name, value in trainer.model.named_parameters() if value.dim() == 1 and "bias" not in name]
    name = config_class.model_type
    taken[name] = sorted({key.split(".")[-2] + "." + key.split(".")[-1] for key in vectors if key in decayed})
    left_out[name] = sorted({key.split(".")[-2] + "." + key.split(".")[-1] for key in vectors if key not in decayed})
    print(f"{name}: vectors that are decayed {taken[name]}, that are not {left_out[name]}")

size = {}
for decay in (0.0, 1.0):
    trainer = trainer_of(Mamba2Config, decay)
    trainer.train()
    weights = dict(trainer.model.named_parameters())
    size[decay] = [weights[k].norm().item() for k in ("backbone.norm_f.weight", "backbone.layers.0.norm.weight")]
kept = [with_decay / without for with_decay, without in zip(size[1.0], size[0.0])]
print(f"mamba2, size after 50 steps with decay in that without: norm_f {kept[0]:.3f}, a layer's norm {kept[1]:.3f}")

assert taken["llama"] == [], "the control is decayed"
assert taken["mamba2"] == ["mixer.A_log", "mixer.D", "norm_f.weight"], "no longer holds for Mamba-2"
assert "norm.weight" in left_out["mamba2"]
assert taken["gpt_oss"] == ["self_attn.sinks"], "no longer holds for gpt-oss"
assert any("time_decay" in name for name in taken["rwkv"]), "no longer holds for RWKV"
assert kept[0] < 0.9 and kept[1] > 0.97, "the sizes are others"
PROGRAM
