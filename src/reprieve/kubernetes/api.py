"""A client of the Kubernetes API: plain dictionaries in and out, and Reprieve's own errors.

The one module that imports lightkube (extra `operator`). It is asynchronous and never retries: who calls it knows
whether a request may be repeated. Inside a pod it uses the service account, elsewhere the kubeconfig.

    async with KubernetesApi() as api:
        crd = await api.get(CUSTOM_RESOURCE_DEFINITION, "trainjobs.trainer.kubeflow.org")
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG
from lightkube.core.exceptions import ConfigError as LightkubeConfigError
from lightkube.generic_resource import GenericGlobalResource, GenericNamespacedResource, create_api_info
from lightkube.types import PatchType

from reprieve.errors import (
    ApiUnreachable,
    ConfigError,
    KubernetesError,
    NotPermitted,
    ObjectChanged,
    ObjectNotFound,
)
from reprieve.kubernetes.kinds import Event, Kind, Object

TIMEOUT_S = 30.0
"""For an answer. A busy API server took more than 10 s to compile the rules in a new schema."""
WATCH_S = 300
"""After so long the server ends a watch. The caller lists again, which also repairs what a watch has missed."""
WATCH_MARGIN_S = 15
"""A server that is gone without a word (a node that lost its power) never ends a watch: the client does."""
PAGE = 250
"""Objects in an answer to a list. A thousand TrainJobs in one have 10 MiB."""
ALL_NAMESPACES = "*"

T = TypeVar("T")
Labels = Mapping[str, str | None]
"""Of the requested objects. None: it has the label, with any value."""


class KubernetesApi:
    """Requests to one API server. Errors are `KubernetesError`s with the server's own message.

    context: of the kubeconfig. Default: the service account inside a pod, else the current context.
    namespace: of requests that do not name one. Default: that of the pod, or of the context.
    field_manager: under this name the API server records what is written.
    """

    def __init__(
        self,
        *,
        context: str | None = None,
        namespace: str | None = None,
        field_manager: str = "reprieve",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        try:
            config = KubeConfig.from_env() if context is None else KubeConfig.from_file(_kubeconfig())
            self._client = AsyncClient(
                config=config.get(context),
                namespace=namespace,
                timeout=httpx2.Timeout(timeout_s),
                field_manager=field_manager,
            )
        except LightkubeConfigError as error:
            raise ConfigError(f"no cluster to connect to: {error}; set KUBECONFIG, or run this in a pod") from error
        except (KeyError, AssertionError, OSError) as error:
            # What lightkube raises where a context names a cluster, a user or a file that is not there.
            raise ConfigError(f"the kubeconfig is incomplete: {type(error).__name__}: {error}") from error
        self.field_manager = field_manager
        self._timeout_s = timeout_s
        self.namespace: str = self._client.namespace

    async def __aenter__(self) -> KubernetesApi:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> Object:
        with _translated(f"get {kind.name} {name}"):
            return dict(await self._client.get(_resource(kind), name, **_in(kind, namespace)))

    async def list_objects(
        self,
        kind: Kind,
        *,
        name: str | None = None,
        labels: Labels | None = None,
        namespace: str | None = None,
    ) -> tuple[list[Object], str]:
        """Return the objects, or those with that name or these labels, and the resource version that a watch continues
        from."""
        return await self.list_reduced(kind, dict, name=name, labels=labels, namespace=namespace)

    async def list_reduced(
        self,
        kind: Kind,
        reduce: Callable[[Object], T],
        *,
        name: str | None = None,
        labels: Labels | None = None,
        namespace: str | None = None,
    ) -> tuple[list[T], str]:
        """The same, page by page, with what `reduce` keeps of each object: the objects themselves may be many."""
        with _translated(f"list {kind.plural}"):
            found = self._client.list(
                _resource(kind), chunk_size=PAGE, fields=_named(name), labels=_plain(labels), **_in(kind, namespace)
            )
            return [reduce(dict(item)) async for item in found], found.resourceVersion

    async def watch(
        self,
        kind: Kind,
        *,
        resource_version: str,
        name: str | None = None,
        labels: Labels | None = None,
        namespace: str | None = None,
        seconds: int = WATCH_S,
    ) -> AsyncIterator[Event]:
        """Report changes since a resource version, for about so many seconds.

        It may end earlier, with an error or without: the caller lists again, and watches from there.
        """
        options: dict[str, Any] = {
            "fields": _named(name),
            "labels": _plain(labels),
            "server_timeout": seconds,
            **_in(kind, namespace),
        }
        with _translated(f"watch {kind.plural}"):
            changes = aiter(self._client.watch(_resource(kind), resource_version=resource_version, **options))
            try:
                while True:
                    try:
                        event, found = await within(seconds + WATCH_MARGIN_S, anext(changes))
                    except (asyncio.TimeoutError, StopAsyncIteration):
                        return
                    yield Event(event, dict(found))
            finally:
                await changes.aclose()  # type: ignore[attr-defined]

    async def create(self, kind: Kind, new: Object, *, namespace: str | None = None) -> Object:
        """Create an object. ObjectChanged: it exists."""
        with _translated(f"create {kind.name} {_name_of(new)}"):
            return dict(await self._client.create(_resource(kind)(new), **_in(kind, namespace)))

    async def replace(self, kind: Kind, changed: Object, *, namespace: str | None = None) -> Object:
        """Replace an object. ObjectChanged: its `metadata.resourceVersion` is no longer that of `changed`."""
        with _translated(f"replace {kind.name} {_name_of(changed)}"):
            return dict(await self._client.replace(_resource(kind)(changed), **_in(kind, namespace)))

    async def json_patch(
        self, kind: Kind, name: str, operations: list[Object], *, namespace: str | None = None
    ) -> Object:
        """Change an object by a JSON patch. ObjectChanged: a `test` in it fails."""
        with _translated(f"patch {kind.name} {name}", tests=any(each["op"] == "test" for each in operations)):
            patched = await self._client.patch(
                _resource(kind),
                name,
                operations,
                patch_type=PatchType.JSON,
                **_in(kind, namespace),
            )
            return dict(patched)

    async def merge_patch(self, kind: Kind, name: str, changes: Object, *, namespace: str | None = None) -> Object:
        """Merge changes into an object. ObjectChanged: it no longer has their `metadata.resourceVersion`."""
        with _translated(f"patch {kind.name} {name}"):
            patched = await self._client.patch(
                _resource(kind), name, changes, patch_type=PatchType.MERGE, **_in(kind, namespace)
            )
            return dict(patched)

    async def apply_status(self, kind: Kind, name: str, content: Object, *, namespace: str | None = None) -> Object:
        """Apply fields of the status, as their owner. ObjectChanged: the uid in `content` is another one."""
        # Lightkube has no status of kinds that it does not know.
        what = f"write the status of {kind.name} {name}"
        where = f"namespaces/{namespace or self.namespace}/" if kind.namespaced else ""
        path = f"{'apis' if kind.group else 'api'}/{kind.api_version}/{where}{kind.plural}/{name}/status"
        body = json.dumps({"apiVersion": kind.api_version, "kind": kind.name, **content})
        with _translated(what):
            answer = await self._http.request(
                "PATCH",
                path,
                params={"fieldManager": self.field_manager, "force": "true"},
                headers={"Content-Type": PatchType.APPLY.value},
                content=body,
            )
            answer.raise_for_status()
            return dict(answer.json())

    async def read_log(
        self,
        pod: str,
        *,
        container: str,
        follow: bool = False,
        lines: int | None = None,
        namespace: str | None = None,
    ) -> AsyncIterator[str]:
        """Yield the lines of a container's log, without their ends. `lines`: only so many of the last."""
        parameters = {
            "container": container,
            **({"follow": "true"} if follow else {}),
            **({"tailLines": str(lines)} if lines is not None else {}),
        }
        timeout = httpx2.Timeout(self._timeout_s, read=None) if follow else httpx2.Timeout(self._timeout_s)
        async with self._streamed(f"read the log of pod {pod}", pod, "log", namespace, parameters, timeout) as answer:
            async for line in answer.aiter_lines():
                yield line

    async def get_from_pod(
        self, pod: str, port: int, path: str, *, most_bytes: int, timeout_s: float, namespace: str | None = None
    ) -> bytes:
        """Return what a pod answers to an HTTP request that the API server passes on (`pods/proxy`)."""
        what = f"get http://{pod}:{port}{path}"

        async def read() -> bytes:
            body = b""
            timeout = httpx2.Timeout(timeout_s)
            async with self._streamed(what, f"{pod}:{port}", f"proxy{path}", namespace, {}, timeout) as answer:
                async for part in answer.aiter_raw():  # not unpacked: 64 KiB of zeros in gzip are 64 MiB
                    body += part
                    if len(body) > most_bytes:
                        raise KubernetesError(f"cannot {what}: the answer is longer than {most_bytes} bytes")
            return body

        try:
            return await within(timeout_s, read())
        except asyncio.TimeoutError:
            raise ApiUnreachable(f"cannot {what}: no answer within {timeout_s:g} s") from None

    @property
    def _http(self) -> httpx2.AsyncClient:
        """The client below lightkube's, with its credentials."""
        client: httpx2.AsyncClient = self._client._client._client
        return client

    @contextlib.asynccontextmanager
    async def _streamed(
        self,
        what: str,
        pod: str,
        resource: str,
        namespace: str | None,
        parameters: dict[str, str],
        timeout: httpx2.Timeout,
    ) -> AsyncIterator[httpx2.Response]:
        """Request a sub-resource of a pod. Lightkube has no proxy, and cannot read the refusal of a log it follows."""
        path = f"api/v1/namespaces/{namespace or self.namespace}/pods/{pod}/{resource}"
        with _translated(what):
            headers = {"Accept-Encoding": "identity"}
            async with self._http.stream("GET", path, params=parameters, headers=headers, timeout=timeout) as answer:
                if answer.is_error:
                    await answer.aread()
                answer.raise_for_status()
                yield answer


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Return what the work returns. asyncio.TimeoutError: it took longer, and was cancelled.

    No cancellation is lost. `asyncio.wait_for` returns a result that comes in the moment in which the caller is
    cancelled, and the caller continues (before Python 3.12): a loop around it then runs for ever.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()


def _kubeconfig() -> str:
    return os.environ.get("KUBECONFIG", DEFAULT_KUBECONFIG)


def _in(kind: Kind, namespace: str | None) -> dict[str, Any]:
    return {"namespace": namespace} if kind.namespaced and namespace is not None else {}


def _named(name: str | None) -> Any:
    return None if name is None else {"metadata.name": name}


def _plain(labels: Labels | None) -> dict[str, Any] | None:
    return None if labels is None else dict(labels)


def _name_of(found: Object) -> str:
    return str(found.get("metadata", {}).get("name", ""))


_resources: dict[Kind, Any] = {}


def _resource(kind: Kind) -> Any:
    """Return lightkube's class for a kind: one of plain dictionaries, also where lightkube has a typed one.

    `create_global_resource` refuses kinds that lightkube has a type for.
    """
    if kind not in _resources:
        base = GenericNamespacedResource if kind.namespaced else GenericGlobalResource
        info = create_api_info(kind.group, kind.version, kind.name, kind.plural)
        _resources[kind] = type(kind.name, (base,), {"_api_info": info})
    return _resources[kind]


@contextlib.contextmanager
def _translated(what: str, *, tests: bool = False) -> Iterator[None]:
    """Raise Reprieve's errors instead of lightkube's. `tests`: the request is a JSON patch with tests."""
    try:
        yield
    except httpx2.HTTPStatusError as error:
        raise _error(what, error.response, str(error), tests=tests) from error
    except httpx2.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ApiUnreachable(f"cannot {what}: the API server does not answer ({reason})") from error
    except LightkubeConfigError as error:  # a token file that is gone, a plugin for credentials that fails
        raise ConfigError(f"cannot {what}: {error}") from error
    except KeyError as error:
        # lightkube looks for the content type of a refusal. Proxies in between may send none.
        if not isinstance(error.__context__, httpx2.HTTPStatusError):
            raise
        refusal = error.__context__
        raise _error(what, refusal.response, str(refusal), tests=tests) from refusal


def _error(what: str, response: httpx2.Response | None, reason: str, *, tests: bool) -> KubernetesError:
    """Return the error for a refusal. Events of a watch have no response, proxies in between no JSON."""
    status: Object = {}
    if response is not None and response.is_closed:
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError, httpx2.ResponseNotRead):
            status = response.json()
    code = response.status_code if response is not None else 0
    message = f"cannot {what}: {status.get('message') or reason}"
    if code == 404:
        return ObjectNotFound(message)
    # The details of an object that is invalid name its kind. Those of a test that failed are empty.
    if code == 409 or (code == 422 and tests and not status.get("details")):
        return ObjectChanged(message)
    if code in (401, 403):
        return NotPermitted(message)
    if code == HTTPStatus.TOO_MANY_REQUESTS or code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ApiUnreachable(message)
    return KubernetesError(message)
