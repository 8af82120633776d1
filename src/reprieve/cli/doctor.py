"""`reprieve doctor`: checks whether this machine is ready for preemptible training.

Checks disk, free space, grace period, torchrun, PID 1, shared memory and versions. Exit 1 if a check is bad.

examples:
  reprieve doctor checkpoints
  REPRIEVE_GRACE=30s reprieve doctor /mnt/checkpoints --state 18GB
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from reprieve.cli.output import data, print_json, talk
from reprieve.launch.doctor import BAD, OK, WARN, Check, Target, examine
from reprieve.storage.uri import local_path
from reprieve.units import parse_size

_COLOURS = {OK: "green", WARN: "yellow", BAD: "red"}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", help="the checkpoint folder, which may not exist yet [CHECKPOINT_URI; else this folder]"
    )
    parser.add_argument("--state", metavar="SIZE", help="size of a checkpoint; default: of the newest in the folder")
    parser.add_argument(
        "--sample", metavar="SIZE", default="256MB", help="how much to write to measure the disk (256MB)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: Namespace) -> int:
    folder = local_path(args.folder or os.environ.get("CHECKPOINT_URI") or ".")
    target = Target(
        _existing(folder),
        os.environ,
        parse_size(args.state) if args.state else _newest_bytes(folder),
        parse_size(args.sample),
    )
    if args.json:
        checks = list(examine(target))
        print_json([asdict(check) for check in checks])
    else:
        with talk.status("writing to the disk …"):
            checks = list(examine(target))
        _show(checks)
    return 1 if any(check.level == BAD for check in checks) else 0


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _newest_bytes(folder: Path) -> int | None:
    from reprieve.checkpoint.folder.catalog import list_checkpoints

    checkpoints = list_checkpoints(folder) if folder.is_dir() else []
    return next((checkpoint.bytes for checkpoint in checkpoints if checkpoint.problem is None), None)


def _show(checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        fix = f"\n→ {check.fix}" if check.fix else ""
        table.add_row(check.name, Text(check.level, _COLOURS[check.level]), f"{check.found}{fix}")
    data.print(table)
