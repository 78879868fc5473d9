"""Programs that try to do harm, each with what the sandbox says of it, as a pattern.

In capitals stand places that the test prepared and watches: SECRET_FILE, SENTINEL, FOLDER, PORT, ABSTRACT, PARENT, VICTIM.
A program whose attack succeeds ends well, and so has `passed` for its reason, which none may have.
"""

# What a program is told that opens what it may not see: without namespaces the file is there and refused.
HIDDEN = r"forbidden: PermissionError|wrong: FileNotFoundError"
REFUSED = r"forbidden: PermissionError"

# What calling a function of the C library takes.
C_LIBRARY = """
import ctypes
library = ctypes.CDLL(None, use_errno=True)
def done(name, *arguments):
    return getattr(library, name)(*arguments) != -1
"""

SLOW = {
    "endless_loop": "while True: pass",
    "sleep_deaf_to_signals": """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    time.sleep(1000)
""",
    "power_in_c_that_checks_no_signal": "9 ** 9 ** 9",
    "catastrophic_regular_expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "print_gigabytes": "import sys\nline = 'x' * (1 << 20)\nwhile True:\n    print(line)\n    print(line, file=sys.stderr)",
    "memory_hog_that_swallows_its_errors": """
kept = []
while True:
    try:
        kept.append(bytearray(1 << 20))
    except MemoryError:
        pass
""",
    "message_that_never_ends": """
class Endless(Exception):
    def __str__(self):
        while True: pass
raise Endless
""",
    "swallow_every_exception": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "close_every_file_and_wait": "import os, time\nos.closerange(0, 64)\ntime.sleep(1000)",
}

QUICK = {
    # Processes and threads.
    "fork_bomb": ("import os\nwhile True:\n    os.fork()", REFUSED),
    "fork_bomb_in_c": (
        C_LIBRARY + "assert any(done(name) for name in ('fork', 'vfork'))\nwhile True: library.fork()",
        "wrong: AssertionError",
    ),
    "daemon_that_outlives_its_parent": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)",
        REFUSED,
    ),
    "thread_bomb": (
        "import threading, time\nfor _ in range(100_000): threading.Thread(target=time.sleep, args=(9,)).start()",
        "wrong: RuntimeError: can't start new thread",
    ),
    "shell": ("import os\nassert os.system('touch FOLDER/shell') == 0", "wrong: AssertionError"),
    "subprocess": ("import subprocess\nsubprocess.run(['touch', 'FOLDER/subprocess'])", HIDDEN),
    "become_another_program": ("import os\nos.execv('/usr/bin/touch', ['touch', 'FOLDER/exec'])", HIDDEN),
    # Memory and limits.
    "memory_hog": ("kept = []\nwhile True: kept.append(bytearray(10_000_000))", "memory: MemoryError"),
    "memory_hog_to_the_last_byte": (
        """
kept, size = [], 1 << 24
while size > 16:
    try:
        while True: kept.append(bytes(size))
    except MemoryError:
        size //= 2
while True: kept.append(object())
""",
        "memory: MemoryError",
    ),
    "memory_in_one_piece": ("'x' * (1 << 40)", "memory: MemoryError"),
    "shared_memory_of_mmap": (
        "import mmap\nkept = []\nwhile True:\n    kept.append(mmap.mmap(-1, 1 << 28))\n    kept[-1][:] = bytes(1 << 28)",
        "memory: MemoryError|wrong: OSError: .* Cannot allocate memory",
    ),
    "lift_the_limits": (
        "import resource\nfor name in ('AS', 'CPU', 'NPROC'):\n"
        "    resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (resource.RLIM_INFINITY,) * 2)",
        "forbidden|wrong: ValueError: not allowed to raise maximum limit",
    ),
    "limit_another_process": (
        "import resource\nresource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (5, 5))",
        "forbidden|wrong: (ValueError|ProcessLookupError)",
    ),
    "stack_overflow": (
        "import sys\nsys.setrecursionlimit(1 << 30)\nclass Deep:\n    def __repr__(self): return repr(self)\nrepr(Deep())",
        r"wrong: it crashed \(SIGSEGV\)|memory: MemoryError",
    ),
    "every_file_descriptor": ("import os\nfor _ in range(100): os.dup(0)", "wrong: OSError: .* Too many open files"),
    # Files.
    "delete_files": ("import os\nos.unlink('SENTINEL')", f"{HIDDEN}"),
    "delete_folders": ("import shutil\nshutil.rmtree('FOLDER', ignore_errors=False)", HIDDEN),
    "overwrite_a_file": ("open('SENTINEL', 'w').write('gone')", REFUSED),
    "truncate_a_file": ("import os\nos.truncate('SENTINEL', 0)", REFUSED),
    "rename_link_and_open_up": (
        """
import os
done = []
for act in (
    lambda: os.rename('SENTINEL', 'FOLDER/renamed'), lambda: os.link('SENTINEL', 'FOLDER/linked'),
    lambda: os.symlink('SENTINEL', 'FOLDER/symlinked'), lambda: os.chmod('SENTINEL', 0), lambda: os.mkdir('FOLDER/made'),
    lambda: os.utime('SENTINEL', (0, 0)), lambda: os.mkfifo('FOLDER/fifo'), lambda: os.chown('SENTINEL', 1, 1),
    lambda: os.setxattr('SENTINEL', 'user.x', b'x'), lambda: os.chroot('FOLDER'), lambda: os.chdir('FOLDER'),
):
    try:
        act()
        done.append(act)
    except OSError:
        pass
assert done
""",
        "wrong: AssertionError",
    ),
    "fill_the_disk": (
        """
import os, tempfile
done = []
for folder in ('.', 'FOLDER', '/tmp', '/var/tmp', '/dev/shm', '/', os.path.dirname(os.__file__)):
    try:
        with open(os.path.join(folder, 'hostile-filler'), 'wb') as file:
            done.append(folder)
            while True: file.write(bytes(1 << 20))
    except OSError:
        pass
assert done
""",
        "wrong: AssertionError",
    ),
    "fill_memory_files": (
        "import os\nfile = os.memfd_create('hostile')\nwhile True: os.write(file, bytes(1 << 20))",
        REFUSED,
    ),
    "change_the_library": ("import os\nopen(os.__file__, 'a').write('#')", f"{REFUSED}|wrong: OSError"),
    "lean_on_the_folder_above": ("print(open('/usr/lib/../../SECRET_FILE').read())", HIDDEN),
    # What others know.
    "read_a_secret_file": ("raise RuntimeError(open('SECRET_FILE').read())", HIDDEN),
    "list_a_folder": ("import os\nraise RuntimeError(os.listdir('FOLDER'))", HIDDEN),
    "search_for_files_of_others": (
        """
import os, sys
library = tuple({*sys.path, sys.base_prefix + '/lib', '/lib', '/usr/lib'})
seen = [path for top in ('/etc', '/home', '/proc', '/tmp', '/var', 'FOLDER') for path, _, files in os.walk(top)
        if not path.startswith(library) and files]
assert seen
""",
        "wrong: AssertionError",
    ),
    "read_the_environment": ("import os\nraise RuntimeError(os.environ['HOSTILE_SECRET'])", "wrong: KeyError"),
    "read_its_first_environment": ("raise RuntimeError(open('/proc/self/environ').read())", HIDDEN),
    "read_the_environment_of_others": ("raise RuntimeError(open('/proc/PARENT/environ').read())", HIDDEN),
    "read_the_memory_of_others": (
        C_LIBRARY
        + """
import os
done_so = []
for path in ('/proc/PARENT/mem', '/proc/self/mem', '/proc/PARENT/maps', '/dev/mem', '/proc/kcore', '/dev/kmsg'):
    try:
        done_so.append(os.open(path, os.O_RDONLY))
    except OSError:
        pass
for pid in (PARENT, VICTIM, os.getppid()):
    if done('ptrace', 16, pid, None, None): done_so.append(pid)  # PTRACE_ATTACH
    place = (ctypes.c_ulong * 2)(id(done_so), 8)
    if done('process_vm_readv', pid, place, ctypes.c_ulong(1), place, ctypes.c_ulong(1), ctypes.c_ulong(0)): done_so.append(pid)
assert done_so
""",
        "wrong: AssertionError",
    ),
    # Others: processes and hosts.
    "kill_its_parent": ("import os, signal\nos.kill(PARENT, signal.SIGKILL)", REFUSED),
    "kill_everything": ("import os, signal\nos.kill(-1, signal.SIGKILL)", REFUSED),
    "kill_by_all_means": (
        C_LIBRARY
        + """
import fcntl, os, signal
done_so = []
for pid in (PARENT, VICTIM, os.getppid(), 1):
    for act in (
        lambda: os.kill(pid, 9), lambda: os.killpg(pid, 9), lambda: os.pidfd_open(pid), lambda: fcntl.fcntl(0, 8, pid),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19), lambda: os.sched_setaffinity(pid, {0}),
    ):
        try:
            act()
            done_so.append(act)
        except OSError:
            pass
assert done_so
""",
        "wrong: AssertionError",
    ),
    "connect": ("import socket\nsocket.create_connection(('127.0.0.1', PORT)).send(b'x')", REFUSED),
    "resolve_a_name": ("import socket\nsocket.getaddrinfo('example.com', 80)", "wrong: gaierror|forbidden|wrong: OSError"),
    "listen": ("import socket\nsocket.create_server(('127.0.0.1', 0))", REFUSED),
    "fetch_a_page": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:PORT/')", "wrong: URLError"),
    "abstract_socket": ("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')", REFUSED),
    "socket_pair": ("import socket\nsocket.socketpair()", REFUSED),
    # The kernel.
    "rare_system_calls": (
        C_LIBRARY
        + """
import platform
numbers = {  # x86_64, aarch64
    'unshare': (272, 97), 'setns': (308, 268), 'mount': (165, 40), 'umount2': (166, 39), 'pivot_root': (155, 41),
    'io_uring_setup': (425, 425), 'bpf': (321, 280), 'add_key': (248, 217), 'keyctl': (250, 219), 'shmget': (29, 194),
    'msgget': (68, 186), 'mq_open': (240, 180), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282), 'prctl': (157, 167),
    'personality': (135, 92), 'clone3': (435, 435), 'memfd_secret': (447, 447), 'init_module': (175, 105), 'reboot': (169, 142),
    'kexec_load': (246, 104), 'swapon': (167, 224), 'inotify_init1': (294, 26), 'name_to_handle_at': (303, 264),
    'open_by_handle_at': (304, 265), 'openat2': (437, 437), 'pidfd_getfd': (438, 438), 'fsopen': (430, 430), 'unknown': (9999, 9999),
}
column = platform.machine() == 'aarch64'
zeros = [ctypes.c_ulong(0)] * 6
assert [name for name, number in numbers.items() if done('syscall', ctypes.c_ulong(number[column]), *zeros)]
""",
        "wrong: AssertionError",
    ),
    "wrong_number_of_another_table": (
        """
import ctypes, mmap, platform
if platform.machine() != 'x86_64':
    raise RuntimeError
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # mov eax, 20; int 0x80; ret: the 32-bit getpid
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
""",
        "forbidden: a system call of another machine|wrong: it crashed|wrong: RuntimeError",
    ),
    "crash": ("import ctypes\nctypes.string_at(0)", r"wrong: it crashed \(SIGSEGV\)"),
    # Passing without having done it.
    "leave_with_status_0": ("import os\nos._exit(0)", r"wrong: it left before its end \(exit status 0\)"),
    "leave_in_c": (C_LIBRARY + "library._exit(0)", r"wrong: it left before its end \(exit status 0\)"),
    "sys_exit": ("import sys\nsys.exit(0)", "wrong: SystemExit: 0"),
    "system_exit_at_the_end": ("raise SystemExit", "wrong: SystemExit"),
    "kill_itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", REFUSED),
    "abort": ("import os\nos.abort()", "wrong: it crashed"),
    "assert_by_another_name": (
        "import builtins\nbuiltins.AssertionError = type('Silent', (), {})\nbuiltins.BaseException = KeyError\nassert False",
        "wrong",
    ),
    "change_how_the_end_is_told": (
        "import os, sys, json, traceback\nos._exit = os.write = os.read = sys.exit = json.dumps = traceback.print_exc = lambda *_: None\n"
        "sys.excepthook = sys.unraisablehook = lambda *_: None\nassert False",
        "wrong: AssertionError",
    ),
    # What cannot be read or said.
    "message_of_a_hundred_megabytes": ("raise ValueError('x\\n' * 50_000_000)", "wrong: ValueError: x x"),
    "message_that_fails": (
        "class Mute(Exception):\n    def __str__(self): raise SystemExit(0)\nraise Mute",
        r"wrong: Mute: \(its message cannot be made\)",
    ),
    "message_of_no_text": ("raise ValueError('\\ud800 \\x00 \\x1b[2J')", "wrong: ValueError: "),
    "nul_in_the_source": ("x = 1\0\nassert False", "wrong: (SyntaxError|ValueError): source code string cannot contain null bytes"),
    "no_python": ("def f(:\n  \x00\x7f", "wrong: (SyntaxError|ValueError)"),
    "parentheses_without_end": ("(" * 100_000, "wrong: SyntaxError|memory: MemoryError"),
    "nothing_on_standard_input": ("input()", "wrong: EOFError"),
}  # fmt: skip
