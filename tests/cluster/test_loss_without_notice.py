"""Pods that are killed without notice, and pods that were thought dead: the newest periodic checkpoint counts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reprieve.checkpoint.folder.catalog import list_checkpoints
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import pod
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.training import START_S, Training, training_pod
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.support.launch_kit import Lab, processes_with, until

pytestmark = pytest.mark.timeout(600)

EVERY = 5


def test_a_job_that_is_killed_resumes_from_its_periodic_checkpoint(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path
) -> None:
    """SIGKILL counts, and is named in the log. So does a delete by force, unless the pod saves within the two seconds
    that the kubelet leaves it."""
    options = {"steps": 400, "step_s": 0.1, "every": EVERY}
    training = Training(namespace, pods, Lab(tmp_path), options)
    training.start()

    def newest() -> int:
        [first, *_] = list_checkpoints(training.lab.job / "checkpoints")
        assert first.problem is None
        return first.step

    training.wait_for_steps(EVERY + 2)
    generation = training.after(
        lambda: namespace.delete("pod", training.rank(0), "--force", "--grace-period=0", wait=False)
    )
    resumed_from = newest()
    has_saved = generation.exit_codes[0] == 143
    assert has_saved or generation.exit_codes[0] == 137, pods.history()
    assert training.step - resumed_from <= (0 if has_saved else 2 * EVERY), pods.history()
    training.wait_for_steps(EVERY + 2)
    assert f"resuming from checkpoint-{resumed_from} " in training.logs()
    assert training.counted_restarts == (0 if has_saved else 1), pods.history()

    def kill() -> None:
        for pid in training.processes():
            os.kill(pid, signal.SIGKILL)

    before = training.counted_restarts
    generation = training.after(kill)
    assert generation.exit_codes == [137, 137], pods.history()
    resumed_from = newest()
    assert training.step - resumed_from <= 2 * EVERY
    until(lambda: training.counted_restarts == before + 1, limit_s=60)
    training.hurry()
    training.wait_until_complete()
    logs = training.logs()
    assert f"resuming from checkpoint-{resumed_from} " in logs, logs
    assert "was killed without notice, after step" in logs, logs


def test_a_job_that_runs_out_of_memory_resumes_from_its_periodic_checkpoint(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path
) -> None:
    options = {"steps": 4 * EVERY, "step_s": 0.1, "every": EVERY, "exhaust_at": 2 * EVERY + 2}
    training = Training(namespace, pods, Lab(tmp_path), options, resources={"memory": "1536Mi"}, nodes=1)
    training.start()
    pods.wait_for(lambda watch: len(watch.ended()) == 1, "the pod ends", timeout_s=START_S)
    [killed] = pods.ended()
    assert (killed.exit_code, killed.reason) == (1, "OOMKilled"), "torchrun ends with 1 if a rank is killed"
    training.wait_until_complete()
    assert training.counted_restarts == 1
    message = json.loads(killed.message)
    # Ranks report saves at once, and steps once a second.
    assert 2 * EVERY <= message["step"] <= 2 * EVERY + 2, killed.message
    assert f"failed with exit code 1 at step {message['step']}: out of memory" in message["message"]
    assert f"resuming from checkpoint-{2 * EVERY}" in training.logs(), training.logs()


def test_a_pod_that_wakes_up_after_another_took_over_changes_nothing(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path
) -> None:
    """A node may be unreachable for minutes and then come back, with its pods."""
    lab = Lab(tmp_path)

    def start(name: str, steps: int) -> None:
        environment = {"REPRIEVE_RUN": "uid-1"}
        spec = training_pod(lab, "python", environment=environment, steps=steps, step_s=0.1, every=EVERY)
        namespace.apply(pod(name, spec))

    start("old", 10_000)
    until(lambda: lab.last_step() >= 2 * EVERY, limit_s=120)
    frozen = processes_with(str(lab.job))
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    stopped_at = lab.last_step()
    start("new", 120)
    until(lambda: lab.last_step() > stopped_at + 2 * EVERY, limit_s=120)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    pods.wait_for(lambda watch: len(watch.ended()) == 2, "both pods end", timeout_s=120)
    ends = {state.name: state.exit_code for state in pods.ended()}
    assert ends["new"] == 0 and ends["old"] not in (0, 143), pods.history()
    assert "must not write any more" in namespace.logs("old"), namespace.logs("old")
    time.sleep(1)
    found = list_checkpoints(lab.job / "checkpoints")
    assert [info.problem for info in found] == [None] * len(found)
    assert {info.manifest.attempt for info in found if info.manifest} == {2}, "the old pod's are gone, none is new"
    assert found[0].step == 120


@pytest.mark.full
def test_a_job_trains_on_while_a_node_is_not_ready_and_saves_when_it_is_back(
    cluster: Cluster, namespace: Kubectl, pods: PodWatch, tmp_path: Path, undisturbed: Callable[..., Lab]
) -> None:
    """The pod of the node is deleted, but nobody there hears of it until the kubelet is back. It then saves as usual.
    No pod replaces it meanwhile, so nothing else writes."""
    steps = 300
    training = Training(namespace, pods, Lab(tmp_path), {"steps": steps, "step_s": 0.5})
    training.start()
    training.wait_for_steps(3)
    [unreachable] = [state for state in training.running() if state.node == cluster.nodes[-1]]

    def freeze() -> None:
        with cluster.frozen_kubelet(unreachable.node):
            pods.wait_for(
                lambda watch: any(state.uid == unreachable.uid and state.is_deleting for state in watch.latest()),
                "the pod of the node is deleted",
                timeout_s=180,
            )
            training.wait_for_steps(3)
            assert len(pods.latest()) == 2 and training.counted_restarts == 0, pods.history()

    generation = training.after(freeze)
    assert generation.exit_codes == [143, 143], pods.history()
    assert "DeletionByTaintManager" in [state.disruption for state in generation.pods], pods.history()
    assert generation.message["step"] == training.step < steps
    cluster.kubectl.wait_for("node", unreachable.node, has_condition("Ready"))
    training.wait_until_complete()
    assert training.counted_restarts == 0
    training.assert_generations_never_overlapped()
    training.assert_equal_to(undisturbed(steps=steps))
