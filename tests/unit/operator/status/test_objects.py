"""What is kept of TrainJobs and pods."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from reprieve.kubernetes.jobs.training_progress import TrainingProgress
from reprieve.operator.status.objects import POLL_ANNOTATION, job_of, pod_of
from reprieve.operator.status.observed import why_it_waits
from reprieve.operator.status.poll_schedule import poll_interval
from tests.support.operator_kit import BEGAN, SETTINGS, pod_object, stamp, train_job_object


def test_jobs_that_do_not_ask_are_not_kept() -> None:
    plain = train_job_object()
    del plain["metadata"]["annotations"], plain["spec"]["checkpointing"]
    assert job_of(plain) is None
    assert job_of(train_job_object(settings="enabled: false")) is None
    assert job_of(train_job_object(settings="{not yaml")) is None
    field_only = train_job_object()
    del field_only["metadata"]["annotations"]
    found = job_of(field_only)
    assert found is not None and found.settings.uri == "/c" and found.has_field


@pytest.mark.parametrize(
    "settings",
    [
        "{}" + " " * 16 * 1024,
        "from: 2026-13-45",
        "maxCheckpoints: !!int ''",
        "from: !!timestamp soon",
        "maxCheckpoints: " + "9" * 5000,
        "storage: {uri: /c}\ngracePeriod: 99999999999999999999d",
        "[" * 60_000,
    ],
    ids=["too long", "13th month", "no number", "no time", "endless number", "endless time", "deep"],
)
def test_settings_that_cannot_be_read_are_no_settings(settings: str) -> None:
    assert job_of(train_job_object(settings=settings)) is None


@pytest.mark.parametrize("record", ["[" * 100_000, "7", '{"version": 1, "time": "0001-01-01T00:00:00+23:00"}'])
def test_a_record_of_a_pause_that_cannot_be_read_is_none(record: str) -> None:
    job = train_job_object()
    job["metadata"]["annotations"]["reprieve.dev/paused-by"] = record
    found = job_of(job)
    assert found is not None and found.pause is None


def test_progress_comes_from_the_status_or_else_from_the_annotation() -> None:
    job = train_job_object()
    job["metadata"]["annotations"]["reprieve.dev/progress"] = '{"step": 7}'
    found = job_of(job)
    assert found is not None and found.progress.step == 7
    job["status"] = {"trainingProgress": {"step": 9}}
    found = job_of(job)
    assert found is not None and found.progress.step == 9
    job["metadata"]["annotations"]["reprieve.dev/progress"] = "{"
    del job["status"]
    found = job_of(job)
    assert found is not None and found.progress == TrainingProgress()


def test_pods_that_do_not_train_are_not_kept() -> None:
    for label, value in (("jobset.sigs.k8s.io/jobset-name", None), ("jobset.sigs.k8s.io/job-index", "1")):
        pod = pod_object("pod")
        pod["metadata"]["labels"] = {**pod["metadata"]["labels"], label: value}
        if value is None:
            del pod["metadata"]["labels"][label]
        assert pod_of(pod) is None
    other = pod_object("pod")
    other["spec"]["containers"][0]["name"] = "dataset-initializer"
    assert pod_of(other) is None


@pytest.mark.parametrize(
    ("value", "port"),
    [("8000", 8000), ("off", None), ("0", None), ("99999", None), ("²", None), ("9" * 5000, None)],
)
def test_the_port_of_a_pod(value: str, port: int | None) -> None:
    pod = pod_object("pod")
    found = pod_of(pod)
    assert found is not None and found.port == 28080
    pod["spec"]["containers"][0]["env"] = [{"name": "REPRIEVE_METRICS_PORT", "value": value}]
    found = pod_of(pod)
    assert found is not None and found.port == port


@pytest.mark.parametrize(
    ("spec", "status"),
    [({"hostNetwork": True}, {"podIP": "10.0.0.1"}), ({}, {"podIP": "10.0.0.1", "hostIP": "10.0.0.1"})],
)
def test_a_pod_on_the_network_of_its_node_is_not_polled(spec: dict[str, Any], status: dict[str, Any]) -> None:
    pod = pod_object("pod")
    found = pod_of(pod)
    assert found is not None and found.why_not_polled == ""
    pod["spec"] |= spec
    pod["status"] |= status
    found = pod_of(pod)
    assert found is not None and "hostNetwork" in found.why_not_polled


def test_a_pod_that_only_pretends_to_be_controlled_has_no_owner() -> None:
    for owners in (
        [],
        [{"kind": "Job", "name": "train-node-0"}],
        [{"kind": "ConfigMap", "name": "x", "controller": True}],
    ):
        pod = pod_object("pod")
        pod["metadata"]["ownerReferences"] = owners
        found = pod_of(pod)
        assert found is not None and found.owner == ""


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("0/2 nodes are available: 2 Insufficient cpu. preemption: none", "Insufficient cpu"),
        (
            "0/3 nodes are available: 1 Insufficient memory, 2 node(s) didn't match Pod's node affinity/selector.",
            "Insufficient memory, node(s) didn't match Pod's node affinity/selector",
        ),
        ('persistentvolumeclaim "claim" not found', 'persistentvolumeclaim "claim" not found'),
    ],
)
def test_why_a_pod_waits(message: str, why: str) -> None:
    pod = pod_object("pod")
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": message}]
    found = pod_of(pod)
    assert found is not None and why_it_waits(found) == why


# How often rank 0 is polled


def interval(age_s: float | None, percent: str = "50.0", *, settings: str = SETTINGS, override: str = "") -> float:
    job = train_job_object(settings=settings)
    job["status"] = {"trainingProgress": {"lastUpdateTime": stamp(BEGAN), "percentComplete": "50.0"}}  # as it was
    reported = TrainingProgress()
    if age_s is not None:
        updated = BEGAN - timedelta(seconds=age_s)
        reported = TrainingProgress(last_update_time=updated, percent_complete=percent)
    if override:
        job["metadata"]["annotations"][POLL_ANNOTATION] = override
    found = job_of(job)
    assert found is not None
    wait = poll_interval(found, reported, BEGAN, is_stopping=False, random=0.5)
    return wait.total_seconds()


def test_the_schedule() -> None:
    assert interval(None) == 15, "before the first progress"
    assert interval(5, "9.9") == 15, "under ten percent"
    assert interval(5) == 30, "fresh"
    assert interval(301) == 60, "older than five minutes"
    assert interval(120) == 60, "half of 5 minutes, but at most a minute"
    assert interval(120, settings=SETTINGS + "interval: 80s\n") == 40
    assert interval(120, settings=SETTINGS + "interval: 10s\n") == 15
    assert interval(120, settings=SETTINGS + "interval: epoch\n") == 60


@pytest.mark.parametrize(
    ("text", "seconds"), [("20", 20), ("20s", 20), ("1", 5), ("9999", 300), ("soon", 30), ("nan", 30)]
)
def test_the_annotation_overrides_the_schedule(text: str, seconds: float) -> None:
    assert interval(5, override=text) == seconds


def test_jobs_that_were_created_together_are_not_polled_together() -> None:
    job = job_of(train_job_object())
    assert job is not None
    nothing = TrainingProgress()
    times = {poll_interval(job, nothing, BEGAN, is_stopping=False, random=n / 10) for n in range(11)}
    assert len(times) == 11 and {13.5, 16.5} == {min(times).total_seconds(), max(times).total_seconds()}
    stopping = poll_interval(job, nothing, BEGAN, is_stopping=True, random=0.0)
    assert stopping.total_seconds() == 5
