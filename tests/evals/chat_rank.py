"""One of two gloo ranks that score the same chat tasks together; started by test_chat_tasks.py. Prints its result as JSON."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.evals.chat import score_chat_tasks
from pipeline.evals.chat_tasks import BUILT_IN, custom_task, load_chat_tasks
from pipeline.evals.tasks import EvaluationInterrupted
from pipeline.process.errors import TandemError
from pipeline.recipe.schema import Source

folder, rank, world_size, checker = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
HAPPENS = os.environ.get("HAPPENS")
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
)
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
own = custom_task("own", source=Source(files=f"{folder}/own.jsonl"), checker=checker, folder=folder, max_new_tokens=8)
tasks = load_chat_tasks([BUILT_IN["arc_easy"], own], places=[folder], cache=Path(folder, "cache"))


def watched(batches):
    """On the last rank, what the environment says happens at the second batch."""
    for n, batch in enumerate(batches):
        if n == 1 and rank == world_size - 1 and HAPPENS:
            raise {"signal": EvaluationInterrupted(), "defect": KeyError("of this rank")}[HAPPENS]
        yield batch


try:
    scores = score_chat_tasks(tasks, model, tokenizer, rank=rank, world_size=world_size, batch_rows=3, watched=watched)
    print(json.dumps([dataclasses.asdict(score) for score in scores]))
except TandemError as error:
    print(json.dumps(str(error)))
except Exception as error:
    print(json.dumps(type(error).__name__))
torch.distributed.barrier()  # neither leaves while the other still reads from it
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a library's thread that outlives the interpreter would now and then end it by SIGABRT
