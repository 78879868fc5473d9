"""Earlier runs, as a recipe is read: what its run began with, and the folders that model.start_from names."""

from pathlib import Path
from typing import Any

from pipeline.run_dir.checkpoints import by_step
from pipeline.run_dir.run_directory import RunDirectory, find_run


class EarlierRuns:
    """What read_recipe is given to look runs up. directory, name: of the recipe's own run; start: model.start_from."""

    def previous_attempt(self, directory: str, name: str | None) -> dict[str, Any]:
        """Return what the run was begun with, by dotted key; empty while it has not made a step."""
        if name is None:
            return {}
        run = RunDirectory(Path(directory) / name)
        begun = run.read_manifest().get("must_match", {})
        return begun if begun and run.has_trained() else {}

    def is_run(self, start: str, directory: str, name: str | None) -> bool:
        return self._run(start, directory, name) is not None

    def config_folder(self, start: str, directory: str, name: str | None) -> Path | None:
        """Return a folder of the run with config and tokenizer, if it has one; no weights are looked at."""
        run = self._run(start, directory, name)
        if run is None:
            return None
        for folder in (run.model, *reversed(by_step(run.checkpoints))):
            if (folder / "config.json").is_file():
                return folder
        return None

    def weights_folder(self, start: str, directory: str, name: str | None) -> Path | None:
        """Return the folder of the run that the recipe's run began from, else its model/, else its newest whole
        checkpoint."""
        run = self._run(start, directory, name)
        if run is None:
            return None
        begun = self.previous_attempt(directory, name).get("model.start_from")
        if begun is not None and Path(begun).is_dir() and Path(begun).resolve().is_relative_to(run.path.resolve()):
            return Path(begun)
        return run.model if run.model.is_dir() else run.whole_checkpoint()

    def _run(self, start: str, directory: str, name: str | None) -> RunDirectory | None:
        # `latest:` of an attempt that resumes is the run that the first attempt took, however many have ended since.
        begun = None
        if start.startswith("latest:"):
            begun = self.previous_attempt(directory, name).get("model.start_from")
        if begun is not None and Path(begun).is_dir():
            run = RunDirectory(Path(begun).parent)
            manifest = run.read_manifest()
            if start.removeprefix("latest:") in (manifest.get("recipe_name"), manifest.get("stage")):
                return run
        return find_run(start, directory)
