"""`reprieve verify`: read every byte of checkpoints and say whether they are what was saved.

Exit 1 if any is not valid. Checkpoints that were set aside are known to be bad: they are left out, unless they are
named or there is nothing else.

example: reprieve verify checkpoints/checkpoint-500
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from reprieve.cli.checkpoint_argument import checkpoints_at
from reprieve.cli.output import data, print_json, talk
from reprieve.errors import InvalidCheckpoint

if TYPE_CHECKING:
    from reprieve.checkpoint.folder.catalog import CheckpointInfo


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("target", help="a checkpoint, or a folder of them")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: Namespace) -> int:
    found = checkpoints_at(args.target)
    found = [one for one in found if not one.is_quarantined] or found
    if not found:
        talk.print(f"no checkpoints in {args.target}")
    results = [result for one in found if (result := _verify_one(one)) is not None]
    if args.json:
        print_json(results)
    for result in results if not args.json else ():
        if result["problem"] is None:
            speed = f"{result['bytes'] / max(result['seconds'], 1e-9) / 1e9:.2f} GB/s"
            verdict = ("valid", "green"), f" ({result['bytes']:,} bytes, {speed})"
        else:
            verdict = ("not valid", "red"), f": {result['problem']}"
        data.print(Text.assemble(f"{result['path']}: ", *verdict))
    return 0 if all(result["problem"] is None for result in results) else 1


def _verify_one(one: CheckpointInfo) -> dict[str, Any] | None:
    """None if it is gone: a run that is training removes what it no longer wants."""
    from reprieve.checkpoint.buffers.block_pool import BlockPool
    from reprieve.checkpoint.folder.retention import reading
    from reprieve.checkpoint.folder.verify import verify as verify_checkpoint

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    problem = one.problem
    start = time.monotonic()
    if problem is None:
        with reading(one.path), Progress(*columns, console=talk, transient=True) as bar:
            task = bar.add_task(one.path.name, total=one.bytes)
            try:
                verify_checkpoint(one.path, BlockPool(), progress=lambda count: bar.advance(task, count))
            except InvalidCheckpoint as error:
                problem = error.reason
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
    if problem is not None and not os.path.lexists(one.path):
        talk.print(f"{one.path} is left out: it was removed meanwhile")
        return None
    seconds = time.monotonic() - start
    return {"path": str(one.path), "step": one.step, "bytes": one.bytes, "seconds": seconds, "problem": problem}
