"""An API server in memory, for one process: objects with resource versions, watches, patches, conflicts, logs.

with KubernetesServer(tmp_path) as server:
    server.put("secrets", {"metadata": {"name": "s", "namespace": "team"}})
    async with KubernetesApi(context=server.context) as api: ...   # KUBECONFIG is set to it
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]
POLL_S = 0.01
GZIP = b"\x1f\x8b"
"""What it begins with."""


class Refusal(Exception):
    """A request fails with this status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status", "apiVersion": "v1", "status": "Failure",
            "code": code, "reason": reason, "message": message, "details": {},
        }  # fmt: skip


class KubernetesServer:
    """Answers on a port of the loopback. `stop` and `start` again keep port and objects."""

    context = "test"

    def __init__(self, folder: Path) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        """By plural, namespace (empty for cluster-wide kinds) and name."""
        self.requests: list[str] = []
        self.forbidden: set[str] = set()
        """Plurals that the credentials may not use."""
        self.overloaded: set[str] = set()
        """Plurals whose requests are answered with 503."""
        self.slow_s = 0.0
        """Before each answer."""
        self.oldest = 0
        """A watch from an older version is answered with 410."""
        self.logs: dict[str, str] = {}
        """By pod. What is added later, a client that follows gets, until the pod has ended."""
        self.log_reads = 0
        """How often a log was opened: what is added later is sent."""
        self.answers: dict[str, bytes] = {}
        """Of pods over HTTP, by `<pod>:<port>/<path>`."""
        self.missing: set[str] = set()
        """Plurals of kinds that do not exist."""
        self.unknown_status: set[str] = set()
        self.unknown_spec: set[str] = set()
        """Fields that the definition of a kind does not have: they are dropped from a status, or a spec."""
        self.connections: list[socket.socket] = []
        self._events: list[tuple[int, str, str, Object]] = []
        self._version = 100
        self._watches = 0
        self._lock = threading.RLock()
        self._port = 0
        self._last_request = 0.0
        self._server: http.server.ThreadingHTTPServer | None = None
        self._kubeconfig = folder / "kubeconfig.yaml"

    def __enter__(self) -> KubernetesServer:
        self.start()
        self._former = os.environ.get("KUBECONFIG")
        os.environ["KUBECONFIG"] = str(self._kubeconfig)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._former is None:
            del os.environ["KUBECONFIG"]
        else:
            os.environ["KUBECONFIG"] = self._former

    def start(self) -> None:
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True).start()
        config = {
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
            "users": [{"name": "test", "user": {"token": "a-token"}}],
            "contexts": [{"name": self.context, "context": {"cluster": "test", "user": "test", "namespace": "system"}}],
            "current-context": self.context,
        }
        self._kubeconfig.write_text(yaml.safe_dump(config))

    def stop(self) -> None:
        """Refuse connections, and end all watches."""
        if self._server is not None:
            self.end_watches()
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def quiet_s(self) -> float:
        """How long there was no request."""
        return time.monotonic() - self._last_request

    def end_watches(self) -> None:
        with self._lock:
            self._watches += 1

    def put(self, plural: str, new: Object, *, manager: str = "test") -> Object:
        """Create or replace an object, as somebody else."""
        with self._lock:
            metadata = new["metadata"]
            key = (plural, metadata.get("namespace", ""), metadata["name"])
            return self._store(key, copy.deepcopy(new), manager)

    def delete(self, plural: str, name: str, namespace: str = "") -> None:
        with self._lock:
            gone = self.objects.pop((plural, namespace, name))
            self._version += 1
            gone["metadata"]["resourceVersion"] = str(self._version)
            self._events.append((self._version, "DELETED", plural, gone))

    def get(self, plural: str, name: str, namespace: str = "") -> Object:
        with self._lock:
            return copy.deepcopy(self.objects[plural, namespace, name])

    # What the handlers call

    def note_request(self, request: str) -> None:
        self.requests.append(request)
        self._last_request = time.monotonic()

    def read(self, key: tuple[str, str, str]) -> Object:
        with self._lock:
            if key not in self.objects:
                raise Refusal(404, "NotFound", f'{key[0]} "{key[2]}" not found')
            return copy.deepcopy(self.objects[key])

    def items(self, plural: str, namespace: str, query: dict[str, str]) -> tuple[list[Object], int]:
        with self._lock:
            found = [
                copy.deepcopy(each)
                for (kind, space, _), each in self.objects.items()
                if kind == plural and namespace in ("", space) and is_selected(each, query)
            ]
            return found, self._version

    def create(self, key: tuple[str, str, str], new: Object, manager: str) -> Object:
        with self._lock:
            if key in self.objects:
                raise Refusal(409, "AlreadyExists", f'{key[0]} "{key[2]}" already exists')
            return self._store(key, new, manager)

    def replace(self, key: tuple[str, str, str], new: Object, manager: str) -> Object:
        with self._lock:
            version = new["metadata"].get("resourceVersion")
            if version not in (None, self.read(key)["metadata"]["resourceVersion"]):
                raise Refusal(409, "Conflict", f'Operation cannot be fulfilled on {key[0]} "{key[2]}"')
            return self._store(key, new, manager)

    def patch(self, key: tuple[str, str, str], changes: list[Object] | Object, manager: str) -> Object:
        """A JSON patch is a list, a merge patch is an object."""
        with self._lock:
            found = self.read(key)
            if isinstance(changes, dict):
                expected = changes.get("metadata", {}).get("resourceVersion", found["metadata"]["resourceVersion"])
                merge(found, changes)
                for name in self.unknown_spec:
                    found.get("spec", {}).pop(name, None)
                return self.replace(
                    key, {**found, "metadata": {**found["metadata"], "resourceVersion": expected}}, manager
                )
            for operation in changes:
                apply_operation(found, operation)
            return self._store(key, found, manager)

    def apply_status(self, key: tuple[str, str, str], applied: Object, manager: str) -> Object:
        """Server-side apply: each field is the manager's as a whole."""
        with self._lock:
            found = self.read(key)
            uid = applied["metadata"].get("uid", found["metadata"].get("uid"))
            if uid != found["metadata"].get("uid"):
                raise Refusal(409, "Conflict", f"the UID in the precondition ({uid}) does not match")
            new = {name: value for name, value in applied["status"].items() if name not in self.unknown_status}
            found["status"] = {**found.get("status", {}), **new}
            return self._store(key, found, manager)

    def log_parts(self, pod: str, *, follow: bool, lines: int | None = None) -> Iterator[bytes]:
        """The last lines of the log of a pod, and what is added to it until the pod is no longer running, or the
        watches are ended."""
        watch, found = self._watches, self.logs[pod].splitlines(keepends=True)
        sent = 0 if lines is None else len("".join(found[: max(0, len(found) - lines)]))
        self.log_reads += 1
        while watch == self._watches:
            ended = not any(
                key[0] == "pods" and key[2] == pod and each.get("status", {}).get("phase") == "Running"
                for key, each in list(self.objects.items())
            )
            text = self.logs[pod]
            yield text[sent:].encode()
            sent = len(text)
            if ended or not follow:
                return
            time.sleep(POLL_S)

    def changes(
        self, plural: str, namespace: str, query: dict[str, str], version: int, seconds: float
    ) -> Iterator[Object]:
        """Events since a version, until the time is over or the watches are ended."""
        watch, until = self._watches, time.monotonic() + seconds
        if version < self.oldest:
            gone = Refusal(410, "Expired", "too old resource version")
            yield {"type": "ERROR", "object": gone.status}
            return
        while time.monotonic() < until and watch == self._watches:
            with self._lock:
                found = [each for each in self._events if each[0] > version and each[2] == plural]
            for at, kind, _, changed in found:
                version = at
                if namespace in ("", changed["metadata"].get("namespace", "")) and is_selected(changed, query):
                    yield {"type": kind, "object": changed}
            time.sleep(POLL_S)

    def _store(self, key: tuple[str, str, str], new: Object, manager: str) -> Object:
        before = self.objects.get(key)
        if before is not None and _without_version(before) == _without_version(new):
            return copy.deepcopy(before)
        records = new["metadata"].setdefault(
            "managedFields", (before or {}).get("metadata", {}).get("managedFields", [])
        )
        only_records = before is not None and _content(before) == _content(new)
        if not only_records and manager not in [record["manager"] for record in records]:
            records.append({"manager": manager, "operation": "Update"})
        self._version += 1
        new["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = new
        kind = "ADDED" if before is None else "MODIFIED"
        self._events.append((self._version, kind, key[0], copy.deepcopy(new)))
        return copy.deepcopy(new)


def is_selected(found: Object, query: dict[str, str]) -> bool:
    """Whether an object has the name and the labels of a query."""
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    labels = [each.partition("=") for each in query.get("labelSelector", "").split(",") if each]
    own = found["metadata"].get("labels", {})
    return name in ("", found["metadata"]["name"]) and all(
        own.get(key) == value if equals else key in own for key, equals, value in labels
    )


def merge(target: Object, changes: Object) -> None:
    """A merge patch: None removes."""
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def _without_version(found: Object) -> Object:
    return {**found, "metadata": {**found["metadata"], "resourceVersion": ""}}


def _content(found: Object) -> Object:
    return {**found, "metadata": {**found["metadata"], "resourceVersion": "", "managedFields": []}}


def apply_operation(target: Any, operation: Object) -> None:
    """One operation of a JSON patch: test, add, replace or remove."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    for part in parents:
        target = _child(target, part)
    value = copy.deepcopy(operation.get("value"))
    match operation["op"]:
        case "test":
            if _child(target, last) != value:
                raise Refusal(422, "Invalid", "the server rejected our request due to an error in our request")
        case "add" if isinstance(target, list):
            target.insert(len(target) if last == "-" else int(last), value)
        case "add" | "replace":
            target[last] = value
        case "remove":
            _child(target, last)
            del target[int(last) if isinstance(target, list) else last]


def _child(target: Any, part: str) -> Any:
    try:
        return target[int(part) if isinstance(target, list) else part]
    except (KeyError, IndexError, ValueError):
        raise Refusal(422, "Invalid", "the server rejected our request due to an error in our request") from None


class _Handler(http.server.BaseHTTPRequestHandler):
    """/api/v1/… and /apis/<group>/<version>/…, with or without a namespace."""

    api: KubernetesServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.api.connections.append(self.connection)

    def do_GET(self) -> None:
        try:
            self._handle()
        except OSError:  # the other side is gone
            self.close_connection = True

    do_POST = do_PUT = do_PATCH = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        url = urlsplit(self.path)
        self.api.note_request(f"{self.command} {url.path}")
        time.sleep(self.api.slow_s)
        try:
            self._answer(url.path, {name: values[0] for name, values in parse_qs(url.query).items()}, body)
        except Refusal as refusal:
            self._send(refusal.status, refusal.code)

    def _answer(self, path: str, query: dict[str, str], body: Any) -> None:
        parts = path.strip("/").split("/")[2 if path.startswith("/api/") else 3 :]
        namespace = parts[1] if parts[0] == "namespaces" else ""
        plural, *rest = parts[2:] if namespace else parts
        name = rest[0] if rest else (body or {}).get("metadata", {}).get("name", "")
        if plural in self.api.missing:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        if plural in self.api.forbidden or "/".join([plural, *rest[1:2]]) in self.api.forbidden:
            raise Refusal(403, "Forbidden", f'{plural} is forbidden: User "tester" cannot {self.command} {plural}')
        if plural in self.api.overloaded:
            raise Refusal(503, "ServiceUnavailable", "the server is currently unable to handle the request")
        key, manager = (plural, namespace, name), query.get("fieldManager", "")
        match self.command:
            case "POST":
                self._send(self.api.create(key, body, manager), 201)
            case "PUT":
                self._send(self.api.replace(key, body, manager))
            case "PATCH" if rest[1:] == ["status"]:
                self._send(self.api.apply_status(key, body, manager))
            case "PATCH":
                self._send(self.api.patch(key, body, manager))
            case _ if rest[1:2] == ["log"]:
                if name not in self.api.logs:
                    raise Refusal(404, "NotFound", f'pods "{name}" not found')
                lines = int(query["tailLines"]) if "tailLines" in query else None
                self._send_parts(self.api.log_parts(name, follow=query.get("follow") == "true", lines=lines))
            case _ if rest[1:2] == ["proxy"]:
                answer = self.api.answers.get(f"{name}/{'/'.join(rest[2:])}")
                if answer is None:
                    raise Refusal(503, "ServiceUnavailable", "error trying to reach service: connection refused")
                self._send_parts(iter([answer]), "gzip" if answer.startswith(GZIP) else "")
            case _ if rest:
                self._send(self.api.read(key))
            case _:
                if query.get("watch") == "true":
                    seconds = float(query.get("timeoutSeconds", 60))
                    events = self.api.changes(plural, namespace, query, int(query["resourceVersion"]), seconds)
                    self._send_parts(json.dumps(event).encode() + b"\n" for event in events)
                else:
                    items, version = self.api.items(plural, namespace, query)
                    self._send({"kind": "List", "metadata": {"resourceVersion": str(version)}, "items": items})

    def _send(self, content: Object, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_parts(self, parts: Iterator[bytes], encoding: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        for part in filter(None, parts):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")
