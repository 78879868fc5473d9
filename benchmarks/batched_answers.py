"""Greedy answers to chat prompts in batches, against one prompt at a time.

    python benchmarks/batched_answers.py [--prompts 24] [--batch 24] [--new-tokens 48] [--layers 4] [--width 128] [--pairs 3]

A random `modern` model in fp32, stirred so that its texts vary, and prompts of 8 to 120 tokens; one token in 64 ends an
answer, so that rows leave at different times. different: prompts whose two answers are not equal, which floating-point ties
alone may cause. forwards: the number of forwards of one at a time over that of the batches, the most that is to be had.
"""

import torch
from common import DEVICE, arguments, in_turns, show

from pipeline.generation.texts import continuations
from pipeline.model.build import build_model
from pipeline.recipe.sizes import MODERN
from pipeline.tokenizer.train import train_bpe


def main() -> None:
    options = arguments(__doc__, prompts=24, batch=24, new_tokens=48, layers=4, width=128, pairs=3)
    tokenizer = train_bpe(["a few words and 12345 numbers " * 50], vocab_size=300, split_pattern="nanochat")
    sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.width // 32, "n_positions": 256}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    fields = {**MODERN, **sizes, **ids, "sliding_window": 64, "vocab_size": 4096}
    model = build_model("tandem", fields, seed=0).eval().to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(DEVICE)
    lengths = torch.randint(8, 120, (options.prompts,), generator=generator).tolist()
    prompts = [torch.randint(0, 4096, (length,), generator=generator).tolist() for length in lengths]
    found: dict[int, list[list[int]]] = {}
    forwards: dict[int, int] = {}

    def answer(batch_size: int) -> None:
        def counted(steps):
            for step in steps:
                forwards[batch_size] += 1
                yield step

        forwards[batch_size] = 0
        found[batch_size] = continuations(
            model,
            tokenizer,
            prompts,
            batch_size=batch_size,
            max_new_tokens=options.new_tokens,
            stop_ids=range(0, 4096, 64),
            calculator=True,
            watched=counted,
        )

    times = in_turns(lambda: answer(options.batch), lambda: answer(1), pairs=options.pairs, warm_up=1)
    together, alone = found[options.batch], found[1]
    row = {
        **times,
        "times_as_fast": 1 / times["ratio"],
        "forwards": forwards[1] / forwards[options.batch],
        "tokens": sum(map(len, alone)),
        "different": sum(one != other for one, other in zip(together, alone, strict=True)),
    }
    show(options, [row])


if __name__ == "__main__":
    main()
