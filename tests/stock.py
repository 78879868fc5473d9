"""Programs of somebody without this package, each in a process of its own: forked from one that imported transformers alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

# -I: neither PYTHONPATH nor the working folder leads to this package; importing it is an error besides. No tensor is computed
# before the fork: threads do not survive it.
SERVER = """
import json, os, sys, traceback
sys.modules["pipeline"] = None
import torch
import transformers.generation.utils
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers import dynamic_module_utils

for line in sys.stdin:
    asked = json.loads(line)
    if (pid := os.fork()) == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(asked["folder"])
        sys.argv[1:] = asked["arguments"]
        dynamic_module_utils.HF_MODULES_CACHE = asked["modules"]
        status = 0
        try:
            exec(asked["code"], {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class StockPython:
    """Starts the interpreter, and programs in it."""

    def __init__(self, folder: Path):
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.server = subprocess.Popen([sys.executable, "-I", "-c", SERVER], cwd=folder, env=environment, **pipes)

    def run(self, code: str, *arguments: object, folder: Path) -> str:
        """Run a program in the folder, where code that comes with a model is put too. Return what it printed."""
        files = {"out": str(self.out), "err": str(self.err), "folder": str(folder), "modules": str(folder / "modules")}
        asked = {"code": code, "arguments": [str(word) for word in arguments], **files}
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        assert self.server.stdout.readline() == "0\n", self.err.read_text()[-4000:]
        return self.out.read_text()

    def close(self) -> None:
        self.server.communicate(timeout=30)  # it ends with its input
