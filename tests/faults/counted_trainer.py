"""A trainer of the standard library that continues where it stopped, or does not: WRONG in the environment says how.

offers: workers, ranks
"""

import json
import os
import random
import time
from pathlib import Path

from faults.conformance.subject import Journal, arguments

PADDING = "0" * 100_000  # a checkpoint as large as that of a small model


def main() -> None:
    given = arguments()
    wrong = os.environ.get("WRONG", "")
    journal = Journal(given.folder)
    state = {"step": 0, "weight": 0.0, "momentum": 0.0}
    if newest := newest_checkpoint(given.folder, wrong):
        state = newest
    wait_for_all_ranks(given)  # or one of them might find a checkpoint that another has just written
    journal.start(state["step"])
    if wrong == "refuses another number of workers" and state["step"] and state["workers"] != given.workers:
        raise SystemExit("the checkpoint is that of another number of workers. Start with that number.")
    first_step = state["step"] + 1
    last_step = given.steps
    if wrong == "a step too many after the end" and first_step > last_step:
        last_step = first_step
    if wrong == "optimizer":
        state["momentum"] = 0.0
    for step in range(first_step, last_step + 1):
        if wrong == "never ends after a resume" and first_step > 1:
            time.sleep(600)
        batch = rows_of(step, first_step, given, wrong)
        rows = batch[given.rank * given.rank_batch : (given.rank + 1) * given.rank_batch]
        loss = sum((state["weight"] - row) ** 2 for row in rows)
        if wrong == "other losses in each training":
            loss += random.random()
        gradient = sum(2 * (state["weight"] - row) for row in batch) / len(batch)  # the mean of all ranks
        state["momentum"] = 0.9 * state["momentum"] + gradient
        state["weight"] -= 0.01 * state["momentum"]
        state["step"] = step
        state["workers"] = given.workers
        journal.step(step, rows, loss)
        if step % given.save_every == 0 and given.rank == 0:
            save(state, given.folder / f"checkpoint-{step}.json", wrong)
    if given.rank == 0:
        save(state, given.folder / f"checkpoint-{state['step']}.json", wrong)
    weight = state["weight"]
    if wrong == "other weights at the end" and first_step > 1:
        weight += 1.0
    journal.end(state["step"], {"weight": weight})


def rows_of(step: int, first_step: int, given, wrong: str) -> list[int]:
    """Return the rows of a step of all ranks; every epoch has an order of its own."""
    per_epoch = given.rows // given.batch
    epoch, batch = divmod(step - 1, per_epoch)
    order = list(range(given.rows))
    random.Random(epoch).shuffle(order)
    first_epoch, first_batch = divmod(first_step - 1, per_epoch)
    if epoch == first_epoch and first_batch > 0:  # this start came into the middle of the epoch
        if wrong == "repeats the epoch's first rows":
            batch -= first_batch
        if wrong == "skips a batch":
            batch = (batch + 1) % per_epoch
        if wrong == "another order of the remaining rows":
            remaining = order[first_batch * given.batch :]
            random.Random(first_step).shuffle(remaining)
            order[first_batch * given.batch :] = remaining
    return order[batch * given.batch : (batch + 1) * given.batch]


def wait_for_all_ranks(given) -> None:
    arrived = f"arrived-{os.getpgid(0)}"
    (given.folder / f"{arrived}-{given.rank}").touch()
    while len(list(given.folder.glob(f"{arrived}-*"))) < given.ranks:
        time.sleep(0.01)


def save(state: dict, path: Path, wrong: str) -> None:
    text = json.dumps({**state, "padding": PADDING})
    if wrong in ("takes a half-written checkpoint", "reads a half-written checkpoint"):
        path.write_text(text)
        return
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def newest_checkpoint(folder: Path, wrong: str) -> dict | None:
    paths = sorted(folder.glob("checkpoint-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    if not paths:
        return None
    text = paths[-1].read_text()
    if wrong == "takes a half-written checkpoint":
        try:
            return json.loads(text)
        except ValueError:
            return None  # as if there were none
    return json.loads(text)


if __name__ == "__main__":
    main()
