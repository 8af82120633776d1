"""What the operator writes about a job, from its first pod to its end, as stories."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import yaml

from reprieve.kubernetes import checkpointing
from reprieve.kubernetes.crd import schema
from reprieve.kubernetes.jobs import training_progress
from reprieve.kubernetes.names import PAUSE_ANNOTATION
from tests.support.operator_kit import SETTINGS, Story, answer, stamp, termination_message

SEED_KEYS = {
    "epoch": int, "totalEpochs": int, "step": int, "totalSteps": int, "loss": str, "accuracy": str,
    "validationLoss": str, "validationAccuracy": str, "learningRate": str, "percentComplete": str,
    "estimatedTimeRemaining": str, "lastUpdateTime": str, "checkpointing": dict,
}  # fmt: skip
"""Readers of earlier controllers rely on these."""
UNSCHEDULABLE = "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available: 2 No victims."


def suspend(story: Story, *, by: str = "", workload: str = "") -> None:
    story.job["spec"]["suspend"] = True
    if by:
        record = {"version": 1, "by": by, "reason": "", "time": stamp(story.now), "workload": workload}
        story.job["metadata"]["annotations"][PAUSE_ANNOTATION] = json.dumps(record)


def in_a_queue() -> Story:
    story = Story()
    story.job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "queue"}
    return story


def fail_once(story: Story, number: int, **changes: Any) -> str:
    """A start that resumes and fails. Return why the job is to be paused."""
    story.train_to(101, resumedFrom="checkpoint-100", resumedFromStep=100, restarts=number, **changes)
    story.after(1)
    story.end(1)
    pause = story.reconcile().pause
    story.remove_pods()
    return pause


# States


def test_a_job_from_its_creation_to_its_end() -> None:
    story = Story(nodes=2)
    story.reconcile()
    assert (story.progress["state"], story.progress["reason"]) == ("Pending", "no pod of rank 0 yet")
    story.add_pods()
    unscheduled = {"type": "PodScheduled", "status": "False", "message": UNSCHEDULABLE}
    story.pods[1]["status"]["conditions"] = [unscheduled]
    story.reconcile()
    assert story.progress["state"] == "Pending"
    story.starts(0)
    story.reconcile()
    assert story.progress["state"] == "WaitingForPeers"
    assert story.progress["reason"] == "rank 1 Pending (Insufficient cpu)"
    story.starts(1)
    story.reconcile()
    assert story.progress["state"] == "Starting"
    story.reports()
    story.reconcile()
    progress = story.progress
    assert progress["state"] == "Running" and "reason" not in progress
    assert {name: type(progress[name]) for name in SEED_KEYS} == SEED_KEYS
    assert progress["checkpointing"]["latestCheckpoint"] == "/c/checkpoint-100"
    assert progress["checkpointing"]["checkpointsCreated"] == 2
    assert progress["pod"] == "train-node-0-0-0"
    story.after(30)
    story.reports(state="saving", checkpointing={"savingStep": 160, "savingPercentage": 40})
    story.reconcile()
    assert (story.progress["state"], story.progress["checkpointing"]["savingPercentage"]) == ("Saving", 40)
    story.after(30)
    message = termination_message(
        state="finished", step=300, progressPercentage=100, estimatedRemainingSeconds=0, saved=None,
        lastUpdateTime=stamp(story.now), message="finished after 300 steps",
    )  # fmt: skip
    story.end(0, message, reason="Completed")
    story.job.setdefault("status", {})["conditions"] = [{"type": "Complete", "status": "True", "message": "done"}]
    story.reconcile()
    progress = story.progress
    assert (progress["state"], progress["step"], progress["percentComplete"]) == ("Succeeded", 300, "100.0")
    assert (progress["estimatedTimeRemaining"], progress["lastExit"]["exitCode"]) == ("0s", 0)
    assert "savingStep" not in progress["checkpointing"]
    assert story.events == []


def test_a_new_start_shows_where_the_job_is_and_not_step_0() -> None:
    story = Story()
    story.train_to(150)
    story.end(143, termination_message())
    story.reconcile()
    before = story.progress
    story.remove_pods()
    story.add_pods()
    story.starts(0)
    story.after(20)
    story.reports(state="starting", step=0, percentComplete="0.0", epoch=0, currentEpoch="0.00", loss=None)
    story.reconcile()
    for name in ("step", "percentComplete", "epoch", "loss", "lastUpdateTime"):
        assert story.progress[name] == before[name], name
    assert story.progress["state"] == "Starting"
    assert "estimatedTimeRemaining" not in story.progress, "nobody knows it before it trains"


def test_data_that_gets_old_is_marked_and_keeps_its_time() -> None:
    story = Story()
    story.train_to(150)
    updated = story.progress["lastUpdateTime"]
    for _ in range(4):
        story.after(30)
        story.reached_at = story.now
        story.reconcile()
    progress = story.progress
    assert (progress["state"], progress["stale"], progress["lastUpdateTime"]) == ("Running", True, updated)
    assert progress["reason"] == f"no news from training since {updated}"
    assert "estimatedTimeRemaining" not in progress
    story.reports(step=151)
    story.reconcile()
    assert "stale" not in story.progress and story.progress["step"] == 151


def test_a_job_that_cannot_be_reached_is_unknown_since_then() -> None:
    story = Story()
    story.train_to(150)
    since = stamp(story.now)
    story.unreachable = "10.0.0.1:28080 refused the connection"
    story.after(60)
    story.reconcile()
    assert story.progress["state"] == "Running"
    story.after(60)
    story.reconcile()
    assert story.progress["state"] == "Unknown"
    assert story.progress["reason"] == f"since {since}: 10.0.0.1:28080 refused the connection"
    assert (story.progress["stale"], story.progress["step"]) == (True, 150)


@pytest.mark.parametrize("port", ["28080", "off"])
def test_a_job_that_never_answers_is_unknown_after_a_while(port: str) -> None:
    story = Story()
    story.add_pods()
    story.pods[0]["spec"]["containers"][0]["env"] = [{"name": "REPRIEVE_METRICS_PORT", "value": port}]
    story.starts(0)
    why = "REPRIEVE_METRICS_PORT turns its progress off"
    if port != "off":
        story.unreachable = why = "Connection refused"
    story.after(600)
    story.reconcile()
    assert (story.progress["state"], story.progress["reason"]) == ("Starting", f"no progress yet: {why}")
    story.after(1)
    story.reconcile()
    assert (story.progress["state"], story.progress["reason"]) == (
        "Unknown",
        f"no answer since it started at 2026-11-19T05:00:00Z: {why}",
    )
    story.reports()
    story.reconcile()
    assert story.progress["state"] == "Running"


@pytest.mark.parametrize("by", ["reprieve pause", ""])
def test_a_pause(by: str) -> None:
    story = Story()
    story.train_to(150)
    suspend(story, by=by)
    story.delete()
    story.reconcile()
    assert story.progress["state"] == "Saving"
    story.end(143, termination_message())
    story.reconcile()
    assert story.progress["state"] == "Paused"
    assert story.progress["reason"].startswith(f"paused by {by} at" if by else "spec.suspend is true")
    assert (story.reasons, story.events[0].message) == (["Paused"], "saved checkpoint-150 in 2.1 s")
    story.remove_pods()
    story.reconcile()
    assert story.progress["state"] == "Paused"
    story.job["spec"]["suspend"] = False
    story.job["metadata"]["annotations"].pop(PAUSE_ANNOTATION, None)
    story.train_to(151, restarts=1, resumedFrom="checkpoint-150", resumedFromStep=150)
    assert (story.progress["state"], story.condition("Paused")["status"]) == ("Running", "False")
    assert story.reasons == ["Paused", "Resumed"]


def test_a_job_in_a_queue_of_kueue() -> None:
    story = in_a_queue()
    suspend(story)
    story.reconcile()
    assert (story.progress["state"], story.progress["reason"]) == ("Pending", "waits for quota of Kueue")
    story.job["spec"]["suspend"] = False
    story.train_to(150)
    suspend(story)
    story.end(143, termination_message())
    story.remove_pods()
    story.reconcile()
    assert (story.progress["state"], story.reasons) == ("Preempted", ["Preempted"])
    assert story.progress["startsWithoutProgress"] == 0
    suspend(story, by="reprieve pause")
    story.reconcile()
    assert story.progress["state"] == "Paused"


def test_a_record_of_a_pause_that_did_not_stop_the_job_is_no_pause() -> None:
    """The Workload could not be deactivated: the job ran on for an hour, and then Kueue preempted it."""
    story = in_a_queue()
    story.train_to(150)
    suspend(story, by="reprieve pause", workload="trainjob-train")
    story.job["spec"]["suspend"] = False
    story.after(3600)
    story.reports(step=1500, checkpointing={"latestCheckpointTime": stamp(story.now)})
    story.reconcile()
    story.job["spec"]["suspend"] = True
    story.end(143, termination_message())
    story.reconcile()
    assert (story.progress["state"], story.reasons) == ("Preempted", ["Preempted"])
    suspend(story, by="reprieve pause", workload="trainjob-train")
    story.reconcile()
    assert story.progress["state"] == "Paused", "a later one is"


def test_a_job_that_failed_for_good() -> None:
    story = Story()
    story.train_to(150)
    message = "permanent failure, restarting will not help: bad setting"
    story.end(42, termination_message(state="failed", message=message))
    story.reconcile()  # before JobSet and Trainer have noticed
    assert story.progress["state"] == "Pending" and "restarting" not in story.progress["reason"]
    story.job["status"]["conditions"] = [{"type": "Failed", "status": "True", "message": "jobset failed"}]
    story.reconcile()
    assert (story.progress["state"], story.progress["reason"]) == ("Failed", message)


# What is written


def test_every_field_is_in_the_schema_with_its_type() -> None:
    story = Story()
    story.train_to(150, restarts=1, resumedFrom="checkpoint-100", resumedFromStep=100, tokensPerSecond="9.00")
    story.end(143, termination_message())
    story.reconcile()
    assert_valid(story.progress, schema()["trainingProgress"], "trainingProgress")
    assert_valid(training_progress.parse(answer())[0].to_json(), schema()["trainingProgress"], "report")


def assert_valid(value: object, rule: Any, path: str) -> None:
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    assert type(value) is kinds[rule["type"]], path
    if isinstance(value, dict):
        for name, each in value.items():
            assert name in rule["properties"], f"{path}.{name}"
            assert_valid(each, rule["properties"][name], f"{path}.{name}")
    if isinstance(value, list):
        for each in value:
            assert_valid(each, rule["items"], f"{path}[]")


def test_the_model_has_every_field_of_the_schema() -> None:
    known = schema()["trainingProgress"]["properties"]
    checkpoints = known["checkpointing"]["properties"]
    for kind, properties in (
        (training_progress.TrainingProgress, known),
        (training_progress.Checkpoints, checkpoints),
        (training_progress.LastExit, known["lastExit"]["properties"]),
        (training_progress.AvailableCheckpoint, checkpoints["availableCheckpoints"]["items"]["properties"]),
    ):
        assert set(training_progress.json_names(kind)) == set(properties), kind


def test_counters_never_fall() -> None:
    story = Story()
    story.train_to(150, restarts=3, checkpointing={"checkpointsCreated": 7})
    story.after(30)
    story.reports(step=120, restarts=1, checkpointing={"checkpointsCreated": 2})
    story.reconcile()
    assert (story.progress["restarts"], story.progress["checkpointing"]["checkpointsCreated"]) == (3, 7)
    assert story.progress["step"] == 120, "a job that was rolled back is where it is"


def test_nothing_is_written_without_a_change() -> None:
    story = Story()
    story.train_to(150)
    story.after(20)
    story.reached_at = story.now
    assert story.reconcile().progress is None


def test_a_dropped_field_comes_back_as_equal_settings() -> None:
    story = Story()
    assert story.reconcile().field is None
    del story.job["spec"]["checkpointing"]
    field = story.reconcile().field
    assert field is not None and "version" not in field
    assert checkpointing.parse(field, "") == checkpointing.parse(yaml.safe_load(SETTINGS), "")


def test_a_stored_status_that_is_nonsense_does_no_harm() -> None:
    story = Story()
    story.job["status"] = {"trainingProgress": {"step": "many", "conditions": "no", "checkpointing": 7}}
    story.train_to(150)
    assert (story.progress["step"], story.progress["state"]) == (150, "Running")


# Events and conditions


def test_a_preemption_and_the_resume_after_it() -> None:
    story = Story(nodes=2)
    story.train_to(150)
    story.delete(disruption="EvictionByEvictionAPI")
    story.reconcile()
    assert (story.progress["state"], story.progress["reason"]) == ("Saving", "stopping (EvictionByEvictionAPI)")
    story.after(3)
    story.end(143, termination_message())
    story.reconcile()
    assert story.progress["state"] == "Preempted"
    assert story.progress["checkpointing"]["latestCheckpoint"] == "/c/checkpoint-150"
    assert story.progress["lastExit"] == {
        "pod": "train-node-0-0-0",
        "time": stamp(story.now),
        "exitCode": 143,
        "reason": "Disrupted: EvictionByEvictionAPI",
        "message": "stopped by SIGTERM: saved at step 150. The next start resumes from there",
        "checkpointStep": 150,
    }
    [event] = story.events
    assert (event.type, event.reason, event.message) == ("Normal", "Preempted", "saved checkpoint-150 in 2.1 s")
    assert story.condition("Preempted")["status"] == "True"
    story.remove_pods()
    story.reconcile()
    assert story.progress["state"] == "Preempted"
    story.train_to(151, restarts=1, resumedFrom="checkpoint-150", resumedFromStep=150)
    assert story.reasons == ["Preempted", "Resumed"]
    assert story.events[-1].message == "resumed from checkpoint-150 in pod train-node-0-0-1"
    assert story.condition("Preempted")["status"] == "False"
    assert (story.progress["state"], story.progress["restarts"]) == ("Running", 1)


def test_the_end_of_a_pod_that_is_already_gone_counts() -> None:
    story = Story()
    story.train_to(150)
    story.end(143, termination_message())
    story.remove_pods()
    story.reconcile()
    assert story.reasons == ["Preempted"]


def test_a_job_that_finds_the_checkpoint_of_an_earlier_job() -> None:
    story = Story()
    story.train_to(151, resumedFrom="checkpoint-150", resumedFromStep=150, restarts=3)  # those of the folder
    [event] = story.events
    assert event.reason == "ResumedFromEarlierJob"
    assert "an earlier job has left it" in event.message


def test_a_kill_without_notice_names_what_is_lost() -> None:
    story = Story()
    story.train_to(157)
    story.end(137, reason="OOMKilled")
    story.reconcile()
    assert story.progress["state"] == "Pending"
    assert story.progress["reason"] == "restarting: rank 0 ended with exit code 137 (OOMKilled)"
    [event] = story.events
    assert (event.type, event.reason) == ("Warning", "NotSaved")
    assert event.message == (
        "rank 0 ended with exit code 137 (OOMKilled) after step 157; the next start begins from checkpoint-100: 57 lost"
    )
    story.remove_pods()
    story.train_to(101, restarts=1, resumedFrom="checkpoint-100", resumedFromStep=100)
    assert story.condition("NotSaved")["status"] == "True"
    story.after(30)
    story.reports(step=161, checkpointing={"latestCheckpoint": "/c/checkpoint-160"})
    story.reconcile()
    assert story.condition("NotSaved")["status"] == "False"


def test_an_end_that_nobody_saw_is_not_known_to_have_lost_anything() -> None:
    story = Story()
    story.train_to(157)
    story.remove_pods()
    story.reconcile()
    [event] = story.events
    assert event.message == (
        "rank 0's pod is gone, and nobody saw how it ended after step 157; the next start begins from checkpoint-100 "
        "or later: at most 57 lost"
    )


def test_a_stop_that_could_not_save() -> None:
    story = Story()
    story.train_to(150)
    story.end(143, termination_message(saved=False, checkpointing={"latestCheckpoint": "/c/checkpoint-100"}))
    story.reconcile()
    assert story.reasons == ["Preempted", "NotSaved"]
    assert story.events[0].message == "stopped after step 150, which is not saved"
    assert "50 lost" in story.events[1].message


def test_a_stop_of_a_job_that_has_reported_no_step() -> None:
    """It may train in a loop of its own, which reports nothing."""
    story = Story()
    story.add_pods()
    story.starts(0)
    story.reconcile()
    story.end(143)
    story.reconcile()
    [event] = story.events
    assert (event.reason, event.message) == ("Preempted", "stopped before it reported a step")


def test_a_job_that_restarts_without_progress_is_paused() -> None:
    story = Story()
    pauses = [fail_once(story, number) for number in range(1, 6)]
    assert pauses[:4] == [""] * 4
    assert pauses[4].startswith("5 starts in a row saved no new step; the last one: rank 0 ended with exit code 1.")
    assert story.condition("NoProgress")["message"] == pauses[4]
    assert story.reasons.count("NoProgress") == 1
    suspend(story, by="reprieve operator")
    assert story.reconcile().pause == ""
    assert story.progress["state"] == "Paused"
    # Somebody corrects it and resumes it.
    del story.job["spec"]["suspend"], story.job["metadata"]["annotations"][PAUSE_ANNOTATION]
    assert story.reconcile().pause == ""
    assert (story.progress["startsWithoutProgress"], story.condition("NoProgress")["status"]) == (0, "False")
    assert [fail_once(story, number) != "" for number in range(6, 11)] == [False] * 4 + [True]


def test_a_job_of_kueue_that_was_paused_without_progress_runs_again_after_a_resume() -> None:
    """Kueue starts it later than the resume: in between it is suspended, and no pause is on it."""
    story = in_a_queue()
    for number in range(1, 6):
        fail_once(story, number)
    suspend(story, by="reprieve operator", workload="trainjob-train")
    assert story.reconcile().pause == ""
    assert story.progress["state"] == "Paused"
    del story.job["metadata"]["annotations"][PAUSE_ANNOTATION]
    story.after(30)
    story.reconcile()
    assert (story.progress["state"], story.progress["startsWithoutProgress"]) == ("Preempted", 0)
    story.job["spec"]["suspend"] = False
    assert story.reconcile().pause == ""
    assert fail_once(story, 6) == ""


def test_a_job_that_is_suspended_by_hand_keeps_its_count() -> None:
    story = Story()
    for number in range(1, 6):
        fail_once(story, number)
    suspend(story)
    story.reconcile()
    story.after(15)
    story.reconcile()
    assert (story.progress["startsWithoutProgress"], story.condition("NoProgress")["status"]) == (5, "True")


def test_a_record_of_a_pause_that_somebody_else_has_undone_has_no_effect() -> None:
    story = Story()
    story.train_to(150)
    suspend(story, by="reprieve pause")
    story.end(143, termination_message())
    story.remove_pods()
    story.reconcile()
    story.job["spec"]["suspend"] = False  # by kubectl: the record is still there
    story.train_to(151, restarts=1, resumedFrom="checkpoint-150", resumedFromStep=150)
    story.delete(disruption="EvictionByEvictionAPI")
    story.end(143, termination_message())
    story.remove_pods()
    story.reconcile()
    assert story.reasons == ["Paused", "Resumed", "Preempted"]
    assert [fail_once(story, number) != "" for number in range(2, 6)][-1], "it is paused like any other"


def test_a_job_that_finished_while_its_node_was_drained_was_not_preempted() -> None:
    story = Story()
    story.train_to(300)
    story.delete(disruption="EvictionByEvictionAPI")
    story.end(0, termination_message(state="finished", step=300), reason="Completed")
    story.reconcile()
    assert (story.progress["state"], story.reasons) == ("Running", [])


def test_a_new_checkpoint_starts_the_count_anew() -> None:
    story = Story()
    for number in range(1, 5):
        fail_once(story, number)
    fail_once(story, 5, checkpointing={"latestCheckpoint": "/c/checkpoint-101"})
    assert story.progress["startsWithoutProgress"] == 0
    assert fail_once(story, 6) == ""


def test_an_operator_that_takes_over_counts_no_start_twice() -> None:
    story = Story()
    fail_once(story, 1)
    gone, story.former = story.former, []
    story.train_to(101, restarts=2)
    story.former = gone
    story.reconcile()
    assert story.progress["startsWithoutProgress"] == 1


def test_an_image_without_reprieve() -> None:
    story = Story()
    story.add_pods()
    missing = 'exec: "reprieve": executable file not found in $PATH'
    story.end(128, missing, reason="StartError")
    story.reconcile()
    [event] = story.events
    assert (event.type, event.reason) == ("Warning", "ReprieveMissing")
    assert missing in event.message and "pip install reprieve" in event.message
    story.remove_pods()
    story.train_to(1)
    assert story.condition("ReprieveMissing")["status"] == "False"


@pytest.mark.parametrize(
    "message", ["", termination_message(state="failed", message="tran.py: no such command")], ids=["none", "a message"]
)
def test_a_command_that_is_not_found_under_the_launcher_is_no_missing_reprieve(message: str) -> None:
    """It has reported, or has left the launcher's message."""
    story = Story()
    if message:
        story.add_pods()
        story.starts(0)
    else:
        story.train_to(150)
    story.end(127, message)
    story.reconcile()
    assert "ReprieveMissing" not in story.reasons
    assert story.progress["lastExit"]["exitCode"] == 127
    assert story.progress["reason"].startswith("restarting: rank 0 ended with exit code 127")
    assert not message or "tran.py: no such command" in story.progress["reason"]


def test_storage_that_is_missing() -> None:
    story = Story()
    story.add_pods()
    message = 'persistentvolumeclaim "claim" not found. not found'
    story.pods[0]["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": message}]
    story.reconcile()
    [event] = story.events
    assert event.reason == "StorageMissing"
    assert 'persistentvolumeclaim "claim" not found' in event.message and "namespace team" in event.message
    story.starts(0)
    story.reconcile()
    assert story.condition("StorageMissing")["status"] == "False"


def test_a_claim_that_is_missing_for_all_ranks_is_one_event() -> None:
    story = Story(nodes=4)
    story.add_pods()
    for rank in range(4):  # one after the other, as the scheduler tries them
        conditions = [{"type": "PodScheduled", "status": "False", "message": 'persistentvolumeclaim "claim" not found'}]
        story.pods[rank]["status"]["conditions"] = conditions
        story.after(1)
        story.reconcile()
    assert story.reasons == ["StorageMissing"]


@pytest.mark.parametrize(
    ("message", "reasons"),
    [
        ('secret "keys" not found', ["StorageMissing"]),
        ("couldn't find key access in Secret team/keys", ["StorageMissing"]),
        ("container has runAsNonRoot and image will run as root", []),
    ],
)
def test_a_container_that_cannot_be_created(message: str, reasons: list[str]) -> None:
    story = Story()
    story.add_pods()
    waiting = {"reason": "CreateContainerConfigError", "message": message}
    story.pods[0]["status"]["containerStatuses"] = [{"name": "node", "state": {"waiting": waiting}}]
    story.reconcile()
    assert story.reasons == reasons
    assert message in story.progress["reason"]


def test_a_secret_that_is_missing_shows_after_a_minute() -> None:
    """Of waiting on a node: a pod may wait for a node as long as it likes."""
    story = Story(settings=SETTINGS.replace("storage:\n", "storage:\n  secretRef: {name: keys}\n"))
    story.add_pods()
    story.after(3600)
    story.schedule()
    story.reconcile()
    assert story.events == []
    story.after(61)
    story.reconcile()
    [event] = story.events
    assert event.reason == "StorageMissing" and "Secret keys" in event.message and "claim claim" in event.message


def test_checkpoints_that_go_to_the_fallback() -> None:
    settings = "storage: {uri: s3://bucket/run}\npersistentVolume: {claimName: claim, mountPath: /c}\n"
    story = Story(settings=settings)
    story.train_to(150)
    [event] = story.events
    assert event.reason == "StorageFallback"
    assert event.message == "checkpoints go to /c/run: s3://bucket/run is not written to"


@pytest.mark.parametrize("state", ["training", "saving"])
def test_a_checkpoint_that_is_overdue(state: str) -> None:
    """Also where its save does not end."""
    story = Story()
    story.train_to(150)
    began = stamp(story.now)
    for _ in range(11):
        story.after(60)
        story.reports(state=state, checkpointing={"latestCheckpointTime": began})
        story.reconcile()
    assert story.reasons == ["CheckpointStale"]
    assert f"no checkpoint since {began}, though the interval is 5m" in story.events[0].message
    story.reports(checkpointing={"latestCheckpointTime": stamp(story.now)})
    story.reconcile()
    assert story.condition("CheckpointStale")["status"] == "False"


@pytest.mark.parametrize("interval_s", [5, 20])
def test_a_job_that_saves_on_time_and_is_polled_seldom_is_not_overdue(interval_s: int) -> None:
    story = Story(settings=SETTINGS + f"interval: {interval_s}s\n")
    story.train_to(150)
    for second in range(1, 600):
        story.after(1)
        if second % 31 == 0:
            saved = story.now - timedelta(seconds=second % interval_s)
            story.reports(checkpointing={"latestCheckpointTime": stamp(saved)})
        if second % 15 == 0:
            story.reconcile()
    assert story.reasons == []


def test_an_operator_that_takes_over_does_not_repeat_that_a_checkpoint_is_overdue() -> None:
    story = Story()
    story.train_to(150)
    began = stamp(story.now)
    story.after(601)
    story.reports(checkpointing={"latestCheckpointTime": began})
    story.reconcile()
    report, story.report, story.reached_at = story.report, None, None
    story.after(1)
    story.reconcile()
    assert story.condition("CheckpointStale")["status"] == "True"
    story.report, story.reached_at = report, story.now
    story.reconcile()
    assert story.reasons == ["CheckpointStale"]


def test_nodes_that_do_not_answer_are_one_event() -> None:
    story = Story(nodes=3)
    story.train_to(150)
    for rank in (2, 1):
        story.delete(rank, disruption="DeletionByTaintManager")
    story.after(50)
    story.reconcile()
    [event] = story.events
    assert event.message.startswith("nodes node-1, node-2 do not answer: ranks 1, 2 run on there")
    assert "`kubectl delete node node-1 node-2`" in event.message


def test_a_node_that_does_not_answer() -> None:
    story = Story(nodes=2)
    story.train_to(150)
    story.delete(1, grace_s=30, disruption="DeletionByTaintManager")
    story.after(40)
    story.reconcile()
    assert story.events == []
    story.after(10)
    story.reconcile()
    [event] = story.events
    assert event.reason == "NodeLost"
    assert "node node-1 does not answer: rank 1" in event.message and "kubectl delete node node-1" in event.message
    story.delete(0, grace_s=-60)
    story.reconcile()
    since = stamp(story.now - timedelta(seconds=60))
    assert (story.progress["state"], story.progress["reason"]) == (
        "Unknown",
        f"since {since}: node node-0 does not answer",
    )
