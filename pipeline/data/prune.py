"""Deleting prepared shards that nothing needs any more.

<folder>/users    the run directories that read these shards, one a line; shards prepared by a version that did not note
                  them have no such file
"""

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path

from pipeline.artifacts.atomic import folder_bytes
from pipeline.artifacts.locks import file_lock
from pipeline.data.plan import ROLES, folders_of

USERS = "users"
# Shards of which nobody noted the users are kept for so long after they were last written or read.
KEPT_DAYS = 30.0


def note_user(plan: dict, run: Path | None) -> None:
    """Say that a run directory reads the shards of a plan; None: they were prepared for none yet."""
    line = "" if run is None else json.dumps(str(run.absolute())) + "\n"
    for folder in folders_of(plan):
        with suppress(OSError):  # a cache that this user may only read is pruned by another one
            folder.mkdir(parents=True, exist_ok=True)
            users = folder / USERS
            if not users.exists() and any(folder.glob("shard-*.json")):
                (folder / ".lock").touch()  # by an earlier version: its time tells that they are used
                continue
            with open(users, "a+", encoding="utf-8") as file:
                file.seek(0)
                if line not in file.read():
                    file.write(line)


def unused_folders(plan: dict, *, runs: Path) -> list[Path]:
    """Shard folders of the cache that neither this plan nor a run uses, whichever folder the run lies in."""
    kept = {s["key"] for role in ROLES if plan[role] for s in plan[role]["sequences"]}
    manifests = [path.read_text(errors="replace") for path in runs.glob("*/run_manifest.json")]
    shards = Path(plan["cache_dir"]) / "shards"
    folders = sorted(path for path in shards.glob("*") if path.is_dir()) if shards.is_dir() else []
    return [
        f
        for f in folders
        if f.name not in kept and not any(f.name in manifest for manifest in manifests) and not _is_used(f)
    ]


def _is_used(folder: Path) -> bool:
    """Return whether a run may read these shards: one that is there, or whose disk may only be away."""
    try:
        lines = (folder / USERS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        newest = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
        return time.time() - newest < KEPT_DAYS * 86400
    except (OSError, UnicodeDecodeError):
        return True
    return any(map(_may_be_there, lines))


def _may_be_there(line: str) -> bool:
    try:
        run = Path(json.loads(line))
        return (run / "run_manifest.json").exists() or not run.parent.exists()
    except (ValueError, TypeError, RecursionError, OSError):
        return True  # a damaged line was a run


def prune(plan: dict, *, runs: Path) -> tuple[int, int]:
    """(folders, bytes) deleted. A folder that some process is writing is left alone."""
    count = freed = 0
    for folder in unused_folders(plan, runs=runs):
        with file_lock(folder / ".lock", blocking=False) as held:
            if held:
                freed += folder_bytes(folder)
                shutil.rmtree(folder, ignore_errors=True)  # NFS keeps what is open in some process
                count += 1
    return count, freed
