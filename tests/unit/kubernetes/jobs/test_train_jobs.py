"""The verbs for TrainJobs against a server in memory. Threads play Kueue, Trainer and the kubelets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from reprieve.errors import NotPermitted, ObjectNotFound
from reprieve.kubernetes.jobs.api_cluster import ApiCluster
from reprieve.kubernetes.jobs.job_log import NoLog
from reprieve.kubernetes.jobs.job_view import Source
from reprieve.kubernetes.jobs.reader import JobNotFound
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.jobs.stop import WaitTimeout
from reprieve.kubernetes.jobs.train_jobs import TrainJobs
from reprieve.kubernetes.pausing import CannotPause, CannotResume
from tests.support.kubernetes_server import KubernetesServer
from tests.support.stored_jobs import PATH, ago, ended_pod, job_pod, stop_all_pods, stored_job, when

Object = dict[str, Any]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        server.missing.add("workloads")
        yield server


@pytest.fixture
def jobs(server: KubernetesServer) -> Iterator[TrainJobs]:
    with ApiCluster() as cluster:
        yield TrainJobs(cluster)


def is_suspended(server: KubernetesServer) -> bool:
    return bool(server.get("trainjobs", "finetune", "system")["spec"]["suspend"])


def test_a_pause_waits_until_all_pods_have_stopped_and_names_the_saved_step(
    server: KubernetesServer, jobs: TrainJobs
) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("finetune-node-0-0", rank=0))
    server.put("pods", job_pod("finetune-node-0-1", rank=1))
    kubelets = when(lambda: is_suspended(server), lambda: stop_all_pods(server))
    outcome = jobs.pause("finetune", reason="budget")
    kubelets.join()
    assert (outcome.step, outcome.is_saved, outcome.checkpoint) == (57, True, PATH)
    assert outcome.message == "saved at step 57 in 0.4 s"
    view = jobs.get("finetune")
    assert view.state == JobState.PAUSED
    assert view.pause is not None and view.pause.by == "reprieve pause"
    assert "budget" in view.reason


def test_a_step_that_could_not_be_saved_is_reported(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("finetune-node-0-0"))
    kubelets = when(lambda: is_suspended(server), lambda: stop_all_pods(server, saved=False, step=60))
    outcome = jobs.pause("finetune")
    kubelets.join()
    assert (outcome.step, outcome.is_saved, outcome.checkpoint) == (60, False, PATH)


def test_with_kueue_a_pause_waits_until_kueue_has_suspended_the_job(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.missing.clear()
    server.put("trainjobs", stored_job())
    owner = [{"uid": "uid-finetune"}]
    metadata = {"name": "trainjob-finetune", "namespace": "system", "ownerReferences": owner}
    server.put(
        "workloads",
        {"apiVersion": "kueue.x-k8s.io/v1beta2", "metadata": metadata, "spec": {"active": True}},
    )
    server.put("pods", job_pod("finetune-node-0-0"))

    def is_active() -> bool:
        return bool(server.get("workloads", "trainjob-finetune", "system")["spec"]["active"])

    def play_kueue() -> None:
        assert not is_suspended(server), "Kueue reverts a direct suspend"
        found = server.get("trainjobs", "finetune", "system")
        server.put("trainjobs", {**found, "spec": {"suspend": True}})
        stop_all_pods(server)

    kueue = when(lambda: not is_active(), play_kueue)
    assert jobs.pause("finetune").step == 57
    kueue.join()
    assert jobs.get("finetune").state == JobState.PAUSED
    view = jobs.resume("finetune")
    assert is_active() and is_suspended(server)
    assert (view.state, view.pause) == (JobState.PENDING, None)


def test_a_pod_that_does_not_stop_is_named(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("finetune-node-0-0"))
    with pytest.raises(WaitTimeout, match="has not stopped after 1 s: finetune-node-0-0 still run"):
        jobs.pause("finetune", timeout=timedelta(seconds=1))
    assert is_suspended(server)
    assert jobs.get("finetune").state == JobState.SAVING


def test_a_pause_whose_watch_breaks_goes_on(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("finetune-node-0-0"))

    def break_and_stop() -> None:
        server.oldest = 10_000
        server.end_watches()
        time.sleep(1)
        server.oldest = 0
        stop_all_pods(server)

    kubelets = when(lambda: is_suspended(server), break_and_stop)
    assert jobs.pause("finetune").took > timedelta(seconds=1)
    kubelets.join()


def test_a_paused_job_is_resumed(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    jobs.pause("finetune")
    assert jobs.pause("finetune").was_paused
    assert jobs.resume("finetune").state == JobState.PENDING
    assert not is_suspended(server)
    with pytest.raises(CannotResume, match="was not paused by Reprieve: it is not suspended"):
        jobs.resume("finetune")


def test_a_job_that_has_ended_is_not_paused(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job(conditions=[{"type": "Complete", "status": "True"}]))
    with pytest.raises(CannotPause, match="finetune has ended"):
        jobs.pause("finetune")


def test_what_the_operator_has_written_is_shown(server: KubernetesServer, jobs: TrainJobs) -> None:
    progress = {"state": "Running", "step": 150, "totalSteps": 300, "percentComplete": "50.0", "lastUpdateTime": ago(5)}
    server.put("trainjobs", stored_job(trainingProgress=progress))
    server.put("pods", job_pod("finetune-node-0-0"))
    view = jobs.get("finetune")
    assert (view.state, view.source, view.progress.step, view.is_stale) == (
        JobState.RUNNING,
        Source.OPERATOR,
        150,
        False,
    )
    assert view.to_json()["progress"]["percentComplete"] == "50.0"


def test_progress_that_is_old_is_marked(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job(trainingProgress={"state": "Running", "step": 150, "lastUpdateTime": ago(100)}))
    server.put("pods", job_pod("finetune-node-0-0"))
    assert jobs.get("finetune").is_stale


def test_progress_in_the_annotation(server: KubernetesServer, jobs: TrainJobs) -> None:
    found = stored_job()
    found["metadata"]["annotations"] = {"reprieve.dev/progress": json.dumps({"state": "Running", "step": 7})}
    server.put("trainjobs", found)
    assert jobs.get("finetune").progress.step == 7


def test_without_an_operator_rank_0_answers_through_the_api_server(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("finetune-node-0-0"))
    listed = [{"path": PATH, "step": 57, "bytes": 100, "valid": True}]
    checkpointing = {"latestCheckpoint": PATH, "availableCheckpoints": listed}
    content = {"state": "evaluating", "step": 58, "loss": "0.5", "checkpointing": checkpointing}
    server.answers["finetune-node-0-0:28080/trainingProgress"] = json.dumps(content).encode()
    view = jobs.get("finetune")
    assert (view.state, view.source, view.progress.step) == (JobState.RUNNING, Source.POD, 58)
    assert [each.step for each in jobs.checkpoints("finetune")] == [57]


def test_the_newest_checkpoint_comes_first_also_where_the_list_is_older(
    server: KubernetesServer, jobs: TrainJobs
) -> None:
    """A termination message has the newest alone, and the operator keeps the list that it has."""
    listed = [{"path": "/workspace/checkpoints/checkpoint-50", "step": 50, "valid": True}]
    progress = {"state": "Succeeded", "checkpointing": {"latestCheckpoint": PATH, "availableCheckpoints": listed}}
    server.put("trainjobs", stored_job(trainingProgress=progress))
    assert [each.step for each in jobs.checkpoints("finetune")] == [57, 50]


def test_without_an_operator_and_rights_a_pod_that_ended_still_has_its_message(
    server: KubernetesServer, jobs: TrainJobs
) -> None:
    server.forbidden.add("pods/proxy")
    server.put("trainjobs", stored_job(conditions=[{"type": "Complete", "status": "True"}]))
    server.put("pods", job_pod("finetune-node-0-0"))
    assert jobs.get("finetune").source == Source.NOWHERE
    server.put("pods", ended_pod(job_pod("finetune-node-0-0"), 0, state="finished"))
    view = jobs.get("finetune")
    assert (view.state, view.source, view.progress.step) == (JobState.SUCCEEDED, Source.TERMINATION_MESSAGE, 57)
    assert [(each.step, each.valid) for each in jobs.checkpoints("finetune")] == [(57, None)]


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b'{"state": 7}', b"9" * 300_000, b'{"state": "training"}'])
def test_a_pod_that_answers_nonsense_changes_nothing(server: KubernetesServer, jobs: TrainJobs, answer: bytes) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("finetune-node-0-0"))
    server.answers["finetune-node-0-0:28080/trainingProgress"] = answer
    view = jobs.get("finetune")
    assert (view.state, view.progress.step) == (JobState.RUNNING, None)


def test_a_pod_with_the_labels_of_the_job_that_is_not_its_own(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("impostor", ownerReferences=[]))
    server.answers["impostor:28080/trainingProgress"] = b'{"state": "training", "step": 1000}'
    view = jobs.get("finetune")
    assert (view.state, view.progress.step) == (JobState.PENDING, None)


def test_the_state_of_the_pods_where_no_operator_runs(server: KubernetesServer, jobs: TrainJobs) -> None:
    def state() -> tuple[str, str]:
        view = jobs.get("finetune")
        return view.state.value, view.reason

    server.put("trainjobs", stored_job())
    assert state() == ("Pending", "no pods yet")
    server.put("pods", job_pod("a", rank=0, phase="Pending"))
    assert state() == ("Pending", "rank 0 Pending (ImagePullBackOff)")
    server.put("pods", job_pod("a", rank=0))
    waiting = job_pod("b", rank=1, phase="Pending")
    message = "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) had untolerated taint. preemption: no"
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": message}]
    server.put("pods", waiting)
    assert state() == ("WaitingForPeers", "rank 1 Pending (Insufficient cpu, node(s) had untolerated taint)")
    server.put("pods", job_pod("b", rank=1))
    assert state() == ("Running", "")
    server.put("pods", job_pod("b", rank=1, deletionTimestamp="2026-11-19T05:00:00Z"))
    assert state() == ("Saving", "stopping: pod b is being deleted")
    server.put("pods", ended_pod(job_pod("b", rank=1), 143))
    server.put("pods", ended_pod(job_pod("a", rank=0), 143))
    assert state() == ("Preempted", "it starts again")
    server.put("pods", ended_pod(job_pod("a", rank=0), 1))
    assert state() == ("Pending", "restarting: rank 0 ended with exit code 1")
    failed = {"type": "Failed", "status": "True", "message": "jobset failed due to job failures"}
    server.put("trainjobs", stored_job(conditions=[failed]))
    assert state() == ("Failed", "jobset failed due to job failures")


def test_a_job_that_somebody_else_has_suspended(server: KubernetesServer, jobs: TrainJobs) -> None:
    found = stored_job()
    found["spec"]["suspend"] = True
    server.put("trainjobs", found)
    view = jobs.get("finetune")
    assert view.state == JobState.PAUSED and view.pause is None
    assert view.reason.startswith("it is suspended, by somebody else")


def test_all_jobs_newest_first(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job("older", created="2026-11-18T05:00:00Z"))
    server.put("trainjobs", stored_job("newer"))
    server.put("pods", job_pod("a", of="older"))
    assert [(each.name, each.state.value) for each in jobs.all()] == [("newer", "Pending"), ("older", "Running")]


def test_a_name_that_does_not_exist_gets_the_nearest_names(server: KubernetesServer, jobs: TrainJobs) -> None:
    with pytest.raises(JobNotFound, match="no TrainJob finetun in namespace system: it has none"):
        jobs.get("finetun")
    for name in ("finetune", "finetune-2", "pretrain"):
        server.put("trainjobs", stored_job(name))
    with pytest.raises(JobNotFound, match=r"did you mean finetune or finetune-2\?"):
        jobs.get("finetun")
    with pytest.raises(JobNotFound, match="there are finetune, finetune-2, pretrain"):
        jobs.pause("zzz")


def test_a_cluster_without_trainer(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.missing.add("trainjobs")
    with pytest.raises(ObjectNotFound, match="the cluster has no TrainJobs: install Kubeflow Trainer"):
        jobs.get("finetune")
    with pytest.raises(ObjectNotFound, match="the cluster has no TrainJobs"):
        jobs.all()


def test_a_user_who_may_only_read_jobs(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.forbidden |= {"pods", "workloads"}
    server.put("trainjobs", stored_job(trainingProgress={"state": "Running", "step": 3}))
    assert jobs.get("finetune").progress.step == 3
    with pytest.raises(NotPermitted, match='User "tester" cannot GET pods'):
        jobs.pause("finetune")


def test_a_user_who_may_not_read_workloads_cannot_pause_a_job_in_a_queue(
    server: KubernetesServer, jobs: TrainJobs
) -> None:
    server.forbidden.add("workloads")
    server.missing.clear()
    found = stored_job()
    server.put("trainjobs", found)
    assert not jobs.pause("finetune").was_paused
    found["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    server.put("trainjobs", found)
    with pytest.raises(NotPermitted, match="cannot GET workloads"):
        jobs.pause("finetune")


def test_a_condition_is_waited_for(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    running = when(lambda: True, lambda: server.put("pods", job_pod("a")) and None)
    assert jobs.wait("finetune", lambda view: view.state == JobState.RUNNING, interval_s=0.05).pods
    running.join()
    with pytest.raises(WaitTimeout, match="finetune is still Running after 0 s"):
        jobs.wait("finetune", lambda view: view.state.is_end, timeout=timedelta(seconds=0.1), interval_s=0.05)


def test_a_log_is_followed_over_the_starts_of_a_job(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("first"))
    server.logs["first"] = "step 1\n"

    def preempt() -> None:
        server.put("pods", ended_pod(job_pod("first"), 143))
        server.delete("pods", "first", "system")
        server.logs["second"] = "step 2\n"
        server.put("pods", job_pod("second"))
        time.sleep(0.5)
        server.put("trainjobs", stored_job(conditions=[{"type": "Complete", "status": "True"}]))
        server.put("pods", ended_pod(job_pod("second"), 0))

    lines = jobs.read_log("finetune", follow=True)
    assert next(lines) == "step 1"
    thread = when(lambda: True, preempt)
    assert list(lines) == ["step 2"]
    thread.join()


def test_a_log_whose_stream_breaks_is_followed_again(
    server: KubernetesServer, jobs: TrainJobs, caplog: pytest.LogCaptureFixture
) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("first"))
    server.logs["first"] = "step 1\n"
    lines = jobs.read_log("finetune", follow=True)
    assert next(lines) == "step 1"
    server.end_watches()

    def train_on() -> None:
        server.logs["first"] += "step 2\n"
        server.put("trainjobs", stored_job(conditions=[{"type": "Complete", "status": "True"}]))
        server.put("pods", ended_pod(job_pod("first"), 0))

    thread = when(lambda: server.log_reads == 2, train_on)
    assert list(lines) == ["step 2"]
    thread.join()
    [warning] = caplog.messages
    assert warning.startswith("the log of first broke off: it is followed again")


def test_a_log_that_may_not_be_read_is_not_waited_for(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("first"))
    server.forbidden.add("pods/log")
    with pytest.raises(NotPermitted):
        list(jobs.read_log("finetune", follow=True))


def test_a_rank_without_a_log(server: KubernetesServer, jobs: TrainJobs) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("a", phase="Pending"))
    with pytest.raises(NoLog, match=r"rank 0 of finetune has no log: the job is Pending \(ImagePullBackOff\)"):
        list(jobs.read_log("finetune"))
