"""The run record: what `reprieve status` shows and `reprieve resume` starts again. One folder a run:

    <state folder>/runs/<name>/run.json     written by the run's launcher alone, as a whole
    <state folder>/runs/<name>/log          what the command printed (log.1: before that)

The state folder is `REPRIEVE_STATE_DIR`, else `reprieve` in XDG_STATE_HOME or ~/.local/state.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from reprieve.errors import ConfigError
from reprieve.launch.process import boot_id, start_time
from reprieve.launch.runs.goodput import AttemptRecord
from reprieve.run_state import RunState
from reprieve.storage.disk import Disk

_LIVE_STATES = (RunState.STARTING, RunState.RUNNING, RunState.STOPPING, RunState.WAITING)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(slots=True)
class RunRecord:
    """Of one run, over all its launches."""

    name: str
    command: list[str]
    """Secrets are masked in it: then it cannot be resumed by name."""
    folder: str
    """Where it was started."""
    settings: dict[str, Any]
    """The launcher's options, as text."""
    environment: dict[str, str] = field(repr=False, default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Variables that look like secrets, and are not stored."""
    state: RunState = RunState.STARTING
    reason: str = ""
    """What the last words were."""
    exit_code: int | None = None
    pid: int = 0
    pid_started: str = ""
    boot: str = ""
    socket: str = ""
    updated: float = 0.0
    attempts: list[AttemptRecord] = field(default_factory=list)
    step: int = 0
    done: float | None = None
    eta_s: float | None = None
    restarts: int = 0
    checkpoints: str | None = None
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None

    @property
    def alive(self) -> bool:
        """Its launcher runs."""
        return bool(self.pid) and self.boot == boot_id() and start_time(self.pid) == self.pid_started

    @property
    def state_now(self) -> RunState:
        return RunState.LOST if self.state in _LIVE_STATES and not self.alive else self.state

    def mine(self) -> None:
        """This process is its launcher."""
        self.pid, self.boot = os.getpid(), boot_id()
        self.pid_started = start_time(self.pid) or ""

    def as_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> RunRecord:
        told = json.loads(data)
        known = {one.name for one in fields(cls)}
        record = cls(**{name: value for name, value in told.items() if name in known})
        record.state = RunState(record.state)
        of_attempt = {one.name for one in fields(AttemptRecord)}
        record.attempts = [
            AttemptRecord(**{name: value for name, value in one.items() if name in of_attempt})
            for one in told["attempts"]
        ]
        return record


def state_folder(env: Mapping[str, str] = os.environ) -> Path:
    if given := env.get("REPRIEVE_STATE_DIR"):
        return Path(given).expanduser().absolute()
    if given := env.get("XDG_STATE_HOME"):
        return Path(given).expanduser().absolute() / "reprieve"
    return Path("~/.local/state/reprieve").expanduser()


class Runs:
    """All runs of this user on this machine."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or state_folder()) / "runs"

    def all(self) -> list[RunRecord]:
        """The one that was written last first."""
        found = [record for path in self._folder.glob("*/run.json") if (record := _read(path)) is not None]
        return sorted(found, key=lambda one: one.updated, reverse=True)

    def find(self, name: str) -> RunRecord:
        record = _read(self.folder(name) / "run.json")
        if record is None:
            known = ", ".join(one.name for one in self.all()[:8])
            raise ConfigError(
                f"no run {name!r}" + (f". There are: {known}" if known else ": none was started here yet")
            )
        return record

    def folder(self, name: str) -> Path:
        check_name(name)
        return self._folder / name

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[RunFolder]:
        """The folder of a run that is being launched. One launcher a run: a second one of the same command (another
        "node" on this machine) gets a number behind its name."""
        number = 1
        while True:
            folder = RunFolder(self.folder(name if number == 1 else f"{name[:90]}-{number}"))
            if folder.take():
                break
            number += 1
        try:
            yield folder
        finally:
            folder.release()


class RunFolder:
    """One run's, while its launcher runs. Where nothing can be written, that is said once, and the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        """Why the record cannot be written."""
        self._lock: int | None = None
        self._disk = Disk()

    @property
    def name(self) -> str:
        return self.path.name

    def take(self) -> bool:
        """False: another launcher has it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        except OSError as error:
            self.problem = f"{error.strerror} ({self.path})"
        return True

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self) -> RunRecord | None:
        return _read(self.path / "run.json")

    def write(self, record: RunRecord) -> None:
        record.updated = time.time()
        fresh = self.path / "run.json.new"
        try:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(fresh)
            self._disk.write_file(fresh, record.as_json(), flush=False)
            fresh.chmod(0o600)
            self._disk.rename(fresh, self.path / "run.json")
            self.problem = None
        except OSError as error:
            self.problem = f"{error.strerror} ({self.path})"


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be a run's name: letters, digits, '.', '_' and '-', at most 100")


def default_name(script: str, words: Sequence[str], folder: str, checkpoints: str | None) -> str:
    """The same for the same command in the same place: started again, it is the same run."""
    digest = hashlib.sha256(os.fsencode("\0".join((folder, checkpoints or "", *words)))).hexdigest()[:6]
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", script).strip("-._") or "run"
    return f"{plain[:60]}-{digest}"


def _read(path: Path) -> RunRecord | None:
    """None: there is none, or what is there is torn."""
    try:
        return RunRecord.from_json(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
