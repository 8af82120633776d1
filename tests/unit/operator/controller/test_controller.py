"""The status controller from end to end: what it observes, asks and writes, and what it leaves alone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from reprieve.kubernetes.names import PAUSE_ANNOTATION, PROGRESS_ANNOTATION
from reprieve.operator.controller import controller as controller_module
from reprieve.operator.metrics import families
from reprieve.operator.status import job_state
from reprieve.operator.status.observed import Observed
from reprieve.operator.status.reconcile import Writes
from tests.support.operator_kit import answer, stamp, termination_message
from tests.support.operator_metrics import METRICS
from tests.support.status_controller_kit import (
    JobServer,
    PodServer,
    controlling,
    fresh_answer,
    http_answer,
    now,
)

POLL_S = 0.3


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobServer]:
    monkeypatch.setattr(controller_module, "poll_interval", lambda *_, **__: timedelta(seconds=POLL_S))
    monkeypatch.setattr(controller_module, "TICK_S", 0.05)
    monkeypatch.setattr(controller_module, "CHECK_S", POLL_S)
    with JobServer(tmp_path) as server:
        yield server


def test_status_follows_what_rank_zero_reports(cluster: JobServer) -> None:
    cluster.add_job()
    with PodServer() as pod, controlling():
        name = cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        assert cluster.progress()["state"] == "Running"
        pod.report(step=151)
        cluster.wait_for(lambda: cluster.progress().get("step") == 151)
        assert cluster.progress()["pod"] == name
        assert None not in json.loads(json.dumps(cluster.progress())).values()


def test_a_job_that_does_not_ask_is_left_alone_and_its_pods_are_not_polled(cluster: JobServer) -> None:
    cluster.add_job("plain")
    plain = cluster.job("plain")
    del plain["spec"]["checkpointing"], plain["metadata"]["annotations"]
    cluster.put("trainjobs", plain)
    cluster.add_job("asks")
    with PodServer() as ignored, PodServer() as pod, controlling():
        cluster.add_pod(ignored, job="plain")
        cluster.add_pod(pod, job="asks")
        cluster.wait_for(lambda: cluster.progress("asks").get("step") == 150)
        assert not ignored.requests
        assert "status" not in cluster.job("plain")


def test_a_pod_with_the_labels_of_rank_zero_that_is_not_the_jobs_is_never_asked(
    cluster: JobServer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_job()
    with PodServer(fresh_answer(step=9)) as stranger, PodServer() as pod, controlling():
        cluster.add_pod(stranger, owner="somebody")
        cluster.add_pod(pod)
        cluster.add_pod(stranger, owner="somebody")
        cluster.wait_for(lambda: cluster.progress().get("step") == 150 and len(warnings(caplog)) >= 2)
        time.sleep(2 * POLL_S)
        assert not stranger.requests
    assert len(warnings(caplog)) == 2, "one for each stranger"
    assert "no Job of it controls it" in warnings(caplog)[0]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in list(caplog.records) if each.levelname == "WARNING"]


def test_a_pod_that_has_the_address_of_its_node_is_never_asked(cluster: JobServer) -> None:
    """Its author would choose a port of the node that the operator calls, and read what answers."""
    cluster.add_job()
    with PodServer() as pod, controlling() as (controller, _):
        stored = cluster.get("pods", cluster.add_pod(pod), "team")
        stored["status"]["hostIP"] = stored["status"]["podIP"]
        stored["metadata"] |= {"name": "host", "uid": "host-uid", "creationTimestamp": stamp(now() + timedelta(1))}
        cluster.put("pods", stored)
        cluster.wait_for(lambda: "hostNetwork" in cluster.progress().get("reason", ""))
        cluster.wait_for(lambda: not any(each.is_polling for each in list(controller.tracked.values())))
        before = len(pod.requests)  # of the time before it had that address
        time.sleep(3 * POLL_S)
        assert len(pod.requests) == before


def test_nothing_is_written_while_nothing_changes_and_no_poll_makes_two_writes(cluster: JobServer) -> None:
    cluster.add_job()
    with PodServer() as pod, controlling():
        cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        before = cluster.writes()
        cluster.wait_for(lambda: len(pod.requests) > 6)
        assert cluster.writes() == before
        polls = len(pod.requests)
        for step in range(151, 156):
            pod.report(step=step)
            cluster.wait_for(lambda step=step: cluster.progress().get("step") == step)
        written = [each for each in cluster.writes()[len(before) :] if each.endswith("/status")]
        assert len(written) <= len(pod.requests) - polls


def test_how_a_pod_ended_is_read_from_its_last_message_and_told_as_an_event(cluster: JobServer) -> None:
    cluster.add_job()
    with PodServer(fresh_answer(step=120)) as pod, controlling():
        name = cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 120)
        cluster.end_pod(name, 143, termination_message())
        cluster.delete("pods", name, "team")
        cluster.wait_for(lambda: cluster.progress().get("state") == "Preempted")
    assert cluster.progress()["step"] == 150
    assert cluster.progress()["lastExit"]["exitCode"] == 143
    [event] = [each for (plural, _, _), each in cluster.objects.items() if plural == "events"]
    assert (event["reason"], event["message"]) == ("Preempted", "saved checkpoint-150 in 2.1 s")
    assert event["involvedObject"]["uid"] == "train-uid"


def test_an_operator_that_takes_over_tells_nothing_twice(cluster: JobServer) -> None:
    cluster.add_job()
    with PodServer(fresh_answer(step=120)) as pod:
        name = cluster.add_pod(pod)
        with controlling():
            cluster.wait_for(lambda: cluster.progress().get("step") == 120)
            cluster.end_pod(name, 143, termination_message())
            cluster.wait_for(lambda: cluster.progress().get("state") == "Preempted")
            assert cluster.events() == ["Preempted"]
        before = cluster.writes()
        with controlling() as (controller, _):
            cluster.wait_for(controller.jobs.has_synced.is_set)
            time.sleep(4 * POLL_S)
        assert cluster.writes() == before


def test_data_that_gets_old_between_two_polls_is_marked(cluster: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "poll_interval", lambda *_, **__: timedelta(minutes=5))
    cluster.add_job()
    with PodServer() as pod, controlling():
        cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        assert "stale" not in cluster.progress()
        monkeypatch.setattr(job_state, "STALE_AFTER", timedelta(seconds=1))
        cluster.wait_for(lambda: cluster.progress().get("stale") is True)
        assert len(pod.requests) == 1


BAD = {
    "10 MB": http_answer(b"x" * 10_000_000),
    "not JSON": http_answer(b"<html>"),
    "a list": http_answer([1, 2]),
    "deep": http_answer(b"[" * 100_000),
    "redirect": http_answer(b"", status="302 Found", headers="Location: http://127.0.0.1/\r\n"),
    "not HTTP": b"220 ready\r\n",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_bad_answer_leaves_the_status_as_it_was_and_the_operator_alive(
    cluster: JobServer, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_job()
    with PodServer() as pod, controlling() as (_, counters):
        cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        before, polls = cluster.progress(), len(pod.requests)
        pod.content = content
        cluster.wait_for(lambda: len(pod.requests) >= polls + 4)
        assert {**cluster.progress(), "state": "", "reason": ""} == {**before, "state": "", "reason": ""}
        pod.report(step=200)
        cluster.wait_for(lambda: cluster.progress().get("step") == 200)
        results = {dict(key)["result"]: count for key, count in counters.of("polls").items()}
        assert results["bad_answer"] >= 3
    assert sum(each.levelname == "WARNING" for each in caplog.records) == 1, caplog.text


def test_values_of_wrong_types_are_left_out_and_named_once(
    cluster: JobServer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_job()
    wrong: dict[str, Any] = {
        "step": 151,
        "loss": 0.5,
        "totalSteps": float("nan"),
        "epoch": -1,
        "accuracy": "good",
        "lastUpdateTime": stamp(now() + timedelta(days=2)),
        "checkpointing": {"checkpointsCreated": 2**70, "latestCheckpoint": ["a"]},
    }
    with PodServer() as pod, controlling():
        cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        before = cluster.progress()
        pod.content = http_answer(answer(**wrong))
        cluster.wait_for(lambda: cluster.progress().get("step") == 151)
        found, polls = cluster.progress(), len(pod.requests)
        cluster.wait_for(lambda: len(pod.requests) > polls + 2)
    for name in ("loss", "totalSteps", "epoch", "accuracy"):
        assert found[name] == before[name], name
    assert found["checkpointing"]["checkpointsCreated"] == before["checkpointing"]["checkpointsCreated"]
    assert found["lastUpdateTime"] <= stamp(now())
    [warning] = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "loss" in warning
    assert "totalSteps" in warning


def test_an_answer_that_never_ends_does_not_hold_up_other_jobs(
    cluster: JobServer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_job("slow")
    cluster.add_job("fast")
    with PodServer() as slow, PodServer() as fast, controlling():
        slow.holds = True
        cluster.add_pod(slow, job="slow")
        cluster.add_pod(fast, job="fast")
        for step in (151, 152, 153):
            fast.report(step=step)
            cluster.wait_for(lambda step=step: cluster.progress("fast").get("step") == step)
        assert "step" not in cluster.progress("slow")
        cluster.wait_for(lambda: "does not end" in cluster.progress("slow")["reason"])
    assert sum(each.levelname == "WARNING" for each in caplog.records) == 1, caplog.text


def test_a_job_that_cannot_be_decided_about_does_not_hold_up_other_jobs(
    cluster: JobServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decide = controller_module.reconcile

    def fail_for_one(observed: Observed) -> Writes:
        if observed.job.name == "broken":
            raise OverflowError("a number that nobody thought of")
        return decide(observed)

    monkeypatch.setattr(controller_module, "reconcile", fail_for_one)
    cluster.add_job("broken")
    cluster.add_job("sound")
    with PodServer() as pod, controlling():
        cluster.add_pod(pod, job="sound")
        cluster.wait_for(lambda: cluster.progress("sound").get("step") == 150)
    assert caplog.text.count("OverflowError: a number that nobody thought of") == 1, "it is tried again once a minute"


def test_without_the_field_in_the_definition_the_progress_goes_into_the_annotation(cluster: JobServer) -> None:
    cluster.unknown_status.add("trainingProgress")
    cluster.add_job()
    with PodServer() as pod, controlling():
        cluster.add_pod(pod)

        def stored() -> Any:
            return json.loads(cluster.job()["metadata"]["annotations"].get(PROGRESS_ANNOTATION, "{}"))

        cluster.wait_for(lambda: stored().get("step") == 150)
        pod.report(step=151)
        cluster.wait_for(lambda: stored().get("step") == 151)
        applied = [each for each in cluster.writes() if each.endswith("/status")]
        assert len(applied) == 1, "it is tried again once a minute only"
        assert "trainingProgress" not in cluster.job().get("status", {})
    # It gets the field. Its progress must not be that of today when the field goes once more.
    cluster.unknown_status.clear()
    with PodServer(fresh_answer(step=152)) as pod, controlling():
        cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 152)
        cluster.wait_for(lambda: PROGRESS_ANNOTATION not in cluster.job()["metadata"]["annotations"])


def test_without_the_fields_in_the_definition_a_job_at_rest_costs_nothing(
    cluster: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.unknown_spec.add("checkpointing")
    cluster.unknown_status.add("trainingProgress")
    cluster.add_job()
    job = cluster.job()
    del job["spec"]["checkpointing"]
    cluster.put("trainjobs", job)
    decisions: list[Observed] = []
    decide = controller_module.reconcile
    monkeypatch.setattr(
        controller_module, "reconcile", lambda observed: (decisions.append(observed), decide(observed))[1]
    )
    with controlling() as (controller, _):
        name = cluster.add_pod(None)
        cluster.end_pod(name, 143, termination_message())
        cluster.wait_for(lambda: "Preempted" in cluster.events())
        cluster.delete("pods", name, "team")
        # Their end is in the status.
        cluster.wait_for(lambda: not any(each.pods for each in list(controller.tracked.values())))
        time.sleep(2 * POLL_S)
        before, writes, began = len(decisions), len(cluster.writes()), time.monotonic()
        time.sleep(5 * POLL_S)
        assert len(decisions) - before <= 1 + (time.monotonic() - began) / POLL_S, "one for each check"
        assert len(cluster.writes()) == writes


def test_a_write_that_has_failed_for_days_is_repeated_once_a_minute(
    cluster: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add_job()
    cluster.forbidden.add("trainjobs/status")
    monkeypatch.setattr(controller_module, "NotPermitted", TimeoutError)  # any other error
    with controlling() as (controller, counters):
        cluster.wait_for(lambda: bool(controller.tracked))
        [tracked] = controller.tracked.values()
        tracked.failures = 5000
        refused = {("what", "status"), ("result", "error")}
        cluster.wait_for(lambda: tracked.failures > 5000)
        [before] = [count for key, count in counters.of("writes").items() if set(key) == refused]
        time.sleep(4 * POLL_S)
        [after] = [count for key, count in counters.of("writes").items() if set(key) == refused]
    assert after == before


def test_a_field_that_a_writer_has_dropped_comes_back_from_the_annotation(cluster: JobServer) -> None:
    cluster.add_job()
    with PodServer() as pod, controlling():
        cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        job = cluster.job()
        del job["spec"]["checkpointing"]
        cluster.put("trainjobs", job)
        cluster.wait_for(lambda: "checkpointing" in cluster.job()["spec"])
    assert cluster.job()["spec"]["checkpointing"]["storage"]["persistentVolume"]["claimName"] == "claim"


def test_a_job_that_makes_no_progress_is_paused_with_the_reason(cluster: JobServer) -> None:
    cluster.add_job()
    with controlling():
        for number in range(5):
            cluster.end_pod(cluster.add_pod(None), 1, "RuntimeError: no such column")
            cluster.wait_for(lambda count=number + 1: cluster.progress().get("startsWithoutProgress") == count)
        cluster.wait_for(lambda: cluster.job()["spec"].get("suspend") is True)
    record = json.loads(cluster.job()["metadata"]["annotations"][PAUSE_ANNOTATION])
    assert record["by"] == "reprieve operator"
    assert "5 starts in a row" in record["reason"]
    assert "NoProgress" in cluster.events()


def test_a_job_with_a_workload_is_paused_through_it(cluster: JobServer) -> None:
    cluster.add_job()
    owner = {"kind": "TrainJob", "name": "train", "uid": "train-uid", "controller": True, "apiVersion": "v1"}
    metadata = {
        "name": "train-workload",
        "namespace": "team",
        "uid": "w",
        "labels": {"kueue.x-k8s.io/job-uid": "train-uid"},
        "ownerReferences": [owner],
    }
    cluster.put("workloads", {"metadata": metadata, "spec": {"active": True}})
    with controlling():
        for number in range(5):
            cluster.end_pod(cluster.add_pod(None), 1, "ValueError")
            cluster.wait_for(lambda count=number + 1: cluster.progress().get("startsWithoutProgress") == count)
        cluster.wait_for(lambda: cluster.get("workloads", "train-workload", "team")["spec"]["active"] is False)
    assert "suspend" not in cluster.job()["spec"]


def test_while_the_api_server_is_away_pods_are_polled_and_the_status_catches_up(cluster: JobServer) -> None:
    cluster.add_job()
    with PodServer() as pod, controlling():
        cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        cluster.stop()
        pod.report(step=180)
        polls = len(pod.requests)
        cluster.wait_for(lambda: len(pod.requests) >= polls + 3)
        cluster.start()
        cluster.wait_for(lambda: cluster.progress().get("step") == 180)


def test_a_refused_write_is_logged_and_repeated(cluster: JobServer, caplog: pytest.LogCaptureFixture) -> None:
    cluster.forbidden.add("trainjobs/status")
    cluster.add_job()
    with PodServer() as pod, controlling() as (_, counters):
        cluster.add_pod(pod)
        refused = {("what", "status"), ("result", "error")}
        cluster.wait_for(lambda: any(set(key) == refused and count for key, count in counters.of("writes").items()))
    assert "trainjobs is forbidden" in caplog.text


def test_an_event_that_the_api_server_could_not_take_is_made_once_it_can(
    cluster: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "FIRST_RETRY_S", 0.1)
    cluster.add_job()
    with PodServer() as pod, controlling() as (_, counters):
        name = cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        cluster.overloaded.add("events")
        cluster.end_pod(name, 143, termination_message())
        failed = {("what", "event"), ("result", "error")}
        cluster.wait_for(lambda: any(set(key) == failed and count for key, count in counters.of("writes").items()))
        cluster.overloaded.clear()
        cluster.wait_for(lambda: cluster.progress().get("state") == "Preempted")
    assert cluster.events() == ["Preempted"]


def test_a_write_that_is_repeated_makes_no_event_twice(cluster: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if somebody has changed the job in between."""
    monkeypatch.setattr(controller_module, "FIRST_RETRY_S", 0.1)
    cluster.add_job()
    with PodServer() as pod, controlling():
        name = cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        cluster.overloaded.add("trainjobs")
        cluster.end_pod(name, 143, termination_message())
        cluster.wait_for(lambda: cluster.events() == ["Preempted"])
        cluster.put("trainjobs", {**cluster.job(), "spec": {**cluster.job()["spec"], "suspend": False}})
        cluster.overloaded.clear()
        cluster.wait_for(lambda: cluster.progress().get("state") == "Preempted")
    assert cluster.events() == ["Preempted"]


def test_an_event_that_is_refused_does_not_hold_up_the_status(cluster: JobServer) -> None:
    cluster.forbidden.add("events")
    cluster.add_job()
    with PodServer() as pod, controlling():
        cluster.end_pod(cluster.add_pod(pod), 143, termination_message())
        cluster.wait_for(lambda: cluster.progress().get("state") == "Preempted")


def test_a_pod_that_starts_while_the_one_before_is_polled_is_polled_at_once(
    cluster: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "poll_interval", lambda *_, **__: timedelta(minutes=5))
    cluster.add_job()
    with PodServer() as former, PodServer() as pod, controlling():
        former.holds = True
        name = cluster.add_pod(former)
        cluster.wait_for(lambda: bool(former.requests))
        cluster.end_pod(name, 143, termination_message())
        cluster.add_pod(pod, created=now() + timedelta(seconds=1))
        cluster.wait_for(lambda: bool(pod.requests))


def test_a_job_that_was_created_again_while_a_write_was_under_way_gets_none_of_it(cluster: JobServer) -> None:
    cluster.add_job()
    with PodServer() as pod, controlling():
        name = cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        cluster.slow_s = 0.5
        pod.report(step=151)
        writes = len(cluster.writes())
        cluster.wait_for(lambda: len(cluster.writes()) > writes)
        cluster.delete("trainjobs", "train", "team")
        cluster.delete("pods", name, "team")
        cluster.add_job()
        job = cluster.job()
        job["metadata"]["uid"] = "another"
        cluster.put("trainjobs", job)
        cluster.slow_s = 0.0
        cluster.wait_for(lambda: cluster.progress().get("state") == "Pending")
        assert "step" not in cluster.progress()


def test_a_job_that_was_created_again_starts_with_nothing(cluster: JobServer) -> None:
    cluster.add_job()
    with PodServer() as pod, controlling():
        name = cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
        cluster.delete("trainjobs", "train", "team")
        cluster.delete("pods", name, "team")
        cluster.add_job()
        job = cluster.job()
        job["metadata"]["uid"] = "another"
        cluster.put("trainjobs", job)
        cluster.wait_for(lambda: cluster.progress().get("state") == "Pending")
        assert "step" not in cluster.progress()


def test_the_metrics_of_jobs_say_what_their_status_says(cluster: JobServer) -> None:
    cluster.add_job()
    cluster.add_job("waits")
    with PodServer() as pod, controlling() as (controller, counters):
        cluster.add_pod(pod)
        cluster.wait_for(lambda: cluster.progress().get("step") == 150 and "state" in cluster.progress("waits"))
        cluster.wait_for(lambda: any(job.progress.step == 150 for job, _ in controller.observed_jobs()))
        lines = list(families.of_jobs(controller.observed_jobs()))
        own = list(families.of_operator(counters, is_leader=True, objects={"TrainJob": 2}))
    train = '{namespace="team",trainjob="train"'
    assert f"reprieve_trainjob_step{train}}} 150.0" in lines
    assert f'reprieve_trainjob_info{train},state="Running"}} 1.0' in lines
    assert f"reprieve_trainjob_last_save_seconds{train}}} 2.13" in lines
    assert f"reprieve_trainjob_grace_period_seconds{train}}} 30.0" in lines
    assert 'reprieve_trainjob_info{namespace="team",trainjob="waits",state="Pending"} 1.0' in lines
    assert not any(line.startswith('reprieve_trainjob_step{namespace="team",trainjob="waits"') for line in lines)
    assert "reprieve_operator_is_leader 1.0" in own
    assert 'reprieve_operator_polls_total{result="bad_answer"} 0.0' in own


def test_exactly_the_metrics_that_alerts_and_dashboard_use_are_served(cluster: JobServer) -> None:
    cluster.add_job()
    with PodServer() as pod, controlling() as (controller, counters):
        cluster.add_pod(pod)
        cluster.wait_for(lambda: any(job.progress.step == 150 for job, _ in controller.observed_jobs()))
        own = families.of_operator(counters, is_leader=True, objects={"Pod": 1})
        lines = [*families.of_jobs(controller.observed_jobs()), *own]
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == set(METRICS)
    for line in lines:
        if not line.startswith("#"):
            name, _, labels = line.split(" ")[0].partition("{")
            assert tuple(re.findall(r'(\w+)="', labels)) == METRICS[name], line
