"""The examples of docs/build_on.md: Python and YAML by file name, and the lines of its shell commands."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "build_on.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(?:# (\S+)\n)?(.*?)^```$", PAGE, re.S | re.M)
EXAMPLES = {name.removesuffix(".py"): text for language, name, text in FENCED if language == "python"}
TASKS = {name: text for language, name, text in FENCED if language == "yaml"}
COMMANDS = [line for language, _, text in FENCED if language == "" for line in text.splitlines()]
