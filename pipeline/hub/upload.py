"""One branch of a repository on the Hub that takes commits."""

import tempfile
from pathlib import Path
from typing import Any

from pipeline.artifacts.checkpoints import SEAL
from pipeline.artifacts.errors import DataError, ServiceError
from pipeline.artifacts.hub_queue import HubQueue, Item
from pipeline.hub.contents import is_of_a_run
from pipeline.hub.retries import retried


class Upload:
    """A branch of a repository that takes commits. Every request is asked again while the Hub is away."""

    def __init__(self, repo_id: str, *, branch: str, private: bool):
        from huggingface_hub import HfApi

        self.api, self.repo_id, self.branch, self.private = HfApi(), repo_id, branch, private

    def open(self) -> None:
        """Create the repository and the branch where they are missing; ServiceError when it is public and must not be."""
        from huggingface_hub.errors import RevisionNotFoundError

        api = self.api
        create = lambda: api.create_repo(self.repo_id, private=self.private, exist_ok=True)  # noqa: E731
        self.repo_id = retried(create, what=f"creating {self.repo_id}").repo_id
        info = retried(lambda: api.model_info(self.repo_id), what=f"reading {self.repo_id}")
        if self.private and not info.private:
            raise ServiceError(
                f"{self.repo_id}: the repository exists and is public, and the recipe asks for a private one (hub.private), so nothing was "
                "uploaded. Make it private on the Hub, name another repository, or push with --public."
            )

        def head() -> tuple[Any, bool]:
            try:
                return api.model_info(self.repo_id, revision=self.branch), False
            except RevisionNotFoundError:
                api.create_branch(self.repo_id, branch=self.branch, exist_ok=True)
                return api.model_info(self.repo_id, revision=self.branch), True

        new = False
        self.head: Any = info
        if self.branch != "main":
            self.head, new = retried(head, what=f"reading {self.branch}")
        # A new branch begins with what main holds, which is another run's.
        self.ours = (lambda name: name != ".gitattributes") if new else is_of_a_run

    def commit(
        self, files: dict[str, Path], *, queue: HubQueue, item: Item, message: str, replaces: list[str]
    ) -> tuple[str, bool]:
        """One commit with these files, without those of an earlier push that are not among them.

        Gives the commit, and whether it was found there: the answer to an earlier attempt may have been lost.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import BadRequestError

        there = {sibling.rfilename for sibling in self.head.siblings or []}
        left = {name for name in there - set(files) if name in replaces or self.ours(name)}
        before = item.before

        def commit() -> tuple[str, bool]:
            nonlocal before
            if before is not None and (there := self._made_since(before, files[SEAL])):
                return there, True
            if before is None:
                before = self.head.sha
                queue.note(item, before=before)
            # Made anew for each attempt: an operation remembers what it has uploaded.
            add = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
            remove = [CommitOperationDelete(path_in_repo=name) for name in sorted(left)]
            try:
                made = self.api.create_commit(
                    self.repo_id, operations=[*add, *remove], commit_message=message, revision=self.branch
                )
            except ValueError as error:  # the client asks the Hub about the card's metadata before it sends anything
                if not isinstance(error.__cause__, BadRequestError):
                    raise ConnectionError(f"an answer that cannot be read: {error}") from None
                raise DataError(
                    f"{self.repo_id}: the Hub does not take the card ({' '.join(str(error).split())}). Correct hub.license, hub.language or run.tags."
                ) from None
            return made.oid, False

        return retried(commit, what=f"uploading to {self.repo_id}")

    def _made_since(self, before: str, seal: Path) -> str | None:
        """The newest commit when it is not `before` and holds the model that `seal` seals."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        newest = self.api.model_info(self.repo_id, revision=self.branch).sha
        if newest is None or newest == before:
            return None
        with tempfile.TemporaryDirectory(prefix="tandem-push-") as folder:
            try:
                theirs = hf_hub_download(self.repo_id, SEAL, revision=newest, local_dir=folder)
            except RemoteEntryNotFoundError:  # not its base, which is also a Hub that was not reached
                return None
            return newest if Path(theirs).read_bytes() == seal.read_bytes() else None

    def tag(self, step: int, commit: str) -> None:
        """step-<n>, which from_pretrained takes as a revision; on another branch than main <branch>-step-<n>. A later one replaces it."""
        from huggingface_hub.errors import HfHubHTTPError

        name = f"step-{step}" if self.branch == "main" else f"{self.branch}-step-{step}"

        def tag() -> None:
            try:
                self.api.create_tag(self.repo_id, tag=name, revision=commit)
            except HfHubHTTPError as error:
                if getattr(error.response, "status_code", None) != 409:
                    raise
                self.api.delete_tag(self.repo_id, tag=name)
                self.api.create_tag(self.repo_id, tag=name, revision=commit)

        retried(tag, what=f"tagging {name}")
