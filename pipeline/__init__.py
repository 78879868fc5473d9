"""Tandem: pretrain and chat-tune a small GPT on the Hugging Face stack.

The folders are rooms on the path of the data, imported from left to right only (tests/test_architecture.py):
process run_dir hardware recipe monitor metrics sources tokenizer data model generation evals training callbacks report
hub plan run, then the entries pretrain, sft and chat.
"""

import os
import signal
import sys
import threading

# Processes beside a run, which end as their parent expects.
HELPERS = ("sampler.py", "probing.py", "checkpoints.py")


def leave_at_once(number: int, frame: object) -> None:
    """End a command that has not begun: an import would print a traceback, or take the signal for an error of its
    own."""
    if "TANDEM_STATUS" not in os.environ:  # else who started this says it
        os.write(2, f"{signal.Signals(number).name} came before anything had begun; nothing is lost.\n".encode())
    os._exit(130 if number == signal.SIGINT else 75)


def _starts_a_command() -> bool:
    """Return whether this process was started for the package: python -m pipeline.X, a file in it, tandem."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m" and "-m" in sys.orig_argv:  # while runpy looks for the module
        return sys.orig_argv[sys.orig_argv.index("-m") + 1].startswith("pipeline.")
    if program in ("", "-c") or os.path.basename(program) in HELPERS:
        return False
    in_package = os.path.abspath(program).startswith(os.path.dirname(os.path.abspath(__file__)) + os.sep)
    return in_package or os.path.basename(program) == "tandem"


# Here, since nothing of ours is imported earlier. run_dir/failures.py and launch/launch.py take over.
if _starts_a_command() and threading.current_thread() is threading.main_thread():
    for _number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(_number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(_number, leave_at_once)
