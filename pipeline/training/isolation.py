"""Try on two short texts whether a model lets the texts of a row see each other, before rows are made, and act on
it."""

import copy
from typing import Any, Literal

import torch

from pipeline.metrics import VAL_BPB_DOCUMENTS
from pipeline.model.build import PLAIN_HEADS
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.recipe import Recipe
from pipeline.recipe.schema import with_values
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.build import build_from_recipe
from pipeline.training.distributed import on_rank_0

Found = Literal["isolates", "leaks", "looks_ahead"]

LENGTHS = (19, 23)  # tokens of the two texts: longer than a convolution, and no multiple of a chunk
# Shares of what the first text changes in the second where nothing keeps it out. SEEN: by another first text, which
# rounding leaves as it was but where experts share products. MOVED: against the second text alone, whose products have
# other shapes. Over all types of transformers (benchmarks/isolation.py) rounding came to 1e-6 and 4e-6, the weakest
# leak to 3e-4 (a new falcon_h1).
SEEN, MOVED = 3e-5, 1e-3
BLANK = 1e-4  # of the logits: the blocks of a new model may write nothing yet
STD = 0.1
MASKED = 1e30
SCAN_CHUNK = 16


@torch.no_grad()
def try_isolation(model: Any, *, row_tokens: int = sum(LENGTHS)) -> Found:
    """Return whether a text behind another one in a row has the logits that it has alone, when its positions begin
    again at 0.

    The model is on the CPU and called as training calls it: no mask, no cache. A new one whose blocks compute nothing
    yet is tried as a copy with random weights. looks_ahead: a token's logits depend on what comes behind it.
    """
    config, training, attention = model.config, model.training, model.config._attn_implementation
    parts = [(part, getattr(part, "use_cache", None)) for part in (config, config.get_text_config())]
    # Without kernels a scan takes memory with the square of its chunk, however short the text is.
    scans = [module for module in model.modules() if type(getattr(module, "chunk_size", None)) is int]
    chunks = [module.chunk_size for module in scans]
    model.eval()  # dropout would give another result each time
    for part, _ in parts:
        part.use_cache = False  # as while training: with a cache, transformers takes a row for one text
    if attention not in ("eager", "sdpa"):
        config._attn_implementation = "eager"  # flash kernels do not run on the CPU
    try:
        for module in scans:
            module.chunk_size = min(module.chunk_size, SCAN_CHUNK)
        return _found(model, row_tokens) or _found(_random_copy(model), row_tokens) or "isolates"
    finally:
        for module, chunk in zip(scans, chunks, strict=True):
            module.chunk_size = chunk
        for part, use_cache in parts:
            part.use_cache = use_cache
        config._attn_implementation = attention
        model.train(training)


def _found(model: Any, row_tokens: int) -> Found | None:
    """Return None where no text changes what is behind it."""
    first = min(LENGTHS[0], row_tokens // 2)
    second = min(LENGTHS[1], row_tokens - first)
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    # Control tokens and those of images mostly lie at the ends of a vocabulary.
    ids = torch.randint(vocab_size // 8, vocab_size // 2, (3, first + second), generator=generator)
    ids[1, first:] = ids[0, first:]  # the same second text behind another first one
    ids[2, :first] = ids[0, :first]  # another second text behind the same first one
    alone = _logits(model(input_ids=ids[:1, first:]))[0]
    together = _logits(model(input_ids=ids))
    if _largest(together[0, :first] - together[2, :first]) > SEEN * _largest(alone):
        return "looks_ahead"
    effect = _largest(together[0, first:] - alone)
    if effect <= BLANK * _largest(alone):
        return None
    restarting = torch.cat([torch.arange(first), torch.arange(second)]).expand(3, -1)
    try:
        packed = _logits(model(input_ids=ids, position_ids=restarting))
    except Exception:  # it takes no positions, or none that begin again: a class of transformers or of the user's
        return "leaks"
    seen = _largest(packed[0, first:] - packed[1, first:])
    moved = _largest(packed[0, first:] - alone)
    return "isolates" if seen <= SEEN * effect and moved <= MOVED * effect else "leaks"  # NaN is no proof


def _logits(output: Any) -> torch.Tensor:
    """Return the logits, 0 where a model masks them: with -inf or the lowest number."""
    logits = output.logits.float()
    return logits.masked_fill(logits < -MASKED, 0.0)


def _largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


def _random_copy(model: Any) -> Any:
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, STD, generator=generator)
    return model


def resolve_rows(recipe: Recipe, model: Any, *, step: int = 0) -> Recipe:
    """Return the recipe, with rows of one text each where texts of a row would see each other. Every rank calls it.

    step: of a run that goes on, which keeps the rows that it began with. Raises RecipeError for a model that sees what
    it is to predict.
    """
    if recipe.model.start_from is None and recipe.model.type in PLAIN_HEADS:
        return recipe  # held by tests/contracts; these would be copied, as their blocks write nothing yet
    model.config.get_text_config().use_cache = False  # Trainer leaves it on in the text part of a larger config
    found = on_rank_0(lambda: try_isolation(model, row_tokens=recipe.data.row_tokens))
    begun = step > 0 and "inputs" in RunDirectory.of(recipe.run).read_manifest()
    kind = f"a {type(model).__name__}"
    if found == "looks_ahead" and not begun:
        where = recipe.where("model.start_from" if recipe.model.start_from else "model.type")
        raise RecipeError(
            f"{where}: {kind} sees the tokens behind the one that it is to predict, so it would learn to copy them. "
            "Take a causal language model; BERT and its kin are one with is_decoder: true."
        )
    if found != "leaks":
        return recipe
    if begun and not recipe.data.one_text_rows:
        line = (
            f"note: texts that share a row see each other in {kind}; this run goes on as it began, a new one has rows "
            "of one text each"
        )
    else:
        recipe = with_values(recipe, {"data.one_text_rows": True})
        rows = "row" if recipe.stage == "sft" or recipe.data.isolate_documents else f"row of {VAL_BPB_DOCUMENTS}"
        text = "conversation" if recipe.stage == "sft" else "document"
        line = (
            f"rows: texts that share one see each other in {kind} (tried on two), so each {rows} holds one {text}, "
            "padded"
        )
    on_rank_0(lambda: print(line, flush=True))
    return recipe


def rows_of_recipe(recipe: Recipe, tokenizer: Any) -> Recipe:
    """Return resolve_rows of the recipe for a preparation without a training: its model is built for that, or its run
    has begun."""
    model, run = recipe.model, RunDirectory.of(recipe.run)
    kind = (model.start_config or {}).get("model_type") if model.start_from else model.type
    if kind in PLAIN_HEADS:
        return recipe
    if run.has_trained():
        recorded = run.read_manifest().get("inputs", {}).get("one_text_rows", False)
        return with_values(recipe, {"data.one_text_rows": recorded})
    try:
        return resolve_rows(recipe, build_from_recipe(recipe, tokenizer))
    except InputMissingError:
        print(
            "note: the model is not here, so rows are made as for one that keeps the texts of a row apart", flush=True
        )
        return recipe
