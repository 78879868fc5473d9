"""One of two gloo ranks that score the same chat tasks together; started by test_chat_tasks.py. Prints its result as JSON."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.artifacts.errors import TandemError
from pipeline.evals.chat.files import load_chat_tasks
from pipeline.evals.chat.score import score_chat_tasks
from pipeline.evals.chat.tasks import BUILT_IN, custom_task
from pipeline.recipe.schema import Source

folder, rank, world_size, checker = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
)
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
own = custom_task("own", source=Source(files=f"{folder}/own.jsonl"), checker=checker, folder=folder, max_new_tokens=8)
tasks = load_chat_tasks([BUILT_IN["arc_easy"], own], places=[folder], cache=Path(folder, "cache"))
try:
    scores = score_chat_tasks(tasks, model, tokenizer, rank=rank, world_size=world_size, batch_rows=3)
    print(json.dumps([dataclasses.asdict(score) for score in scores]))
except TandemError as error:
    print(json.dumps(str(error)))
torch.distributed.destroy_process_group()
