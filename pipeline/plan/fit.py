"""What fits a card: full tuning and LoRA of a model, with and without recomputed activations, by trials.

Planned for a GPU that multiplies in bf16 over fp32 weights, with AdamW and more than one micro-step. Nothing here was
measured on a GPU.
"""

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.plan.memory import Memory, Workload, usable_bytes
from pipeline.plan.plan import gibibytes
from pipeline.plan.step_memory import StepMemory, memory_of_config
from pipeline.plan.table import UNKNOWN, millions
from pipeline.process.errors import InputMissingError
from pipeline.recipe.model_sizes import sizes_from_config
from pipeline.recipe.schema import Adapter

TABLE = Path(__file__).with_name("small_models.json")  # sizes of public config.json files, by short names
ROW_LENGTHS = (512, 1024, 2048, 4096, 8192)
TRIED_TOKENS = 512  # of a row of the trials: memory grows in proportion to the positions
LEAST_TOKENS = 1024  # of a row, for a model to count as one that fits
MOST_ROWS = 1024
WAYS: dict[str, tuple[Adapter | None, dict[str, Any] | None]] = {
    "full": (None, None),
    "full, recomputed": (None, {}),
    "LoRA": (Adapter(), None),
    "LoRA, recomputed": (Adapter(), {}),
}


@dataclass(frozen=True)
class Fit:
    """The most rows of one length that fit, and the memory of that step; rows 0: not even one row fits, whose memory
    it is."""

    rows: int
    row_tokens: int
    memory: Memory
    loss_bytes: int

    @property
    def positions(self) -> int:
        return self.rows * self.row_tokens


def known_models() -> dict[str, dict[str, Any]]:
    """Return the table of small models: repository, parameters as published, and what config.json says of sizes."""
    return json.loads(TABLE.read_text())


def config_of(name: str) -> Any:
    """Return transformers' config of a folder, a model of the table, or a Hub id in the local cache."""
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig

    known = {model.lower(): entry for model, entry in known_models().items()}
    known |= {entry["repository"].lower(): entry for entry in known.values()}
    entry = known.get(name.lower())
    if entry is not None:
        return AutoConfig.for_model(**entry["config"])
    folder = Path(name)
    if not (folder / "config.json").is_file():
        cached = try_to_load_from_cache(name, "config.json") if name.count("/") == 1 else None
        if not isinstance(cached, str):
            raise InputMissingError(
                f"--fit: {name} is no folder with a config.json, not in the Hub's local cache and not in the table "
                f"({', '.join(known_models())}). Give one of these."
            )
        folder = Path(cached).parent
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def fits_of(config: Any, *, limit: float, way: str) -> list[Fit]:
    """Return for each row length the most rows that fit into so many bytes."""
    adapter, checkpointing = WAYS[way]
    step = _tried(config, adapter=adapter, checkpointing=checkpointing)
    longest = config.get_text_config().max_position_embeddings
    found = []
    for row_tokens in ROW_LENGTHS:
        if row_tokens > longest:
            break
        workload = Workload(
            sizes=sizes_from_config(config, row_tokens),
            optimizer="adamw",
            half_tables=False,
            modern=False,
            eager=False,
            recomputes=checkpointing is not None,
            scored_rows=1,
            saves=True,
            half=True,
            compiled=False,
            on_cpu=False,
            processes=1,
            shards=1,
            step=step.of_rows(row_tokens / TRIED_TOKENS),
        )
        rows = _most_rows(workload, limit)
        loss = workload.loss_bytes(max(rows, 1))
        found.append(Fit(rows, row_tokens, workload.memory(max(rows, 1)), loss))
    return found


def _tried(config: Any, *, adapter: Adapter | None, checkpointing: dict[str, Any] | None) -> StepMemory:
    step = memory_of_config(
        copy.deepcopy(config),
        attention="sdpa",
        adapter=adapter,
        row_tokens=TRIED_TOKENS,
        half=True,
        on_cpu=False,
        isolated=True,
        checkpointing=checkpointing,
    )
    if step is None:
        raise InputMissingError(
            f"--fit: a {config.model_type} chooses by its values what it computes, so its memory cannot be tried. Ask "
            "for a model without experts."
        )
    return step


def _most_rows(workload: Workload, limit: float) -> int:
    """Return the most rows whose step fits, by halves; 0 where one does not."""
    fitting, too_many = 0, MOST_ROWS + 1
    while too_many - fitting > 1:
        rows = (fitting + too_many) // 2
        if (workload.memory(rows).total or math.inf) <= limit:
            fitting = rows
        else:
            too_many = rows
    return fitting


def largest(fits: list[Fit]) -> Fit:
    """Return the fit of most positions, of longest rows where several have as many."""
    return max(fits, key=lambda fit: (fit.positions, fit.row_tokens * (fit.rows > 0), -fit.row_tokens))


def fit_table(config: Any, *, gigabytes: float) -> str:
    """Return what fits of one model, a column for each way to tune it."""
    limit = usable_bytes(gigabytes)
    columns = [_column(fits_of(config, limit=limit, way=way)) for way in WAYS]
    names = list(columns[0])
    width = max(map(len, names))
    lines = [f"  {''.ljust(width)}  {'  '.join(way.rjust(16) for way in WAYS)}"]
    for name in names:
        lines.append(f"  {name.ljust(width)}  {'  '.join(column[name].rjust(16) for column in columns)}")
    return "\n".join(lines)


def _column(fits: list[Fit]) -> dict[str, str]:
    """Return the lines of one way: rows of each length, then the memory of the largest step that fits."""
    lines = {f"rows of {fit.row_tokens:,} tokens": str(fit.rows or "-") for fit in fits}
    best = largest(fits)
    memory = best.memory
    heading = f"{best.rows} x {best.row_tokens:,}" if best.rows else f"(1 x {best.row_tokens:,})"
    lines["memory with rows x tokens"] = heading
    lines["  weights, fp32"] = gibibytes(memory.weights)
    lines["  gradients"] = gibibytes(memory.gradients)
    lines["  optimizer states"] = gibibytes(memory.optimizer or 0)
    lines["  activations"] = gibibytes(memory.activations - best.loss_bytes)
    lines["  logits and loss"] = gibibytes(best.loss_bytes)
    lines["  together"] = gibibytes(memory.total or 0)
    return lines


def card_rows(gigabytes: float) -> list[str]:
    """Return for each way to tune the largest model of the table that fits a card, and its step."""
    limit = usable_bytes(gigabytes)
    by_size = sorted(known_models().items(), key=lambda item: -item[1]["parameters"])
    cells = []
    for way in WAYS:
        cells.append(UNKNOWN)
        for name, entry in by_size:
            if 4 * entry["parameters"] * (1 if "LoRA" in way else 4) > limit:  # weights, gradients and states alone
                continue
            fits = [fit for fit in fits_of(config_of(name), limit=limit, way=way) if fit.row_tokens >= LEAST_TOKENS]
            best = largest(fits)
            if best.rows:
                cells[-1] = f"{name}, {best.rows} x {best.row_tokens:,}"
                break
    return cells


def heading(name: str, config: Any, *, gigabytes: float) -> str:
    """Return a sentence on what the table counts."""
    total = sizes_from_config(config, TRIED_TOKENS).parameters()["total"]
    planned = gibibytes(usable_bytes(gigabytes))
    return (
        f"{name} ({millions(total)} parameters) on a card of {gigabytes:g} GB, of which {planned} are planned for: "
        "AdamW, bf16 autocast. By trial on shapes; not yet measured on a GPU."
    )
