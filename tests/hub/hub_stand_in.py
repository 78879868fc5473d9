"""A Hub on 127.0.0.1: the parts of its HTTP API that create, commit, list and resolve use, kept in memory.

It misbehaves on request: a Fault holds for every request it names until it is taken away, `away` closes the port.
"""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    private: bool
    branches: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)  # to the commit

    @property
    def commits(self) -> list[tuple[str, dict[str, bytes]]]:
        """Of main, oldest first."""
        return self.branches["main"]

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        sha = self.tags.get(revision, revision)
        return next((commit for branch in self.branches.values() for commit in branch if commit[0] == sha), None)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to every request whose "METHOD path" contains `to`: it is late, then cut, answered wrongly, or answered."""

    to: str = ""
    delay_s: float = 0.0
    cut: bool = False  # half of the body is read, then the connection is closed
    lost: bool = False  # everything is done, and the connection is closed instead of an answer
    times: int | None = None  # of the next so many requests only
    html: bool = False  # a web page, with status 200 as a proxy's login page comes, or with `status`
    status: int | None = None
    retry_after: int | None = None  # seconds
    echo: bool = False  # the answer with that status repeats the Authorization header


@dataclass
class StandIn:
    url: str = ""
    fault: Fault | None = None
    asked: list[tuple[float, str]] = field(default_factory=list)  # time.time() and "METHOD path" of every request
    server: ThreadingHTTPServer | None = None
    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    received: list[bytes] = field(default_factory=list)  # every request body
    calls: list[str] = field(default_factory=list)  # "METHOD path"
    faults: list[tuple[str, int]] = field(default_factory=list)  # (part of "METHOD path", status), each used once
    damaged: set[str] = field(default_factory=set)  # files served with other bytes than were sent
    answers: dict[str, Callable[["_Handler"], None]] = field(
        default_factory=dict
    )  # part of "METHOD path" -> what answers it

    def take_fault(self, call: str) -> Fault:
        fault = self.fault
        if fault is None or fault.to not in call:
            return Fault()
        if fault.times is not None:
            self.fault = replace(fault, times=fault.times - 1) if fault.times > 1 else None
        return fault

    def open(self, port: int = 0) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"state": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @contextmanager
    def away(self):
        """Nothing listens on the port while the block runs."""
        port = self.server.server_port
        self.close()
        try:
            yield
        finally:
            self.open(port)


@contextmanager
def hub_stand_in():
    """Yields the StandIn of a running server; `.url` is what HF_ENDPOINT must be."""
    state = StandIn()
    state.open()
    try:
        yield state
    finally:
        state.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: StandIn
    lost = False

    def log_message(self, *arguments):
        pass

    def answer(self, status=200, body=b"", **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if self.lost:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        with suppress(ConnectionError):  # who asked has lost patience
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def missing(self, code):
        self.answer(404, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def handle_any(self):
        path = unquote(urlsplit(self.path).path)
        call = f"{self.command} {path}"
        self.state.calls.append(call)
        self.state.asked.append((time.time(), call))
        fault = self.state.take_fault(call)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length // 2 if fault.cut else length)
        self.state.received.append(body)
        time.sleep(fault.delay_s)
        self.lost = fault.lost
        if fault.cut:
            self.close_connection = True
            return None
        if fault.html:
            return self.answer(
                fault.status or 200,
                b"<html><body>Please log in</body></html>",
                Content_Type="text/html; charset=utf-8",
            )
        if fault.status:
            wait = {} if fault.retry_after is None else {"Retry_After": str(fault.retry_after)}
            said = f"refused: {self.headers.get('Authorization')}" if fault.echo else "made to fail"
            return self.answer(fault.status, {"error": said}, **wait)
        for fault in self.state.faults:
            if fault[0] in call:
                self.state.faults.remove(fault)
                return self.answer(fault[1], {"error": "made to fail"})
        for part, answer in list(self.state.answers.items()):
            if part in call:
                return answer(self)
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.answer(body={"errors": [], "warnings": []})
        if path.startswith("/blobs/"):
            self.state.blobs[path.removeprefix("/blobs/")] = body
            return self.answer()
        if path.endswith("/info/lfs/objects/batch"):
            return self.lfs_batch(json.loads(body))
        if path.startswith("/api/models/"):
            return self.api(path.removeprefix("/api/models/").split("/"), body)
        if path.startswith("/api/datasets/"):
            return self.api(path.removeprefix("/api/datasets/").split("/"), body)
        if "/resolve/" in path:
            repo_id, rest = path.strip("/").split("/resolve/")
            return self.resolve(repo_id.removeprefix("datasets/"), *rest.split("/", 1))
        return self.answer(404, {"error": f"{call} is not part of the stand-in"})

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def create(self, request):
        repo_id = "/".join(filter(None, [request.get("organization"), request["name"]]))
        repo_id = repo_id if "/" in repo_id else f"somebody/{repo_id}"
        url = {"url": f"{self.state.url}/{repo_id}", "id": repo_id}
        if repo_id in self.state.repos:
            return self.answer(409, {"error": "exists", **url})
        private = request.get("private") or request.get("visibility") == "private"
        self.state.repos[repo_id] = Repo(bool(private), {"main": [("0" * 40, {".gitattributes": b""})]})
        return self.answer(body=url)

    def lfs_batch(self, request):
        objects = []
        for item in request["objects"]:
            upload = (
                {}
                if item["oid"] in self.state.blobs
                else {"upload": {"href": f"{self.state.url}/blobs/{item['oid']}"}}
            )
            objects.append({**item, **({"actions": upload} if upload else {})})
        self.answer(body={"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")

    def api(self, parts, body):
        repo_id, rest = "/".join(parts[:2]), parts[2:]
        repo = self.state.repos.get(repo_id)
        if repo is None:
            return self.missing("RepoNotFound")
        if rest[:1] == ["preupload"]:
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith((".safetensors", ".bin")) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for f in json.loads(body)["files"]
            ]
            return self.answer(body={"files": modes})
        name = "/".join(rest[1:]) or "main"  # of a branch or tag, or a commit
        if rest[:1] == ["commit"]:
            return self.commit(repo, repo_id, name, [json.loads(line) for line in body.splitlines()])
        if rest[:1] == ["branch"]:
            return self.branch(repo, name)
        if rest[:1] == ["tag"]:
            return self.tag(repo, name, body)
        if rest[:1] == ["tree"]:
            name = rest[1]
        found = repo.files(name)
        if found is None:
            return self.missing("RevisionNotFound")
        sha, files = found
        if rest[:1] == ["commits"]:
            facts = {"title": "", "message": "", "date": "2026-01-01T00:00:00.000Z", "authors": []}
            return self.answer(body=[{"id": commit, **facts} for commit, _ in reversed(repo.branches[name])])
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": p, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for p, d in files.items()
            ]
            return self.answer(body=entries)
        siblings = [{"rfilename": name} for name in files]
        return self.answer(
            body={
                "id": repo_id,
                "modelId": repo_id,
                "sha": sha,
                "private": repo.private,
                "siblings": siblings,
                "tags": [],
            }
        )

    def branch(self, repo, name):
        if name in repo.branches:
            return self.answer(409, {"error": "exists"})
        repo.branches[name] = [repo.commits[-1]]
        return self.answer(body={})

    def tag(self, repo, name, body):
        if self.command == "DELETE":
            return self.answer(body={}) if repo.tags.pop(name, None) else self.missing("RevisionNotFound")
        wanted = json.loads(body)["tag"]
        if wanted in repo.tags:
            return self.answer(409, {"error": "exists"})
        repo.tags[wanted] = repo.files(name)[0]
        return self.answer(body={})

    def commit(self, repo, repo_id, branch, lines):
        commits = repo.branches[branch]
        files = dict(commits[-1][1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        sha = hashlib.sha1(json.dumps(lines).encode() + commits[-1][0].encode()).hexdigest()
        commits.append((sha, files))
        self.answer(
            body={
                "success": True,
                "commitOid": sha,
                "commitUrl": f"{self.state.url}/{repo_id}/commit/{sha}",
                "hookOutput": "",
            }
        )

    def resolve(self, repo_id, revision, name):
        repo = self.state.repos.get(repo_id)
        if repo is None:
            return self.missing("RepoNotFound")
        found = repo.files(revision)
        if found is None:
            return self.missing("RevisionNotFound")
        sha, files = found
        if name not in files:
            return self.missing("EntryNotFound")
        data = files[name]
        etag = hashlib.sha256(data).hexdigest()
        if etag not in self.state.blobs:  # as the Hub does: sha256 of what came as LFS, git's hash of the rest
            etag = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        if name in self.state.damaged:
            data, etag = data[:-1] + bytes([data[-1] ^ 1]), "0" * len(etag)
        return self.answer(200, data, ETag=f'"{etag}"', X_Repo_Commit=sha)
