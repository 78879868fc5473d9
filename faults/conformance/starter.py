"""Start the processes of a subject for the driver, which gives orders line by line: `PYTHON starter.py [ADAPTER]`.

With an adapter its module is imported once, and each process is a fork of this one: importing torch takes seconds.
Without one, each process is the program that the order names. A status is reported as each process ends.
"""

import importlib.util
import json
import os
import random
import sys
from contextlib import suppress
from types import ModuleType


def main() -> None:
    orders = os.fdopen(os.dup(0), "r")
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a library prints while it is imported is no report
    module = None
    if len(sys.argv) > 1:
        module = imported(sys.argv[1])
    _report(reports, ready=True)
    for line in orders:
        order = json.loads(line)
        ranks = {}
        group = 0
        for rank, environment in enumerate(order["environments"]):
            pid = os.fork()
            if pid == 0:
                _become(order, environment, group, module)
            group = group or pid
            with suppress(OSError):  # the child does it too: whoever comes first
                os.setpgid(pid, group)
            ranks[pid] = rank
        _report(reports, group=group)
        while ranks:
            pid, status = os.wait()
            if pid in ranks:
                _report(reports, rank=ranks.pop(pid), status=os.waitstatus_to_exitcode(status))


def imported(path: str) -> ModuleType:
    """Return the adapter as a module; its `main()` is called in each fork."""
    spec = importlib.util.spec_from_file_location("subject_of_conformance", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, os.path.dirname(path))
    spec.loader.exec_module(module)
    return module


def _report(reports, **what) -> None:
    reports.write(json.dumps(what) + "\n")
    reports.flush()


def _become(order: dict, environment: dict, group: int, module: ModuleType | None) -> None:
    """Be one rank of the subject, which ends as a program does that was started by itself."""
    with suppress(OSError):
        os.setpgid(0, group)
    os.environ.update(environment)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(order["folder"])
    if module is None:
        os.execvp(order["command"][0], order["command"])
    # A process that starts by itself draws these anew; a fork would have those of all forks before it.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv = order["command"]
    module.main()
    sys.exit(0)


if __name__ == "__main__":
    main()
