"""The runtime of deploy/runtimes/reprieve-torch.yaml: what a preemption needs of it.

Much of it would be missed only on a cluster, and late: by an unreachable node, or a pod that is Pending for an hour.
"""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from tests.support.train_jobs import RUNTIME, Object

JOB_SET: Object = RUNTIME["spec"]["template"]["spec"]
JOB: Object = JOB_SET["replicatedJobs"][0]["template"]["spec"]
POD: Object = JOB["template"]["spec"]
CONTAINER: Object = POD["containers"][0]
ENVIRONMENT: Object = {variable["name"]: variable for variable in CONTAINER["env"]}


def job_failure(exit_code: int, *, disrupted: bool) -> str | None:
    """The message of a Job whose pod ended so, by the first rule that matches; None: the backoff limit decides."""
    for index, rule in enumerate(JOB["podFailurePolicy"]["rules"]):
        if exit_code in rule.get("onExitCodes", {}).get("values", []):
            return f"Container node for pod a/train-node-0-0-x failed with exit code {exit_code} matching {index}"
        if disrupted and rule.get("onPodConditions") == [{"type": "DisruptionTarget"}]:
            return f"Pod a/train-node-0-0-x has condition DisruptionTarget matching FailJob rule at index {index}"
    return None


def action(message: str | None) -> str | None:
    """What JobSet does then, by the first rule that matches; None: it restarts the job and counts that."""
    for rule in JOB_SET["failurePolicy"]["rules"]:
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"] and rule["targetReplicatedJobs"] == ["node"]
        if message is not None and any(re.search(each, message) for each in rule["onJobFailureMessagePatterns"]):
            return str(rule["action"])
    return None


@pytest.mark.parametrize(
    ("exit_code", "disrupted", "expected"),
    [
        (42, False, "FailJobSet"),
        (42, True, "FailJobSet"),
        (143, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (143, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (1, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, False, None),
        (1, False, None),
        (142, False, None),
    ],
)
def test_preemptions_do_not_count_and_a_permanent_failure_ends_the_job(
    exit_code: int, disrupted: bool, expected: str | None
) -> None:
    assert action(job_failure(exit_code, disrupted=disrupted)) == expected


def test_the_first_failed_pod_fails_the_job() -> None:
    """So that JobSet restarts all pods together. `onExitCodes` needs the name of Trainer's container."""
    assert (JOB["backoffLimit"], POD["restartPolicy"], CONTAINER["name"]) == (0, "Never", "node")
    rules = JOB["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"FailJob"}
    found = [(each["containerName"], each["operator"]) for rule in rules if (each := rule.get("onExitCodes"))]
    assert found == [("node", "In"), ("node", "In")]
    actions = [rule["action"] for rule in JOB_SET["failurePolicy"]["rules"]]
    assert actions == ["FailJobSet", "RestartJobSetAndIgnoreMaxRestarts"]


def test_the_launcher_ends_before_the_grace_period_does() -> None:
    assert POD["terminationGracePeriodSeconds"] - 2 == int(ENVIRONMENT["REPRIEVE_GRACE"]["value"])


def test_a_pod_that_waits_for_others_waits_for_days() -> None:
    conf = dict(each.split("=") for each in ENVIRONMENT["PET_RDZV_CONF"]["value"].split(","))
    for timeout in ("timeout", "join_timeout"):  # of the static rendezvous, and of c10d
        assert timedelta(seconds=int(conf[timeout])) >= timedelta(days=2)


def test_pods_of_an_unreachable_node_are_replaced_soon() -> None:
    found = {each["key"]: each["tolerationSeconds"] for each in POD["tolerations"]}
    assert found.keys() == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    assert max(found.values()) <= 60  # Kubernetes' default is 300
    assert {(each["operator"], each["effect"]) for each in POD["tolerations"]} == {("Exists", "NoExecute")}


def test_a_container_that_may_write_nowhere_else() -> None:
    """Without root, a volume is writable by its group only; with a read-only root, /tmp is a volume."""
    assert POD["securityContext"] == {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    assert {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]} == {"tmp": "/tmp"}
    assert POD["volumes"] == [{"name": "tmp", "emptyDir": {}}]


def test_a_pod_knows_its_run_and_its_address() -> None:
    fields = {
        name: each["valueFrom"]["fieldRef"]["fieldPath"] for name, each in ENVIRONMENT.items() if "valueFrom" in each
    }
    assert fields == {"REPRIEVE_RUN": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']", "POD_IP": "status.podIP"}
