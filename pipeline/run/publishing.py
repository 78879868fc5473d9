"""The trainer's side of publishing: start the publisher, and at the end of the run wait for it, but not for ever."""

import os
import subprocess

from pipeline.process import side_process
from pipeline.process.commands import command
from pipeline.recipe import Recipe
from pipeline.run_dir.hub_queue import MODEL, HubQueue
from pipeline.run_dir.run_directory import RunDirectory


class Publishing:
    """Publishing to hub.id beside the run, on the first rank; without hub.id and on other ranks it does nothing.

    A process and not a thread: uploading takes the interpreter's lock, hashing takes time, and a process can be killed.
    """

    def __init__(self, recipe: Recipe, run: RunDirectory, *, start_step: int):
        self.hub, self.run, self.queue = recipe.hub, run, HubQueue(run, strategy=recipe.hub.strategy)
        self.active = recipe.hub.id is not None and int(os.environ.get("RANK", 0)) == 0
        self.process: subprocess.Popen[bytes] | None = None
        if self.active:
            try:
                self.queue.drop_after(start_step)
            except OSError as error:
                print(f"{self.queue.path}: what lies beyond step {start_step} stays queued: {error}", flush=True)
            if recipe.hub.strategy != "end":
                self._start()

    def finish(self) -> None:
        """Publish the finished model; say what was published, or what was not and how to finish it. Never raises."""
        if not self.active:
            return
        try:
            self.queue.add_model(str(self.hub.id))
            if self.queue.items():
                self._wait()
            self._notify()
        except OSError as error:
            print(f"the model was not published: {error}. {self._later()}", flush=True)

    def _start(self) -> None:
        environment = side_process.environment(HF_HUB_DISABLE_PROGRESS_BARS="1")  # in a log they are noise
        try:
            self.queue.path.mkdir(parents=True, exist_ok=True)
            with open(self.queue.log, "ab") as log:
                self.process = side_process.start(
                    *("-m", "pipeline.hub", "beside", self.run.path, "--trainer", str(os.getpid())),
                    log=log,
                    env=environment,
                )
        except OSError as error:
            print(f"nothing is published while the run goes on: {error}. {self._later()}", flush=True)

    def _wait(self) -> None:
        print(f"publishing to {self.hub.id}, for at most {self.hub.wait_at_end_s:.0f} s", flush=True)
        if self.process is None or self.process.poll() is not None:
            self._start()
        if self.process is not None:
            try:
                self.process.wait(timeout=self.hub.wait_at_end_s)
            except subprocess.TimeoutExpired:
                self.process.kill()  # what it was sending becomes no commit, and the queue keeps the item
                self.process.wait()

    def _notify(self) -> None:
        last = self.queue.last_published(str(self.hub.id))
        if last and last["item"] == MODEL:
            self.run.update_manifest(hub={"id": last["repo_id"], "commit": last["commit"], "time": last["time"]})
            print(f"{last['url']}: published, {len(last['files'])} files, downloaded again and equal", flush=True)
        left = [
            f"{item.name} of step {item.step} ({item.error or 'no time was left'})" for item in self.queue.items()[-1:]
        ]
        if left:
            print(f"unpublished: {'; '.join(left)}\n{self._later()}", flush=True)

    def _later(self) -> str:
        return f"Finish with: {command('hub', 'push', self.run.path)}"
