"""Speed and result beside nanochat's own code: the same rows, tokenizer, model, batch, optimizer and steps.

    python benchmarks/against_nanochat.py --peer NANOCHAT --text 'train/*.parquet' --validation val.parquet \\
        [--depth 4] [--steps 300] [--pairs 1] [--dtype bfloat16] [--rows 16] [--row-tokens 256] [--head-dim 64]

NANOCHAT is a folder with https://github.com/karpathy/nanochat. Its scripts/base_train.py runs as it is, on the rows that our
run was trained on, fed through the name of its data loader, so that both learn from the same tokens and neither is timed
while it tokenizes. Both get the same warm-up: our default is shorter in runs under 200 steps. Each seed is a pair of runs,
ours first and then the other one first. Compared: tokens/s (medians over the last four fifths of the steps, as each prints
them), the loss step by step, and bits per byte of the validation text, both by `python -m pipeline.evals`; at equal steps,
and ours also after a run of as many steps as it makes in the peer's time. Needs what nanochat imports: tiktoken, filelock,
requests, jinja2.
"""

import argparse
import json
import os
import pickle
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
from common import ROOT, TRAIN_ONLY, compared, show

STEP = re.compile(r"^step (\d+)/\d+ .*?\| loss: ([\d.]+) .*?dt: ([\d.]+)ms", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--validation", required=True)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup-steps", type=int, help="of both; default 40, at most a fifth of the steps")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=16, help="of a batch; there is no accumulation")
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--window-pattern", default="SSSL")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="more for our recipe")
    parser.add_argument(
        "--peer-set", nargs="*", default=[], metavar="flag=value", help="more for base_train, say matrix-lr=0.06"
    )
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.peer = options.peer.resolve()
    if options.warmup_steps is None:  # before the fall of the rates begins: where the two overlap, the programs differ
        options.warmup_steps = min(40, options.steps // 5)
    if options.role:
        run_ours(*options.role) if options.role[0] != "peer" else run_peer(*options.role[1:])
        return
    with tempfile.TemporaryDirectory() as folder:
        results = [pair(options, Path(folder), seed) for seed in range(options.pairs)]
    speeds = [(r["ours_step_s"], r["peer_step_s"]) for r in results]
    summary = {"tokens_per_s_ratio": 1 / compared(speeds)["ratio"]}
    for name in ("ours_bpb", "peer_bpb", "ours_bpb_in_equal_time"):
        if all(name in r for r in results):
            summary[name] = statistics.mean(r[name] for r in results)
    show(options, [*results, {"seed": "all", **summary}])


def pair(options: argparse.Namespace, folder: Path, seed: int) -> dict:
    """One run of each. The first run of ours makes the rows and the tokenizer that the peer needs."""
    name, base = f"seed{seed}", folder / f"peer{seed}"
    rows, ours = folder / f"{name}.npz", folder / "runs" / name
    first = not list(folder.glob("seed*.npz"))
    if first or seed % 2 == 0:
        start(options, folder, recipe(options, folder, name, seed), rows)
    else:  # those of the first run: the peer has no seed, so its run is the same in every pair
        rows = folder / "seed0.npz"
    # Our seed chooses the text that a tokenizer learns from: the peer's ids are those of the rows that it is given.
    rows_of = folder / "runs" / rows.stem / "model"
    tokenizer_for_peer(rows_of, base / "tokenizer")
    log = start_peer(options, base, rows)
    if not ours.exists():
        start(options, folder, recipe(options, folder, name, seed), folder / f"{name}.npz")
    rows = [json.loads(line) for line in (ours / "metrics.jsonl").read_text().splitlines()]
    own = {row["step"]: row for row in rows if "train/loss" in row}
    peers = {int(step) + 1: (float(loss), float(ms) / 1e3) for step, loss, ms in STEP.findall(log)}
    late = [step for step in own if step > options.steps / 5 and step in peers]
    model = from_peer(base, rows_of, folder / f"peer_model{seed}", options.depth)
    row: dict = {"seed": seed}
    row["ours_step_s"] = statistics.median(own[step]["perf/step_s"] for step in late)
    row["peer_step_s"] = statistics.median(peers[step][1] for step in late)
    tokens = options.rows * options.row_tokens
    row |= {"ours_tok_per_s": tokens / row["ours_step_s"], "peer_tok_per_s": tokens / row["peer_step_s"]}
    row |= {"ours_loss_ema": own[options.steps]["train/loss_ema"], "peer_loss_ema": peers[options.steps][0]}
    difference = [abs(own[step]["train/loss_ema"] - peers[step][0]) for step in late]
    row["largest_loss_difference"] = max(difference)
    row |= {"ours_bpb": score(options, ours / "model"), "peer_bpb": score(options, model)}
    steps = row["steps_in_equal_time"] = int(options.steps * row["peer_step_s"] / row["ours_step_s"])
    if steps > options.steps:
        start(options, folder, recipe(options, folder, f"{name}_longer", seed, steps=steps), folder / "longer.npz")
        row["ours_bpb_in_equal_time"] = score(options, folder / "runs" / f"{name}_longer" / "model")
    return row


def recipe(options: argparse.Namespace, folder: Path, name: str, seed: int, *, steps: int | None = None) -> list[str]:
    return [
        str(ROOT / "recipes" / "fineweb_d24.yaml"),
        f"run.name={name}",
        f"run.directory={folder / 'runs'}",
        "run.hardware=",
        f"model.depth={options.depth}",
        f"model.head_dim={options.head_dim}",
        f"model.options.window_pattern={options.window_pattern}",
        f"tokenizer.vocab_size={options.vocab_size}",
        "tokenizer.train_chars=20000000",
        f"data.sources=[{{files: '{options.text}'}}]",
        f"data.validation=[{{files: '{options.validation}'}}]",
        f"data.row_tokens={options.row_tokens}",
        f"data.batch_tokens={options.rows * options.row_tokens}",
        f"data.cache_dir={folder / 'cache'}",
        f"train.max_steps={steps or options.steps}",
        f"optimizer.schedule.warmup_steps={options.warmup_steps}",
        f"train.per_device_train_batch_size={options.rows}",
        f"train.bf16={str(options.dtype == 'bfloat16').lower()}",
        f"train.seed={seed}",
        *TRAIN_ONLY,
        "monitor.trackers=[]",
        *options.set,
    ]


def environment(options: argparse.Namespace, **more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", **more}


def start(options: argparse.Namespace, folder: Path, arguments: list[str], rows: Path) -> None:
    command = [sys.executable, __file__, *fixed(options), "--role", str(rows), *arguments]
    subprocess.run(command, check=True, env=environment(options), cwd=folder, stdout=sys.stderr)


def fixed(options: argparse.Namespace) -> list[str]:
    return ["--peer", str(options.peer), "--text", options.text, "--validation", options.validation]


def run_ours(rows: str, *arguments: str) -> None:
    """Train, then write down the rows of every step: (steps, rows, row_tokens) ids and labels."""
    from pipeline import pretrain
    from pipeline.training.trainer import TandemTrainer

    trained: list[TandemTrainer] = []
    resume = TandemTrainer.resume

    def remembered(trainer: TandemTrainer, checkpoint: Path | None) -> None:
        trained.append(trainer)
        resume(trainer, checkpoint)

    TandemTrainer.resume = remembered  # type: ignore[method-assign]
    pretrain.main(list(arguments))
    (trainer,) = trained
    size = trainer.args.per_device_train_batch_size
    batches = [
        trainer.rows.micro_batch(step, 0, rank=0, world_size=1, rows=size) for step in range(trainer.args.max_steps)
    ]
    np.savez(rows, ids=np.stack([b["input_ids"] for b in batches]), labels=np.stack([b["labels"] for b in batches]))


def tokenizer_for_peer(model: Path, folder: Path) -> None:
    """The same ids in the files that nanochat reads: a pickled tiktoken encoding and the bytes of each id."""
    import tiktoken
    from transformers import AutoTokenizer

    from pipeline.tokenizer.encode import TiktokenTwin, byte_lengths

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    twin = TiktokenTwin.of(tokenizer.backend_tokenizer)
    assert twin is not None, "the tokenizer is none that tiktoken can run"
    specials = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    plain = twin.encoding
    encoding = tiktoken.Encoding(
        "ours", pat_str=plain._pat_str, mergeable_ranks=plain._mergeable_ranks, special_tokens=specials
    )
    folder.mkdir(parents=True)
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    torch.save(torch.from_numpy(byte_lengths(tokenizer)), folder / "token_bytes.pt")


def start_peer(options: argparse.Namespace, base: Path, rows: Path) -> str:
    command = [sys.executable, __file__, *fixed(options), "--role", "peer", str(options.peer), str(rows)]
    command += [f"depth={options.depth}", f"head-dim={options.head_dim}", f"max-seq-len={options.row_tokens}"]
    command += [f"total-batch-size={options.rows * options.row_tokens}", f"device-batch-size={options.rows}"]
    command += [f"num-iterations={options.steps}", f"warmup-steps={options.warmup_steps}"]
    command += [f"window-pattern={options.window_pattern}", *options.peer_set]
    command += [f"{name}=-1" for name in ("eval-every", "core-metric-every", "sample-every")]
    peer = environment(options, NANOCHAT_BASE_DIR=str(base), NANOCHAT_DTYPE=options.dtype)
    ended = subprocess.run(command, env=peer, cwd=base, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        sys.exit(f"nanochat ended with {ended.returncode}:\n{ended.stdout[-4000:]}")
    return ended.stdout


def run_peer(peer: str, rows: str, *arguments: str) -> None:
    """nanochat's base_train on our rows."""
    sys.path.insert(0, peer)
    with_rust = "rustbpe"  # it trains tokenizers, which is done here
    sys.modules.setdefault(with_rust, types.ModuleType(with_rust))
    import nanochat.dataloader as loader

    given = np.load(rows)
    ids, labels = torch.from_numpy(given["ids"]), torch.from_numpy(given["labels"])
    labels[labels == -100] = -1

    def ours(*_, device, **__):
        for step in [*range(len(ids)), 0]:  # it reads one ahead
            yield ids[step].to(device), labels[step].to(device), {"epoch": 1, "pq_idx": 0, "rg_idx": 0}

    loader.tokenizing_distributed_data_loader_with_state_bos_bestfit = ours
    sys.argv = ["base_train", *(f"--{argument}" for argument in arguments)]
    runpy.run_module("scripts.base_train", run_name="__main__")


PEERS = [
    (r"^(wte|h|smear|resid|x0|backout)", r"transformer.\1"),
    (r"^transformer\.(transformer\.)", r"\1"),
    (r"^value_embeds\.(\d+)\.", r"transformer.h.\1.attn.value_embedding."),
    (r"\.ve_gate\.", ".value_gate."),
]


def from_peer(base: Path, ours: Path, folder: Path, depth: int) -> Path:
    """The peer's last checkpoint as a model folder like ours."""
    from safetensors.torch import load_file, save_file

    (path,) = (base / "base_checkpoints" / f"d{depth}").glob("model_*.pt")
    weights = {}
    for name, value in torch.load(path, map_location="cpu").items():
        for pattern, ours_name in PEERS:
            name = re.sub(pattern, ours_name, name)
        weights[name] = value.float().contiguous()
    expected = {name for name in load_file(ours / "model.safetensors") if "bigram" not in name}  # nanochat has none
    assert weights.keys() == expected, sorted(weights.keys() ^ expected)
    folder.mkdir()
    for file in ours.iterdir():
        if file.is_file() and file.name not in ("model.safetensors", "MANIFEST.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bigram_embeddings": None}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def score(options: argparse.Namespace, model: Path) -> float:
    command = [sys.executable, "-m", "pipeline.evals", str(model), "bpb", "--text", options.validation]
    command += ["--window", str(options.row_tokens)]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, env=environment(options))
    return float(re.search(r"text/bpb_documents\s+([\d.]+)", done.stdout)[1])  # type: ignore[index]


if __name__ == "__main__":
    main()
