"""A tokenizer and small random models of several kinds."""

import pytest
import torch

from pipeline.tokenizer.train import train_bpe

TEXT = "def complete(model, prompts): return what the model writes after each prompt, it's 12345! " * 30


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe([TEXT, "\u00e9\u4e2d\U0001f600" * 20], vocab_size=330, split_pattern="nanochat")


@pytest.fixture(params=["gpt2", "llama", "modern"], scope="session")
def model(request, tokenizer):
    """fp32 and random, with weights large enough that greedy texts vary."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if request.param == "gpt2":
            made = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=len(tokenizer),
                    n_embd=32,
                    n_layer=2,
                    n_head=2,
                    n_positions=96,
                    initializer_range=0.3,
                    **ids,
                )
            )
        elif request.param == "llama":
            made = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=len(tokenizer),
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    max_position_embeddings=96,
                    initializer_range=0.3,
                    **ids,
                )
            )
        else:
            from pipeline.model.build import build_model
            from pipeline.recipe.sizes import MODERN

            fields = {
                **MODERN,
                "n_embd": 32,
                "n_layer": 4,
                "n_head": 2,
                "n_positions": 96,
                "sliding_window": 16,
                "vocab_size": len(tokenizer),
                **ids,
            }
            made = build_model("tandem", fields, seed=0)
            for parameter in made.parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)
    return made.eval()
