"""What a run was trained on: files, tokenizer and parent weights by hash, recorded once and compared at every later
start."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipeline.data.row_plan import batch_warmup
from pipeline.data.validation import held_out_coverage
from pipeline.hardware.device import autocast_dtype
from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS
from pipeline.process.errors import DataError
from pipeline.process.storage import cache_dir
from pipeline.process.user_code import ran
from pipeline.recipe.schema import Data
from pipeline.run.open_run import OpenRun
from pipeline.sources.file_facts import FileFacts
from pipeline.tokenizer import identity
from pipeline.training.distributed import on_rank_0


def record_inputs(
    run: OpenRun,
    data: Data,
    train: dict[str, Any],
    *,
    start_from: str | None,
    chat: bool,
    trust_code: bool,
    tokenizer: Any,
    sources: tuple[list, list],
    rows: Any,
    validation: Any,
) -> None:
    """Write the inputs to the manifest at the first start, and set validation.coverage.

    At a later one raises DataError naming each input that is another one now: continuing would mix two runs.
    """

    def record() -> float:
        trained, held_out = sources
        begun = run.directory.read_manifest().get("inputs", {}) if run.step else {}
        now = {
            "tokenizer": {"identity": identity(tokenizer), "size": len(tokenizer)},
            "sources": [source.describe() for source in trained],
            "validation": [source.describe() for source in held_out],
            "batch_tokens": data.batch_tokens,
            **batch_warmup(rows.step_rows),
            "max_steps": train["max_steps"],
        }
        if data.one_text_rows:
            now["one_text_rows"] = True
        now["start_from"] = _weights(start_from, begun.get("start_from"), cache=data.cache_dir)
        if "end" in rows.plan:
            now["document_end"] = rows.plan["end"]
        now |= _overlap(begun, sources)
        # As counted at the first start; nothing where none are known.
        scored = begun.get("validation_bytes") or validation.scored_bytes(tokenizer)
        if scored:
            now["validation_bytes"] = scored
        validation.coverage = held_out_coverage(tokenizer, held_out)
        now |= _protocols(validation, scored or {}, dtype=autocast_dtype(train), chat=chat)
        changed = changes(begun, now) if begun else []
        if changed:
            lines = "\n  ".join(changed)
            raise DataError(
                f"{run.directory.path}: the run was trained on other inputs than it would go on with:\n  {lines}\n"
                "Put them back, or give this run another run.name to start anew."
            )
        shares = rows.shares()
        run.directory.update_manifest(inputs=now, shares=shares)
        run.directory.update_manifest(code={"trusted": trust_code, "ran": ran()})
        for use, opened in (("data", trained), ("validation", held_out)):
            for source in opened:
                print(f"{use}: {source.headline()}", flush=True)
        if len(shares) > 1:
            parts = [f"{name} {100 * facts['share']:.1f} %" for name, facts in shares.items()]
            print(f"shares of the rows: {', '.join(parts)}")
        if not validation.keeps_text:
            from pipeline.tokenizer.coverage import lost_text

            lost = lost_text(validation.coverage)
            print(f"note: there are no bits per byte of data.validation, only val/loss: {lost}.")
        return validation.coverage

    validation.coverage = on_rank_0(record)


def _protocols(validation: Any, scored_bytes: dict[str, int], *, dtype: str, chat: bool) -> dict[str, Any]:
    """Return the protocols that validation is scored under, and their parts; null where it is not."""
    ids: dict[str, str | None] = {}
    parts = {}
    for name, role in ((VAL_BPB, "validation"), (VAL_BPB_DOCUMENTS, "documents")):
        ids[name] = None
        if validation.keeps_text and validation.plan[role] and validation.plan[role]["sequences"]:
            scored_as = SFT_BPB if chat else name
            count = scored_bytes.get(scored_as)
            protocol = validation.protocol(name, scored_bytes=count, dtype=dtype)
            ids[name], parts[name] = protocol.id, dict(protocol.parts)
    return {"protocols": ids, "protocol_parts": parts}


def _overlap(begun: dict[str, Any], sources: tuple[list, list]) -> dict[str, Any]:
    """Return what was looked for before the first step and kept from then on; nothing where nothing is held out."""
    if begun:
        return {"overlap": begun["overlap"]} if "overlap" in begun else {}
    from pipeline.data.overlap import overlap_of

    overlap = overlap_of(*sources)
    if not overlap.documents:
        return {}
    return {"overlap": {name: value for name, value in asdict(overlap).items() if value is not None}}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for every input that differs; files are named."""
    lines = []
    if before["tokenizer"]["identity"] != now["tokenizer"]["identity"]:
        lines.append(
            f"tokenizer: another one ({before['tokenizer']['size']} -> {now['tokenizer']['size']} ids, or other "
            "merges or template)"
        )
    for role in ("sources", "validation"):
        # In their order: another order of sources is another order of rows.
        if [s["fingerprint"] for s in before[role]] == [s["fingerprint"] for s in now[role]]:
            continue  # a moved folder may give a source another name
        old = {source["name"]: source for source in before[role]}
        new = {source["name"]: source for source in now[role]}
        for name in sorted(old.keys() | new.keys()):
            if name not in new:
                lines.append(f"{role}: {name} is gone")
            elif name not in old:
                lines.append(f"{role}: {name} is new")
            elif old[name]["fingerprint"] != new[name]["fingerprint"]:
                lines += [f"{role}: {name}: {line}" for line in _changed_files(old[name], new[name])]
    for key in ("batch_tokens", "max_steps", "start_from"):
        if before.get(key) != now[key]:
            lines.append(f"{key}: {before.get(key)} -> {now[key]}")
    return lines


def _changed_files(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    before = {file["label"]: file["sha256"] for file in old["files"]}
    after = {file["label"]: file["sha256"] for file in new["files"]}
    lines = []
    for label in before | after:
        if label not in after:
            lines.append(f"{label} is gone")
        elif label not in before:
            lines.append(f"{label} is new")
        elif before[label] != after[label]:
            lines.append(f"{label} has other content")
    return lines or ["the files' order or how their rows are read"]


def _weights(start_from: str | None, begun: dict[str, str] | None, *, cache: str | None) -> dict[str, str] | None:
    """Return files of a folder by hash, read once: a later start knows them by size and time of change. Of a Hub id
    the commit, which a run that continues keeps: its weights are in its checkpoint, whatever the branch has by now."""
    if start_from is None:
        return None
    if not Path(start_from).is_dir():
        if begun and begun["from"] == start_from:
            return begun
        return {"from": start_from} | _commit(start_from)
    facts = FileFacts(cache_dir(cache))
    files = sorted(Path(start_from).absolute().glob("model*.safetensors"))
    for path in files:  # a header takes no time, a hash of a terabyte of zeros half an hour
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise DataError(
                f"{path}: holds no weights as safetensors writes them ({error}), so no run starts from it. Take the "
                "model again."
            ) from None
    return {"from": start_from} | {path.name: facts.of(path).sha256 for path in files}


def _commit(repo_id: str) -> dict[str, str]:
    from transformers.utils.hub import cached_file, extract_commit_hash

    found = extract_commit_hash(cached_file(repo_id, "config.json"), None)
    return {"commit": found} if found else {}
