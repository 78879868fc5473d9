"""What vLLM's Transformers backend asks of a model with its own code, asked by a stand-in for its engine.

The stand-in does as vllm/model_executor/models/transformers does (docs: "Writing custom models"): the base model comes by
auto_map, attention through ALL_ATTENTION_FUNCTIONS to an object per layer that is handed down as a keyword and keeps keys
and values itself, tokens of several sequences in one row distinguished by their positions, output flat. Not vLLM itself.
"""

import subprocess
import sys

import pytest
import torch
from tiny_models import GPT2, MODERN, random_ids, stirred
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.model.build import build_model
from pipeline.model.configuration_tandem import TandemConfig
from pipeline.model.export import save_model

ENGINE = """
import sys
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
sys.modules["pipeline"] = None  # importing it is an error
from transformers import AutoConfig, AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Attention:
    def __init__(self, config, layer):
        self.shape = (-1, config.head_dim)
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.kept = {}

    def forward(self, query, key, value, scale):
        rows = []
        for sequence, q, k, v in zip(SEQUENCES, query, key, value, strict=True):
            kept = self.kept.setdefault(sequence, [])
            kept.append((k.view(self.shape), v.view(self.shape)))
            keys, values = (torch.stack(part, 1) for part in zip(*kept[-self.window if self.window else 0 :]))
            keys, values = (part.repeat_interleave(self.groups, 0) for part in (keys, values))
            weights = F.softmax(q.view(self.shape)[:, None] @ keys.mT * scale, -1)
            rows.append((weights @ values).flatten())
        return torch.stack(rows)


def attend(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    length = query.shape[-2]
    query, key, value = (x.transpose(1, 2).reshape(length, -1) for x in (query, key, value))
    return attention_instances[module.layer_idx].forward(query, key, value, scaling), None


ALL_ATTENTION_FUNCTIONS.register("vllm", attend)
folder, out = sys.argv[1:]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
code = get_class_from_dynamic_module(config.auto_map["AutoModel"], folder)
assert code.is_backend_compatible()
config._attn_implementation = "vllm"
with torch.device("meta"):
    model = AutoModel.from_config(config, trust_remote_code=True).eval()
assert type(model) is code
file = load_file(folder + "/model.safetensors")
head = file.pop("lm_head.weight", None)
weights = {name.removeprefix(model.base_model_prefix + "."): tensor for name, tensor in file.items()}
embedding = weights[next(n for n, m in model.named_modules() if m is model.get_input_embeddings()) + ".weight"]
assert embedding.shape == (config.vocab_size, config.hidden_size)
model.load_state_dict(weights, strict=True, assign=True)
layers = {i: Attention(config, i) for i in range(config.num_hidden_layers)}
texts = torch.load(out + "/texts.pt")
hidden, done = [[] for _ in texts], [0] * len(texts)
for share in ([7, 12], [1, 1], [0, 1], [2, 0], [1, 1]):
    SEQUENCES = [s for s, n in enumerate(share) for _ in range(n)]
    row = [(text[at : at + n], torch.arange(at, at + n)) for text, at, n in zip(texts, done, share)]
    ids, positions = (torch.cat(part)[None] for part in zip(*row))
    with torch.no_grad():
        given = {"input_ids": ids, "inputs_embeds": None, "position_ids": positions, "use_cache": False}
        output = model(**given, attention_instances=layers, return_dict=False)[0][0]
    for s, state in zip(SEQUENCES, output):
        hidden[s].append(state)
    done = [at + n for at, n in zip(done, share)]
logits = [torch.stack(states) @ (embedding if head is None else head).T for states in hidden]
if cap := config.final_logit_softcapping:
    logits = [cap * torch.tanh(one / cap) for one in logits]
torch.save(logits, out + "/logits.pt")
"""
# What serves: all of `modern` but smear; and GPT-2's biases and learned positions with one option that makes it ours.
SERVED = {
    "modern": MODERN | {"smear": False, "vocab_multiple": 1},
    "gpt2": GPT2 | {"final_logit_softcapping": 15.0},
}


@pytest.mark.parametrize("name", SERVED)
def test_an_engine_with_attention_and_cache_of_its_own_gives_the_models_logits(tmp_path, name):
    model = stirred(build_model("tandem", SERVED[name], seed=1)).eval()
    save_model(model, tmp_path / "model")
    texts = [random_ids(1, 11)[0], random_ids(1, 15, seed=4)[0]]
    torch.save(texts, tmp_path / "texts.pt")
    command = [sys.executable, "-P", "-c", ENGINE, str(tmp_path / "model"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    with torch.no_grad():
        for text, logits in zip(texts, torch.load(tmp_path / "logits.pt"), strict=True):
            assert (logits - model(text[None]).logits[0]).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "said"), [({"smear": True}, "smear reads"), ({"vocab_multiple": 64}, "128 rows for 101 tokens")]
)
def test_what_vllm_would_compute_wrongly_it_is_refused_with_the_reason(change, said, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", None)
    config = TandemConfig(**SERVED["modern"] | change)
    config._attn_implementation = "vllm"
    with torch.device("meta"), pytest.raises(ValueError, match=rf"vLLM cannot run this model: .*{said}"):
        AutoModel.from_config(config)
