"""Chromium by its DevTools protocol over two pipes: no driver and no package to install."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_S = 60


class Page:
    """A page of the browser: what it logged, what it asked the network for, and its scripts' answers."""

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read = write, read
        self.unread, self.last_id, self.session = b"", 0, None
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.last_id:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            part = os.read(self.read, 2**20)
            assert part, "the browser has ended"
            self.unread += part
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def run(self, script: str) -> Any:
        """The value of a script, awaited."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The first value of the script that is true."""
        ends = time.monotonic() + WAIT_S
        while not (value := self.run(script)):
            assert time.monotonic() < ends, f"never true: {script}; {self.complaints()}"
            time.sleep(0.1)
        return value

    def asked_for(self) -> list[str]:
        """Addresses outside of the page itself."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]

    def complaints(self) -> list[Any]:
        """Warnings and errors on the console, and exceptions nobody caught."""
        bad = []
        for event in self.events:
            kind, params = event.get("method"), event.get("params", {})
            if kind == "Runtime.exceptionThrown":
                bad.append(params["exceptionDetails"])
            if kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                bad.append([argument.get("value", argument.get("description")) for argument in params["args"]])
            if kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                bad.append(params["entry"]["text"])
        return bad


def _high(descriptor: int) -> int:
    """The same under a number that is neither 3 nor 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


@contextmanager
def opened(place: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
    """The file, or the page at an address of this machine, in a browser without a network, its window that wide."""
    assert CHROMIUM
    to_browser, from_us = map(_high, os.pipe())
    to_us, from_browser = map(_high, os.pipe())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        options += ["--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        # The browser reads its orders from descriptor 3 and answers on 4.
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, "browser", CHROMIUM, *options, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        page = Page(from_us, to_us)
        try:
            target = page.send("Target.createTarget", url="about:blank")["targetId"]
            page.session = page.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.send(f"{domain}.enable")
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            page.send("Emulation.setDeviceMetricsOverride", **size)
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            page.send("Emulation.setEmulatedMedia", features=scheme)
            page.send("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
            page.until("document.readyState === 'complete' && location.protocol !== 'about:'")
            yield page
        finally:
            with suppress(OSError, AssertionError):
                page.session = None
                page.send("Browser.close")  # its children with it
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
            os.close(from_us)
            os.close(to_us)


# What of the page cannot be read at its width: what stands out of the window or of a box that hides it, and does not scroll.
CUT_OFF = """
(() => {
  const width = document.documentElement.clientWidth, found = [];
  const scrolls = (node) => node && (["auto", "scroll"].includes(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  for (const node of document.querySelectorAll("body *")) {
    if (!node.checkVisibility() || node.closest(".plot, script, select")) continue;
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    const hides = (overflow) => ["hidden", "clip"].includes(overflow);
    const wide = node.scrollWidth > node.clientWidth + 1, high = node.scrollHeight > node.clientHeight + 1;
    if ((box.right > width + 1 || box.left < -1 || (style.display !== "inline" && wide)) && !scrolls(node)) found.push(node.outerHTML.slice(0, 200));
    else if ((hides(style.overflowX) && wide) || (hides(style.overflowY) && high)) found.push(node.outerHTML.slice(0, 200));
  }
  return document.documentElement.scrollWidth > innerWidth ? [...found, "the page scrolls sideways"] : found;
})()
"""
UNFOLD = "for (const section of document.querySelectorAll('details')) section.open = true"


def looks(page: Page) -> Iterator[tuple[int, bool]]:
    """Show the page at 1400 and 390 px, light and dark, and yield which (width, dark) it has."""
    for width, height in ((1400, 900), (390, 844)):
        page.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        for dark in (False, True):
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            page.send("Emulation.setEmulatedMedia", features=scheme)
            page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            yield width, dark
