"""`reprieve status trainjob[/NAME]`: a table of all jobs, one job in full, or its changes as they come."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from typing import Any

from rich.table import Table
from rich.text import Text

from reprieve.cli.output import ago, data, print_json, talk
from reprieve.cli.trainjob.target import Target, connected
from reprieve.errors import ApiUnreachable, ConfigError
from reprieve.kubernetes.jobs.job_view import JobView, Source
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.jobs.train_jobs import TrainJobs
from reprieve.kubernetes.jobs.training_progress import step_of

POLL_S = 2.0
INTERRUPTED = 130
_COLOURS = {
    JobState.SUCCEEDED: "green",
    JobState.RUNNING: "green",
    JobState.FAILED: "red",
    JobState.UNKNOWN: "red",
}


def show(target: Target, args: Namespace) -> int:
    if args.watch and not target.name:
        raise ConfigError("--watch is for one job: write trainjob/NAME")
    with connected(target, "status") as jobs:
        if args.watch:
            return _follow(jobs, target, as_json=args.json)
        views = [jobs.get(target.name)] if target.name else jobs.all()
    if args.json:
        shown = [view.to_json() for view in views]
        print_json(shown[0] if target.name else shown)
    elif target.name:
        data.print(_details(views[0]))
    elif views:
        data.print(_table(views))
    else:
        talk.print("no TrainJobs here; name another namespace with --namespace")
    return 0


def _follow(jobs: TrainJobs, target: Target, *, as_json: bool) -> int:
    """Print a line for each change, until the job has ended or somebody interrupts it."""
    last: Any = None
    try:
        while True:
            try:
                view = jobs.get(target.name)
            except ApiUnreachable as error:
                talk.print(f"{error}; trying again")
                time.sleep(POLL_S)
                continue
            shown = json.dumps(view.to_json()) if as_json else _line(view)
            if shown != last:
                print(shown if as_json else f"{view.now:%H:%M:%S}  {shown}", flush=True)
                last = shown
            if view.state.is_end:
                return 0 if view.state == JobState.SUCCEEDED else 1
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return INTERRUPTED


def _line(view: JobView) -> str:
    progress = view.progress
    parts = [
        str(view.state),
        _step(view),
        f"loss {progress.loss}" if progress.loss is not None else "",
        f"{progress.estimated_time_remaining} left" if _is_running(view) and progress.estimated_time_remaining else "",
        _checkpoint_name(view),
        f"stale: {_age(view)}" if view.is_stale else "",
        view.reason,
    ]
    return "  ".join(part for part in parts if part)


def _table(views: list[JobView]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("trainjob", "state", "step", "done", "left", "checkpoint", "updated"):
        table.add_column(heading, justify="right" if heading in ("step", "done", "left") else "left")
    for view in views:
        progress = view.progress
        table.add_row(
            view.name,
            _state(view),
            "" if progress.step is None else str(progress.step),
            "" if progress.percent is None else f"{progress.percent:.0f}%",
            (progress.estimated_time_remaining or "") if _is_running(view) else "",
            _checkpoint_name(view),
            _age(view),
        )
    return table


def _details(view: JobView) -> Table:
    progress, saved, age = view.progress, view.progress.checkpointing, _age(view)
    values = {
        "loss": progress.loss,
        "accuracy": progress.accuracy,
        "learning rate": progress.learning_rate,
        "validation loss": progress.validation_loss,
        "validation accuracy": progress.validation_accuracy,
    }
    rows: list[tuple[str, str | Text]] = [
        ("trainjob", f"{view.namespace}/{view.name}"),
        ("state", _state(view)),
        ("reason", view.reason),
        ("step", _step(view)),
        ("epoch", _epoch(view)),
        *((name, value or "") for name, value in values.items()),
        ("left", (progress.estimated_time_remaining or "") if _is_running(view) else ""),
        ("checkpoint", _checkpoint(view)),
        ("checkpoints", "" if saved.checkpoints_created is None else f"{saved.checkpoints_created} created"),
        ("save error", Text(saved.error or "", "red")),
        ("resumed from", progress.resumed_from or ""),
        ("restarts", "" if progress.restarts is None else str(progress.restarts)),
        ("updated", f"{age}, from {_SOURCES[view.source]}" if age and view.source in _SOURCES else age),
        ("pods", ", ".join(f"{pod.name} {pod.phase}" for pod in view.pods)),
    ]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for key, value in rows:
        if value:
            table.add_row(key, value)
    if view.source == Source.NOWHERE and _is_running(view):
        table.add_row("progress", "unknown: no operator reports it, and pods/proxy does not answer")
    return table


_SOURCES = {
    Source.OPERATOR: "the operator",
    Source.POD: "rank 0 (no operator has written it)",
    Source.TERMINATION_MESSAGE: "the termination message of rank 0 (no operator has written it)",
}


def _is_running(view: JobView) -> bool:
    return view.state in (JobState.RUNNING, JobState.SAVING)


def _state(view: JobView) -> Text:
    return Text(f"{view.state}{' (stale)' if view.is_stale else ''}", _COLOURS.get(view.state, "yellow"))


def _step(view: JobView) -> str:
    progress = view.progress
    if progress.step is None:
        return ""
    total = "" if progress.total_steps is None else f"/{progress.total_steps}"
    done = "" if progress.percent_complete is None else f" ({progress.percent_complete} %)"
    return f"step {progress.step}{total}{done}"


def _epoch(view: JobView) -> str:
    progress = view.progress
    epoch = progress.current_epoch or ("" if progress.epoch is None else str(progress.epoch))
    return f"{epoch} of {progress.total_epochs}" if epoch and progress.total_epochs is not None else epoch


def _checkpoint_name(view: JobView) -> str:
    step = step_of(view.progress.checkpointing.latest_checkpoint)
    return "" if step is None else f"checkpoint-{step}"


def _checkpoint(view: JobView) -> str:
    saved = view.progress.checkpointing
    if saved.latest_checkpoint is None:
        return ""
    when = "" if saved.latest_checkpoint_time is None else f", {ago(saved.latest_checkpoint_time)}"
    return f"{saved.latest_checkpoint}{when}"


def _age(view: JobView) -> str:
    """How old the data is: never how old the table is."""
    updated = view.progress.last_update_time
    return "" if updated is None else ago(updated)
