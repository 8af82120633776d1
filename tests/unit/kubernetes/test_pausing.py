"""Pausing and resuming a TrainJob, with and without Kueue: what is patched, and what is left alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from reprieve.kubernetes.kinds import EARLIER_WORKLOAD, TRAIN_JOB, WORKLOAD
from reprieve.kubernetes.names import PAUSE_ANNOTATION
from reprieve.kubernetes.pausing import (
    CannotPause,
    CannotResume,
    MergePatch,
    PauseRecord,
    is_queued,
    pause,
    pause_of,
    resume,
    unfinished_pods,
    workload_of,
)

Object = dict[str, Any]
NOW = datetime(2026, 11, 19, 5, 0, tzinfo=timezone.utc)


def job(*, suspend: bool = False, annotations: Object | None = None, conditions: Iterable[str] = ()) -> Object:
    return {
        "metadata": {
            "name": "finetune",
            "namespace": "team",
            "uid": "job-uid",
            "resourceVersion": "7",
            "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
            "annotations": annotations or {},
            "managedFields": [
                {"manager": "sdk", "time": "2026-11-18T10:00:00Z", "fieldsV1": {"f:spec": {"f:suspend": {}}}},
                {"manager": "kubectl-patch", "time": "2026-11-19T04:00:00Z", "fieldsV1": {"f:spec": {"f:suspend": {}}}},
                {"manager": "trainer", "time": "2026-11-19T04:30:00Z", "fieldsV1": {"f:status": {}}},
            ],
        },
        "spec": {"suspend": suspend},
        "status": {"conditions": [{"type": each, "status": "True"} for each in conditions]},
    }


def workload(*, active: bool | None = True, version: str = WORKLOAD.api_version, **metadata: Any) -> Object:
    owner = [{"kind": "TrainJob", "name": "finetune", "uid": "job-uid"}]
    return {
        "apiVersion": version,
        "metadata": {"name": "trainjob-finetune-1a", "resourceVersion": "3", "ownerReferences": owner, **metadata},
        "spec": {} if active is None else {"active": active},
    }


def written(found: Mapping[str, Any], patches: list[MergePatch], name: str) -> Object:
    """Return the object with the patches for it, as the API server merges them."""
    merged: Object = copy.deepcopy(dict(found))
    for patch in patches:
        if patch.name == name:
            assert patch.content["metadata"]["resourceVersion"] == merged["metadata"]["resourceVersion"]
            for key, value in patch.content["metadata"].get("annotations", {}).items():
                merged["metadata"]["annotations"].pop(key, None)
                if value is not None:
                    merged["metadata"]["annotations"][key] = value
            merged["spec"] |= patch.content.get("spec", {})
    return merged


def paused(found: Object) -> Object:
    return written(found, pause(found, None, by="reprieve pause", now=NOW), "finetune")


def test_a_job_is_suspended_with_a_record_in_one_patch() -> None:
    [patch] = pause(job(), None, by="reprieve pause", now=NOW, reason="budget")
    assert (patch.kind, patch.name) == (TRAIN_JOB, "finetune")
    assert patch.content["spec"] == {"suspend": True}
    found = written(job(), [patch], "finetune")
    assert pause_of(found, None)
    record = PauseRecord(by="reprieve pause", reason="budget", time=NOW)
    assert PauseRecord.from_job(found) == record
    assert str(record) == "reprieve pause at 2026-11-19 05:00:00 UTC (budget)"


def test_a_paused_job_is_resumed_and_nothing_of_the_pause_remains() -> None:
    found = paused(job(annotations={"of": "the user"}))
    resumed = written(found, resume(found, None), "finetune")
    assert resumed == job(annotations={"of": "the user"})


def test_pausing_twice_changes_nothing() -> None:
    assert pause(paused(job()), None, by="another", now=NOW + timedelta(hours=1)) == []


def test_with_kueue_the_workload_is_deactivated_and_the_job_is_only_annotated() -> None:
    first, second = pause(job(), workload(active=None), by="reprieve pause", now=NOW)
    assert "spec" not in first.content and first.kind == TRAIN_JOB
    assert (second.kind, second.name, second.content["spec"]) == (WORKLOAD, "trainjob-finetune-1a", {"active": False})
    # Kueue suspends the job then.
    found, inactive = written(job(suspend=True), [first], "finetune"), workload(active=False)
    assert pause_of(found, inactive)
    assert pause(found, inactive, by="another", now=NOW) == []
    activate, forget = resume(found, inactive)
    assert activate.content["spec"] == {"active": True}
    assert "spec" not in forget.content, "Kueue starts the job once it has quota"
    assert PauseRecord.from_job(written(found, [forget], "finetune")) is None


def test_a_pause_whose_second_patch_failed_is_completed_by_the_next() -> None:
    first, _ = pause(job(), workload(), by="reprieve pause", now=NOW)
    found = written(job(), [first], "finetune")
    assert pause_of(found, workload()) is None
    assert [each.kind for each in pause(found, workload(), by="reprieve pause", now=NOW)] == [TRAIN_JOB, WORKLOAD]


def test_kueue_of_an_earlier_version() -> None:
    patches = pause(job(), workload(version=EARLIER_WORKLOAD.api_version), by="reprieve pause", now=NOW)
    assert patches[1].kind == EARLIER_WORKLOAD


def test_a_job_that_waits_for_quota_can_be_paused_but_not_resumed() -> None:
    waiting = job(suspend=True)
    assert is_queued(waiting, workload())
    assert len(pause(waiting, workload(), by="reprieve pause", now=NOW)) == 2
    with pytest.raises(CannotResume, match="not paused by Reprieve: it waits for quota in the queue gpus of Kueue"):
        resume(waiting, workload())


def test_what_somebody_else_has_suspended_stays_as_it_is() -> None:
    match = (
        "finetune was not paused by Reprieve: it is suspended, by kubectl-patch at 2026-11-19T04:00:00Z. To start it "
        'all the same: kubectl patch trainjob finetune -n team --type merge -p \'{"spec":{"suspend":false}}\''
    )
    with pytest.raises(CannotResume) as refusal:
        resume(job(suspend=True), None)
    assert str(refusal.value) == match
    with pytest.raises(CannotPause, match="suspended already, by kubectl-patch at 2026-11-19T04:00:00Z"):
        pause(job(suspend=True), None, by="reprieve pause", now=NOW)


def test_what_somebody_else_has_started_and_suspended_again_stays_as_it_is() -> None:
    """The record of the pause stays when somebody starts the job by another way."""
    found = paused(job())
    ours = {"f:metadata": {"f:annotations": {f"f:{PAUSE_ANNOTATION}": {}}}, "f:spec": {"f:suspend": {}}}
    found["metadata"]["managedFields"] = [{"manager": "reprieve.dev/cli", "fieldsV1": ours}]
    assert pause_of(found, None) and resume(found, None)
    theirs = {"f:spec": {"f:suspend": ours.pop("f:spec")["f:suspend"]}}
    found["metadata"]["managedFields"].append({"manager": "argocd", "fieldsV1": theirs})
    assert pause_of(found, None) is None
    with pytest.raises(CannotResume, match="not paused by Reprieve: it is suspended, by argocd"):
        resume(found, None)


def test_what_somebody_else_has_deactivated_stays_as_it_is() -> None:
    inactive = workload(active=False)
    with pytest.raises(CannotResume, match=r"Workload is not active, by somebody else.*patch workload trainjob-fine"):
        resume(job(suspend=True), inactive)
    with pytest.raises(CannotPause, match="its Workload is not active"):
        pause(job(suspend=True), inactive, by="reprieve pause", now=NOW)


def test_a_job_that_runs_is_not_resumed() -> None:
    with pytest.raises(CannotResume, match="it is not suspended"):
        resume(job(), None)


@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_a_job_that_has_ended_is_neither_paused_nor_resumed(end: str) -> None:
    with pytest.raises(CannotPause, match=end):
        pause(job(conditions=[end]), None, by="reprieve pause", now=NOW)
    with pytest.raises(CannotResume, match=end):
        resume(paused(job()) | {"status": job(conditions=[end])["status"]}, None)


def test_a_job_that_somebody_has_started_since_loses_its_record() -> None:
    started = paused(job())
    started["spec"]["suspend"] = False
    assert pause_of(started, None) is None
    [patch] = resume(started, None)
    assert "spec" not in patch.content
    assert written(started, [patch], "finetune") == job()


@pytest.mark.parametrize(
    "record", ["", "no JSON", "[]", "null", '{"version": 2, "by": "x"}', json.dumps({"version": 1, "time": "soon"})]
)
def test_a_record_that_cannot_be_read_is_no_pause_of_this_version(record: str) -> None:
    found = job(suspend=True, annotations={PAUSE_ANNOTATION: record})
    assert PauseRecord.from_job(found) is None
    with pytest.raises(CannotResume):
        resume(found, None)


def test_the_workload_is_found_by_its_owner_or_its_label() -> None:
    other = workload(name="other", ownerReferences=[{"uid": "another"}])
    older = workload(name="older", creationTimestamp="2026-11-18T00:00:00Z")
    labelled = workload(
        name="labelled",
        ownerReferences=None,
        labels={"kueue.x-k8s.io/job-uid": "job-uid"},
        creationTimestamp="2026-11-19T00:00:00Z",
    )
    assert workload_of(job(), [other]) is None
    assert workload_of(job(), [older, other]) == older
    assert workload_of(job(), [older, labelled, other]) == labelled


def test_a_pod_that_is_being_deleted_still_saves() -> None:
    def pod(name: str, phase: str, of: str = "finetune", **metadata: str) -> Object:
        labels = {"jobset.sigs.k8s.io/jobset-name": of}
        return {"metadata": {"name": name, "labels": labels, **metadata}, "status": {"phase": phase}}

    pods = [
        pod("saves", "Running", deletionTimestamp="2026-11-19T05:00:00Z"),
        pod("waits", "Pending"),
        pod("ended", "Failed"),
        pod("another", "Running", of="another"),
    ]
    assert unfinished_pods(job(), pods) == ["saves", "waits"]
