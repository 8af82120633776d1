"""`reprieve pause`, `resume`, `logs` and `ls` for `trainjob/NAME`."""

from __future__ import annotations

import json
from argparse import Namespace

from rich.table import Table
from rich.text import Text

from reprieve.cli.output import ago, data, print_json, talk
from reprieve.cli.trainjob.target import Target, connected
from reprieve.kubernetes.jobs.train_jobs import PauseOutcome
from reprieve.kubernetes.jobs.training_progress import AvailableCheckpoint, step_of
from reprieve.units import format_duration, format_size, parse_duration

INTERRUPTED = 130


def pause(target: Target, args: Namespace) -> int:
    timeout = None if args.timeout is None else parse_duration(args.timeout)
    with connected(target, "pause") as jobs, talk.status(Text(f"{target.name} is saving …")):
        outcome = jobs.pause(target.name, reason=args.reason or "", wait=not args.no_wait, timeout=timeout)
    if args.json:
        print_json(
            {
                "name": outcome.name,
                "step": outcome.step,
                "saved": outcome.is_saved,
                "checkpoint": outcome.checkpoint,
                "message": outcome.message,
                "seconds": round(outcome.took.total_seconds(), 1),
                "waited": not args.no_wait,
            }
        )
    else:
        talk.print(f"{_sentence(outcome, waited=not args.no_wait)}. Resume it with: {target.command('resume')}")
    return 1 if outcome.is_saved is False else 0


def resume(target: Target, args: Namespace) -> int:
    with connected(target, "resume") as jobs:
        view = jobs.resume(target.name)
    if args.json:
        print_json(view.to_json())
        return 0
    checkpoint = view.progress.checkpointing.latest_checkpoint
    talk.print(
        f"{target.name} resumes{f' from {_short(checkpoint)}' if checkpoint else ''}. "
        f"Follow it with: {target.command('status --watch')}"
    )
    return 0


def show_log(target: Target, args: Namespace) -> int:
    rank = args.rank or 0
    with connected(target, "logs") as jobs:
        try:
            for line in jobs.read_log(target.name, rank=rank, follow=args.follow, lines=args.lines):
                print(json.dumps({"rank": rank, "line": line}) if args.json else line, flush=args.follow)
        except KeyboardInterrupt:
            return INTERRUPTED
    return 0


def list_checkpoints(target: Target, args: Namespace) -> int:
    with connected(target, "ls") as jobs:
        found = jobs.checkpoints(target.name)
    if args.json:
        print_json([_as_dict(checkpoint) for checkpoint in found])
        return 0
    if not found:
        talk.print(f"{target.name} has reported no checkpoints")
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in ("checkpoint", "step", "saved", "size", "state"):
        table.add_column(heading, justify="right" if heading in ("step", "saved", "size") else "left")
    for checkpoint in found:
        table.add_row(
            checkpoint.path or "",
            "" if checkpoint.step is None else str(checkpoint.step),
            "" if checkpoint.created is None else ago(checkpoint.created),
            "" if checkpoint.bytes is None else format_size(checkpoint.bytes),
            _validity(checkpoint),
        )
    data.print(table)
    return 0


def _sentence(outcome: PauseOutcome, *, waited: bool) -> str:
    """Say what a pause has saved: `finetune is paused: checkpoint-57 is saved, all pods stopped within 2.1 s`."""
    name, took = outcome.name, format_duration(outcome.took.total_seconds())
    if outcome.was_paused:
        return f"{name} was paused already" + (f": {_short(outcome.checkpoint)}" if outcome.checkpoint else "")
    if not waited:
        return f"{name} saves and stops"
    stopped = f"all pods stopped within {took}"
    if outcome.is_saved is False:
        newest = _short(outcome.checkpoint) if outcome.checkpoint else "there is no checkpoint"
        return f"{name} is paused, and step {outcome.step} is NOT saved ({newest}); {outcome.message}"
    if outcome.step is None:
        return f"{name} is paused; {stopped}, and training had not begun, or rank 0 has left no report"
    return f"{name} is paused: saved at step {outcome.step} ({_short(outcome.checkpoint)}); {stopped}"


def _short(checkpoint: str | None) -> str:
    step = step_of(checkpoint)
    return f"checkpoint-{step}" if step is not None else checkpoint or "no checkpoint"


def _validity(checkpoint: AvailableCheckpoint) -> Text:
    if checkpoint.valid is None:
        return Text("")
    return Text("valid", "green") if checkpoint.valid else Text(checkpoint.reason or "invalid", "red")


def _as_dict(checkpoint: AvailableCheckpoint) -> dict[str, object]:
    return {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "created": None if checkpoint.created is None else checkpoint.created.isoformat(),
        "bytes": checkpoint.bytes,
        "valid": checkpoint.valid,
        "problem": checkpoint.reason,
    }
