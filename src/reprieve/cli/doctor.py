"""`reprieve doctor`: is there something to fix on this machine?

Looks at disk, room, grace period, torchrun, PID 1, shared memory and versions. Exit 1 if something is bad.

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
from reprieve.launch.doctor import BAD, OK, WARN, Check, Where, examine
from reprieve.storage.uri import local_path
from reprieve.units import parse_size

_COLOURS = {OK: "green", WARN: "yellow", BAD: "red"}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", help="where checkpoints are or will be [CHECKPOINT_URI; else this folder]")
    parser.add_argument("--state", help="how large a checkpoint is; default: the newest in the folder")
    parser.add_argument("--sample", default="256MB", help="how much to write to measure the disk (256MB)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: Namespace) -> int:
    asked = local_path(args.folder or os.environ.get("CHECKPOINT_URI") or ".")
    where = Where(
        _existing(asked),
        os.environ,
        parse_size(args.state) if args.state else _newest_bytes(asked),
        parse_size(args.sample),
    )
    if args.json:
        checks = list(examine(where))
        print_json([asdict(one) for one in checks])
    else:
        with talk.status("writing to the disk …"):
            checks = list(examine(where))
        _show(checks)
    return 1 if any(one.level == BAD for one in checks) else 0


def _existing(folder: Path) -> Path:
    """It, or the folder that it would be made in."""
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _newest_bytes(folder: Path) -> int | None:
    from reprieve.checkpoint.folder.catalog import list_checkpoints

    found = [one for one in list_checkpoints(folder) if one.problem is None] if folder.is_dir() else []
    return found[0].bytes if found else None


def _show(checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for one in checks:
        fix = f"\n→ {one.fix}" if one.fix else ""
        table.add_row(one.name, Text(one.level, _COLOURS[one.level]), f"{one.found}{fix}")
    data.print(table)
