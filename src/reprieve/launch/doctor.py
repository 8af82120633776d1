"""`reprieve doctor`: finds what on this machine would make a stop slow or lose work. Each check is a function."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from mmap import mmap
from pathlib import Path

from reprieve.launch.runs.run_record import state_folder
from reprieve.preemption.deadline import Grace, resolve_grace_period
from reprieve.storage.disk import Disk, free_bytes, free_files
from reprieve.units import format_size

OK, WARN, BAD = "ok", "warning", "bad"

_BLOCK_BYTES = 16 * 2**20
_SLOW_BYTES_PER_S = 200e6
"""Bytes a second below which a save of a few gigabytes does not fit into 30 s."""
_MIN_TORCH = (2, 6)
_SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"}
_SHM = "/dev/shm"  # noqa: S108 - only inspected
_MIN_SHM_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    level: str
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """What is checked."""

    folder: Path
    """The checkpoint folder, or its nearest parent that exists."""
    env: Mapping[str, str]
    state_bytes: int | None
    """The size of a checkpoint: given, or of the newest."""
    sample_bytes: int
    """How much to write to measure the disk."""


def examine(target: Target) -> Iterator[Check]:
    speed, checks = _disk(target)
    yield from checks
    yield _room(target)
    grace = resolve_grace_period(None, target.env)
    yield _in_time(target, grace, speed)
    yield _torchrun(target, grace)
    yield _first_process()
    yield _shared_memory()
    yield _records(target)
    yield from _versions()


def _disk(target: Target) -> tuple[float | None, list[Check]]:
    """Measure the disk by writing as a save does: in blocks, past the page cache, flushed."""
    path = target.folder / f".reprieve-doctor-{os.getpid()}"
    disk, block = Disk(), mmap(-1, _BLOCK_BYTES)
    block.write(os.urandom(2**20) * (_BLOCK_BYTES // 2**20))
    size = max(target.sample_bytes, _BLOCK_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
    if size > free_bytes(target.folder) / 2:
        return None, [Check("disk", BAD, f"no space in {target.folder}", "free some space, or use another disk")]
    try:
        file = disk.create(path, size)
        try:
            began = time.monotonic()
            for at in range(0, size, _BLOCK_BYTES):
                disk.write(file, memoryview(block), at)
            disk.flush(file)
            speed = size / (time.monotonic() - began)
            direct = file.direct
        finally:
            disk.close(file)
            disk.remove(path)
    except OSError as error:
        fix = "choose a folder that can be written"
        return None, [Check("disk", BAD, f"{target.folder} cannot be written: {error.strerror}", fix)]
    level = OK if speed >= _SLOW_BYTES_PER_S else WARN
    fix = "" if level == OK else "use a faster disk for checkpoints (local NVMe, a larger volume)"
    checks = [Check("disk", level, f"{format_size(speed)}/s durable, in {target.folder}", fix)]
    if direct:
        checks.append(Check("direct I/O", OK, "supported by the file system"))
    else:
        fix = "saves go through the page cache here, which is slower; use a local ext4 or xfs"
        checks.append(Check("direct I/O", WARN, "not supported by the file system", fix))
    return speed, checks


def _room(target: Target) -> Check:
    free = free_bytes(target.folder)
    found = f"{format_size(free)} and {free_files(target.folder):,.0f} files free"
    if target.state_bytes is None:
        return Check("room", OK, found + "; no checkpoint to compare with (give its size with --state 14GB)")
    found += f"; a checkpoint takes {format_size(target.state_bytes)}"
    if free < target.state_bytes:
        return Check("room", BAD, found, "the next save will not fit: free some space, or lower keep")
    if free < 2 * target.state_bytes:
        return Check("room", WARN, found, "only one more save fits: free some space, or lower keep")
    return Check("room", OK, found)


def _in_time(target: Target, grace: Grace, speed: float | None) -> Check:
    if grace.period is None:
        return Check(
            "grace period", OK, "no preemption source detected; set REPRIEVE_GRACE=30s to check a grace period"
        )
    if target.state_bytes is None or speed is None:
        return Check("grace period", OK, f"{grace}")
    needed = target.state_bytes / speed
    found = f"{grace}; a save takes about {needed:.1f} s"
    if needed > grace.period.total_seconds():
        return Check("grace period", BAD, found, f"use at least {needed * 1.5 + 5:.0f} s; reprieve drill measures it")
    if needed > grace.period.total_seconds() / 2:
        return Check("grace period", WARN, found, "the margin is thin; reprieve drill measures it")
    return Check("grace period", OK, found)


def _torchrun(target: Target, grace: Grace) -> Check:
    text = target.env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    if not text:
        return Check("torchrun", OK, "kills its ranks 30 s after a signal; reprieve run makes that the grace period")
    seconds = int(text) if text.isdigit() else 30
    if grace.period is not None and seconds < grace.period.total_seconds():
        fix = f"unset TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or make it {grace.period.total_seconds():.0f}"
        return Check("torchrun", BAD, f"kills its ranks after {seconds} s, before the grace period is over", fix)
    return Check("torchrun", OK, f"kills its ranks {seconds} s after a signal")


def _first_process() -> Check:
    try:
        words = Path("/proc/1/cmdline").read_bytes().split(b"\0")
    except OSError:
        return Check("PID 1", OK, "cannot be seen from here")
    name = Path(os.fsdecode(words[0])).name if words and words[0] else "?"
    if name in _SHELLS:
        fix = "a shell does not forward SIGTERM: make the command `exec …`, or start the container with reprieve run"
        return Check("PID 1", BAD, f"is {name}", fix)
    return Check("PID 1", OK, f"is {name}")


def _shared_memory() -> Check:
    try:
        total = shutil.disk_usage(_SHM).total
    except OSError:
        return Check("shared memory", WARN, f"there is no {_SHM}", "DataLoader workers need it")
    if total < _MIN_SHM_BYTES:
        fix = "DataLoader workers pass batches through it: docker run --shm-size=8g, or an emptyDir of medium Memory"
        return Check("shared memory", WARN, f"{_SHM} has {format_size(total)}", fix)
    return Check("shared memory", OK, f"{_SHM} has {format_size(total)}")


def _records(target: Target) -> Check:
    folder = state_folder(target.env)
    known = folder
    while not known.exists():
        known = known.parent
    if os.access(known, os.W_OK):
        return Check("run records", OK, f"in {folder}")
    return Check("run records", WARN, f"{folder} cannot be written", "set REPRIEVE_STATE_DIR to a folder that can")


def _versions() -> Iterator[Check]:
    python = ".".join(str(part) for part in sys.version_info[:3])
    yield Check(
        "Python",
        OK if sys.version_info >= (3, 10) else BAD,
        python,
        "" if sys.version_info >= (3, 10) else "3.10 or newer is needed",
    )
    for package, least in (("torch", _MIN_TORCH), ("transformers", None), ("accelerate", None), ("safetensors", None)):
        try:
            found = version(package)
        except PackageNotFoundError:
            if least is not None:
                yield Check(package, BAD, "not installed", "pip install 'reprieve[torch]'")
            continue
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if least is not None and numbers < least:
            yield Check(package, BAD, found, f"{'.'.join(map(str, least))} or newer is needed")
        else:
            yield Check(package, OK, found)
