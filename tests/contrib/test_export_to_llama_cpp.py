"""GGUF in llama.cpp itself, by the wheel of xllamacpp: ids, greedy tokens, ends and conversations are those of transformers."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from test_export import with_ends, write_model

from pipeline.contrib.export import export
from pipeline.recipe.schema import Recipe
from pipeline.tokenizer import load_or_train
from pipeline.tokenizer.train import train_bpe
from tests.conftest import docstrings, shared_data

pytestmark = pytest.mark.slow  # needs the package xllamacpp; one case a checkout of llama.cpp

TEXTS = docstrings(modules=120)
GELU_APART = 5e-3  # of a logit, by llama.cpp's table of GELU in f16; an untrained model has ids as near as that
AWKWARD = [
    "  a\u00a0b\n\n\tc",
    "I'll WE'RE it'S don\u2019t",
    "1 12 12345 x1y22 \u0663\u0664 \u00bd",
    "e\u0301 \U0001f468\u200d\U0001f469 \u4e2d\u6587 \ud55c\uad6d \u0000\ufffd",
    "<|bos|><|end|> <|assistant|>",
    "a" * 99 + " " * 99 + "!" * 99 + "\n" * 99,
]
CHATS = [
    [{"role": "user", "content": "What is a path?"}],
    [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "a <|end|><|bos|> b <|assistant|> \u2060"},
        {"role": "assistant", "content": "<|user|> no"},
        {"role": "user", "content": "  x\ty  "},
    ],
]


@contextmanager
def llama_cpp(gguf: Path) -> Iterator[Callable[[str, dict], dict]]:
    """A function of path and body that asks llama.cpp's server, which runs in this process, with that model.

    Keys and values are kept in f32: in llama.cpp's own f16 two tokens that are nearly as likely can change places.
    """
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, trust_env=False, timeout=60) as client:

        def ask(path: str, body: dict) -> dict:
            return client.post(path, json=body).raise_for_status().json()

        yield ask
    del server


def greedy(ask, ids: list[int], tokens: int = 24, **more) -> dict:
    return ask("/completion", {"prompt": ids, "n_predict": tokens, "temperature": 0, "return_tokens": True, **more})


def gguf_of(folder: Path, target: Path, dtype: str = "f32") -> Path:
    return export(str(folder), to="gguf", dtype=dtype, output=str(target), max_shard_size="5GB")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Path]:
    """A GPT-2 with a tokenizer of ours, or with GPT-2's own as a run takes it."""
    pytest.importorskip("xllamacpp")
    made: dict[str, Path] = {}

    def of(tokenizer: str) -> Path:
        if tokenizer not in made:
            folder = tmp_path_factory.mktemp("models") / tokenizer
            ours = tokenizer == "ours"
            taken = train_bpe(TEXTS, vocab_size=800, split_pattern="gpt2") if ours else gpt2s_own()
            made[tokenizer] = write_model(folder, tokenizer=taken)
        return made[tokenizer]

    return of


def gpt2s_own():
    data = shared_data()
    if data is None:
        pytest.skip("no GPT-2 tokenizer here (tokenizer_gpt2 in TANDEM_SHARED_DATA)")
    recipe = Recipe()
    recipe.tokenizer.path = str(data / "tokenizer_gpt2")
    return load_or_train(recipe.tokenizer_settings(), [])


@pytest.mark.parametrize("tokenizer", ["ours", "gpt2s_own"])
def test_llama_cpp_gives_the_same_ids_greedy_tokens_and_conversations(models, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models(tokenizer)
    mine, words = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = [*AWKWARD, *TEXTS][:1000]
    assert len(texts) == 1000
    with llama_cpp(gguf_of(folder, tmp_path / "m.gguf")) as ask:
        for text in texts:
            for special in (False, True):
                body = {"content": text, "add_special": True, "parse_special": special}
                expected = words(text, split_special_tokens=not special).input_ids
                assert ask("/tokenize", body)["tokens"] == expected, text
        ties: list[float] = []
        for text in TEXTS[:20]:
            ids = words(text).input_ids[:40]
            on = {"max_new_tokens": 24, "eos_token_id": None, "suppress_tokens": mine.generation_config.eos_token_id}
            expected = mine.generate(torch.tensor([ids]), do_sample=False, **on)[0].tolist()
            found = ids + greedy(ask, ids, ignore_eos=True)["tokens"]
            differ = [at for at, pair in enumerate(zip(expected, found, strict=True)) if len(set(pair)) == 2]
            for at in differ[:1]:
                likeliest = mine(torch.tensor([expected[:at]])).logits[0, -1].topk(2).values
                ties.append(float(likeliest[0] - likeliest[1]))
        assert len(ties) <= 1, ties
        assert all(apart <= GELU_APART for apart in ties)
        for end in mine.generation_config.eos_token_id:
            said = greedy(ask, words("x").input_ids, logit_bias=[[end, 1000]])
            assert (said["stop_type"], said["tokens_predicted"]) == ("eos", 1), words.decode(end)
        for messages in CHATS:
            expected = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            prompt = ask("/apply-template", {"messages": messages})["prompt"]
            body = {"content": prompt, "add_special": True, "parse_special": True}
            assert ask("/tokenize", body)["tokens"] == expected
            said = ask("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "temperature": 0})
            assert said["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", GELU_APART), ("f16", 0.05), ("bf16", 0.1), ("q8_0", 0.2)])
def test_every_type_gives_the_models_probabilities(models, dtype, tolerance, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models("ours")
    mine, words = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with llama_cpp(gguf_of(folder, tmp_path / "m.gguf", dtype)) as ask, torch.no_grad():
        compared = 0
        for text in TEXTS[:20]:
            ids = words(text).input_ids[:40]
            logarithms = mine(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            # None where the token is no whole character.
            for first in greedy(ask, ids, tokens=1, n_probs=10, ignore_eos=True).get("completion_probabilities", []):
                for one in first["top_logprobs"]:
                    assert abs(one["logprob"] - float(logarithms[one["id"]])) <= tolerance
                    compared += 1
        assert compared >= 50


def test_the_llama_cpp_converter_takes_a_model_with_the_gpt2_tokenizer(models, tmp_path):
    """LLAMA_CPP: a checkout of llama.cpp, whose convert_hf_to_gguf.py is in no package."""
    gguf = pytest.importorskip("gguf")
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP names no checkout of llama.cpp")
    folder = models("gpt2s_own")
    script = [sys.executable, os.environ["LLAMA_CPP"] + "/convert_hf_to_gguf.py"]
    theirs = tmp_path / "theirs.gguf"
    command = [*script, str(folder), "--outfile", str(theirs), "--outtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (gguf.GGUFReader(path) for path in (theirs, gguf_of(folder, tmp_path / "ours.gguf")))
    assert {t.name: t.data.tobytes() for t in one.tensors} == {t.name: t.data.tobytes() for t in two.tensors}
    for name in ("tokens", "token_type", "merges", "pre"):
        fields = (reader.fields[f"tokenizer.ggml.{name}"].contents() for reader in (one, two))
        assert next(fields) == next(fields), name
    with llama_cpp(theirs) as ask:
        assert ask("/apply-template", {"messages": CHATS[0]})["prompt"].endswith("<|assistant|>")


def test_llama_cpp_ends_at_every_end_of_generation(tmp_path):
    pytest.importorskip("xllamacpp")
    from transformers import AutoTokenizer

    ends = ("<|end|>", "<|im_end|>", "<|stop|>", "<|halt|>")
    folder = with_ends(tmp_path / "model", *ends)
    words = AutoTokenizer.from_pretrained(folder)
    with llama_cpp(gguf_of(folder, tmp_path / "m.gguf")) as ask:
        for end in words.convert_tokens_to_ids(list(ends)):
            said = greedy(ask, words("x").input_ids, logit_bias=[[end, 1000]])
            assert (said["stop_type"], said["tokens_predicted"]) == ("eos", 1), words.decode(end)
