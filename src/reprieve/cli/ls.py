"""`reprieve ls`: lists the checkpoints in a folder, newest first: step, age, size, and whether they are valid.

Reads manifests and sizes only; `reprieve verify` reads every byte. Of a TrainJob, it lists those that rank 0 has last
reported.

examples:
  reprieve ls checkpoints
  reprieve ls trainjob/finetune --json
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from reprieve.cli.checkpoint_argument import checkpoints_at
from reprieve.cli.output import ago, data, print_json, talk
from reprieve.cli.trainjob.target import add_options, find_job
from reprieve.units import format_size

if TYPE_CHECKING:
    from reprieve.checkpoint.folder.catalog import CheckpointInfo


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the checkpoint folder, or trainjob/NAME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_options(parser)


def main(args: Namespace) -> int:
    if (target := find_job(args.folder, args)) is not None:
        from reprieve.cli.trainjob.verbs import list_checkpoints

        return list_checkpoints(target, args)
    checkpoints = checkpoints_at(args.folder)
    if args.json:
        print_json([as_dict(checkpoint) for checkpoint in checkpoints])
        return 0
    if not checkpoints:
        talk.print(f"no checkpoints in {args.folder}")
        return 0
    table = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("checkpoint", "left"),
        ("step", "right"),
        ("epoch", "right"),
        ("saved", "right"),
        ("size", "right"),
        ("run", "left"),
        ("state", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for checkpoint in checkpoints:
        manifest = checkpoint.manifest
        table.add_row(
            checkpoint.path.name,
            str(checkpoint.step),
            f"{manifest.epoch:g}" if manifest and manifest.epoch is not None else "",
            ago(checkpoint.created),
            format_size(checkpoint.bytes),
            f"{manifest.run} #{manifest.attempt}" if manifest else "",
            Text("valid", "green")
            if manifest and not checkpoint.problem
            else Text(checkpoint.problem, "red")
            if checkpoint.problem
            else Text("no manifest (written by other tools)", "yellow"),
        )
    data.print(table)
    return 0


def as_dict(checkpoint: CheckpointInfo) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "epoch": manifest.epoch if manifest else None,
        "created": checkpoint.created.isoformat(),
        "bytes": checkpoint.bytes,
        "valid": None if checkpoint.is_foreign else checkpoint.problem is None,
        "problem": checkpoint.problem,
        "run": manifest.run if manifest else None,
        "attempt": manifest.attempt if manifest else None,
        "metrics": dict(manifest.metrics) if manifest else {},
    }
