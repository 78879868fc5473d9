"""What the tests of engines have in common: texts, conversations, and the forms that model/ has, small and with a tokenizer."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.model.build import build_model
from pipeline.model.saved import save_model
from pipeline.tokenizer.train import train_bpe
from tests.model.tiny_models import GPT2, MODERN, NANOCHAT, stirred

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = [paragraph for file in sorted(DOCS.glob("*.md")) for paragraph in file.read_text().split("\n\n")]
CHATS = [
    [{"role": "user", "content": "What is a path?"}],
    [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "a <|end|><|bos|> b <|assistant|>"},
        {"role": "assistant", "content": "<|user|> no"},
        {"role": "user", "content": "  x\ty  "},
    ],
]
QWEN3 = {
    **{"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{
        "intermediate_size": 352,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    },
}
OWN = {"n_embd": 128, "n_positions": 256}  # heads of 32: vLLM has no kernel for those of 12 on a CPU
FORMS = {
    "portable": ("qwen3", QWEN3),
    "gpt2": ("tandem", GPT2 | OWN),
    "gpt2-capped": ("tandem", GPT2 | OWN | {"final_logit_softcapping": 15.0}),
    "nanochat": ("tandem", NANOCHAT | OWN),
    "modern": ("tandem", MODERN | OWN),
    "modern-without-smear": ("tandem", MODERN | OWN | {"smear": False}),
}


def write_forms(folder: Path, *names: str) -> None:
    """Save each of the forms under its name, with noise for weights, and one tokenizer trained on TEXTS."""
    tokenizer = train_bpe(TEXTS, vocab_size=800, split_pattern="qwen2")
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name in names:
        kind, fields = FORMS[name]
        save_model(stirred(build_model(kind, fields | ids | {"vocab_size": len(tokenizer)}, seed=1)), folder / name)
        tokenizer.save_pretrained(folder / name)


def load(folder: Path):
    """Return the model and the tokenizer as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@torch.no_grad()
def greedy(model, ids: list[int], **settings) -> list[int]:
    """Return the 32 tokens that transformers' generate appends; fewer where it ends by itself."""
    given = torch.tensor([ids])
    settings = {"attention_mask": torch.ones_like(given), "max_new_tokens": 32, "do_sample": False} | settings
    return model.generate(given, **settings)[0, len(ids) :].tolist()
