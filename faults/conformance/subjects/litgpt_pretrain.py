"""litgpt's pretraining command on its LitData module, with --resume auto; the loader's state is in its checkpoint.

packages: litgpt==0.5.13 litdata==0.2.76 torch==2.13.0
offers: workers
docs: https://github.com/Lightning-AI/litgpt/blob/main/tutorials/pretrain.md
    https://github.com/Lightning-AI/litgpt/blob/main/tutorials/pretrain_tinyllama.md
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no compiler is needed, and a small model is not slower

import sys

import litgpt.__main__
import litgpt.pretrain
import torch
from litdata import TokensLoader, optimize
from torch.optim.optimizer import register_optimizer_step_post_hook

from faults.conformance.loader_subject import VOCABULARY, row_tensor
from faults.conformance.subject import Journal, arguments

TOKENS = 15  # of a row that are trained; a row has one more


def main() -> None:
    given = arguments()
    data = given.folder / "data"
    if not data.exists():
        size = 8 * (TOKENS + 1)
        rows = list(range(given.rows))
        loader = TokensLoader(block_size=TOKENS + 1)
        optimize(row_tensor, rows, str(data), chunk_size=size, num_workers=1, item_loader=loader, start_method="fork")
    keep_journal(Journal(given.folder))
    model = (
        f"--model_config.name tiny --model_config.block_size {TOKENS} --model_config.n_layer 1 --model_config.n_head 2"
    )
    model += f" --model_config.n_embd 64 --model_config.vocab_size {VOCABULARY}"
    model += f" --model_config.padded_vocab_size {VOCABULARY}"
    train = f"--train.global_batch_size {given.batch} --train.micro_batch_size {given.batch} --train.lr_warmup_steps 5"
    train += f" --train.max_tokens {given.max_steps * given.batch * TOKENS} --train.save_interval {given.save_every}"
    where = (
        f"--data LitData --data.data_path {data} --data.num_workers {given.workers} --out_dir {given.folder / 'out'}"
    )
    how = "--eval.final_validation false --precision 32-true --devices 1 --logger_name csv --resume auto"
    sys.argv = ["litgpt", "pretrain", "tiny", *model.split(), *train.split(), *where.split(), *how.split()]
    litgpt.__main__.main()


def keep_journal(journal: Journal) -> None:
    """Read along: rows as the model is given them, losses as they are computed, steps as the optimizer ends them."""
    fit = litgpt.pretrain.fit
    cross_entropy = litgpt.pretrain.chunked_cross_entropy
    seen = {}

    def noted_cross_entropy(logits, targets, **kwargs):
        loss = cross_entropy(logits, targets, **kwargs)
        seen["loss"] = loss
        return loss

    def noted_fit(*, state, **kwargs):
        model = state["model"]
        seen["step"] = state["step_count"]
        journal.start(seen["step"])
        model.register_forward_pre_hook(lambda module, inputs: seen.update(rows=inputs[0][:, 0].tolist()))
        hook = register_optimizer_step_post_hook(noted_step)
        fit(state=state, **kwargs)
        hook.remove()
        journal.end(seen["step"], dict(model.named_parameters()))

    def noted_step(optimizer, *_):
        seen["step"] += 1
        journal.step(seen["step"], seen["rows"], float(seen["loss"].detach()))

    litgpt.pretrain.chunked_cross_entropy = noted_cross_entropy
    litgpt.pretrain.fit = noted_fit
    torch.manual_seed(0)


if __name__ == "__main__":
    main()
