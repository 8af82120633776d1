"""The seam between the verbs for TrainJobs and a client of the API server.

The command line has one over lightkube, the SDK one over the client that the Kubeflow SDK brings. Both pass
tests/unit/kubernetes/jobs/test_clusters.py. Calls block: a notebook runs an event loop of its own, and needs no second
one. Errors are `KubernetesError`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from reprieve.kubernetes.kinds import Event, Kind, Object
from reprieve.kubernetes.pausing import MergePatch

MOST_BYTES = 256 * 1024
"""Of what a pod answers. Progress with 20 checkpoints has 6 KiB."""


class Cluster(Protocol):
    """One namespace of a cluster."""

    @property
    def namespace(self) -> str: ...

    def get(self, kind: Kind, name: str) -> Object:
        """ObjectNotFound: it does not exist, or the kind does not."""
        ...

    def list(self, kind: Kind, *, labels: Mapping[str, str] | None = None) -> tuple[list[Object], str]:
        """Return the objects, and the resource version that a watch continues from. ObjectNotFound: no such kind."""
        ...

    def watch(
        self, kind: Kind, *, resource_version: str, labels: Mapping[str, str] | None = None, seconds: int
    ) -> Iterator[Event]:
        """Yield changes for about so many seconds. It may end earlier, with an error or without: list again."""
        ...

    def patch(self, patch: MergePatch) -> Object:
        """ObjectChanged: the object no longer has the resource version of the patch."""
        ...

    def read_log(self, pod: str, *, container: str, follow: bool = False, lines: int | None = None) -> Iterator[str]:
        """Yield lines without their ends, and with `follow` until the container ends."""
        ...

    def get_from_pod(self, pod: str, port: int, path: str) -> bytes:
        """Return what the pod answers over HTTP, through the API server; KubernetesError above `MOST_BYTES`."""
        ...
