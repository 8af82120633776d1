"""`reprieve logs`: shows the output of a run over all its starts, or of one rank of a TrainJob.

examples:
  reprieve logs --follow train-3f2a1b
  reprieve logs --lines 20 --rank 1 trainjob/finetune
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from reprieve.cli.trainjob.target import add_options, find_job
from reprieve.errors import ConfigError
from reprieve.launch.runs.run_record import Runs

_POLL_INTERVAL_S = 0.2
_CHUNK_BYTES = 2**20


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's name, or trainjob/NAME; reprieve status lists them")
    parser.add_argument("-n", "--lines", metavar="N", type=int, help="show only the last N lines")
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new output until the run ends")
    add_options(parser)
    parser.add_argument("--rank", metavar="N", type=int, help="the node of the TrainJob whose output to show (0)")
    parser.add_argument("--json", action="store_true", help="print each line as JSON (a TrainJob)")


def main(args: Namespace) -> int:
    if (target := find_job(args.run, args, "rank", "json")) is not None:
        from reprieve.cli.trainjob.verbs import show_log

        return show_log(target, args)
    run: str = args.run
    runs = Runs()
    record, folder = runs.find(run), runs.folder(run)
    paths = [path for path in (folder / "log.1", folder / "log") if path.exists()]
    if not paths:
        raise ConfigError(
            f"{run} has no log: it printed nothing, it runs in a pod (kubectl logs), or {folder} could not be written"
        )
    printed = [path.read_bytes() for path in paths]
    _print(b"".join(printed), args.lines)
    at = len(printed[-1])
    while args.follow:
        alive = record.alive
        at = _print_from(folder / "log", at)
        if not alive:
            return 0
        time.sleep(_POLL_INTERVAL_S)
        record = runs.find(run)
    return 0


def _print(data: bytes, lines: int | None) -> None:
    if lines is not None:
        data = b"".join(data.splitlines(keepends=True)[-lines:] if lines > 0 else [])
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _print_from(path: Path, at: int) -> int:
    """Print new output and return where it ends. A rotated log is read from its start."""
    if not path.exists():
        return 0
    if path.stat().st_size < at:
        at = 0
    with path.open("rb") as file:
        file.seek(at)
        while data := file.read(_CHUNK_BYTES):
            _print(data, None)
        return file.tell()
