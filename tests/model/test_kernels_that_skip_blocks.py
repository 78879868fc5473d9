"""FlexAttention and flash kernels see what eager attention sees: windows, and packed documents in any number of rows."""

import re

import pytest
import torch
from tiny_models import loss_and_gradients, random_ids, tiny
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import modeling_flash_attention_utils as flash
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.model.modeling_tandem import _blocks, _visible

pytestmark = pytest.mark.full

LENGTH = 300  # three blocks of 128, the last one cut


def packed_positions(*lengths):
    """Rows of LENGTH tokens, each packed with documents of its own length."""
    return torch.stack([torch.arange(LENGTH).remainder(length) for length in lengths])


@pytest.mark.parametrize("length", [1, 100, 128, 129, 640])
@pytest.mark.parametrize("window", [None, 1, 9, 129, 255, 256, 300])
def test_blocks_are_those_that_torch_finds_in_the_whole_mask(length, window):
    tokens = torch.arange(length)
    for documents in (None, torch.stack([tokens // 7, tokens // 200, (tokens >= 130) + (tokens >= 131).int()])):
        rows = None if documents is None else len(documents)
        expected = create_block_mask(_visible(window, documents), rows, None, length, length, device="cpu")
        parts = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        parts += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
        for part, found in zip(parts, _blocks(window, length, "cpu", documents), strict=True):
            assert torch.equal(found, getattr(expected, part)), part
            assert (found.dtype, found.is_contiguous()) == (torch.int32, True)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed rows"])
def test_flex_attention_gives_the_logits_of_eager_attention(name, packed):
    model = tiny(name, n_positions=LENGTH)
    given = {"position_ids": packed_positions(17, 200) if packed else None}
    logits = []
    for implementation in ("eager", "flex_attention"):
        model.set_attn_implementation(implementation)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits.append(model(random_ids(2, LENGTH), **given).logits)
    assert (logits[1] - logits[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed rows"])
def test_the_training_step_with_flex_attention_is_one_graph_compiled_once(packed, monkeypatch):
    # Only the CPU's generated code lacks the backward pass; the graph and its gradients are there.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *given: None)
    torch._dynamo.reset()
    model, counter = tiny("modern").train(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for seed in range(3):
        labels = random_ids(2, LENGTH, seed=seed + 10)
        batch = {"input_ids": random_ids(2, LENGTH, seed=seed), "labels": labels, "shift_labels": labels}
        batch |= {"position_ids": packed_positions(17 + seed, 200)} if packed else {}
        found = []
        for implementation, step in (("eager", model), ("flex_attention", compiled)):
            model.set_attn_implementation(implementation)
            found.append(loss_and_gradients(step, batch, model=model))
        for eager, flex in zip(*found, strict=True):
            torch.testing.assert_close(flex, eager, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
    assert sum("flex_attention" in name for name in called) == (4 if packed else 3)
    assert sum("scaled_dot_product_attention" in name for name in called) == (0 if packed else 1)
    assert any("argsort" in name for name in called) == packed  # the blocks of a window are constants of the graph


def test_the_compiler_keeps_block_lists_contiguous_as_the_gpu_kernel_assumes():
    # That kernel multiplies by the stride of the heads' dimension, which is of size 1 here; the CPU's does not.
    def masked(query, documents):
        how = {"BLOCK_SIZE": (128, 128), "mask_mod": _visible(9, documents)}
        mask = BlockMask((512, 512), *_blocks(9, 512, "cpu", documents), **how)
        return flex_attention(query, query, query, block_mask=mask)

    torch._dynamo.reset()
    documents = torch.arange(512).expand(2, -1) // torch.tensor([[70], [200]])
    with torch.no_grad():
        compiled = torch.compile(masked, dynamic=False)
        _, (code, *_) = run_and_get_code(compiled, torch.randn(2, 2, 512, 16), documents)
    strides = [eval(found) for found in re.findall(r"empty_strided_cpu\(\(2, 1, 4\), (\(.*?\)), torch.int32", code)]
    assert set(strides) == {(4, 4, 1)}
    strides = [eval(found) for found in re.findall(r"empty_strided_cpu\(\(2, 1, 4, 4\), (\(.*?\)), torch.int32", code)]
    assert strides.count((16, 16, 4, 1)) >= 2  # others are only sorted


def test_generation_leaves_flex_attention_to_rows(monkeypatch):
    """Its lengths change with every token, and each would be compiled anew."""

    def refuse(*given, **more):
        raise AssertionError("FlexAttention was asked for a row in generation")

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", refuse)
    model, ids = tiny("modern"), random_ids(2, 30)
    mask = (torch.arange(30) >= torch.tensor([[14], [0]])).long()
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **given)
    model.set_attn_implementation("flex_attention")
    assert torch.equal(model.generate(ids, **given), expected)
    with pytest.raises(AssertionError, match="for a row in generation"):
        model(ids, use_cache=False)


def flash_attn_func(query, key, value, *, causal, softmax_scale, window_size=(-1, -1)):
    """flash-attn's function of that name as its documentation has it, on (B, T, H, K): a query sees the keys from
    window_size[0] before it to window_size[1] after it, both included, and with causal none after it."""
    length = query.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance <= window_size[0]) if window_size[0] >= 0 else torch.ones_like(distance, dtype=torch.bool)
    seen &= distance >= (0 if causal else -window_size[1])
    heads = [states.transpose(1, 2) for states in (query, key, value)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


def flash_attn_varlen_func(
    query, key, value, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size=(-1, -1)
):  # fmt: skip
    """The same on (tokens, H, K), where cu_seqlens are the beginnings of its sequences and the end of the last."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_q.diff().tolist()
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max(lengths) <= max_seqlen_q
    given = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size}
    parts = zip(*(states.split(lengths) for states in (query, key, value)), strict=True)
    return torch.cat([flash_attn_func(*(part[None] for part in sequence), **given)[0] for sequence in parts])


@pytest.fixture
def flash_kernel(monkeypatch):
    """transformers' flash attention over the two functions above: what no CPU has is the kernel itself."""
    kernel = (flash_attn_func, flash_attn_varlen_func, None, None, None)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *given, **more: kernel)
    monkeypatch.setattr(flash, "_loaded_implementation", None, raising=False)
    name = "flash_attention_by_its_documentation"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, ALL_ATTENTION_FUNCTIONS["flash_attention_2"])
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, flash_attention_mask)
    return name


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed rows"])
def test_flash_kernels_give_the_logits_of_eager_attention_for_any_rows(model, flash_kernel, rows, packed):
    model.double()  # half precision would hide a difference
    ids, positions = random_ids(rows, 60), packed_positions(17, 60, 23)[:rows, :60] if packed else None
    logits = []
    for implementation in ("eager", flash_kernel):
        model.config._attn_implementation = implementation
        with torch.no_grad():
            logits.append(model(ids, position_ids=positions, use_cache=False).logits)
    assert (logits[1] - logits[0]).abs().max() <= 1e-5


def test_a_flash_kernel_which_takes_no_float32_is_not_asked_to(model, flash_kernel, monkeypatch):
    """Samples of a run in bf16 autocast are drawn from its fp32 weights, outside autocast."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, flash_kernel, None)
    ids, positions = random_ids(2, 30), packed_positions(17, 60)[:, :30]
    model.config._attn_implementation = "eager"
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        logits = model(ids, position_ids=positions).logits
        model.config._attn_implementation = flash_kernel
        assert (model(ids, position_ids=positions).logits - logits).abs().max() <= 1e-5
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None), expected)
