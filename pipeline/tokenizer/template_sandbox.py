"""Limits on what a chat template may cost: it came with somebody's model, and may loop or grow without end."""

import ctypes
import time
from functools import cache

import psutil

MAX_CPU_S = 10.0  # of the thread, for one rendering; an ordinary conversation takes milliseconds
MAX_GROWTH = 2**29  # bytes of memory in use, of the process while it renders
CHECK_S = 0.01  # between two checks


def bound_templates() -> None:
    """Let transformers compile chat templates in its own sandbox with limits on time and memory from now on.

    Not undone afterwards: transformers keeps what it has compiled.
    """
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = _bounded_sandbox()  # type: ignore[assignment,misc]


class _Malloc(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    # arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, then:
    _fields_ = [
        *((f"other_{n}", ctypes.c_size_t) for n in range(8)),
        ("free", ctypes.c_size_t),
        ("top", ctypes.c_size_t),
    ]


def used_bytes() -> int:
    """Return the resident memory of this process without what glibc keeps of freed blocks, into which texts may grow
    without a page more (hardware/processor.py has it keep them)."""
    resident = psutil.Process().memory_info().rss
    try:
        mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):  # of another C library, or one before 2.33
        return resident
    mallinfo2.restype = _Malloc
    return resident - mallinfo2().free


@cache
def _bounded_sandbox() -> type:
    from jinja2.compiler import CodeGenerator
    from jinja2.exceptions import SecurityError
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedContext(Context):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.began = self.checked = time.thread_time()
            self.used = used_bytes()

        def derived(self, locals=None):
            context = super().derived(locals)
            context.began, context.used = self.began, self.used  # type: ignore[attr-defined]
            return context

        def check_limits(self):
            now = time.thread_time()
            if now - self.checked < CHECK_S:
                return
            self.checked = now
            if now - self.began > MAX_CPU_S:
                raise SecurityError(f"it computes for more than {MAX_CPU_S:.0f} s")
            used = used_bytes()
            self.used = min(self.used, used)  # what others freed meanwhile is no room for the template
            if used - self.used > MAX_GROWTH:
                raise SecurityError("it makes texts or lists without end")

    class BoundedCode(CodeGenerator):
        def blockvisit(self, nodes, frame):
            self.writeline("context.check_limits()")
            super().blockvisit(nodes, frame)

    class BoundedSandbox(ImmutableSandboxedEnvironment):
        context_class = BoundedContext
        code_generator_class = BoundedCode

    return BoundedSandbox
