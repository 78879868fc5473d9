"""Speed and memory of training over depths and ways: {eager, compile} x {sdpa, flex} x {adamw, muon} x {bf16, fp8}.

    python benchmarks/gpu_matrix.py [--depths 12 20 24] [--cells 'compile-*-muon-*' ...] [--steps 12] [--rows 16]
        [--peer NANOCHAT --text 'train/*.parquet' --validation val.parquet]

A cell is a process of train_steps.py, with one micro-batch of --rows a step, on the first device. sdpa: full attention in every
layer; flex: windows of the recipe's pattern through flex_attention. A cell ends after --cell-s seconds, and a depth begins no
further one after --depth-s. One that cannot run, or ran out of memory or time, is a row that says so. ratio: of tokens/s to
those of the depth's first cell that ran. --peer adds nanochat's base_train on the same rows, tokenizer and shapes
(against_nanochat.py), compiled and in bf16, as it is; it has no accumulation either.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from time import monotonic

import against_nanochat as nanochat
from common import ROOT, show, write_words

MODES = {"eager": ["train.torch_compile=false"], "compile": ["train.torch_compile=true"]}
ATTENTION = {
    "sdpa": ["model.attn_implementation=sdpa", "model.options.window_pattern=L"],
    "flex": ["model.attn_implementation=flex_attention", "model.options.window_pattern=SSSL"],
}
OPTIMIZERS = {"adamw": ["optimizer.type=adamw"], "muon": ["optimizer.type=muon_adamw"]}
FORMATS = {"bf16": ["train.bf16=true"], "fp8": ["train.bf16=true", "train.fp8=true"]}
CELLS = {
    "-".join(names): list(
        itertools.chain(MODES[names[0]], ATTENTION[names[1]], OPTIMIZERS[names[2]], FORMATS[names[3]])
    )
    for names in itertools.product(MODES, ATTENTION, OPTIMIZERS, FORMATS)
}
MEMORY = re.compile(r"Peak memory usage: ([\d.]+)\s*MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 20, 24])
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="PATTERN", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--cell-s", type=float, default=240.0)
    parser.add_argument("--depth-s", type=float, default=900.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="more for every cell")
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--text")
    parser.add_argument("--validation")
    options = parser.parse_args()
    if options.peer and not (options.text and options.validation):
        parser.error("--peer needs --text and --validation, which both sides are trained and scored on.")
    names = [name for name in CELLS if any(fnmatch(name, pattern) for pattern in options.cells)]
    if not names:
        parser.error(f"--cells {' '.join(options.cells)} matches none of {', '.join(CELLS)}.")
    with tempfile.TemporaryDirectory() as folder:
        options.words = write_words(Path(folder) / "words.jsonl")
        show(options, [row for depth in options.depths for row in of_depth(options, depth, names)])


def of_depth(options: argparse.Namespace, depth: int, names: list[str]) -> list[dict]:
    prepare(options, depth)
    rows = list(cells(options, depth, names))
    if options.peer:
        rows.append({"depth": depth, "cell": "nanochat", **peer(options, depth)})
    first = next((row["tok_per_s"] for row in rows if "tok_per_s" in row), None)
    return [row | {"ratio": row["tok_per_s"] / first} if "tok_per_s" in row else row for row in rows]


def cells(options: argparse.Namespace, depth: int, names: list[str]) -> Iterator[dict]:
    ends = monotonic() + options.depth_s
    for name in names:
        left = ends - monotonic()
        if left < 0:
            found = {"outcome": f"not begun: the depth's {options.depth_s:g} s are over"}
        else:
            found = cell(options, depth, CELLS[name], limit_s=min(options.cell_s, left))
        row = {"depth": depth, "cell": name, **found}
        print(", ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr, flush=True)
        yield row


def overrides(options: argparse.Namespace, depth: int) -> list[str]:
    return [
        f"model.depth={depth}",
        "run.tokens_per_param=",
        "run.hardware=",
        f"model.head_dim={options.head_dim}",
        f"tokenizer.vocab_size={options.vocab_size}",
        f"data.row_tokens={options.row_tokens}",
        f"data.batch_tokens={options.rows * options.row_tokens}",
        f"train.per_device_train_batch_size={options.rows}",
        f"data.sources=[{{files: {options.words}}}]",
        *options.set,
    ]


def prepare(options: argparse.Namespace, depth: int) -> None:
    """Rows and tokenizer, which no cell's time is to hold."""
    recipe = str(ROOT / "recipes" / "fineweb_d24.yaml")
    command = [sys.executable, "-m", "pipeline.data", recipe, *overrides(options, depth)]
    subprocess.run([*command, f"train.max_steps={options.steps}"], check=True, cwd=ROOT, stdout=sys.stderr)


def cell(options: argparse.Namespace, depth: int, own: list[str], *, limit_s: float) -> dict:
    """The medians of train_steps.py, or why there are none."""
    script = Path(__file__).with_name("train_steps.py")
    command = [sys.executable, str(script), "--steps", str(options.steps), "--depth", str(depth)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given = [*overrides(options, depth), *own]
    process = subprocess.Popen([*command, *given], **pipes, cwd=ROOT)
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"outcome": f"no end within {limit_s:.0f} s"}
    if process.returncode:
        return {"outcome": reason(errors)}
    found = json.loads(output.splitlines()[-1])["results"][0]
    return {name.removeprefix("perf/"): value for name, value in found.items()} | {"outcome": "ran"}


def reason(errors: str) -> str:
    """Why a process ended, from its traceback."""
    if "OutOfMemoryError" in errors or "out of memory" in errors:
        return "out of memory"
    raised = [line for line in errors.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (raised or errors.splitlines() or ["no word"])[-1]


def peer(options: argparse.Namespace, depth: int) -> dict:
    """nanochat's steps on the rows of a run of ours of the same shapes."""
    given = {**vars(options), "depth": depth, "peer": options.peer.resolve()}
    given |= {"dtype": "bfloat16", "window_pattern": "SSSL", "threads": os.cpu_count()}
    shapes = argparse.Namespace(**given)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, base = folder / "rows.npz", folder / "peer"
        try:
            nanochat.start(shapes, folder, nanochat.recipe(shapes, folder, "shapes", 0), rows)
            nanochat.tokenizer_for_peer(folder / "runs" / "shapes" / "model", base / "tokenizer")
            log = nanochat.start_peer(shapes, base, rows)
        except (SystemExit, subprocess.CalledProcessError) as error:
            return {"outcome": reason(str(error))}
    late = [float(ms) / 1e3 for step, _, ms in nanochat.STEP.findall(log) if int(step) >= options.steps / 5]
    step_s = statistics.median(late)
    memory = {"peak_memory_gib": float(found[1]) / 1024} if (found := MEMORY.search(log)) else {}
    return {"step_s": step_s, "tok_per_s": options.rows * options.row_tokens / step_s, **memory, "outcome": "ran"}


if __name__ == "__main__":
    main()
