"""The plan's bytes against real models, optimizers and what the backward pass really keeps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.hardware.accelerators import device_without_torch, planned_device
from pipeline.hardware.processor import available_bytes
from pipeline.model.build import build_model
from pipeline.model.modeling_tandem import chunk_rows
from pipeline.plan.memory import (
    CPU_LOSS_CHUNK_ELEMENTS,
    CPU_POSITIONS,
    KEPT,
    LOSS_BYTES,
    LOSS_CHUNK_ELEMENTS,
    checkpoints_on_disk,
    micro_batches,
)
from pipeline.plan.plan import make_plan, workload_of
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import model_fields, sizes_of

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart_pretrain.yaml")
SMALL = ["tokenizer.vocab_size=1024", "model.n_layer=4", "model.n_embd=128", "model.n_head=2", "data.row_tokens=128", "data.batch_tokens=512", "train.per_device_train_batch_size=4"]  # fmt: skip


def memory_of(recipe, sizes, **how):
    return workload_of(recipe, sizes, **how).memory(recipe.micro_batch_rows)


def small(*overrides):
    named = {override.split("=")[0] for override in overrides}
    recipe = read_recipe([QUICKSTART, *(key for key in SMALL if key.split("=")[0] not in named), *overrides])
    fields = model_fields(recipe.model, vocab_size=1024, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model = build_model("tandem", fields, seed=0)
    model.train()
    return recipe, model


def kept_bytes(model, batch, *, half):
    """Bytes that the graph holds for the backward pass, the weights themselves left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage  # the storage too, or its address could be used again
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        model(batch, shift_labels=batch)
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("preset", ["modern", "modern_bigram", "gpt2"])
def test_what_a_block_keeps_is_what_the_estimate_says(preset, half):
    options = (
        "{window_pattern: L}"
        if preset.startswith("modern")
        else "{resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}"
    )
    kept = {}
    for layers in (4, 8):
        _, model = small(f"model.preset={preset}", f"model.options={options}", f"model.n_layer={layers}")
        kept[layers] = kept_bytes(model, torch.randint(3, 1024, (4, 128)), half=half)
    weights_16_bit = 12 * 128 * 128 * 2 if half else 0
    per_block = ((kept[8] - kept[4]) / 4 - weights_16_bit) / (4 * 128) / 128
    assert per_block == pytest.approx(KEPT[half, False][0 if preset.startswith("modern") else 1], rel=0.1)


@pytest.mark.parametrize("kind", ["muon_adamw", "adamw", "trainer"])
def test_optimizer_state_is_as_large_as_planned(kind):
    plain = ["optimizer.groups=null", "optimizer.schedule=null"] if kind == "trainer" else []
    if kind == "adamw":
        plain = ["optimizer.groups.matrices={learning_rate: 0.003}"]
    recipe, model = small(f"optimizer.type={kind}", *plain)
    if kind == "trainer":
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        from pipeline.training.build import build_optimizer

        optimizer = build_optimizer(model, recipe)
    batch = torch.randint(3, 1024, (2, 64))
    model(batch, shift_labels=batch).loss.backward()
    optimizer.step()
    real = sum(
        t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1
    )
    workload = workload_of(recipe, sizes_of(recipe), half=False, compiled=False)
    assert workload.optimizer_bytes == pytest.approx(real, rel=0.01)


def test_weights_and_gradients_are_counted_exactly_and_buckets_on_several_processes():
    recipe, model = small()
    real = sum(p.nbytes for p in model.parameters())
    alone = memory_of(recipe, sizes_of(recipe), processes=1, half=True, compiled=False)
    joined = memory_of(recipe, sizes_of(recipe), processes=2, half=True, compiled=False)
    assert alone.weights == alone.gradients == real
    assert joined.gradients == 2 * real


def test_a_process_of_a_sharded_model_has_its_share_and_gathered_parts():
    recipe, model = small()
    real = sum(p.nbytes for p in model.parameters())
    eighth = memory_of(recipe, sizes_of(recipe), processes=8, half=True, compiled=False, shards=8)
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.transformer.h]
    gathered = model.lm_head.weight.nbytes + sum(blocks) / 2  # two of four
    assert eighth.weights == eighth.gradients == pytest.approx(real / 8 + gathered, rel=0.02)


@pytest.mark.parametrize(("device", "planned"), [("cuda", LOSS_CHUNK_ELEMENTS), ("cpu", CPU_LOSS_CHUNK_ELEMENTS)])
@pytest.mark.parametrize(("fused_bf16", "bytes_each"), [(False, 12), (True, 4)])  # a compiled fp32 step holds 8
def test_the_planned_loss_is_an_upper_bound_of_every_chunk(device, planned, fused_bf16, bytes_each):
    for positions in (2**9, 2**11, 2**13, 2**20):
        held = bytes_each * 2**15 * chunk_rows(positions, 2**15, device, fused_bf16=fused_bf16)
        assert held <= LOSS_BYTES * min(planned, positions * 2**15)
    if device == "cuda" or not fused_bf16:
        assert held > 0.99 * LOSS_BYTES * planned


# The sizes of what was measured, whatever the quickstart is today.
MEASURED = ["tokenizer.vocab_size=4096", "data.batch_tokens=2048", "data.isolate_documents=false", "model.n_embd=256", "model.n_head=4", "train.per_device_train_batch_size=8"]  # fmt: skip
ADAMW = ["optimizer.type=adamw", "optimizer.groups={matrices: {learning_rate: 0.001}}"]
SDPA = "model.attn_implementation=sdpa"
TINY = ["model.n_embd=64", "model.n_head=1", "model.n_layer=2", "tokenizer.vocab_size=1024", "train.per_device_train_batch_size=2", "train.per_device_eval_batch_size=2", "data.batch_tokens=512"]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "half", "compiled", "took_mib"),
    [
        # Peaks of `python -m pipeline.run.probing` on an EPYC, one thread, and of runs (docs/log.md, 2026-11-23).
        ([], True, False, 905),
        (["train.per_device_train_batch_size=2", "train.per_device_eval_batch_size=2"], True, False, 690),
        ([SDPA], True, False, 860),
        ([SDPA], False, False, 859),
        ([SDPA, *ADAMW], True, False, 852),
        ([SDPA, "model.n_embd=512", "model.n_head=8", "model.n_layer=6"], True, False, 1446),
        ([SDPA, "model.preset=gpt2", "model.options={}", *ADAMW], True, False, 923),
        (TINY, True, False, 509),
        ([*TINY[:3], *TINY[4:5], "data.batch_tokens=512"], True, False, 678),  # 16 rows a batch of the evaluation
        (["train.save_steps=10"], True, True, 1122),
        (["train.save_steps=10"], True, False, 1017),
    ],
)
def test_a_process_on_a_cpu_takes_what_is_planned(overrides, half, compiled, took_mib):
    saves = "train.save_steps=10" in overrides
    named = {override.split("=")[0] for override in overrides}
    sizes = [size for size in MEASURED if size.split("=")[0] not in named]
    recipe = read_recipe([QUICKSTART, *sizes, *([] if saves else ["train.save_strategy=no"]), *overrides])
    memory = memory_of(recipe, sizes_of(recipe), processes=1, half=half, compiled=compiled, on_cpu=True)
    assert 0.9 < memory.total / 2**20 / took_mib < 1.15
    assert memory.saved == pytest.approx(72 * 2**20 * saves, rel=0.01)


@pytest.mark.slow
def test_a_probe_of_a_tiny_model_takes_what_is_planned(tmp_path):
    given = [QUICKSTART, *TINY, "train.save_strategy=no", "train.torch_compile=false", "train.bf16=false", f"data.cache_dir={tmp_path}"]  # fmt: skip
    command = [sys.executable, "-m", "pipeline.run.probing", "0.01", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(QUICKSTART).parents[1])
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"step_s"'))
    recipe = read_recipe(given)
    memory = memory_of(recipe, sizes_of(recipe), processes=1, half=False, compiled=False, on_cpu=True)
    assert 0.8 < memory.total / json.loads(line)["peak_bytes"] < 1.25  # of another torch and machine too


def test_memory_on_an_accelerator_counts_neither_the_process_nor_a_checkpoint():
    recipe = read_recipe([QUICKSTART])
    memory = memory_of(recipe, sizes_of(recipe), processes=1, half=True, compiled=True)
    assert (memory.process, memory.saved) == (0, 0)


def test_activation_checkpointing_and_rows_change_the_estimate():
    def activations(*overrides):
        recipe = read_recipe([QUICKSTART, "model.n_layer=24", *overrides])
        return memory_of(recipe, sizes_of(recipe), processes=1, half=True, compiled=True).activations

    assert activations("train.activation_checkpointing=true") < activations() / 2
    assert activations("train.per_device_train_batch_size=16") > 1.1 * activations()


@pytest.mark.parametrize(
    ("limit", "best", "every", "steps", "count"),
    [
        (2, False, None, 1000, 3),
        (2, True, None, 1000, 4),
        (2, True, 250, 1000, 6),  # a checkpoint every 100 steps: those of 500 and 1000
        (2, True, None, 100, 1),
        (None, True, None, 1000, 10),
        (2, True, None, None, 4),
        (2, True, 250, None, None),
        (None, True, None, None, None),
    ],
)
def test_checkpoints_at_the_fullest_moment(limit, best, every, steps, count):
    kept = {"limit": limit, "keep_best": best, "keep_every_steps": every}
    assert checkpoints_on_disk(steps, save_steps=100, **kept) == count


AUTO = "train.per_device_train_batch_size=auto"


def test_auto_is_planned_as_the_largest_divisor_whose_estimate_fits_the_device():
    wide = ["model.n_layer=24", "data.row_tokens=2048", "model.n_positions=2048", "data.batch_tokens=524288"]
    chosen = {}
    for hardware, processes in (("1xH100", 1), ("8xH100", 8), ("1xRTX 4090", 1)):
        plan = make_plan(read_recipe([QUICKSTART, AUTO, *wide]), planned_device(hardware), processes=processes)
        chosen[hardware] = rows = plan.recipe.micro_batch_rows
        limit = 0.9 * plan.device.memory_gib * 2**30
        assert plan.memory.total <= limit
        choices = micro_batches(plan.recipe.rows_per_step, processes)
        larger = [n for n in choices if n > rows]
        assert rows in choices
        assert plan.padding_share == 0
        if larger:
            workload = workload_of(plan.recipe, plan.sizes, processes=processes, half=True, compiled=True)
            assert workload.memory(min(larger)).total > limit
    assert chosen["1xH100"] > chosen["1xRTX 4090"] > 0


def test_on_a_cpu_auto_is_limited_by_work_and_by_free_memory():
    plan = make_plan(read_recipe([QUICKSTART, AUTO]), device_without_torch(), processes=1)
    rows = plan.recipe.micro_batch_rows
    positions = rows * plan.recipe.data.row_tokens
    assert positions <= CPU_POSITIONS
    assert plan.memory.total <= 0.5 * available_bytes() * 1.5  # others may take or give some meanwhile
    assert plan.micro_steps * rows == plan.batch_tokens // plan.recipe.data.row_tokens


def test_auto_beside_accumulation_is_refused_as_the_batch_would_vary():
    with pytest.raises(
        RecipeError, match="is auto, and train.gradient_accumulation_steps is given".replace(".", r"\.")
    ):
        read_recipe([QUICKSTART, AUTO, "data.batch_tokens=null", "train.gradient_accumulation_steps=2"])
