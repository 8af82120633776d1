"""What the operator exports: the alert rules and the dashboard of the chart use these series and no others."""

from __future__ import annotations

_JOB = ("namespace", "trainjob")

METRICS: dict[str, tuple[str, ...]] = {
    **{
        f"reprieve_trainjob_{name}": _JOB
        for name in (
            "step",
            "total_steps",
            "progress_percent",
            "loss",
            "remaining_seconds",
            "last_update_timestamp_seconds",
            "running_since_timestamp_seconds",
            "last_checkpoint_timestamp_seconds",
            "checkpoint_interval_seconds",
            "last_save_seconds",
            "grace_period_seconds",
            "restarts_total",
            "starts_without_progress",
            "checkpoints_created_total",
        )
    },
    "reprieve_trainjob_info": (*_JOB, "state"),
    "reprieve_trainjob_condition": (*_JOB, "condition"),
    "reprieve_operator_is_leader": (),
    "reprieve_operator_objects": ("kind",),
    "reprieve_operator_polls_total": ("result",),
    "reprieve_operator_writes_total": ("what", "result"),
    "reprieve_operator_watch_restarts_total": ("kind",),
    "process_resident_memory_bytes": (),
    "process_cpu_seconds_total": (),
}
"""Name and labels. Only the leader exports the series of jobs."""
TARGET_LABELS = ("instance", "pod")
"""Prometheus adds these to each series, by where it has it from."""
