"""The report of one run: which sections it has and in which order; report.md, report.html and curves.png are made of them."""

import hashlib
import time
import traceback
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from pipeline.process.errors import ServiceError
from pipeline.process.network import LOOPBACK, host_of
from pipeline.process.storage import write_bytes, write_text
from pipeline.report.benchmarks import benchmarks_text
from pipeline.report.curves import AXES, panels_of
from pipeline.report.diagnosis import diagnosis_text
from pipeline.report.run_data import RunData, read_run
from pipeline.report.sections import (
    attempts_text,
    bpb_text,
    checkpoints_text,
    data_shares_text,
    data_text,
    energy_text,
    failure_text,
    gradient_norm_text,
    learning_rate_text,
    links_text,
    losses_text,
    manifest_text,
    metadata_text,
    other_results_text,
    outcome_text,
    recipe_text,
    samples_text,
    system_text,
    tokenizer_text,
    versions_text,
    worth_text,
)
from pipeline.report.summary import summary_of, summary_text
from pipeline.run_dir.run_directory import RunDirectory

# In the order in which one asks. Each function gives Markdown, "" when there is nothing to say, under its own title if it has one.
SECTIONS: dict[str, list[tuple[str, Callable[[RunData], str]]]] = {
    "Failure": [("", failure_text)],
    "Diagnosis": [("", diagnosis_text)],
    "Curves": [
        ("Losses", losses_text),
        ("Learning rate", learning_rate_text),
        ("Gradient norm", gradient_norm_text),
    ],
    "Evaluations": [("", benchmarks_text), ("Bits per byte", bpb_text), ("Other evaluations", other_results_text)],
    "Samples": [("", samples_text)],
    "Data": [("", data_text), ("Shares", data_shares_text), ("Tokenizer", tokenizer_text)],
    "Time, cost and energy": [
        ("", worth_text),
        ("Plan against outcome", outcome_text),
        ("GPUs and energy", energy_text),
    ],
    "System": [("", system_text), ("Checkpoints", checkpoints_text), ("Attempts", attempts_text)],
    "Recipe": [("", recipe_text)],
    "Manifest": [
        ("", metadata_text),
        ("Links", links_text),
        ("Versions", versions_text),
        ("Not as documented", manifest_text),
    ],
}


def write_report(data: RunData) -> Path:
    """Write report.md, report.html and their picture into the run's report/; returns the page's path."""
    from pipeline.report.plots import picture  # these two cost a second of imports, which a comparison need not pay

    data.run.refuse_links(data.run.report)
    run, panels = data.run, panels_of(data)
    drawn = picture(panels, title=data.name) if panels else None
    if drawn:
        write_bytes(run.report / "curves.png", drawn)
    else:
        (run.report / "curves.png").unlink(missing_ok=True)
    write_text(run.report / "report.md", markdown(data, picture=drawn is not None))
    write_text(run.report / "report.html", html_page(data, picture=drawn))
    return run.report / "report.html"


def html_page(data: RunData, *, picture: bytes | None = None, version: str | None = None) -> str:
    """Return report.html. picture: for print and for browsers without scripts. version: of a page that is served, which is
    loaded anew when another one is there."""
    from pipeline.report.page import page

    return page(
        data.name,
        sections_of(data),
        kind="report",
        summary=summary_of(data),
        panels=panels_of(data),
        axes=AXES,
        picture=picture,
        version=version,
    )


def report(data: RunData) -> str:
    """Return the whole report in Markdown. Only what the run directory holds is shown; what is missing is left out, never guessed."""
    return markdown(data, picture=bool(panels_of(data)))


def sections_of(data: RunData) -> dict[str, str]:
    """Return title and Markdown of the sections that have something to say."""
    found = {title: _section(data, parts) for title, parts in SECTIONS.items()}
    return {title: text for title, text in found.items() if text}


def _section(data: RunData, parts: list[tuple[str, Callable[[RunData], str]]]) -> str:
    texts = [(title, text(data)) for title, text in parts]
    return "\n".join(f"### {title}\n\n{text}" if title else text for title, text in texts if text)


def markdown(data: RunData, *, picture: bool) -> str:
    """Return the summary and the sections under one title; picture: whether curves.png is beside the text."""
    curves = "![the run's curves over its steps](curves.png)\n" if picture else ""
    head = f"# {data.name}\n\nStatus: {data.status()}.\n\n{summary_text(summary_of(data), picture=curves)}"
    return "\n".join([head, *(f"## {title}\n\n{text}" for title, text in sections_of(data).items())])


# --serve: the report of a run while it trains, made anew whenever the run's files have changed.

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
        files = [run.manifest, run.recipe, run.metrics, run.samples, run.evals, run.failure, run.checkpoints, run.model]
        found: list[object] = [(path.name, *_stamp(path)) for path in [*files, *run.all_gpu_samples()]]
        if self.training:
            found.append(time.time() // LOOK_S)  # a process that is killed leaves its files as they are
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16]

    def current(self) -> str:
        """Return the page; the one before where the files cannot be read just now, as while a crash tears them."""
        with self.lock:
            version = (
                self.current_version()
            )  # taken first: what is written while the page is made belongs to the next one
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
    """Serve the page until Ctrl-C. port: default PORT, or where that is taken any that is free; 0: any that is free."""
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
