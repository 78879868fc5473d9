"""Put the repository's recipes and launch configurations into the wheel, as data of the package; all else: pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self):
        if (
            not self.editable_mode
        ):  # what an earlier build left there goes into the wheel, modules that are gone by now too
            shutil.rmtree(Path(self.build_lib, "pipeline"), ignore_errors=True)
        super().run()
        if not self.editable_mode:  # there the repository's own folders are found
            for folder in ("recipes", "accelerate_configs"):
                target = Path(self.build_lib, "pipeline", folder)
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithRecipes})
