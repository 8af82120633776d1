"""`Cluster` over the client that the Kubeflow SDK brings: one set of credentials in a notebook, and one connection."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import urllib3
from kubernetes.client import ApiClient, ApiException
from kubernetes.config import ConfigException

from reprieve.errors import (
    ApiUnreachable,
    ConfigError,
    KubernetesError,
    NotPermitted,
    ObjectChanged,
    ObjectNotFound,
)
from reprieve.kubernetes.jobs.cluster import MOST_BYTES
from reprieve.kubernetes.kinds import Event, Kind, Object
from reprieve.kubernetes.pausing import MergePatch

TIMEOUT_S = 30.0
POD_TIMEOUT_S = 5.0
"""For an answer of a pod. One that trains answers within milliseconds."""
WATCH_MARGIN_S = 15
"""A server that is gone without a word never ends a watch: the client does."""


class SdkCluster:
    """Requests to one namespace."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    @property
    def namespace(self) -> str:
        return self._namespace

    def get(self, kind: Kind, name: str) -> Object:
        return self._json(f"get {kind.name} {name}", "GET", f"{self._path(kind)}/{quote(name, safe='')}")

    def list(self, kind: Kind, *, labels: Mapping[str, str] | None = None) -> tuple[list[Object], str]:
        found = self._json(f"list {kind.plural}", "GET", self._path(kind), query=_selector(labels))
        return list(found["items"]), str(found["metadata"].get("resourceVersion", ""))

    def watch(
        self, kind: Kind, *, resource_version: str, labels: Mapping[str, str] | None = None, seconds: int
    ) -> Iterator[Event]:
        what = f"watch {kind.plural}"
        query = {
            "watch": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
            **_selector(labels),
        }
        until = time.monotonic() + seconds + WATCH_MARGIN_S
        for line in self._lines(what, self._path(kind), query, read_s=seconds + WATCH_MARGIN_S):
            change = json.loads(line)
            if change["type"] == "ERROR":
                raise _error(what, change["object"].get("code"), change["object"], "")
            yield Event(change["type"], change["object"])
            if time.monotonic() >= until:
                return

    def patch(self, patch: MergePatch) -> Object:
        path = f"{self._path(patch.kind)}/{quote(patch.name, safe='')}"
        query = {"fieldManager": "reprieve.dev/sdk"}
        return self._json(f"patch {patch.kind.name} {patch.name}", "PATCH", path, query=query, body=patch.content)

    def read_log(self, pod: str, *, container: str, follow: bool = False, lines: int | None = None) -> Iterator[str]:
        query = {
            "container": container,
            **({"follow": "true"} if follow else {}),
            **({"tailLines": str(lines)} if lines is not None else {}),
        }
        read_s = None if follow else TIMEOUT_S
        yield from self._lines(f"read the log of pod {pod}", f"{self._pod(pod)}/log", query, read_s=read_s)

    def get_from_pod(self, pod: str, port: int, path: str) -> bytes:
        what = f"get http://{pod}:{port}{path}"
        until, body = time.monotonic() + POD_TIMEOUT_S, b""
        with self._response(what, "GET", f"{self._pod(f'{pod}:{port}')}/proxy{path}", read_s=POD_TIMEOUT_S) as answer:
            for part in answer.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise KubernetesError(f"cannot {what}: the answer is longer than {MOST_BYTES} bytes")
                if time.monotonic() > until:
                    raise ApiUnreachable(f"cannot {what}: no answer within {POD_TIMEOUT_S:g} s")
        return body

    def _path(self, kind: Kind) -> str:
        root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
        space = f"/namespaces/{self._namespace}" if kind.namespaced else ""
        return f"{root}{space}/{kind.plural}"

    def _pod(self, name: str) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods/{name}"

    def _json(
        self, what: str, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Object | None = None
    ) -> Object:
        with self._response(what, method, path, query=query, body=body) as answer:
            found: Object = json.loads(answer.data)
        return found

    def _lines(self, what: str, path: str, query: Mapping[str, str], *, read_s: float | None) -> Iterator[str]:
        with self._response(what, "GET", path, query=query, read_s=read_s) as answer:
            rest = b""
            for part in answer.stream(amt=None, decode_content=True):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
            if rest:
                yield rest.decode(errors="replace")

    @contextlib.contextmanager
    def _response(
        self,
        what: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        read_s: float | None = TIMEOUT_S,
    ) -> Iterator[Any]:
        """Send a request. The body of the answer is read by the caller."""
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            answer, _, _ = self._client.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=(TIMEOUT_S, read_s),
            )
            try:
                if answer.status >= 400:
                    raise _error(what, answer.status, _status(answer.data), str(answer.reason))
                yield answer
            finally:
                answer.close()
                answer.release_conn()
        except ApiException as error:
            raise _error(what, error.status, _status(error.body), str(error.reason)) from error
        except urllib3.exceptions.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ApiUnreachable(f"cannot {what}: the API server does not answer ({reason})") from error
        except ConfigException as error:
            raise ConfigError(f"cannot {what}: {error}") from error


def _selector(labels: Mapping[str, str] | None) -> dict[str, str]:
    return {"labelSelector": ",".join(f"{name}={value}" for name, value in labels.items())} if labels else {}


def _status(body: object) -> Object:
    """Return the Status object of a refusal; proxies in between send none."""
    with contextlib.suppress(ValueError, TypeError):
        found = json.loads(body)  # type: ignore[arg-type]
        if isinstance(found, dict):
            return found
    return {}


def _error(what: str, code: int | None, status: Object, reason: str) -> KubernetesError:
    message = f"cannot {what}: {status.get('message') or reason}"
    if not code or code == HTTPStatus.TOO_MANY_REQUESTS or code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ApiUnreachable(message)
    kinds = {404: ObjectNotFound, 409: ObjectChanged, 401: NotPermitted, 403: NotPermitted}
    return kinds.get(code, KubernetesError)(message)
