"""`reprieve doctor`: what of this machine would make a stop slow, or lose it. Each check is one function."""

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

_BLOCK = 16 * 2**20
_SLOW = 200e6
"""Bytes a second below which a save of a few gigabytes does not fit into 30 s."""
_TORCH = (2, 6)
_SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"}
_SHM = "/dev/shm"  # noqa: S108 - looked at, not used
_SHM_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    level: str
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Where:
    """What is looked at."""

    folder: Path
    """Of the checkpoints, or the one that it would be made in."""
    env: Mapping[str, str]
    state_bytes: int | None
    """Of the newest checkpoint, or as the user says."""
    sample_bytes: int
    """How much is written to measure the disk."""


def examine(where: Where) -> Iterator[Check]:
    speed, checks = _disk(where)
    yield from checks
    yield _room(where)
    grace = resolve_grace_period(None, where.env)
    yield _in_time(where, grace, speed)
    yield _torchrun(where, grace)
    yield _first_process()
    yield _shared_memory()
    yield _records(where)
    yield from _versions()


def _disk(where: Where) -> tuple[float | None, list[Check]]:
    """By writing: as a save does, in blocks past the page cache, flushed."""
    path = where.folder / f".reprieve-doctor-{os.getpid()}"
    disk, block = Disk(), mmap(-1, _BLOCK)
    block.write(os.urandom(2**20) * (_BLOCK // 2**20))
    size = max(where.sample_bytes, _BLOCK) // _BLOCK * _BLOCK
    if size > free_bytes(where.folder) / 2:
        return None, [Check("disk", BAD, f"no room in {where.folder}", "free some space, or use another disk")]
    try:
        file = disk.create(path, size)
        try:
            began = time.monotonic()
            for at in range(0, size, _BLOCK):
                disk.write(file, memoryview(block), at)
            disk.flush(file)
            speed = size / (time.monotonic() - began)
            direct = file.direct
        finally:
            disk.close(file)
            disk.remove(path)
    except OSError as error:
        fix = "choose a folder that can be written"
        return None, [Check("disk", BAD, f"{where.folder} cannot be written: {error.strerror}", fix)]
    level = OK if speed >= _SLOW else WARN
    fix = "" if level == OK else "checkpoints on a faster disk (local NVMe, a larger volume) are saved sooner"
    checks = [Check("disk", level, f"{format_size(speed)}/s durable, in {where.folder}", fix)]
    if direct:
        checks.append(Check("direct I/O", OK, "the file system takes it"))
    else:
        fix = "saves go through memory here, more slowly; a local ext4 or xfs takes it"
        checks.append(Check("direct I/O", WARN, "the file system refuses it", fix))
    return speed, checks


def _room(where: Where) -> Check:
    free = free_bytes(where.folder)
    found = f"{format_size(free)} and {free_files(where.folder):,.0f} files free"
    if where.state_bytes is None:
        return Check("room", OK, found + "; no checkpoint there to compare with (or say --state 14GB)")
    found += f"; a checkpoint has {format_size(where.state_bytes)}"
    if free < where.state_bytes:
        return Check("room", BAD, found, "the next save will not fit: free some space, or lower keep")
    if free < 2 * where.state_bytes:
        return Check("room", WARN, found, "only one more save fits: free some space, or lower keep")
    return Check("room", OK, found)


def _in_time(where: Where, grace: Grace, speed: float | None) -> Check:
    if grace.period is None:
        return Check(
            "grace period", OK, "nobody is known to kill jobs here; with REPRIEVE_GRACE=30s this would be checked"
        )
    if where.state_bytes is None or speed is None:
        return Check("grace period", OK, f"{grace}")
    needed = where.state_bytes / speed
    found = f"{grace}; a save takes about {needed:.1f} s"
    if needed > grace.period.total_seconds():
        return Check(
            "grace period", BAD, found, f"at least {needed * 1.5 + 5:.0f} s are needed: reprieve drill measures it"
        )
    if needed > grace.period.total_seconds() / 2:
        return Check("grace period", WARN, found, "that is thin: reprieve drill measures it")
    return Check("grace period", OK, found)


def _torchrun(where: Where, grace: Grace) -> Check:
    text = where.env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
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
        fix = "a shell does not pass SIGTERM on: make the command `exec …`, or start the container with reprieve run"
        return Check("PID 1", BAD, f"is {name}", fix)
    return Check("PID 1", OK, f"is {name}")


def _shared_memory() -> Check:
    try:
        total = shutil.disk_usage(_SHM).total
    except OSError:
        return Check("shared memory", WARN, f"there is no {_SHM}", "DataLoader workers need it")
    if total < _SHM_BYTES:
        fix = "DataLoader workers pass batches through it: docker run --shm-size=8g, or an emptyDir of medium Memory"
        return Check("shared memory", WARN, f"{_SHM} has {format_size(total)}", fix)
    return Check("shared memory", OK, f"{_SHM} has {format_size(total)}")


def _records(where: Where) -> Check:
    folder = state_folder(where.env)
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
    for package, least in (("torch", _TORCH), ("transformers", None), ("accelerate", None), ("safetensors", None)):
        try:
            found = version(package)
        except PackageNotFoundError:
            if least is not None:
                yield Check(package, BAD, "not installed", f"pip install {package}")
            continue
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if least is not None and numbers < least:
            yield Check(package, BAD, found, f"{'.'.join(map(str, least))} or newer is needed")
        else:
            yield Check(package, OK, found)
