"""One of two gloo ranks that score the same text together; started by test_bpb.py. Prints its result as JSON."""

import dataclasses
import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM

from pipeline.evals.bpb import bits_per_byte

folder, rank, world_size, rows_per_batch = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
)
data = torch.load(f"{folder}/data.pt", weights_only=True)
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
mine = {name: value[rank::world_size] for name, value in data["batch"].items()}
batches = [
    {name: value[first : first + rows_per_batch] for name, value in mine.items()}
    for first in range(0, len(mine["input_ids"]), rows_per_batch)
]
try:
    sources = data.get("sources", 0)
    score = bits_per_byte(model, batches, data["byte_lengths"], device="cpu", sources=sources)
    print(json.dumps(dataclasses.asdict(score)))
except ValueError as error:
    print(json.dumps(str(error)))
torch.distributed.barrier()  # neither leaves while the other still reads from it
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a library's thread that outlives the interpreter would now and then end it by SIGABRT
