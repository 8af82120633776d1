"""The log of one rank of a TrainJob, over its starts: each has a pod of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from reprieve.clock import Clock
from reprieve.errors import KubernetesError, NotPermitted
from reprieve.kubernetes.jobs.cluster import Cluster
from reprieve.kubernetes.jobs.pods import Pod
from reprieve.kubernetes.jobs.reader import JobReader
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.kinds import POD
from reprieve.kubernetes.names import JOB_SET_LABEL, TRAINER_CONTAINER

log = logging.getLogger(__name__)

POLL_S = 1.0


class NoLog(KubernetesError):
    """The rank has not started. The message says why."""


def read(
    cluster: Cluster, reader: JobReader, name: str, clock: Clock, *, rank: int, follow: bool, lines: int | None
) -> Iterator[str]:
    """Yield the lines of the newest pod's log; with `follow` also those of later ones, until the job is at rest."""
    seen: set[str] = set()
    warned: set[str] = set()
    broken = ""
    """The pod that still ran after its log had ended. The kubelet may take a moment to report an end."""
    while True:
        view = reader.view(name)
        pod = _newest(view.pods, rank)
        if pod is None:
            cluster.list(POD, labels={JOB_SET_LABEL: name})  # NotPermitted, where that is why there is none
        if pod is not None and (pod.is_running or (pod.has_ended and pod.uid not in seen)):
            if pod.uid in seen and pod.uid != broken:
                broken = pod.uid
                clock.sleep(POLL_S)
                continue
            if pod.uid == broken:
                broken, lines = "", 0
                if pod.uid not in warned:
                    log.warning(
                        "the log of %s broke off: it is followed again, and lines may be missing in between. "
                        "`reprieve logs` without -f prints all",
                        pod.name,
                    )
                warned.add(pod.uid)
            seen.add(pod.uid)
            try:
                yield from cluster.read_log(pod.name, container=TRAINER_CONTAINER, follow=follow, lines=lines)
            except NotPermitted:
                raise
            except KubernetesError:
                # A pod that was deleted in between has no log any more.
                if not follow:
                    raise
            lines = None
        elif not follow:
            waits = f" ({pod.why_it_waits})" if pod is not None and pod.why_it_waits else ""
            raise NoLog(f"rank {rank} of {name} has no log: the job is {view.state}{waits}")
        elif view.state.is_end or view.state == JobState.PAUSED:
            return
        else:
            clock.sleep(POLL_S)
        if not follow:
            return


def _newest(pods: tuple[Pod, ...], rank: int) -> Pod | None:
    return next((pod for pod in reversed(pods) if pod.rank == rank), None)
