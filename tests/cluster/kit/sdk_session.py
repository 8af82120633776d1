"""The Kubeflow SDK as a notebook uses it: a client in this process, in the network of the cluster.

A thread enters the network namespace; its sockets and those of the threads that it starts are in there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from kubeflow.trainer import KubernetesBackendConfig

from reprieve.kubeflow import TrainerClient
from tests.cluster.kit.cluster import OTHER_CLUSTER, Cluster

T = TypeVar("T")

CLONE_NEWNET = 0x40000000


class SdkSession:
    """A client. `call` runs a function of it in the thread."""

    def __init__(self, cluster: Cluster, namespace: str, kind: Callable[..., Any] = TrainerClient) -> None:
        self._instance = cluster.instance
        self._thread = ThreadPoolExecutor(1, initializer=self._enter)
        config_file = os.environ[OTHER_CLUSTER] if self._instance is None else str(self._instance.admin_kubeconfig)
        config = KubernetesBackendConfig(namespace=namespace, config_file=config_file)
        self.client = self.call(lambda: kind(config))

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function in the network of the cluster: `session.call(session.client.pause, "job")`."""
        return self._thread.submit(function, *args, **kwargs).result()

    def close(self) -> None:
        self._thread.shutdown()

    def _enter(self) -> None:
        if self._instance is not None:
            with self._instance.network_namespace_file.open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def sdk_session(cluster: Cluster, namespace: str, **options: Any) -> Iterator[SdkSession]:
    session = SdkSession(cluster, namespace, **options)
    try:
        yield session
    finally:
        session.close()
