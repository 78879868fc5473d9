"""A tiny run that has learnt a few answers by heart, and its base."""

import json
import shutil

import pytest
import torch
from known_answers import ALONE, DIALOG, MARKUP, PIRATE, SUM

from pipeline.tokenizer.chat import render
from pipeline.tokenizer.train import train_bpe

TEXT = "def complete(model, prompts): return what the model writes after each prompt, it's 12345! " * 30


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe([TEXT, "\u00e9\u4e2d\U0001f600" * 20], vocab_size=330, split_pattern="nanochat")


@pytest.fixture(scope="session")
def run(tokenizer, tmp_path_factory):
    """A run directory with a finished model that knows DIALOG, PIRATE, ALONE, SUM and MARKUP."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("runs") / "parrot"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer), n_embd=48, n_layer=2, n_head=2, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            )
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(400):
            losses = []
            for messages in (DIALOG, PIRATE, ALONE, SUM, MARKUP):
                ids, trained = render(tokenizer, messages)
                labels = [i if bit else -100 for i, bit in zip(ids, trained, strict=True)]
                loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            if max(losses) < 0.02:  # By heart: no rounding changes an answer.
                break
        assert max(losses) < 0.02
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    inputs = {"sources": [{"name": "dialogs"}], "batch_tokens": 64, "start_from": None}
    (path / "run_manifest.json").write_text(json.dumps({"stage": "sft", "inputs": inputs, "results": {"step": 100}}))
    (path / "samples.jsonl").write_text(json.dumps({"step": 0, "prompt": "ping", "text": ""}) + "\n")
    return path


@pytest.fixture(scope="session")
def base(run, tmp_path_factory):
    """The same model, as a run of stage 1."""
    path = tmp_path_factory.mktemp("runs") / "base"
    shutil.copytree(run, path)
    (path / "run_manifest.json").write_text(json.dumps({"stage": "pretrain"}))
    return path


@pytest.fixture
def babbler(tokenizer, tmp_path):
    """A model that never ends by itself."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 4096, "initializer_range": 0.3}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ids))
    with torch.no_grad():
        model.transformer.wte.weight[list(ids.values())] = 0.0
    model.save_pretrained(tmp_path / "babbler")
    tokenizer.save_pretrained(tmp_path / "babbler")
    return tmp_path / "babbler"
