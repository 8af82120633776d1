"""A hub of models and data on the loopback, with what `huggingface_hub.snapshot_download` asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_the-right-one"


@dataclass
class Hub:
    """What the hub has, and what was requested."""

    repositories: dict[str, Path] = field(default_factory=dict)
    """`models/org/name` or `datasets/org/name` → the folder with its files."""
    gated: set[str] = field(default_factory=set)
    """Repositories that need the token."""
    refusal: tuple[int, str] | None = None
    """The code and the message for a request with another token than the right one, as to a wrong or a limited one."""
    commit: str = "1" * 40
    """The head of all repositories."""
    downloads: Counter[str] = field(default_factory=Counter)
    """How often each file was read."""
    lookups: list[str] = field(default_factory=list)
    """The requests to the API."""
    tokens: set[str | None] = field(default_factory=set)
    """What clients sent as their authorisation, for what is here. The library asks for other things without one."""
    url: str = ""


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, *, head: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/"):
            self.hub.lookups.append(path)
        kind, name, rest = self._parts(path)
        folder = self.hub.repositories.get(f"{kind}/{name}")
        if folder is None:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        self.hub.tokens.add(self.headers.get("Authorization"))
        if self.hub.refusal is not None and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, text = self.hub.refusal
            return self._refuse(status, None, text)
        if f"{kind}/{name}" in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(403, "GatedRepo", f"Access to model {name} is restricted")
        if not path.startswith("api/"):
            return self._file(folder / rest.partition("/")[2].partition("/")[2], head=head)
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        if rest.startswith("tree/"):
            entries = [(str(each.relative_to(folder)), each) for each in files]
            return self._json(
                [
                    {"type": "file", "path": name, "size": each.stat().st_size, "oid": _hash(each)}
                    for name, each in entries
                ]
            )
        return self._json(
            {
                "id": name,
                "sha": self.hub.commit,
                "siblings": [{"rfilename": str(each.relative_to(folder))} for each in files],
            }
        )

    def _parts(self, path: str) -> tuple[str, str, str]:
        """Return the kind, the name and the rest of `api/models/org/name/…` and of `org/name/resolve/COMMIT/FILE`."""
        words = path.split("/")
        if words[0] == "api":
            return words[1], "/".join(words[2:4]), "/".join(words[4:])
        if words[0] == "datasets":
            return "datasets", "/".join(words[1:3]), "/".join(words[3:])
        return "models", "/".join(words[:2]), "/".join(words[2:])

    def _file(self, file: Path, *, head: bool) -> None:
        if not file.is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found")
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{_hash(file)}"')
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not head:
            self.hub.downloads[file.name] += 1
            self.wfile.write(content)
        return None

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str | None, text: str) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", text)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _hash(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
