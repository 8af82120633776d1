"""ProgressKeeper: of all replicas, one keeps `status.trainingProgress` of the jobs; and what it knows, as metrics."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from enum import Enum

from reprieve.errors import KubernetesError
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.jobs.cluster import MOST_BYTES
from reprieve.operator.controller import pod_request
from reprieve.operator.controller.controller import AskPod, StatusController
from reprieve.operator.controller.leader import LeaderElection
from reprieve.operator.controller.pod_request import NoAnswer
from reprieve.operator.metrics import families
from reprieve.operator.metrics.counters import Counters
from reprieve.operator.status.objects import ObservedPod


class ProgressMode(str, Enum):
    """How the operator gets the progress of jobs."""

    DIRECT = "direct"
    """From the pod of rank 0."""
    PROXY = "proxy"
    """The same, and where the operator cannot reach pods, through the API server: needs `get` for pods/proxy."""
    OFF = "off"
    """Not at all: the operator only serves admission."""

    def __str__(self) -> str:
        return self.value


class ProgressKeeper:
    """Takes part in the election, and runs the controller while this replica is the leader."""

    def __init__(self, api: KubernetesApi, mode: ProgressMode, *, lease: str) -> None:
        self._api = api
        self.ask = _through_the_api_server(api) if mode == ProgressMode.PROXY else _ask_pod
        self._counters = Counters()
        self._controller: StatusController | None = None
        identity = f"{socket.gethostname()}-{os.urandom(4).hex()}"
        self._election = LeaderElection(api, name=lease, namespace=api.namespace, identity=identity)

    async def run(self) -> None:
        """Run until cancelled; then the lease is given back."""
        await self._election.run(self._lead)

    def metrics(self) -> Iterator[str]:
        """Yield the lines of all metrics. Those of jobs, only the leader has."""
        controller = self._controller
        objects = {} if controller is None else {"TrainJob": len(controller.jobs), "Pod": len(controller.pods)}
        yield from families.of_operator(self._counters, is_leader=self._election.is_leader, objects=objects)
        if controller is not None:
            yield from families.of_jobs(controller.observed_jobs())

    async def _lead(self) -> None:
        # What an earlier leadership has observed is old.
        self._controller = StatusController(self._api, self.ask, self._counters)
        try:
            await self._controller.run()
        finally:
            self._controller = None


async def _ask_pod(pod: ObservedPod, path: str) -> bytes:
    if pod.port is None or pod.why_not_polled:
        raise NoAnswer(pod.why_not_polled)
    return await pod_request.get(pod.address, pod.port, path)


def _through_the_api_server(api: KubernetesApi) -> AskPod:
    async def ask(pod: ObservedPod, path: str) -> bytes:
        try:
            return await _ask_pod(pod, path)
        except NoAnswer as direct:
            if pod.port is None or pod.why_not_polled:
                raise
            try:
                return await api.get_from_pod(
                    pod.name,
                    pod.port,
                    path,
                    most_bytes=MOST_BYTES,
                    timeout_s=pod_request.TIMEOUT_S,
                    namespace=pod.namespace,
                )
            except KubernetesError as error:
                raise NoAnswer(f"{direct}; through the API server: {error}") from error

    return ask
