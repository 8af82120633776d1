"""What happened to a job, as conditions in its status and as Events, which `kubectl describe` shows.

A condition holds until what it reports is over. Its message names the thing, the number and the way out, and an Event
with the same message is made whenever a condition begins to hold or its message changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from reprieve import exit_codes
from reprieve.errors import ConfigError
from reprieve.kubernetes.checkpointing import Checkpointing
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.jobs.training_progress import Condition, LastExit, TrainingProgress
from reprieve.operator.status.job_state import NOT_STARTED, how_it_ended, is_lost, pause_of, was_preempted
from reprieve.operator.status.objects import ObservedPod
from reprieve.operator.status.observed import Observed, why_it_waits
from reprieve.operator.status.starts import (
    MAX_STARTS_WITHOUT_PROGRESS,
    NO_PROGRESS,
    is_without_progress,
    last_report,
)
from reprieve.run_state import RunState
from reprieve.units import parse_duration

VOLUMES_WITHIN = timedelta(seconds=60)
"""How long a pod may wait for its volumes on its node before their objects count as missing."""
STALE_INTERVALS = 2
_CLAIM = "persistentvolumeclaim"
_NOT_THERE = re.compile("not found|couldn't find key")
"""A container may also have a wrong configuration, such as an image that runs as root."""

NORMAL, WARNING = "Normal", "Warning"
_KINDS = {
    "Preempted": NORMAL,
    "Paused": NORMAL,
    "Resumed": NORMAL,
    "ResumedFromEarlierJob": NORMAL,
    "NotSaved": WARNING,
    NO_PROGRESS: WARNING,
    "CheckpointStale": WARNING,
    "StorageFallback": WARNING,
    "StorageMissing": WARNING,
    "ReprieveMissing": WARNING,
    "NodeLost": WARNING,
}
"""All conditions, and the type of their Events."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something to show beside the job."""

    type: str
    reason: str
    message: str


def conditions_of(
    observed: Observed, before: TrainingProgress, after: TrainingProgress
) -> tuple[tuple[Condition, ...], list[Event]]:
    """Return the conditions, and the Events about those that are new. `after`: the progress with its new state."""
    messages = {**_lasting(observed, before, after), **dict(_current(observed, before, after))}
    found, events = [], []
    for kind, event_type in _KINDS.items():
        former, message = before.condition(kind), messages.get(kind)
        if message is None:
            if former is not None:
                found.append(_with_status(former, "False", observed.now) if former.holds else former)
            continue
        if former is None or not former.holds or former.message != message:
            events.append(Event(event_type, kind, message))
        condition = former or Condition(type=kind)
        found.append(replace(_with_status(condition, "True", observed.now), reason=kind, message=message))
    return tuple(found), events


def _with_status(condition: Condition, status: str, now: datetime) -> Condition:
    if condition.status == status:
        return condition
    return replace(condition, status=status, last_transition_time=now.replace(microsecond=0))


def _lasting(observed: Observed, before: TrainingProgress, after: TrainingProgress) -> dict[str, str]:
    """The conditions that hold on, with their messages: what they report is not over."""
    trains = observed.live_report is not None and _is_training(after)
    last = after.last_exit
    has_new_checkpoint = last is not None and (after.latest_step or 0) > (last.checkpoint_step or 0)
    is_over = {
        "Preempted": trains or bool(observed.job.end),
        "Paused": trains or not observed.job.is_suspended,
        "NotSaved": has_new_checkpoint or bool(observed.job.end),
        "ReprieveMissing": observed.live_report is not None,
    }
    # The operator that has just taken over does not know yet.
    is_over["CheckpointStale"] = observed.live_report is not None or not _is_training(after)
    is_over |= {"Resumed": False, "ResumedFromEarlierJob": False}
    held = [each for each in before.conditions or () if each.holds]
    return {each.type: each.message for each in held if not is_over.get(each.type, True)}


def _current(observed: Observed, before: TrainingProgress, after: TrainingProgress) -> Iterator[tuple[str, str]]:
    """The conditions that hold now."""
    yield from _of_the_last_exit(observed, before, after)
    yield from _of_a_resume(observed, after)
    if is_without_progress(after):
        yield NO_PROGRESS, no_progress_message(after)
    if stale := _stale_checkpoint(observed, after):
        yield "CheckpointStale", stale
    if fallback := _fallback(observed.job.settings, after):
        yield "StorageFallback", fallback
    # One message about all pods: with one for each, the same fault would be as many Events.
    missing = dict.fromkeys(filter(None, (_missing_storage(observed, pod) for pod in observed.pods)))
    if missing:
        yield "StorageMissing", ". ".join(missing)
    if lost := [pod for pod in observed.pods if is_lost(observed, pod)]:
        yield "NodeLost", _lost_nodes(lost)


def _is_training(after: TrainingProgress) -> bool:
    return after.state in (JobState.RUNNING, JobState.SAVING)


def _of_the_last_exit(
    observed: Observed, before: TrainingProgress, after: TrainingProgress
) -> Iterator[tuple[str, str]]:
    last = after.last_exit
    if last is None or (before.last_exit is not None and before.last_exit.pod == last.pod):
        return
    if was_preempted(last):
        is_pause = observed.job.is_suspended and (pause_of(observed, after) is not None or not observed.job.is_queued)
        yield "Paused" if is_pause else "Preempted", _how_it_was_saved(after)
    if last.exit_code in NOT_STARTED and not _has_reported(observed, last):
        yield (
            "ReprieveMissing",
            (
                f"the container's command was not found (exit code {last.exit_code}: {last.message or 'no message'}): "
                "the image needs `pip install reprieve`"
            ),
        )
    elif last.exit_code not in (exit_codes.FINISHED, exit_codes.PERMANENT_FAILURE):
        lost = (after.step or 0) - (after.latest_step or 0)
        if lost > 0:
            start = "at step 0" if after.latest_step is None else f"from checkpoint-{after.latest_step}"
            # What nobody saw end may have saved once more.
            most = " or later: at most" if last.exit_code is None else ":"
            yield (
                "NotSaved",
                f"{how_it_ended(last)} after step {after.step}; the next start begins {start}{most} {lost} lost",
            )


def _has_reported(observed: Observed, last: LastExit) -> bool:
    """Whether Reprieve has run in the pod: then the command that it starts was not found, or has this exit code."""
    return any(pod.name == last.pod and last_report(observed, pod) is not None for pod in observed.pods)


def _how_it_was_saved(after: TrainingProgress) -> str:
    """`saved checkpoint-150 in 2.1 s`."""
    if after.saved and after.latest_step is not None:
        seconds = after.checkpointing.last_save_seconds
        took = "" if seconds is None else f" in {seconds:.1f} s"
        return f"saved checkpoint-{after.latest_step}{took}"
    if (after.step or 0) > (after.latest_step or 0):
        return f"stopped after step {after.step}, which is not saved"
    if after.latest_step is not None:
        return f"stopped before it trained a new step: checkpoint-{after.latest_step} is the newest"
    return "stopped before it reported a step"


def _of_a_resume(observed: Observed, after: TrainingProgress) -> Iterator[tuple[str, str]]:
    report = observed.live_report
    if report is None or report.progress.state == RunState.STARTING or report.progress.resumed_from is None:
        return
    message = f"resumed from {report.progress.resumed_from} in pod {report.pod}"
    pod = observed.rank_zero
    # Not by the reported restarts: the launcher counts those of the folder, and an earlier job's are among them.
    if after.last_exit is None and pod is not None and pod.restart == 0:
        yield "ResumedFromEarlierJob", f"{message}: an earlier job has left it in the folder"
    else:
        yield "Resumed", message


def no_progress_message(after: TrainingProgress) -> str:
    last = after.last_exit
    ended = f"; the last one: {last.message or how_it_ended(last)}" if last is not None else ""
    return (
        f"{MAX_STARTS_WITHOUT_PROGRESS} starts in a row saved no new step{ended}. The job is paused: correct it, "
        "and resume it with `reprieve resume`"
    )


def _stale_checkpoint(observed: Observed, after: TrainingProgress) -> str:
    """Why the newest checkpoint is older than the job wants it to be; empty: it is not, as far as is known."""
    interval, pod = interval_of(observed.job.settings), observed.rank_zero
    if interval is None or pod is None or pod.container.started is None or pod.deleted_at is not None:
        return ""
    if not _is_training(after):  # a save that does not end is one more reason
        return ""
    # At the time of the report: since then the job may have saved as often as it wants to.
    reported_at = observed.reached_at if observed.live_report is not None else None
    since = max(filter(None, (pod.container.started, after.checkpointing.latest_checkpoint_time)))
    if reported_at is None or reported_at - since <= STALE_INTERVALS * interval:
        return ""
    return (
        f"no checkpoint since {since:%Y-%m-%dT%H:%M:%SZ}, though the interval is {observed.job.settings.interval}: "
        f"see `kubectl logs {pod.name}`"
    )


def interval_of(settings: Checkpointing) -> timedelta | None:
    """How often the job wants a checkpoint; None: not by time."""
    if settings.strategy not in ("", "time"):
        return None
    try:
        return parse_duration(settings.interval)
    except ConfigError:
        return None


def _fallback(settings: Checkpointing, after: TrainingProgress) -> str:
    latest = after.checkpointing.latest_checkpoint
    if not settings.in_object_store or latest is None or "://" in latest:
        return ""
    return f"checkpoints go to {settings.folder}: {settings.uri} is not written to"


def _missing_storage(observed: Observed, pod: ObservedPod) -> str:
    if pod.is_gone or pod.has_ended or pod.container.started is not None:
        return ""
    why, namespace = why_it_waits(pod), pod.namespace
    if _CLAIM in pod.unscheduled:
        return f"{why}. Create it in namespace {namespace}: the pods then start by themselves"
    if pod.container.waiting == "CreateContainerConfigError" and _NOT_THERE.search(pod.container.waiting_message):
        return f"{pod.container.waiting_message}. Create it in namespace {namespace}"
    settings = observed.job.settings
    wanted = [f"claim {settings.volume.claim}"] if settings.volume else []
    wanted += [f"Secret {settings.secret}"] if settings.secret else []
    waits_since = None if pod.has_sandbox else pod.scheduled_at
    if not wanted or waits_since is None or observed.now - waits_since < VOLUMES_WITHIN:
        return ""
    return f"the pods wait for their volumes: see whether {' and '.join(wanted)} exist in namespace {namespace}"


def _lost_nodes(pods: list[ObservedPod]) -> str:
    nodes, ranks = sorted({pod.node for pod in pods}), ", ".join(map(str, sorted(pod.rank for pod in pods)))
    subject = f"node {nodes[0]} does not answer" if len(nodes) == 1 else f"nodes {', '.join(nodes)} do not answer"
    waiting = f"rank {ranks} runs on there" if len(pods) == 1 else f"ranks {ranks} run on there"
    return (
        f"{subject}: {waiting}, and the job waits. What is back saves and ends. If a machine is gone for good, "
        f"`kubectl delete node {' '.join(nodes)}` starts the job again"
    )
