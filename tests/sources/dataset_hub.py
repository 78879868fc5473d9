"""A Hub on 127.0.0.1 that speaks the few endpoints which reading a dataset needs, by us and by `datasets` itself."""

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote

import yaml

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "somebody/corpus"


class HubServer(ThreadingHTTPServer):
    """A dataset, and further ones in `others`.

    failures: how many requests for whole files are answered by 503 first. asked: paths of what was fetched whole;
    listed: paths whose sizes were asked for; peeked: in part, which `ranges` allows, answered with `part_status`. hung_up: answers of which the client did not want the rest.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.card: dict = {}
        self.others: dict[str, dict[str, bytes]] = {}
        self.commit = COMMIT
        self.earlier: dict[str, dict[str, bytes]] = {}
        self.failures = 0
        self.status = 200
        self.ranges = True
        self.part_status = 206
        self.hung_up = 0
        self.asked: list[str] = []
        self.peeked: list[str] = []
        self.listed: list[str] = []

    def at(self, revision: str, repo: str = REPO) -> dict[str, bytes] | None:
        if repo != REPO:
            return self.others.get(repo)
        return self.files if revision in ("main", self.commit) else self.earlier.get(revision)

    def push(self, commit: str, **files: bytes) -> None:
        self.earlier[self.commit] = self.files
        self.commit, self.files = commit, {**self.files, **files}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, *_):
        pass

    def answer(self, content, headers=None, status=200):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(content)
            except ConnectionError:
                self.server.hung_up += 1

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server = self.server
        if server.status != 200:
            code = {401: "RepoNotFound", 403: "GatedRepo"}[server.status]
            return self.answer(b"{}", {"X-Error-Code": code}, server.status)
        path = unquote(self.path.partition("?")[0])
        if api := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            repo, revision = api[1], api[2] or "main"
            files = server.at(revision, repo)
            if files is None:
                code = "RevisionNotFound" if repo == REPO else "RepoNotFound"
                return self.answer(b"{}", {"X-Error-Code": code}, 404)
            info = {
                "id": repo,
                "sha": server.commit if revision == "main" else revision,
                "cardData": server.card or front_matter(files.get("README.md", b"")),
                "siblings": [{"rfilename": name} for name in files],
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "private": False,
                "disabled": False,
                "gated": False,
            }
            return self.answer(json.dumps(info).encode(), {"Content-Type": "application/json"})
        if tree := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", path):
            files = server.at(tree[2], tree[1]) or {}
            below = f"{tree[3]}/" if tree[3] else ""
            recursive = "recursive=true" in self.path.lower()
            entries = [entry for entry in with_folders(files) if entry["path"].startswith(below)]
            entries = [entry for entry in entries if recursive or "/" not in entry["path"].removeprefix(below)]
            if not entries:
                return self.answer(b"{}", {"X-Error-Code": "EntryNotFound"}, 404)
            return self.answer(json.dumps(entries).encode(), {"Content-Type": "application/json"})
        wanted = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        content = (server.at(wanted[2], wanted[1]) or {}).get(wanted[3]) if wanted else None
        if wanted is None or content is None:
            known = wanted is not None and server.at(wanted[2], wanted[1]) is not None
            code = "EntryNotFound" if known else "RepoNotFound"
            return self.answer(b"{}", {"X-Error-Code": code, "X-Repo-Commit": server.commit}, 404)
        commit = server.commit if wanted[2] == "main" else wanted[2]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        if server.ranges and (part := re.fullmatch(r"bytes=(\d*)-(\d+)", self.headers.get("Range") or "")):
            server.peeked.append(wanted[3])
            some = content[int(part[1]) : int(part[2]) + 1] if part[1] else content[-int(part[2]) :]
            return self.answer(some, headers, server.part_status)
        if server.failures:
            server.failures -= 1
            return self.answer(b"busy", status=503)
        if self.command == "GET":
            server.asked.append(wanted[3])
        return self.answer(content, headers)

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        paths = parse_qs(asked.decode())["paths"]
        self.server.listed += paths
        _, _, _, owner, name, _, revision = unquote(self.path).split("/")
        files = self.server.at(revision, f"{owner}/{name}") or {}
        listed = [entry for entry in with_folders(files) if entry["path"] in paths]
        self.answer(json.dumps(listed).encode(), {"Content-Type": "application/json"})


def with_folders(files: dict[str, bytes]) -> list[dict]:
    """The repository's entries, as the Hub lists them."""
    folders = {str(folder) for name in files for folder in PurePosixPath(name).parents if str(folder) != "."}
    return [{"type": "directory", "path": folder, "oid": "b" * 40, "size": 0} for folder in sorted(folders)] + [
        {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": "a" * 40,
            "lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100},
        }
        for path, content in files.items()
    ]


def front_matter(readme: bytes) -> dict:
    """The card's YAML, which the Hub reads itself."""
    parts = readme.decode().split("---\n")
    return yaml.safe_load(parts[1]) if len(parts) > 2 and not parts[0] else {}
