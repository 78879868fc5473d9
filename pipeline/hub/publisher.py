"""The process that publishes beside a run: what the queue holds, for as long as the run lives."""

import os
import time
import traceback

from pipeline.hub.client import bound_waits
from pipeline.hub.push import publish
from pipeline.process.commands import end_with
from pipeline.process.errors import ServiceError, TandemError
from pipeline.process.secrets import redacted
from pipeline.report.run_data import read_run
from pipeline.run_dir.hub_queue import MODEL, HubQueue, Item
from pipeline.run_dir.run_directory import RunDirectory

LOOK_EVERY_S = 1.0
# Between two rounds of attempts while the Hub is away; it doubles up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0


def publish_beside(run: RunDirectory, *, trainer: int) -> None:
    """Publish until the finished model is published or has failed once, or until the process `trainer` is gone.

    Nothing that happens here reaches the run: an item that fails stays in the queue with its reason.
    """
    end_with(trainer)  # in the middle of an upload too: the queue keeps the item
    if hasattr(os, "nice"):
        os.nice(19)  # training comes first
    bound_waits()
    hub = read_run(str(run.path)).recipe["hub"]
    queue = HubQueue(run, strategy=hub["strategy"])
    # The publisher of a start that was killed may still be leaving.
    with queue.hold(wait_s=60.0) as held:
        if not held:
            print(f"{queue.path}: another process publishes", flush=True)
            return
        pause, next_round, next_look, at_end = FIRST_PAUSE_S, 0.0, 0.0, False
        while True:
            at_end = at_end or any(item.name == MODEL for item in queue.items())  # then the look misses no checkpoint
            if hub["strategy"] != "end" and time.monotonic() >= next_look and not _look(queue, hub["id"]):
                next_look = time.monotonic() + FIRST_PAUSE_S
            item = queue.next()
            if at_end and (item is None or item.not_before > time.time() + hub["wait_at_end_s"]):
                return  # nothing is left, or the Hub asked for more time than the run's end has
            due = at_end or (item and item.name != MODEL and time.monotonic() >= next_round)
            if item and due and item.not_before <= time.time():
                published = _try(queue, item, run=run, repo_id=hub["id"])
                if published and item.name == MODEL:
                    return
                if at_end and not published and all(left.not_before <= time.time() for left in queue.items()[-1:]):
                    return
                pause = FIRST_PAUSE_S if published else min(pause * 2, LONGEST_PAUSE_S)
                next_round = 0.0 if published else time.monotonic() + pause
            time.sleep(LOOK_EVERY_S)


def _look(queue: HubQueue, repo_id: str) -> bool:
    """Return whether what was saved could be queued; one that could not must not end the publishing of what comes later."""
    try:
        queue.add_checkpoints(repo_id)
        return True
    except Exception as error:  # the disk is full, a seal is damaged
        print(f"a checkpoint was not queued: {type(error).__name__}: {error}", flush=True)
        return False


def _try(queue: HubQueue, item: Item, *, run: RunDirectory, repo_id: str) -> bool:
    """Return whether it was published; if not, the queue holds why."""
    try:
        publish(queue, item, data=read_run(str(run.path)), repo_id=repo_id)
        return True
    except TandemError as error:
        reason, wait_s = str(error), error.wait_s if isinstance(error, ServiceError) else 0.0
    except Exception as error:  # an answer that nobody foresaw must not end the publishing of what comes later
        traceback.print_exc()
        reason, wait_s = f"{type(error).__name__}: {error}", 0.0
    reason = redacted(reason)  # the Hub's answer may repeat the request, token and all
    print(f"{item.name} of step {item.step} was not published: {reason}", flush=True)
    try:
        queue.note(item, error=reason, not_before=time.time() + wait_s if wait_s else item.not_before)
    except OSError as error:
        print(f"{queue.path}: the reason was not written down: {error}", flush=True)
    return False
