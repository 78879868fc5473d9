"""Put the repository's recipes and launch configurations into the wheel, as data of the package; all else:
pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self):
        if self.editable_mode:  # there the repository's own folders are found
            super().run()
            return
        package = Path(self.build_lib, "pipeline")
        shutil.rmtree(package, ignore_errors=True)  # what an earlier build left would go into the wheel, too
        super().run()
        for folder in ("recipes", "accelerate_configs"):
            shutil.copytree(folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithRecipes})
