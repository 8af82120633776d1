"""The run record, which `reprieve status` shows and `reprieve resume` starts again. Each run has a folder:

    <state folder>/runs/<name>/run.json     the record: only the run's launcher writes it, always as a whole
    <state folder>/runs/<name>/log          the output of the command (log.1: older output)

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

from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.errors import ConfigError
from reprieve.host import boot_id
from reprieve.launch.process import start_time
from reprieve.run_state import RunState
from reprieve.storage.disk import Disk

_LIVE_STATES = (RunState.STARTING, RunState.RUNNING, RunState.STOPPING, RunState.WAITING)
VERSION = 1
"""The version of the record's format. New fields do not need a new version: older readers ignore them."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(slots=True)
class RunRecord:
    """The state of one run over all its launches."""

    name: str
    command: list[str]
    """Secrets in it are masked; a run with a masked secret cannot be resumed by name."""
    folder: str
    """The working directory."""
    settings: dict[str, Any]
    """The options of the command line, as text."""
    environment: dict[str, str] = field(repr=False, default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Variables that look like secrets and are not stored."""
    state: RunState = RunState.STARTING
    reason: str = ""
    """The exit message, or why the run stops or waits."""
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
    version: int = VERSION

    @property
    def alive(self) -> bool:
        """Whether the run's launcher runs."""
        return bool(self.pid) and self.boot == boot_id() and start_time(self.pid) == self.pid_started

    @property
    def state_now(self) -> RunState:
        return RunState.LOST if self.state in _LIVE_STATES and not self.alive else self.state

    def set_launcher(self) -> None:
        """Record this process as the launcher."""
        self.pid, self.boot = os.getpid(), boot_id()
        self.pid_started = start_time(self.pid) or ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> RunRecord:
        """Raises NewerRecord for a record of a newer version. Unknown fields are ignored."""
        content = json.loads(data)
        if content.get("version", VERSION) > VERSION:
            raise NewerRecord(
                f"the record of run {content.get('name')!r} has version {content['version']}, and this Reprieve reads "
                f"versions up to {VERSION}: use the Reprieve that wrote it, or a newer one"
            )
        record = cls(**_known_fields(cls, content))
        record.state = RunState(record.state)
        record.attempts = [AttemptRecord.from_json(attempt) for attempt in content["attempts"]]
        return record


class NewerRecord(ConfigError):
    """A newer version of Reprieve wrote the run record."""


def _known_fields(kind: type[Any], content: Mapping[str, Any]) -> dict[str, Any]:
    return {entry.name: content[entry.name] for entry in fields(kind) if entry.name in content}


def state_folder(env: Mapping[str, str] = os.environ) -> Path:
    if given := env.get("REPRIEVE_STATE_DIR"):
        return Path(given).expanduser().absolute()
    if given := env.get("XDG_STATE_HOME"):
        return Path(given).expanduser().absolute() / "reprieve"
    with contextlib.suppress(RuntimeError):  # no HOME, and a uid without a passwd entry
        return Path("~/.local/state/reprieve").expanduser()
    return Path("/.local/state/reprieve")


class Runs:
    """All runs of this user on this machine."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or state_folder()) / "runs"

    def all(self) -> list[RunRecord]:
        """Return all records, the last written first. Records of a newer version are left out."""
        records: list[RunRecord] = []
        for path in self._folder.glob("*/run.json"):
            with contextlib.suppress(NewerRecord):
                if (record := _read(path)) is not None:
                    records.append(record)
        return sorted(records, key=lambda record: record.updated, reverse=True)

    def find(self, name: str) -> RunRecord:
        record = _read(self.folder(name) / "run.json")
        if record is None:
            known = ", ".join(record.name for record in self.all()[:8])
            raise ConfigError(
                f"there is no run {name!r}" + (f". Known runs: {known}" if known else ": none was started here yet")
            )
        return record

    def folder(self, name: str) -> Path:
        check_name(name)
        return self._folder / name

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[RunFolder]:
        """Hold the folder of a run while it is launched. A run has one launcher: a second one of the same command, such
        as another "node" on this machine, gets a number behind its name."""
        number = 1
        while True:
            folder = RunFolder(self.folder(name if number == 1 else f"{name[:90]}-{number}"))
            if folder.lock():
                break
            number += 1
        try:
            yield folder
        finally:
            folder.release()


class RunFolder:
    """The folder of one run while its launcher runs. If it cannot be written, the run continues without a record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        """Why the record cannot be written; None: it can."""
        self._lock: int | None = None
        self._disk = Disk()

    @property
    def name(self) -> str:
        return self.path.name

    def lock(self) -> bool:
        """Return whether the folder is locked now; False: another launcher holds it."""
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
        temporary = self.path / "run.json.new"
        try:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(temporary)
            self._disk.write_file(temporary, record.to_json(), flush=False)
            temporary.chmod(0o600)
            self._disk.rename(temporary, self.path / "run.json")
            self.problem = None
        except OSError as error:
            self.problem = self.problem or f"{error.strerror} ({self.path})"


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a run: use letters, digits, '.', '_' and '-', at most 100 characters"
        )


def default_name(script: str, words: Sequence[str], folder: str, checkpoints: str | None) -> str:
    """Return a name that is the same for the same command in the same folder: started again, it is the same run."""
    digest = hashlib.sha256(os.fsencode("\0".join((folder, checkpoints or "", *words)))).hexdigest()[:6]
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", script).strip("-._") or "run"
    return f"{plain[:60]}-{digest}"


def _read(path: Path) -> RunRecord | None:
    """Return None if there is no record, or an incomplete one."""
    try:
        return RunRecord.from_json(path.read_bytes())
    except NewerRecord:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
