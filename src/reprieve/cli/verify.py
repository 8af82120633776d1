"""`reprieve verify`: reads every byte of checkpoints and reports whether they are what was saved.

Exit 1 if any is not valid. Quarantined checkpoints are known to be bad: they are left out, unless they are named or
there are no others.

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
    checkpoints = checkpoints_at(args.target)
    checkpoints = [checkpoint for checkpoint in checkpoints if not checkpoint.is_quarantined] or checkpoints
    if not checkpoints:
        talk.print(f"no checkpoints in {args.target}")
    results = [result for checkpoint in checkpoints if (result := _verify(checkpoint)) is not None]
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


def _verify(checkpoint: CheckpointInfo) -> dict[str, Any] | None:
    """Verify a checkpoint. None: it is gone, as a running training prunes its checkpoints."""
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
    problem = checkpoint.problem
    start = time.monotonic()
    if problem is None:
        with reading(checkpoint.path), Progress(*columns, console=talk, transient=True) as bar:
            task = bar.add_task(checkpoint.path.name, total=checkpoint.bytes)
            try:
                verify_checkpoint(checkpoint.path, BlockPool(), progress=lambda count: bar.advance(task, count))
            except InvalidCheckpoint as error:
                problem = error.reason
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
    if problem is not None and not os.path.lexists(checkpoint.path):
        talk.print(f"{checkpoint.path} was removed meanwhile: left out")
        return None
    seconds = time.monotonic() - start
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "bytes": checkpoint.bytes,
        "seconds": seconds,
        "problem": problem,
    }
