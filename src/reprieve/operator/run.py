"""`reprieve operator`: runs the webhook's server, the keepers of its certificates, of the resource definition and of
progress, and a server for metrics in one process, until SIGTERM.

    SIGTERM → the lease goes to another replica, /readyz fails, connections close → (drain) → no new connections,
    requests finish → exit 0

All replicas answer reviews, and keep certificates and definition: what they write is guarded against each other. One of
them, the leader, writes progress. If a part ends by itself, so does the process: Kubernetes restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from reprieve.errors import ConfigError, ReprieveError
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.crd_install import FIELD_MANAGER
from reprieve.operator.certificate_files import CertificateFiles
from reprieve.operator.certificate_keeper import CertificateKeeper, service_names
from reprieve.operator.certificates import DEFAULT_LIFE, MIN_LIFE
from reprieve.operator.crd_keeper import CrdKeeper
from reprieve.operator.log import fields
from reprieve.operator.metrics.server import metrics_server
from reprieve.operator.progress_keeper import ProgressKeeper, ProgressMode
from reprieve.operator.serving_context import ServingContext
from reprieve.operator.webhook_server import WebhookServer, runtime_reader

log = logging.getLogger(__name__)

NAME = "reprieve-operator"
SECRET_SUFFIX = "-certificates"  # noqa: S105 - the name of a Secret is no secret


class OperatorFailed(ReprieveError):
    """A part of the operator ended, so the whole does."""


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """What `reprieve operator` is started with."""

    host: str = ""
    """The address to serve on. Default: all."""
    port: int = 8443
    """The port to serve on; below 1024 a container needs a capability."""
    namespace: str = ""
    """Where the Service and the Secret are. Default: the pod's."""
    service: str = NAME
    """The Service that the API server calls: the certificates are for its names."""
    webhook_configuration: str = NAME
    """The MutatingWebhookConfiguration whose caBundle is kept."""
    certificate_life: timedelta = DEFAULT_LIFE
    """Of the operator's own certificates. The next one is made after 3/5 of it."""
    certificate_folder: Path | None = None
    """Where tls.crt and tls.key are mounted. Default: the operator makes its own certificates."""
    progress: ProgressMode = ProgressMode.DIRECT
    """How to get the progress of jobs."""
    metrics_port: int = 8080
    """The port for metrics, in plain HTTP; 0: none."""
    drain: timedelta = timedelta(seconds=5)
    """How long to answer after SIGTERM: until all API servers have stopped calling this replica."""

    def __post_init__(self) -> None:
        if self.certificate_life < MIN_LIFE:
            raise ConfigError(f"--certificate-life: use {MIN_LIFE.total_seconds():g}s or more")
        for option, port in (("--port", self.port), ("--metrics-port", self.metrics_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{option} {port}: use 1 to 65535")


async def run_operator(settings: OperatorSettings, api: KubernetesApi, stop: asyncio.Event) -> None:
    """Run until `stop` is set. OperatorFailed: a part of it ended by itself."""
    serving = ServingContext()
    certificates = _certificates(settings, api, serving)
    server = WebhookServer(
        runtime_reader(api), serving, missing=certificates.missing, address=(settings.host, settings.port)
    )
    keeper = ProgressKeeper(api, settings.progress, lease=settings.service)
    parts = {"server": server.run, "certificates": certificates.run, "crd": CrdKeeper(api).run}
    if settings.metrics_port:
        parts["metrics"] = metrics_server(keeper.metrics, (settings.host, settings.metrics_port)).run
    if settings.progress != ProgressMode.OFF:
        parts["progress"] = keeper.run
    log.info("started", extra=fields(port=server.port, certificates=type(certificates).__name__))
    tasks = {name: asyncio.create_task(part(), name=name) for name, part in parts.items()}
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([*tasks.values(), stopped], return_when=asyncio.FIRST_COMPLETED)
        _raise_failure(tasks.values())
        log.info("stopping", extra=fields(drain_s=settings.drain.total_seconds()))
        server.drain()
        if leaving := tasks.pop("progress", None):
            await _cancel(leaving)
        drain_s = settings.drain.total_seconds()
        await asyncio.wait(tasks.values(), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        _raise_failure(tasks.values())
        server.stop()
        await tasks["server"]
        log.info("stopped")
    finally:
        await _cancel(*tasks.values(), stopped)


def run_until_signal(settings: OperatorSettings) -> None:
    """Run the operator until SIGTERM or SIGINT."""

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with KubernetesApi(namespace=settings.namespace or None, field_manager=FIELD_MANAGER) as api:
            await run_operator(settings, api, stop)

    asyncio.run(run())


def _certificates(
    settings: OperatorSettings, api: KubernetesApi, serving: ServingContext
) -> CertificateKeeper | CertificateFiles:
    if settings.certificate_folder is not None:
        return CertificateFiles(settings.certificate_folder, serving)
    return CertificateKeeper(
        api,
        serving,
        namespace=api.namespace,
        secret=f"{settings.service}{SECRET_SUFFIX}",
        configuration=settings.webhook_configuration,
        names=service_names(settings.service, api.namespace),
        life=settings.certificate_life,
    )


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raise_failure(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            error = None
            with contextlib.suppress(asyncio.CancelledError):
                error = task.exception()
            reason = f"{type(error).__name__}: {error}" if error is not None else "without a reason"
            raise OperatorFailed(f"the operator's part {task.get_name()!r} ended: {reason}") from error
