"""The report of a run while it trains, made anew whenever the run's files have changed (--serve)."""

import hashlib
import time
import traceback
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from pipeline.process.errors import ServiceError
from pipeline.process.network import LOOPBACK, host_of
from pipeline.report.run_data import read_run
from pipeline.report.single import html_page
from pipeline.run_dir.run_directory import RunDirectory

ADDRESS = "127.0.0.1"  # for this machine only: the page shows what the run was trained on
PORT = 8765
LOOK_S = 60  # after so long a run that trains is looked at again, whatever its files say


class LivePage:
    """A run's page in memory. Nothing is written: the run directory belongs to the training."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = read_run(name).run.path  # raises where there is no run, before anything is served
        self.lock = Lock()  # two tabs ask at once
        self.version, self.html = "", ""
        self.training = False

    def current_version(self) -> str:
        """Return a name for what the run's files hold now, by their sizes and times."""
        run = RunDirectory(self.path)
        files = [
            run.manifest,
            run.recipe,
            run.metrics,
            run.samples,
            run.evals,
            run.failure,
            run.checkpoints,
            run.model,
        ]
        found: list[object] = [(path.name, *_stamp(path)) for path in [*files, *run.all_gpu_samples()]]
        if self.training:
            found.append(time.time() // LOOK_S)  # a process that is killed leaves its files as they are
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16]

    def current(self) -> str:
        """Return the page; the one before where the files cannot be read just now, as while a crash tears them."""
        with self.lock:
            version = self.current_version()  # first: what is written while the page is made belongs to the next one
            if version != self.version:
                try:
                    data = read_run(self.name)
                    self.training = data.is_training
                    self.html, self.version = html_page(data, version=version), version
                except Exception:
                    if not self.html:
                        raise
                    traceback.print_exc()
            return self.html


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


class Handler(BaseHTTPRequestHandler):
    def __init__(self, page: LivePage, *connection) -> None:
        self.page = page
        with suppress(ConnectionError):  # the browser left before it had all
            super().__init__(*connection)

    def do_GET(self) -> None:
        # A website that a browser was led to believe to be this machine (DNS rebinding) names its own host.
        if not all(
            host_of(value) in LOOPBACK for name in ("Host", "Origin") for value in self.headers.get_all(name, [])
        ):
            self._answer(403, "text/plain", "This page answers the machine that it runs on, by its own address.")
        elif self.path == "/":
            self._answer(200, "text/html", self.page.current())
        elif self.path == "/version":
            self._answer(200, "text/plain", self.page.current_version())
        else:
            self._answer(404, "text/plain", "There is one page, /.")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode(errors="backslashreplace")
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
        }
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Print nothing: a page asks every second."""


def serve(name: str, *, port: int | None = None) -> None:
    """Serve the page until Ctrl-C. port: default PORT, or where that is taken any that is free; 0: any that is
    free."""
    page = LivePage(name)
    server = None
    for wanted in [PORT, 0] if port is None else [port]:
        try:
            server = ThreadingHTTPServer((ADDRESS, wanted), partial(Handler, page))
            break
        except OSError as error:
            reason = error.strerror
    if server is None:
        raise ServiceError(
            f"command line: port {port} of {ADDRESS} cannot be listened at ({reason}). Name another with --port."
        )
    with server:
        print(f"http://{ADDRESS}:{server.server_port}/ shows {page.path} and follows it. Ctrl-C ends it.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
