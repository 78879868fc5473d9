"""References to prepared shards: which runs read them, and the deletion of those that nothing needs any more."""

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path

from pipeline.data.row_plan import folders_of
from pipeline.process.storage import file_lock, folder_bytes

REFERENCES = "users"  # a file in the folder of shards: the run directories that read them
KEPT_DAYS = 30.0  # that shards without this file are kept after they were last written


def add_reference(plan: dict, run: Path | None) -> None:
    """Note that a run directory reads the shards of a plan; None: they were prepared for none yet."""
    line = "" if run is None else json.dumps(str(run.absolute())) + "\n"
    for folder in folders_of(plan):
        with suppress(OSError):  # a cache that this user may only read is pruned by another one
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / REFERENCES, "a+", encoding="utf-8") as file:
                file.seek(0)
                if line not in file.read():
                    file.write(line)


def prune(plan: dict, *, runs: Path) -> tuple[int, int]:
    """Delete the shards that neither this plan nor a run reads; return (folders, bytes) deleted.

    runs: the folder of run directories whose manifests are read too. Shards that some process is writing are kept.
    """
    # A manifest has the cache keys of its run, which are the folders' names.
    manifests = "".join(path.read_text(errors="replace") for path in runs.glob("*/run_manifest.json"))
    count = freed = 0
    for folder in (Path(plan["cache_dir"]) / "shards").glob("*"):
        if folder in folders_of(plan) or folder.name in manifests or _is_read(folder):
            continue
        with file_lock(folder / ".lock", wait_s=0.0) as held:
            if held:
                freed += folder_bytes(folder)
                shutil.rmtree(folder, ignore_errors=True)  # NFS keeps what is open in some process
                count += 1
    return count, freed


def _is_read(folder: Path) -> bool:
    """Return whether a run that is there, or whose disk may only be away, reads these shards."""
    if not (folder / REFERENCES).exists():
        return time.time() - folder.stat().st_mtime < KEPT_DAYS * 86400
    for line in (folder / REFERENCES).read_text(encoding="utf-8").splitlines():
        run = Path(json.loads(line))
        if (run / "run_manifest.json").exists() or not run.parent.exists():
            return True
    return False
