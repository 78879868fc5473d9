"""The process that publishes checkpoints while a run trains."""

import time
import traceback
from contextlib import suppress

from pipeline.hub.client import bound_waits
from pipeline.hub.push import publish
from pipeline.process.commands import end_with, yield_to_training
from pipeline.process.errors import (
    ServiceError,
    TandemError,
)
from pipeline.process.secrets import redacted
from pipeline.report.run_data import read_run
from pipeline.run_dir.hub_queue import HubQueue
from pipeline.run_dir.run_directory import RunDirectory

# Seconds between two looks at the checkpoints.
LOOK_EVERY_S = 1.0
# Seconds between two attempts while the Hub is away; doubled up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0


def publish_checkpoints(run: RunDirectory, *, trainer: int) -> None:
    """Publish the newest checkpoint whenever there is a new one, until the process `trainer` is gone.

    Nothing that happens here reaches the run: a checkpoint that fails stays in the queue, its reason in the log.
    """
    end_with(trainer)  # in the middle of an upload too: the queue keeps the checkpoint
    yield_to_training()
    bound_waits()
    repo_id = read_run(str(run.path)).recipe["hub"]["id"]
    queue = HubQueue(run)
    # The publisher of a start that was killed may still be leaving.
    with queue.hold(wait_s=60.0) as held:
        if not held:
            print(f"{queue.path}: another process publishes", flush=True)
            return
        failures, item = 0, None
        while True:
            pause_s = LOOK_EVERY_S
            try:
                with suppress(FileNotFoundError):  # rotated away between two looks: the next look finds a newer one
                    item = queue.checkpoint()
                if item is not None and not queue.is_published(item, repo_id):
                    publish(queue, item, data=read_run(str(run.path)), repo_id=repo_id, state=item.folder)
                failures = 0
            except Exception as error:  # it must not end the publishing of what comes later
                if not isinstance(error, TandemError):
                    traceback.print_exc()
                print(f"the newest checkpoint was not published: {redacted(str(error))}", flush=True)
                asked_s = error.wait_s if isinstance(error, ServiceError) else 0.0
                pause_s = max(asked_s, min(FIRST_PAUSE_S * 2**failures, LONGEST_PAUSE_S))
                failures += 1
            time.sleep(pause_s)
