"""Tokens a core-second of preparing data (read, tokenize, pack, seal), against encoding the same texts alone.

    python benchmarks/preparation.py --text 'train/*.parquet' [--vocab-size 32768] [--packing best_fit_crop] [--pairs 3] [--processes 2]

Both ways use one thread and the same encoder, tiktoken where it gives the same ids, else tokenizers, and are
timed by the processor's seconds of this process. The tokenizer is trained on the text first, which is not timed. ratio: of
the seconds a token; the goal is less than 1 / 0.7 = 1.43.

With --processes N instead: wall seconds of preparing by N processes against one, in turns on a machine at rest, the start of the
processes included (give it a minute of text). speed_up: the goal for 2 is 1.8. encoding_s: a processor's seconds of the processes
that encode. packing_s: those of the one that packs and seals what they made. feeds_processes: how many it keeps up with.
"""

import os

os.environ["RAYON_NUM_THREADS"] = "1"  # before anything imports tokenizers

import resource
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from common import ROOT, arguments, in_turns, seconds, show

from pipeline.contrib.parts import prepare_part
from pipeline.data.prepare import prepare_now
from pipeline.data.row_plan import plan_rows, sequence_folder
from pipeline.process.storage import read_json
from pipeline.recipe import read_recipe
from pipeline.recipe.dial import row_settings
from pipeline.recipe.schema import with_values
from pipeline.sources.open import open_sources
from pipeline.tokenizer import load_or_train
from pipeline.tokenizer.encode import Encoder


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = arguments(
        __doc__, text="", vocab_size=32768, packing="best_fit_crop", row_tokens=2048, pairs=3, threads=1, processes=0
    )
    if not options.text:
        sys.exit("preparation.py needs --text, the files to prepare: see preparation.py --help.")
    with tempfile.TemporaryDirectory() as folder:
        recipe = read_recipe(
            [
                str(ROOT / "recipes" / "fineweb_d24.yaml"),
                "run.hardware=",
                "run.tokens_per_param=",
                "train.num_train_epochs=1",
                f"data.sources=[{{files: '{options.text}'}}]",
                f"data.cache_dir={folder}",
                f"data.row_tokens={options.row_tokens}",
                f"data.packing={options.packing}",
                "data.batch_tokens=65536",
                "data.num_proc=1",
                f"tokenizer.vocab_size={options.vocab_size}",
            ],
            stage="pretrain",
        )
        sources = open_sources(recipe.source_settings())
        tokenizer = load_or_train(recipe.tokenizer_settings(), sources[0], validation=sources[1])
        texts = [item.text for source in sources[0] for block in source.read(file=0, block=0) for item in block.items]
        encoder = Encoder(tokenizer, num_proc=1)
        tokens = sum(map(len, encoder.encode(texts)))

        def plan_of(processes: int) -> dict:
            return plan_rows(
                row_settings(with_values(recipe, {"data.num_proc": processes})), tokenizer, sources=sources
            )

        def prepare(processes: int = 1) -> None:
            shutil.rmtree(Path(folder) / "shards", ignore_errors=True)
            prepare_now(plan_of(processes), tokenizer, sources=sources)

        if options.processes:
            plan = plan_of(1)
            prepare_now(plan, tokenizer, sources=sources)
            (about,) = plan["train"]["sequences"]

            def train_alone(processes: int = 1) -> None:
                shutil.rmtree(sequence_folder(plan, about), ignore_errors=True)
                prepare_now(plan_of(processes), tokenizer, sources=sources)

            found = in_turns(lambda: train_alone(options.processes), train_alone, pairs=options.pairs, warm_up=0)
            shutil.rmtree(sequence_folder(plan, about))
            encoding = seconds(partial(prepare_part, plan, tokenizer, sources=sources, part=(1, 1)), cpu_of_children)
            packing = seconds(partial(prepare_now, plan, tokenizer, sources=sources), time.process_time)
            row = {"processes": options.processes, "one_s": found["other_s"], "speed_up": 1 / found["ratio"]}
            row |= {"encoding_s": encoding, "packing_s": packing, "feeds_processes": encoding / packing}
            show(options, [row])
            return

        found = in_turns(
            prepare, lambda: encoder.encode(texts), pairs=options.pairs, warm_up=1, clock=time.process_time
        )
        # Validation is prepared too, as rows and as documents: more tokens than those of the other way.
        seals = [read_json(sorted(shards.glob("shard-*.json"))[-1]) for shards in (Path(folder) / "shards").iterdir()]
        prepared = sum(seal["read"]["text_tokens"] for seal in seals)
    row = {
        "encoder": "tokenizers" if encoder.twin is None else "tiktoken",
        "ours_tok_per_s": prepared / found["ours_s"],
        "encoding_tok_per_s": tokens / found["other_s"],
    }
    per_token = tokens / prepared
    row |= {name: found[name] * per_token for name in ("ratio", "ratio_p10", "ratio_p90")}
    show(options, [row])


if __name__ == "__main__":
    main()
