"""The adapters of model.adapter: put around the model of model.start_from, or refused before step 1."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.model.adapter import add_adapter
from pipeline.model.errors import ModelOptionsError
from pipeline.process.errors import InputMissingError, RecipeError, ServiceError
from pipeline.recipe.schema import Adapter
from pipeline.tokenizer.load import open_tokenizer
from pipeline.training.distributed import on_rank_0


def adapt(
    model: Any,
    adapter: Adapter,
    *,
    start: str,
    rows: int,
    tokenizer: Any,
    where: Callable[[str], str],
    seed: int,
) -> None:
    """Put the adapters of the recipe around the model's layers. rows: of the embedding of start. Raises RecipeError
    for what cannot be adapted, merged and loaded again as one model."""
    place = where("model.adapter")
    if getattr(model, "processor_files", None) is not None:
        raise RecipeError(
            f"{place}: {start} also reads pictures or sound, and adapters are put around models of text here. Save its "
            "text part as a model and start from that."
        )
    is_folder = Path(start).is_dir()
    known = rows
    with suppress(InputMissingError, ServiceError):  # without a tokenizer of its own: each row stands for an id
        known = len(open_tokenizer(start, revision=None, beside=None, where=place))
    new_ids = range(known, len(tokenizer))
    base = str(Path(start).absolute()) if is_folder else start
    revision = None if is_folder else getattr(model.config, "_commit_hash", None)
    try:
        add_adapter(model, peft_settings(adapter), base=base, revision=revision, new_ids=new_ids, seed=seed)
    except ModelOptionsError as error:
        raise RecipeError(f"{place}.{error}") from error
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    line = f"model: {trained:,} of {total:,} parameters are trained, as adapters of rank {adapter.r}"
    if new_ids:
        line += f" and rows of {len(new_ids)} new tokens"
    on_rank_0(lambda: print(f"{line}; the weights of {start} stay as they are"))


def peft_settings(adapter: Adapter) -> dict[str, Any]:
    """Return the adapter as arguments of PEFT's LoraConfig."""
    return {
        "r": adapter.r,
        "lora_alpha": 2 * adapter.r if adapter.alpha is None else adapter.alpha,
        "target_modules": adapter.target,
        "lora_dropout": adapter.dropout,
        "use_dora": adapter.use_dora,
        "use_rslora": adapter.use_rslora,
        "modules_to_save": adapter.modules_to_save,
    }
