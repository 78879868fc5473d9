"""Deleting prepared shards that nothing needs any more."""

import shutil
from pathlib import Path

from pipeline.artifacts.atomic import folder_bytes
from pipeline.artifacts.locks import file_lock
from pipeline.data.plan import ROLES


def unused_folders(plan: dict, *, runs: Path) -> list[Path]:
    """Shard folders of the cache that neither this plan nor any run of `runs` names."""
    kept = {s["key"] for role in ROLES if plan[role] for s in plan[role]["sequences"]}
    manifests = [path.read_text(errors="replace") for path in runs.glob("*/run_manifest.json")]
    shards = Path(plan["cache_dir"]) / "shards"
    folders = sorted(path for path in shards.glob("*") if path.is_dir()) if shards.is_dir() else []
    return [f for f in folders if f.name not in kept and not any(f.name in manifest for manifest in manifests)]


def prune(plan: dict, *, runs: Path) -> tuple[int, int]:
    """(folders, bytes) deleted. A folder that some process is writing is left alone."""
    count = freed = 0
    for folder in unused_folders(plan, runs=runs):
        with file_lock(folder / ".lock", blocking=False) as held:
            if held:
                freed += folder_bytes(folder)
                shutil.rmtree(folder)
                count += 1
    return count, freed
