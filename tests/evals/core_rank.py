"""One of two gloo ranks that score CORE together; started by test_core_score.py. Prints its answers as JSON."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a file

import torch
from transformers import AutoTokenizer

from pipeline.evals.core import score_core
from pipeline.evals.core_bundle import open_bundle
from pipeline.model.load import load_model

folder, rank, world_size = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
)
model, tokenizer = load_model(f"{folder}/model"), AutoTokenizer.from_pretrained(f"{folder}/model")
given = {"device": "cpu", "rank": rank, "world_size": world_size}
score = score_core(open_bundle(f"{folder}/bundle"), model, tokenizer, **given)
answers = {scored.task.name: scored.correct.tolist() for scored in score.tasks}


class Broken(type(model)):
    """Breaks on the first rank, after the first look at what it keeps of a position."""

    def forward(self, input_ids=None, past_key_values=None, use_cache=None, logits_to_keep=0):
        if rank == 0 and input_ids.shape[1] > 1:
            raise RuntimeError(f"rank {rank} broke")
        return super().forward(
            input_ids, past_key_values=past_key_values, use_cache=use_cache, logits_to_keep=logits_to_keep
        )


model.__class__ = Broken
try:
    score_core(open_bundle(f"{folder}/bundle"), model, tokenizer, **given)
    failure = None
except RuntimeError as error:
    failure = f"{type(error).__name__}: {error}"
print(json.dumps({"answers": answers, "failure": failure}))
torch.distributed.barrier()  # neither leaves while the other still reads from it
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a library's thread that outlives the interpreter would now and then end it by SIGABRT
