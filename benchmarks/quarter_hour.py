"""Everything that only a GPU can show, in the order of its worth, within a quarter of an hour.

    python benchmarks/quarter_hour.py [--parts a,c,e] [--budget 840] [--nanochat FOLDER] [--out quarter_hour.json] [--toy]

Parts, each of processes with a time limit of their own; the results are written after each process, and a table in the end:
LIST
First of all it measures the card's two ceilings: copying memory, and multiplying bfloat16 matrices. A part that the rest of the budget
(seconds) is too short for is skipped and says so. Needs no network: rows are made here, of random words or of the built-in corpora.
Part a compares with https://github.com/karpathy/nanochat only where --nanochat names a checkout with what that imports. --toy: the same at
toy sizes, uncompiled, on one thread of a CPU in a minute or two; its numbers mean nothing.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep, strftime
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE),
    str(ROOT),
]  # nothing of torch is imported here: processes are forked without a context of CUDA
# What the processes would spend seconds to import, each for itself.
PRELOADED = [
    "pipeline.train",
    "pipeline.training.build",
    "pipeline.run.finish",
    "pipeline.run.open_rows",
    "pipeline.report.single",
]
PRELOADED += ["pipeline.data.prepare", "pipeline.run.checks", "pipeline.run.start_process", "pipeline.tokenizer.train"]
NOT_COMPARED = "not compared: --nanochat names no checkout"
# Keys of the results that a table does not show.
HIDDEN = ("operators", "log")

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What the parts run at."""

    depth: int = 12
    deep: tuple[int, ...] = (20, 24)
    rows: tuple[int, ...] = (16, 32, 64)
    row_tokens: int = 2048
    head_dim: int = 128
    vocab_size: int = 32768
    words: int = 60_000
    documents: int = 4000
    steps: int = 12
    compared_steps: int = 40
    killed_steps: int = 40  # of the runs that are killed
    copied: int = 2**30  # elements of bfloat16
    product: int = 8192
    compile: bool = True


TOY = Sizes(
    depth=2, deep=(2,), rows=(2, 4), row_tokens=64, head_dim=16, vocab_size=512, words=1500, documents=120, steps=4,
    compared_steps=4, killed_steps=24, copied=2**20, product=128, compile=False,
)  # fmt: skip


TOY_OWN_TEXT = ["model.depth=2", "tokenizer.vocab_size=512", "data.row_tokens=64", "data.batch_tokens=256"]
TOY_OWN_TEXT += ["train.per_device_train_batch_size=4"]
TOY_GPT2 = ["model.n_layer=2", "model.n_embd=32", "model.n_head=2", "tokenizer.vocab_size=512", "data.row_tokens=64"]
TOY_GPT2 += ["data.batch_tokens=256", "train.per_device_train_batch_size=4"]
# Overrides of a run that saves and does little else but train.
LITTLE_ELSE = [
    "train.eval_strategy=no",
    "evals.bpb.at_start=false",
    "evals.bpb.tokens=2048",
    "evals.bpb.document_bytes=2048",
]
LITTLE_ELSE += ["samples.every_steps=0", "monitor.trackers=[]", "train.logging_steps=1"]


@dataclass
class Bench:
    """Runs a function in a process of its own and keeps what it found."""

    options: argparse.Namespace
    sizes: Sizes
    folder: Path
    results: Row
    ends: float
    part: str = ""
    part_ends: float = field(default=0.0)

    def run(self, name: str, function: Callable[..., Row], *, limit_s: float = 240.0, **given: Any) -> Row:
        """Return what the function returned, with `name` and `outcome`; kept and written."""
        started = monotonic()
        process, answer = self.start(name, function, **given)
        process.join(max(1.0, min(limit_s, self.part_ends - started, self.ends - started)))
        if process.is_alive():
            kill(process)
            found: Row = {"outcome": f"no end within {monotonic() - started:.0f} s"}
        elif answer.exists():
            found = json.loads(answer.read_text())
        else:
            found = {"outcome": f"ended with {process.exitcode}"}
        row = {"name": name, **found, "took_s": round(monotonic() - started, 1)}
        self.keep(row)
        return row

    def start(self, name: str, function: Callable[..., Row], **given: Any) -> tuple[Any, Path]:
        """Return the process, and where its answer will be."""
        number = sum(1 for _ in self.folder.glob("*.log"))
        answer = self.folder / f"{number}.json"
        log = self.folder / f"{number}.log"
        process = multiprocessing.get_context("forkserver").Process(
            target=in_process, args=(function, given, str(answer), str(log))
        )
        process.start()
        log.touch()
        print(f"{self.part or '-'} {name} ...", file=sys.stderr, flush=True)
        return process, answer

    def keep(self, row: Row) -> None:
        """Add the row to those of the part and write all."""
        self.results["parts"].setdefault(self.part, {"rows": []})["rows"].append(row)
        self.write()
        shown = ", ".join(f"{key} {text_of(value)}" for key, value in row.items() if key not in HIDDEN)
        print(f"{self.part or '-'} {shown}", file=sys.stderr, flush=True)

    def write(self) -> None:
        new = self.options.out.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1, default=str) + "\n")
        new.replace(self.options.out)

    def recipe(self, *, depth: int | None = None, rows: int | None = None, batch_rows: int | None = None) -> list[str]:
        """Return the overrides that train fineweb_d12 of this depth on words of our own."""
        sizes = self.sizes
        rows = rows or sizes.rows[0]
        return [
            f"model.depth={depth or sizes.depth}",
            f"model.head_dim={sizes.head_dim}",
            f"data.row_tokens={sizes.row_tokens}",
            f"data.batch_tokens={(batch_rows or rows) * sizes.row_tokens}",
            f"train.per_device_train_batch_size={rows}",
            f"tokenizer.vocab_size={sizes.vocab_size}",
            *self.everywhere(),
            self.words(),
        ]

    def words(self) -> str:
        """Return the override that trains on words of our own."""
        return f"data.sources=[{{files: {self.folder / 'words.jsonl'}}}]"

    def everywhere(self) -> list[str]:
        """Return the overrides of every recipe."""
        return [
            f"data.cache_dir={self.folder / 'cache'}",
            "run.tokens_per_param=",
            "run.tokens=",
            "run.hardware=",
            "optimizer.schedule.warmup_steps=1",
            f"train.torch_compile={str(self.sizes.compile).lower()}",
        ]


def in_process(function: Callable[..., Row], given: Row, answer: str, log: str) -> None:
    """Call the function in this new process, which is the leader of all that it starts, and write what it returned."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from pipeline.run import finish

    finish.write_report = lambda run: None  # seconds of each run, of which nothing here is read
    try:
        found = {**function(**given), "outcome": "ran"}
    except BaseException as error:  # also SystemExit: a run that ends itself says why
        traceback.print_exc()
        found = {"outcome": reason(error), "log": Path(log).read_text(errors="replace")[-2000:]}
    Path(answer).with_suffix(".part").write_text(json.dumps(found, default=str))
    Path(answer).with_suffix(".part").replace(answer)
    sys.stdout.flush()
    os._exit(0)


def reason(error: BaseException) -> str:
    """Return one line that says why a process ended."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, subprocess.CalledProcessError):
        return f"a process that it started ended with {error.returncode}, see its log"
    if "OutOfMemory" in text or "out of memory" in text:
        return "out of memory"
    return " ".join(text.split())[:200]


def kill(process: Any) -> None:
    """Kill the process and what it started, and return once it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


# What the processes do. They import for themselves: benchmarks/common.py asks for the device.


def ceilings(*, copied: int, product: int) -> Row:
    """Return the card's two ceilings: bytes copied and floating-point operations, a second."""
    import torch
    from common import DEVICE, seconds

    from pipeline.hardware.device import device_info

    source = torch.ones(copied, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    copying = median_of(lambda: seconds(lambda: target.copy_(source)))
    left, right = (torch.randn(product, product, device=DEVICE).bfloat16() for _ in range(2))
    multiplying = median_of(lambda: seconds(lambda: left @ right))
    info = device_info()
    return {
        "device": info.name,
        "torch": torch.__version__,
        "copy_tb_per_s": 2 * source.nbytes / copying / 1e12,
        "product_tflops": 2 * product**3 / multiplying / 1e12,
        "peak_tflops": (info.peak_flops or {}).get("bfloat16", 0) / 1e12,
    }


def median_of(measure: Callable[[], float], *, times: int = 10, warm_up: int = 3) -> float:
    return statistics.median([measure() for _ in range(warm_up + times)][warm_up:])


def make_words(*, path: str, words: int, documents: int) -> Row:
    from common import write_words

    text = write_words(Path(path), words=words, documents=documents)
    lines = text.read_text().splitlines()[:40]
    held_out = [json.dumps({"text": json.loads(line)["text"][::-1]}) for line in lines]  # words of no other text
    text.with_name("held_out.jsonl").write_text("\n".join(held_out) + "\n")
    return {}


def steps(*, overrides: list[str], steps: int, recipe: str = "fineweb_d12") -> Row:
    """Return the medians of a run (train_steps.py)."""
    from train_steps import measured, train

    options = argparse.Namespace(depth=12, steps=steps, recipe=recipe, overrides=overrides)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(train(options, Path(folder)), steps)
    return {name.removeprefix("perf/"): value for name, value in found.items()}


def profiled(*, overrides: list[str], recipe: str, warm_up: int, steps: int) -> Row:
    """Return what a step is made of (profile_step.py), and how much of it the device works."""
    from profile_step import kinds, profile_run, table

    with tempfile.TemporaryDirectory() as folder:
        found = profile_run(recipe, overrides, warm_up=warm_up, steps=steps, folder=Path(folder))
    operators = table(found, top=25)
    step_ms = 1e3 * found.plain_step_s
    spent = kinds(found)
    busy = {"busy_pct": 100 * sum(spent.values()) / step_ms} if spent else {}
    return {"step_ms": step_ms, "loss": found.loss, **busy, **spent, "operators": operators}


def head(*, chunk: int | None, rows: int, width: int, vocab: int, compile: bool) -> Row:
    """Return the time of a loss head, forward and backward. chunk: elements of the logits at a time; None: nanochat's,
    which holds all of them."""
    import torch
    from common import DEVICE, seconds
    from loss_head import chunked_head, whole_head

    from pipeline.model import modeling_tandem

    if chunk:
        modeling_tandem.CHUNK_ELEMENTS[DEVICE] = chunk
    function = chunked_head(15.0) if chunk else whole_head(15.0)
    if compile:
        function = torch.compile(function, fullgraph=True)
    hidden = torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, vocab, (rows,), device=DEVICE)

    def pass_() -> None:
        hidden.grad = weight.grad = None
        function(hidden, weight, labels).backward()

    row = {"ms": 1e3 * median_of(lambda: seconds(pass_))}
    if DEVICE == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def attention(*, kind: str, rows: int, heads: int, length: int, head_dim: int, window: int | None) -> Row:
    """Return the time of an attention, forward and backward, in bfloat16. kind: a backend of sdpa, or flex_attention."""
    import torch
    from common import DEVICE, seconds
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    shape = (rows, heads, length, head_dim)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    if kind == "flex_attention":

        def seen(b, h, query, key):
            return (query >= key) & (query - key < (window or length))

        mask = create_block_mask(seen, None, None, length, length, device=DEVICE)
        compiled = torch.compile(flex_attention)

        def attend():
            return compiled(q, k, v, block_mask=mask)

    else:

        def attend():
            with sdpa_kernel(getattr(SDPBackend, kind)):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

    return {"ms": 1e3 * median_of(lambda: seconds(lambda: attend().sum().backward()))}


def launch(*, stage: str, arguments: list[str]) -> Row:
    """Run a stage in this process."""
    from importlib import import_module

    status = import_module(f"pipeline.{stage}").main(arguments)
    if status:
        raise RuntimeError(f"ended with status {status}")
    return {}


def sharded(*, arguments: list[str]) -> Row:
    """Run as one process under FSDP2, as its users start it."""
    config = ROOT / "accelerate_configs" / "fsdp2.yaml"
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(config),
        "--num_processes",
        "1",
    ]
    subprocess.run([*command, str(ROOT / "pipeline" / "pretrain.py"), *arguments], check=True, cwd=ROOT)
    return {}


def nanochat_run(*, options: Row, folder: str, base: str, rows: str, of: str) -> Row:
    """Return the steps of nanochat's base_train on the rows of our run `of`. The first call makes these."""
    import against_nanochat as nanochat

    given = argparse.Namespace(**options)
    place, rows_file = Path(folder), Path(rows)
    if not rows_file.exists():
        nanochat.start(given, place, nanochat.recipe(given, place, of, 0), rows_file)
    nanochat.tokenizer_for_peer(place / "runs" / of / "model", Path(base) / "tokenizer")
    log = nanochat.start_peer(given, Path(base), rows_file)
    late = [float(ms) / 1e3 for step, _, ms in nanochat.STEP.findall(log) if int(step) >= given.steps / 5]
    step_s = statistics.median(late)
    row = {"step_s": step_s, "tok_per_s": given.rows * given.row_tokens / step_s}
    if found := re.search(r"Peak memory usage: ([\d.]+)\s*MiB", log):
        row["peak_memory_gib"] = float(found[1]) / 1024
    return row


# The parts.


def part_a(bench: Bench) -> None:
    """depth 12 beside nanochat's base_train on the same text and shapes, both compiled, alternating"""
    sizes, peer = bench.sizes, bench.options.nanochat
    given = {
        "peer": peer and peer.resolve(),
        "text": str(bench.folder / "words.jsonl"),
        "validation": str(bench.folder / "held_out.jsonl"),
        "depth": sizes.depth,
        "steps": sizes.compared_steps,
        "warmup_steps": 1,
        "dtype": "bfloat16",
        "rows": sizes.rows[0],
        "row_tokens": sizes.row_tokens,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "window_pattern": "SSSL",
        "threads": os.cpu_count(),
        "set": [f"train.torch_compile={str(sizes.compile).lower()}"],
        "peer_set": [],
    }
    speeds: dict[str, list[float]] = {"ours": [], "nanochat": []}
    for turn in range(2 if peer else 1):
        found = bench.run(f"ours {turn}", steps, overrides=bench.recipe(), steps=sizes.compared_steps)
        speeds["ours"].append(found.get("tok_per_s", 0.0))
        if peer:
            places = {
                "folder": str(bench.folder),
                "base": str(bench.folder / f"peer{turn}"),
                "rows": str(bench.folder / "rows.npz"),
            }
            found = bench.run(f"nanochat {turn}", nanochat_run, options=given, of="shapes", **places)
            speeds["nanochat"].append(found.get("tok_per_s", 0.0))
    if not peer:
        bench.keep({"name": "nanochat", "outcome": NOT_COMPARED})
    elif min(speeds["nanochat"]) > 0:
        ratio = statistics.mean(speeds["ours"]) / statistics.mean(speeds["nanochat"])
        bench.keep({"name": "ours / nanochat", "ratio": ratio, "outcome": "compared"})


def part_b(bench: Bench) -> None:
    """the loss head in chunks of several sizes, and with all logits at once as nanochat's"""
    sizes = bench.sizes
    shape = {"rows": sizes.rows[0] * sizes.row_tokens, "width": 64 * sizes.depth, "vocab": sizes.vocab_size}
    whole = shape["rows"] * shape["vocab"]
    for parts in (32, 11, 4, 1):
        bench.run(f"{parts} chunks", head, chunk=-(-whole // parts), compile=sizes.compile, **shape)
    bench.run("all logits, nanochat's", head, chunk=None, compile=sizes.compile, **shape)


def part_c(bench: Bench) -> None:
    """rows of a micro-batch, within the same batch"""
    for rows in bench.sizes.rows:
        overrides = bench.recipe(rows=rows, batch_rows=bench.sizes.rows[-1])
        bench.run(f"{rows} rows", steps, overrides=overrides, steps=bench.sizes.steps)


def part_d(bench: Bench) -> None:
    """attention at the run's shapes, forward and backward, and in the run"""
    sizes = bench.sizes
    heads = 64 * sizes.depth // sizes.head_dim
    shape = {"rows": sizes.rows[0], "heads": heads, "length": sizes.row_tokens, "head_dim": sizes.head_dim}
    for kind in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        bench.run(kind, attention, kind=kind, window=None, limit_s=60, **shape)
    if sizes.compile:
        for window in (None, sizes.row_tokens // 4):
            bench.run(
                f"flex, window {window or 'none'}",
                attention,
                kind="flex_attention",
                window=window,
                limit_s=90,
                **shape,
            )
    for name in ("sdpa", "flex_attention") if sizes.compile else ("sdpa",):
        overrides = [*bench.recipe(), f"model.attn_implementation={name}"]
        bench.run(f"run with {name}", steps, overrides=overrides, steps=sizes.steps)


def part_e(bench: Bench) -> None:
    """kernels of one step"""
    bench.run(
        f"depth {bench.sizes.depth}", profiled, overrides=bench.recipe(), recipe="fineweb_d12", warm_up=6, steps=2
    )


def part_f(bench: Bench) -> None:
    """depth 20 and 24, five steps, bf16 and float8"""
    for depth in bench.sizes.deep:
        for fp8 in (False, True):
            overrides = [*bench.recipe(depth=depth), f"train.fp8={str(fp8).lower()}"]
            bench.run(f"depth {depth}, {'float8' if fp8 else 'bf16'}", steps, overrides=overrides, steps=5)


def part_g(bench: Bench) -> None:
    """kill -9 and resume with train.full_determinism, bitwise"""
    total = bench.sizes.killed_steps
    runs = bench.folder / "killed"
    fixed = [*bench.recipe(depth=min(4, bench.sizes.depth)), *LITTLE_ELSE, f"run.directory={runs}"]
    fixed += [f"train.max_steps={total}", f"train.save_steps={total // 4}", "train.full_determinism=true"]
    bench.run("uncut", launch, stage="pretrain", arguments=["fineweb_d12", *fixed, "run.name=uncut"])
    cut = ["fineweb_d12", *fixed, "run.name=cut"]
    process, _ = bench.start("to be killed", launch, stage="pretrain", arguments=cut)
    limit = min(monotonic() + 120, bench.ends)
    seen = 0
    while process.is_alive() and monotonic() < limit and seen <= total // 2:
        seen = max(losses_of(runs / "cut"), default=0)
        sleep(0.005)
    alive = process.is_alive()
    kill(process)
    bench.keep({"name": "killed", "seen_step": seen, "outcome": "killed" if alive else "had ended before"})
    bench.run("resumed", launch, stage="pretrain", arguments=cut)
    weights = {}
    for name in ("uncut", "cut"):
        file = runs / name / "model" / "model.safetensors"
        weights[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else f"{name} has none"
    same = {"weights_equal": weights["uncut"] == weights["cut"]}
    same["losses_equal"] = losses_of(runs / "uncut") == losses_of(runs / "cut")
    bench.keep({"name": "bitwise", **same, "outcome": "equal" if all(same.values()) else "DIFFER"})


def losses_of(run: Path) -> dict[int, float]:
    """Return the losses of a run by step; none of one that did not begin."""
    from pipeline.run_dir.rows import read_rows

    metrics = run / "metrics.jsonl"
    rows = read_rows(metrics) if metrics.exists() else []
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def part_h(bench: Bench) -> None:
    """own_text and the quickstart with and without CUDA graphs"""
    toy = [] if bench.sizes.compile else TOY_OWN_TEXT
    given = {"warm_up": 12, "steps": 5} if bench.sizes.compile else {"warm_up": 3, "steps": 1}
    for recipe, own in (("own_text", [bench.words(), *toy]), ("quickstart_pretrain", [])):
        bench.run(f"{recipe}, default", profiled, overrides=[*bench.everywhere(), *own], recipe=recipe, **given)
        if bench.sizes.compile:
            graphs = [*bench.everywhere(), *own, "train.torch_compile_mode=reduce-overhead"]
            bench.run(f"{recipe}, reduce-overhead", profiled, overrides=graphs, recipe=recipe, **given)


def part_i(bench: Bench) -> None:
    """SFT, portable_d12 and gpt2_124m, ten steps each"""
    bench.run("portable_d12", steps, recipe="portable_d12", overrides=bench.recipe(), steps=10)
    shape = ["data.batch_tokens=32768"] if bench.sizes.compile else TOY_GPT2  # 32 rows, one micro-batch
    everywhere = [key for key in bench.everywhere() if not key.startswith("optimizer.schedule")]  # transformers' own
    overrides = [*everywhere, *shape, bench.words(), "model.depth=", "train.warmup_steps=1"]
    bench.run("gpt2_124m", steps, recipe="gpt2_124m", overrides=overrides, steps=10)
    common = [*bench.everywhere(), *LITTLE_ELSE, f"run.directory={bench.folder / 'chat'}", "train.max_steps=10"]
    base = ["quickstart_pretrain", *common, "run.name=base"]
    bench.run("quickstart_pretrain", launch, stage="pretrain", arguments=base)
    chat = ["quickstart_sft", *common, "run.name=chat", f"model.start_from={bench.folder / 'chat' / 'base' / 'model'}"]
    chat += ["train.num_train_epochs=", "evals.chat.max_per_task=8", "evals.chat.at_start=false"]
    bench.run("quickstart_sft", launch, stage="sft", arguments=chat)


def part_j(bench: Bench) -> None:
    """FSDP2 with one process"""
    run = bench.folder / "sharded"
    arguments = ["fineweb_d12", *bench.recipe(), *LITTLE_ELSE, "run.name=run", f"run.directory={run}"]
    found = bench.run("10 steps", sharded, arguments=[*arguments, "train.max_steps=10"])
    if found["outcome"] == "ran":
        step, loss = list(losses_of(run / "run").items())[-1]
        bench.keep({"name": "its last step", "step": step, "loss": loss, "outcome": "ran"})


# Of each part: the function, its time limit, and the least seconds that it is begun with.
PARTS: dict[str, tuple[Callable[[Bench], None], float, float]] = {
    "a": (part_a, 300, 120),
    "b": (part_b, 120, 40),
    "c": (part_c, 210, 60),
    "d": (part_d, 210, 60),
    "e": (part_e, 120, 45),
    "f": (part_f, 300, 60),
    "g": (part_g, 180, 60),
    "h": (part_h, 240, 60),
    "i": (part_i, 240, 60),
    "j": (part_j, 120, 45),
}


def text_of(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def tables(results: Row) -> Iterator[str]:
    """Yield the results as Markdown: a line of the card, then a table for each part."""
    for letter, part in results["parts"].items():
        yield f"\n**{letter or 'ceilings'}** {part.get('title', '')}".rstrip() + "\n"
        if "skipped" in part:
            yield part["skipped"]
            continue
        columns = list(dict.fromkeys(key for row in part["rows"] for key in row if key not in HIDDEN))
        yield f"| {' | '.join(columns)} |"
        yield f"|{'---|' * len(columns)}"
        for row in part["rows"]:
            yield f"| {' | '.join(text_of(row.get(key, '')) for key in columns)} |"


def main() -> None:
    names = "\n".join(f"    {letter}  {function.__doc__}" for letter, (function, _, _) in PARTS.items())
    doc = (__doc__ or "").replace("LIST", names)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="letters, in the order in which they are run")
    parser.add_argument("--budget", type=float, default=840.0, metavar="SECONDS")
    parser.add_argument("--nanochat", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("quarter_hour.json"))
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    letters = options.parts.split(",")
    if unknown := [letter for letter in letters if letter not in PARTS]:
        parser.error(f"--parts: there is no part {', '.join(unknown)}. Write letters of {','.join(PARTS)}.")
    begun = monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.toy:
        os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as name:
        results: Row = {
            "started": strftime("%Y-%m-%d %H:%M:%S"),
            "toy": options.toy,
            "budget_s": options.budget,
            "parts": {},
        }
        sizes = TOY if options.toy else Sizes()
        bench = Bench(options, sizes, Path(name), results, begun + options.budget)
        bench.part_ends = bench.ends
        bench.run("ceilings", ceilings, copied=sizes.copied, product=sizes.product)
        path = str(bench.folder / "words.jsonl")
        bench.run("words", make_words, path=path, words=sizes.words, documents=sizes.documents)
        for letter in letters:
            function, limit_s, least_s = PARTS[letter]
            part = results["parts"][letter] = {"title": function.__doc__, "rows": []}
            left = bench.ends - monotonic()
            if left < (1 if options.toy else least_s):
                part["skipped"] = f"skipped: {left:.0f} s of the budget are left, and it takes at least {least_s:.0f}."
                continue
            bench.part, bench.part_ends = letter, monotonic() + limit_s
            function(bench)
            part["took_s"] = round(limit_s - (bench.part_ends - monotonic()), 1)
            bench.write()
    results["took_s"] = round(monotonic() - begun, 1)
    bench.write()
    table = "\n".join(tables(results))
    options.out.with_suffix(".md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
