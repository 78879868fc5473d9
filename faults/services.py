"""The service faults, and a real training run that publishes at every save while one of them lasts.

`python -m faults.services [FAULT ...]` makes them all with the slow Hub at 60 s; a row each, as trial() gives it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

from pipeline.run_dir.checkpoints import SEAL
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory
from tests.conftest import docstrings
from tests.hub.hub_stand_in import Fault, StandIn, hub_stand_in
from tests.runner import ROOT, Runner

HF_TOKEN = "hf_" + "aBcD1234" * 4 + "eF"
WANDB_API_KEY = "0123456789abcdef0123456789abcdef01234567"
NO_SUCH_HOST = "http://tandem-hub.invalid"
TEN_STEPS = {"max_steps": 10, "per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": 5, "eval_steps": 100, "seed": 7}  # fmt: skip
# The ten of the issue. refused and dns are not answers: the port is closed, the name does not exist.
FAULTS: dict[str, Fault | None] = {
    "connection refused": None,
    "no such host": None,
    "401": Fault(status=401),
    "403": Fault(status=403),
    "404": Fault(status=404),
    "429 with Retry-After": Fault(status=429, retry_after=2),
    "500": Fault(status=500),
    "503": Fault(status=503),
    "slow": Fault(delay_s=60.0),
    "upload cut": Fault(to="PUT /blobs", cut=True),
    "HTML with status 200": Fault(html=True),
}


def environment(hub_url: str, home: Path, **more: str) -> dict[str, str]:
    """For a process that talks to the stand-in, with realistic secrets planted."""
    return {
        "HF_ENDPOINT": hub_url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(home),
        "HF_TOKEN": HF_TOKEN,
        "WANDB_API_KEY": WANDB_API_KEY,
        "no_proxy": "127.0.0.1",
        **more,
    }


def push(run: Path, hub_url: str, home: Path) -> subprocess.CompletedProcess[str]:
    """The command that finishes what was left."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline.hub", "push", str(run)],
        env={**os.environ, **environment(hub_url, home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def differences(run: Path, hub: StandIn, repo_id: str) -> list[str]:
    """Files of model/ that do not stand on the Hub as they are on disk."""
    files = hub.repos[repo_id].commits[-1][1] if repo_id in hub.repos else {}
    model = RunDirectory(run).model
    return [p.name for p in sorted(model.iterdir()) if files.get(p.name) != p.read_bytes()]


@contextmanager
def lasting(hub: StandIn, name: str | None):
    """The fault holds while the block runs; yields the address that the run is given."""
    if name == "no such host":
        yield NO_SUCH_HOST
        return
    with hub.away() if name == "connection refused" else nullcontext():
        hub.fault = FAULTS[name] if name else None
        try:
            yield hub.url
        finally:
            hub.fault = None


def trial(folder: Path, name: str | None, *, steps: int = 60, wait_at_end_s: float = 20.0) -> dict:
    """Train with the fault from step 1 to the end, then let the Hub recover and push. name None: no fault.

    From step 1, since a Hub that refuses before it (401, 403) refuses the run. A host that does not exist never did.
    """
    texts, files = docstrings(modules=60), []
    for number in range(3):
        files.append(folder / f"part-{number}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[number::3]))
    runner = Runner(folder, folder / "cache", files, [])
    hub_section = {"id": "somebody/model", "strategy": "checkpoint", "wait_at_end_s": wait_at_end_s}
    wrong = []
    with hub_stand_in() as hub:
        recipe = runner.recipe("services", "modern", train={**TEN_STEPS, "max_steps": steps}, hub=hub_section)
        started = time.monotonic()
        process = runner.start(
            recipe, **environment(NO_SUCH_HOST if name == "no such host" else hub.url, folder / "hf")
        )
        directory = RunDirectory(folder / "runs" / recipe.stem)
        while process.poll() is None and not any("event" not in row for row in read_rows(directory.metrics)):
            time.sleep(0.01)
        with lasting(hub, name):
            output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-4000:]
        seconds = time.monotonic() - started
        rows = read_rows(directory.metrics)
        step_s = statistics.median(row["perf/step_s"] for row in rows if "perf/step_s" in row)
        listed = "unpublished: model" in output
        if not listed and (left := differences(directory.path, hub, "somebody/model")):
            wrong.append(f"neither published nor listed: {left}")
        if listed:
            pushed = push(directory.path, hub.url, folder / "hf")
            if pushed.returncode:
                wrong.append(f"the push afterwards ended with {pushed.returncode}: {pushed.stderr[-300:]}")
            elif left := differences(directory.path, hub, "somebody/model"):
                wrong.append(f"other bytes on the Hub: {left}")
        repository = hub.repos.get("somebody/model")
        commits = [files.get(SEAL) for _, files in repository.commits[1:]] if repository else []
        if len(set(commits)) < len(commits) - 1:  # the last checkpoint and model/ are the same model
            wrong.append("a model was published twice")
    return {"fault": name or "none", "ok": not wrong, "wrong": wrong, "listed": listed, "commits": len(commits),
            "step_ms": round(1000 * step_s, 2), "seconds": round(seconds, 1)}  # fmt: skip


def main(names: list[str]) -> int:
    """Each fault between two runs without one; the ratio of step times is to their mean."""
    results = []
    for name in names or list(FAULTS):
        steps = []
        for this in (None, name, None):
            with tempfile.TemporaryDirectory(prefix="tandem-services-") as folder:
                row = trial(Path(folder), this)
            steps.append(row["step_ms"])
            if this is not None:
                results.append(row)
        results[-1]["step_ratio"] = round(steps[1] / statistics.mean((steps[0], steps[2])), 3)
        print(json.dumps(results[-1]), flush=True)
    return int(not all(row["ok"] for row in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
