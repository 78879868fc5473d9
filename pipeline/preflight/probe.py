"""Steps measured on this machine before the run: seconds a step, and the most memory that a process took.

Child processes make real steps of the recipe's model, at its micro-batch and with its optimizer, on rows of random tokens
(run/probing.py): what a row says does not change its time. The result lies in the cache under all that it depends on.
There the next plan of such a run finds it, that of the training's own start too, which measures nothing itself.
"""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.hardware.cpu import available_bytes, usable_cores
from pipeline.hardware.device import DeviceInfo
from pipeline.process import side_process
from pipeline.process.storage import cache_dir, read_sealed_json, write_sealed_json
from pipeline.recipe import Recipe
from pipeline.recipe.identity import must_match
from pipeline.recipe.resolve import KEY, isolates_documents, micro_batch

START_S = 180.0  # for imports, the model, and the first step with its compilation
CPU_SHARE = 0.5  # of a CPU's free memory that a probe may take by arithmetic: more would push others out
# Beginnings of keys of train: that neither time nor memory of a step depends on, and of those told apart (the micro-batch).
WITHOUT = ("max_steps", "num_train_epochs", "seed", "logging_", "eval_", "save_", "per_device_", "learning_rate", "warmup_", "ddp_timeout")  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """Seconds of the measured steps (median, quickest, slowest), the first two left out, of which the first compiles.

    peak_bytes: of one process, resident memory where it trains on the CPU, else allocated on the device.
    """

    step_s: float
    low_s: float
    high_s: float
    steps: int
    first_step_s: float
    peak_bytes: int
    time: float

    def facts(self) -> dict[str, Any]:
        """Return the measurement as run_manifest.json holds it."""
        return dataclasses.asdict(self)


class NotMeasured(Exception):
    """Why a probe gave nothing: half a sentence."""


def measure(argv: list[str], device: DeviceInfo, *, processes: int, seconds: float, needed_bytes: int | None) -> Probe:
    """Probe the run of this command line with so many processes, for about so many seconds of steps.

    needed_bytes: of one process, by arithmetic. Raises NotMeasured.
    """
    free = CPU_SHARE * available_bytes() / processes
    if device.kind == "cpu" and needed_bytes is not None and needed_bytes > free:
        raise NotMeasured(
            f"a process takes about {needed_bytes / 2**30:.1f} GiB, and its part of half the free memory is {free / 2**30:.1f} GiB"
        )
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "pipeline.run.probing", str(seconds), *argv]
    limit = START_S + 3 * seconds
    child = subprocess.Popen(
        command,
        env=side_process.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, stderr = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"three steps took more than {limit:.0f} s (--probe SECONDS gives them more)") from None
    finally:
        with suppress(ProcessLookupError):  # whatever it has started
            os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
        child.wait()
    results = [line for line in out.splitlines() if line.startswith('{"step_s"')]
    if not results:
        lines = (stderr.strip() or out.strip() or f"status {child.returncode}").splitlines()
        raise NotMeasured(f"its process ended with: {lines[-1]}")
    return Probe(**json.loads(results[-1]))


def keep(probe: Probe, recipe: Recipe, device: DeviceInfo, *, processes: int) -> None:
    """For the plans to come."""
    write_sealed_json(_place(recipe, device, processes=processes), probe.facts())


def kept(recipe: Recipe, device: DeviceInfo, *, processes: int) -> Probe | None:
    """Return what was measured last, on such a machine, of such steps. The micro-batch of the recipe must be a number by now."""
    try:
        return Probe(**read_sealed_json(_place(recipe, device, processes=processes)))
    except (OSError, ValueError, TypeError, PackageNotFoundError):
        return None


def _place(recipe: Recipe, device: DeviceInfo, *, processes: int) -> Path:
    settings = {
        name: value
        for name, value in must_match(recipe).items()
        if name.startswith(("model.", "optimizer.")) and not name.startswith("optimizer.schedule.")
    }
    settings |= {f"train.{n}": value for n, value in recipe.train.items() if not n.startswith(WITHOUT)}
    settings |= {
        KEY: micro_batch(recipe),
        "attention": recipe.model.attn_implementation,
        "vocab_size": recipe.tokenizer.vocab_size,
        "row_tokens": recipe.data.row_tokens,
        "batch_tokens": recipe.data.batch_tokens,
        "isolated": isolates_documents(recipe),
        "machine": [device.name, usable_cores(), processes],
        "versions": [version("torch"), version("transformers")],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return cache_dir(recipe.data.cache_dir) / "probes" / f"{digest}.json"
