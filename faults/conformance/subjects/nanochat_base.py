"""nanochat's scripts/base_train.py as it is, with --save-every and --resume-from-step, on the CPU and on tiny shards.

A document is a row of the model, and numbered. The buffer of 1,000 documents, read 128 at a time from row groups of
1,024, is made smaller together with the rows: 8, read 1 at a time from row groups of 8. The variable NANOCHAT names a
checkout of https://github.com/karpathy/nanochat (seen at commit 92d63d4e).

packages: torch==2.13.0 pyarrow==25.0.0 rustbpe==0.1.0 tiktoken==0.14.0 wandb==0.31.0 filelock==4.3.1
    psutil==7.2.2 requests==2.34.2 jinja2==3.1.6 pyyaml==6.0.4
docs: https://github.com/karpathy/nanochat/blob/master/scripts/base_train.py
    https://github.com/karpathy/nanochat/blob/master/nanochat/dataloader.py
notes: Its loader says "approximate resume" (commit 92d63d4e, 2026-07-03). The state is that of the batch that was
    read ahead, and names a row group; the documents in the buffer and the rest of the row group are not read again.
    Nothing repeats within an epoch until the shards begin again; as steps are counted, what is left out at each
    resume is made up for by rows of a later epoch. A checkpoint is written under its final name, and a torn one is
    the newest for find_last_step.
"""

import functools
import os
import runpy
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its torch.compile needs a compiler; the numbers are the same

import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken  # noqa: F401
import torch
import torch._dynamo  # the first optimizer imports it, for seconds: here once for all starts
import wandb  # noqa: F401
from torch.optim.optimizer import register_optimizer_step_post_hook

from faults.conformance.subject import Journal, arguments

CHECKOUT = os.environ.get("NANOCHAT", "")
TOKENS = 32  # of a row; a document has as many characters, and begins with its number


def main() -> None:
    given = arguments()
    if not os.path.exists(os.path.join(CHECKOUT, "scripts", "base_train.py")):
        raise SystemExit("nanochat: the variable NANOCHAT names no checkout of it. Set it to the folder of one.")
    sys.path.insert(0, CHECKOUT)
    os.environ["NANOCHAT_BASE_DIR"] = str(given.folder / "nanochat")
    write_data(given)
    from nanochat import checkpoint_manager, dataloader, gpt  # they read the folder as they are imported

    loader = dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit
    smaller = functools.partial(loader, buffer_size=8, tokenizer_batch_size=1)
    dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit = smaller
    checkpoints = given.folder / "nanochat" / "base_checkpoints" / "d1"
    step = checkpoint_manager.find_last_step(str(checkpoints)) if checkpoints.exists() else -1
    journal = Journal(given.folder)
    journal.start(max(step, 0))
    keep_journal(journal, gpt.GPT, step=max(step, 0))
    shape = "--depth=1 --aspect-ratio=64 --head-dim=32 --window-pattern=L --warmup-steps=5 --device-type=cpu"
    shape += f" --max-seq-len={TOKENS} --device-batch-size={given.batch} --total-batch-size={given.batch * TOKENS}"
    every = f"--save-every={given.save_every} --eval-every=-1 --core-metric-every=-1 --sample-every=-1"
    steps = f"--num-iterations={given.max_steps} --resume-from-step={step}"
    sys.argv = ["base_train", *shape.split(), *every.split(), *steps.split()]
    end = runpy.run_module("scripts.base_train", run_name="__main__")
    journal.end(end["step"], end["orig_model"])


def keep_journal(journal: Journal, GPT: type, *, step: int) -> None:
    """Read along: rows and losses as the model is given them, steps as the optimizer ends them."""
    forward = GPT.forward
    seen = {"step": step}

    def noted_forward(self, idx, targets=None, **kwargs):
        result = forward(self, idx, targets, **kwargs)
        seen["rows"] = [int(bytes(ids).decode()) for ids in idx[:, 1:5].tolist()]
        seen["loss"] = float(result.detach())
        return result

    def noted_step(*_):
        seen["step"] += 1
        journal.step(seen["step"], seen["rows"], seen["loss"])

    GPT.forward = noted_forward
    register_optimizer_step_post_hook(noted_step)


def write_data(given) -> None:
    """Write two shards of rows, one of validation, and a tokenizer of bytes: a row is its number and some letters."""
    base = given.folder / "nanochat"
    shards = base / "base_data_climbmix"
    if shards.exists():
        return
    shards.mkdir(parents=True)
    texts = [f"{row:04d}" + (f" row {row * 7}" * TOKENS)[: TOKENS - 4] for row in range(given.rows)]
    half = given.rows // 2
    for number, part in enumerate([texts[:half], texts[half:], texts[:8]]):
        pq.write_table(pa.table({"text": part}), shards / f"shard_{number:05d}.parquet", row_group_size=8)
    from nanochat.tokenizer import RustBPETokenizer

    tokenizer = RustBPETokenizer.train_from_iterator(iter(texts), vocab_size=256 + 9)
    tokenizer.save(str(base / "tokenizer"))
    torch.save(torch.ones(tokenizer.get_vocab_size(), dtype=torch.int32), base / "tokenizer" / "token_bytes.pt")


if __name__ == "__main__":
    main()
