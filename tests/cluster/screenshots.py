"""`make screenshots`: run a job on the test cluster, preempt and pause it, and draw what kubectl says at each moment.

The drawings in docs/images/ hold what kubectl printed and nothing else.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from examples.picture import drawing
from rich.console import Console

from tests.cluster.kit.cluster import Cluster, session_cluster
from tests.cluster.kit.objects import HOST_PATH, pod_spec, reprieve_runtime
from tests.cluster.kit.operator_deployment import deployed
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.status import POLL_ANNOTATION, POLL_S, wait_for, wait_for_state
from tests.cluster.kit.training import Training
from tests.support.launch_kit import Lab
from tests.support.places import ROOT

IMAGES = ROOT / "docs/images"
NAMESPACE = "team"
NAME = "finetune"
WIDTH = 120
STEPS = 400


class Screen:
    """A terminal that is recorded."""

    def __init__(self, cluster: Cluster) -> None:
        self._kubectl = cluster.kubectl.for_namespace(NAMESPACE)
        self._console = Console(record=True, width=WIDTH, force_terminal=False)

    def run(self, *arguments: str, last: int | None = None) -> None:
        """Print a command and its output, or the last lines of it."""
        lines = self._kubectl.run(*arguments).splitlines()
        shown = lines if last is None else lines[-last:]
        text = "\n".join([f"$ kubectl {' '.join(arguments)}", *shown, ""])
        self._console.print(text, markup=False, highlight=False)

    def draw(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawing(self._console, title=f"namespace {NAMESPACE}"))


def main() -> int:
    with session_cluster(full=False) as cluster, deployed(cluster), workspace() as folder:
        runtime = reprieve_runtime("reprieve-torch", pod_spec(container="node", environment={"PATH": HOST_PATH}))
        runtime["kind"] = "ClusterTrainingRuntime"
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        cluster.kubectl.apply(namespace, runtime)
        try:
            _play(cluster, folder)
        finally:
            cluster.kubectl.delete("namespace", NAMESPACE)
            cluster.kubectl.delete("clustertrainingruntime", "reprieve-torch")
    return 0


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A folder with a name as in the documents, for the time of the script."""
    folder = Path("/workspace")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _play(cluster: Cluster, folder: Path) -> None:
    kubectl = cluster.kubectl.for_namespace(NAMESPACE)
    kubectl.wait_for("serviceaccount", "default", lambda _: True)
    screen, events = Screen(cluster), Screen(cluster)
    with PodWatch(kubectl) as pods:
        training = Training(kubectl, pods, Lab(folder), {"steps": STEPS, "step_s": 0.1, "by_environment": True}, NAME)
        training.checkpointing = {"storage": {"uri": f"{training.lab.job}/checkpoints"}, "interval": "1h"}
        training.environment["PATH"] = HOST_PATH
        training.start()
        kubectl.run("annotate", "trainjob", NAME, f"{POLL_ANNOTATION}={POLL_S}")
        wait_for(kubectl, NAME, lambda progress: progress.get("step", 0) > 50)
        screen.run("get", "trainjob", NAME)
        kubectl.delete("pod", training.rank(1), wait=False)
        wait_for_state(kubectl, NAME, "Preempted")
        screen.run("get", "trainjob", NAME)
        wait_for_state(kubectl, NAME, "Running")
        time.sleep(2 * POLL_S)
        screen.run("get", "trainjob", NAME)
        training.wait_until_complete()
        wait_for_state(kubectl, NAME, "Succeeded")
        screen.run("get", "trainjob", NAME)
        events.run("events", "--for", f"trainjob/{NAME}")
    screen.draw(IMAGES / "kubectl-get-trainjob.svg")
    events.draw(IMAGES / "kubectl-events.svg")


if __name__ == "__main__":
    sys.exit(main())
