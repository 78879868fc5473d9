"""Sizes and FLOPs against published numbers, the models themselves and a count of visible pairs."""

import pytest

from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import sizes_from_config, sizes_of
from pipeline.recipe.schema import with_values
from pipeline.recipe.sizes import arithmetic_sizes

# depth, matrices and value embeddings and total and scaling in M, FLOPs/token with SSSL and with full windows: nanochat.
NANOCHAT = [
    (4, "3.1", "16.8", "36.7", "11.5", "8.02e+07", "9.44e+07"),
    (6, "10.6", "37.7", "73.5", "23.2", "1.68e+08", "1.96e+08"),
    (12, "84.9", "151.0", "286.3", "110.1", "7.597e+08", "8.871e+08"),
    (16, "201.3", "268.4", "536.9", "234.9", "1.585e+09", "1.812e+09"),  # 1,585,456,272 exactly
    (20, "393.2", "419.4", "896.5", "435.2", "2.886e+09", "3.240e+09"),
    (24, "679.5", "604.0", "1384.1", "729.8", "4.775e+09", "5.285e+09"),
    (26, "863.9", "708.8", "1681.8", "918.4", "5.991e+09", "6.574e+09"),
    (32, "1610.6", "1073.7", "2818.6", "1677.7", "1.077e+10", "1.168e+10"),
]
# nanochat's automatic batch as a power of two, and steps at 8 / 10.5 / 12 tokens per scaling parameter.
BATCHES = [
    (4, 18, (352, 462, 528)),
    (6, 18, (708, 929, 1062)),
    (12, 19, (1680, 2205, 2520)),
    (16, 19, (3584, 4704, 5376)),
    (20, 20, (3320, 4357, 4980)),
    (24, 20, (5568, 7308, 8352)),
    (26, 20, (7007, 9196, 10510)),
    (32, 21, (6400, 8400, 9600)),
]


def modern(tmp_path, depth, *overrides):
    path = tmp_path / "modern.yaml"
    path.write_text(
        "data: {sources: [{files: x.parquet}]}\nmodel: {preset: modern}\noptimizer: {type: muon_adamw}\n"
        "tokenizer: {vocab_size: 32768}\n"
    )
    return read_recipe([str(path), f"model.depth={depth}", *overrides])


@pytest.mark.parametrize(("depth", "matrices", "value_embeddings", "total", "scaling", "windowed", "full"), NANOCHAT)
def test_sizes_and_flops_are_those_published_for_nanochat(
    tmp_path, depth, matrices, value_embeddings, total, scaling, windowed, full
):
    sizes = sizes_of(modern(tmp_path, depth))
    counts = sizes.parameters()
    expected = {"matrices": matrices, "value_embeddings": value_embeddings, "total": total, "scaling": scaling}
    assert {name: f"{counts[name] / 1e6:.1f}" for name in expected} == expected
    precision = len(windowed.split("e")[0].replace(".", "")) - 1
    assert f"{sizes.flops_per_token('nanochat'):.{precision}e}" == windowed
    everywhere = sizes_of(modern(tmp_path, depth, "model.options.window_pattern=L"))
    assert f"{everywhere.flops_per_token('nanochat'):.{precision}e}" == full


@pytest.mark.parametrize(("depth", "exponent", "steps"), BATCHES)
def test_the_depth_dial_sets_the_batch_and_steps_published_for_nanochat(tmp_path, depth, exponent, steps):
    for ratio, expected in zip((8, 10.5, 12), steps, strict=True):
        recipe = modern(tmp_path, depth, f"run.tokens_per_param={ratio}")
        assert recipe.data.batch_tokens == 2**exponent
        assert recipe.train["max_steps"] == expected


def test_depth_24_at_ratio_8_is_the_run_the_plan_must_print(tmp_path):
    recipe = modern(tmp_path, 24, "run.tokens_per_param=8")
    sizes = sizes_of(recipe)
    counts = sizes.parameters()
    assert f"{counts['total'] / 1e6:,.1f}M" == "1,384.1M"
    assert f"{counts['value_embeddings'] / 1e6:.1f}M" == "604.0M"
    assert f"{counts['scaling'] / 1e6:.1f}M" == "729.8M"
    assert f"{sizes.flops_per_token('nanochat'):.3e}" == "4.775e+09"
    assert f"{sizes.flops_per_token('exact_causal'):.3e}" == "4.641e+09"
    assert (recipe.train["max_steps"], recipe.data.batch_tokens) == (5568, 1048576)
    flops = sizes.flops_per_token("nanochat") * recipe.train["max_steps"] * recipe.data.batch_tokens
    assert f"{flops:.2e}" == "2.79e+19"


def test_the_dial_sets_nanochat_s_rates_and_decay(tmp_path):
    recipe = modern(tmp_path, 24, "run.tokens_per_param=8")
    groups, scale = recipe.optimizer.groups, recipe.optimizer.rate_scale
    assert f"{scale:.4f}" == "1.4142"
    assert f"{groups.matrices.weight_decay:.4f}" == "0.0597"
    peaks = {name: getattr(groups, name).learning_rate * scale for name in ("head", "embeddings", "value_embeddings", "matrices", "x0_lambdas")}  # fmt: skip
    assert {name: f"{peak:.4f}" for name, peak in peaks.items()} == {
        "head": "0.0080",
        "embeddings": "0.3000",
        "value_embeddings": "0.1500",
        "matrices": "0.0283",
        "x0_lambdas": "0.7071",
    }


@pytest.mark.parametrize(("exponent", "rate"), [(20, 0.2), (19, 0.2), (17, 0.1), (13, 0.025)])
def test_the_gates_rate_follows_only_batches_below_the_tuned_one(tmp_path, exponent, rate):
    optimizer = modern(tmp_path, 4, "run.tokens=1e9", f"data.batch_tokens={2**exponent}").optimizer
    assert optimizer.groups.gates.learning_rate * optimizer.rate_scale == pytest.approx(rate)


@pytest.mark.parametrize(("rows", "window"), [(7, 3), (16, 16), (16, 5), (33, 1), (64, 64)])
def test_exact_causal_counts_every_visible_pair_once(rows, window):
    pairs = sum(1 for query in range(rows) for key in range(query + 1) if query - key < window)
    options = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 1, "n_positions": rows, "sliding_window": window}
    sizes = arithmetic_sizes(options, "tandem", rows)
    attention = sizes.flops_per_token("exact_causal") - 6 * sizes.parameters()["scaling"]
    assert attention * rows == pytest.approx(12 * 8 * pairs, rel=1e-12)


@pytest.mark.parametrize(("full", "causal", "config"), [("854.4", "797.9", {}), ("10273.5", "9802.1", {"n_layer": 48, "n_embd": 1600, "n_head": 25})])  # fmt: skip
def test_gpt2_flops_are_the_known_ones(full, causal, config):
    from transformers import GPT2Config

    sizes = sizes_from_config(GPT2Config(**config), row_tokens=1024)
    assert f"{sizes.flops_per_token('full') / 1e6:.1f}" == full
    assert f"{sizes.flops_per_token('exact_causal') / 1e6:.1f}" == causal


def model_parameters(config) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def small_configs():
    from transformers import GPT2Config, LlamaConfig, NanoChatConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 320}
    yield GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=320, n_positions=128)
    yield LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=160)
    yield LlamaConfig(**sizes, intermediate_size=160, tie_word_embeddings=True)
    yield NanoChatConfig(**sizes, intermediate_size=256, num_key_value_heads=4)


@pytest.mark.parametrize("index", range(4))
def test_parameters_are_those_of_the_transformers_model(index):
    config = list(small_configs())[index]
    assert sizes_from_config(config, row_tokens=64).parameters()["total"] == model_parameters(config)


@pytest.mark.parametrize(
    "options", [["gpt2"], ["modern"], ["modern_bigram"], ["modern_bigram", "model.options.bigram_embeddings=5000"]]
)
def test_parameters_are_those_of_the_tandem_model(tmp_path, options):
    import torch

    from pipeline.model.configuration_tandem import TandemConfig
    from pipeline.model.modeling_tandem import TandemForCausalLM
    from pipeline.recipe.model_sizes import model_fields

    recipe = modern(
        tmp_path,
        5,
        f"model.preset={options[0]}",
        *options[1:],
        "model.head_dim=32",
        "model.aspect_ratio=16",
        "data.row_tokens=512",
    )
    recipe = with_values(recipe, {"tokenizer.vocab_size": 1000})
    fields = model_fields(recipe.model, vocab_size=1000, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    config = TandemConfig(**fields)
    with torch.device("meta"):
        model = TandemForCausalLM(config)
    ours, theirs = sizes_of(recipe), sizes_from_config(config, row_tokens=512)
    assert ours == theirs
    rows = {"modern_bigram": 5000 if options[1:] else 16 * 1000}
    assert (config.bigram_embeddings or 0) == rows.get(options[0], 0)
    assert ours.parameters()["total"] == sum(p.numel() for p in model.parameters())
    assert ours.windows == [window or 512 for window in config.windows]


def shapes_with_models():
    """Six configs whose layers and head outweigh everything that the formula leaves out."""
    from transformers import GPT2Config, LlamaConfig, NanoChatConfig

    from pipeline.model.configuration_tandem import TandemConfig
    from pipeline.recipe.sizes import MODERN

    hf = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512}
    gpt2 = {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 256}
    yield GPT2Config(**gpt2)
    yield LlamaConfig(**hf, num_key_value_heads=2, intermediate_size=352)
    yield NanoChatConfig(**hf, intermediate_size=512, num_key_value_heads=4)
    yield TandemConfig(**gpt2)
    yield TandemConfig(**{**MODERN, **gpt2, "n_layer": 4, "n_kv_head": 2, "window_pattern": "SL"})
    yield TandemConfig(**{**MODERN, **gpt2, "n_layer": 5, "n_inner": 320, "vocab_size": 500})


@pytest.mark.parametrize("index", range(6))
def test_full_flops_are_those_that_torch_counts_with_eager_attention(index):
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    from pipeline.model.modeling_tandem import TandemForCausalLM

    config = list(shapes_with_models())[index]
    config._attn_implementation = "eager"
    tandem = config.model_type == "tandem"
    model = (
        TandemForCausalLM(config) if tandem else AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    )
    rows, length = 2, 192
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    expected = sizes_from_config(config, row_tokens=length).flops_per_token("full") * rows * length
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
