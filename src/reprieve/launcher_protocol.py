"""The wire protocol between training processes and the launcher that started them (`reprieve run`).

    Starting → Started → Restored → Step … → Saved → … → Stopping → Stopped | Finished | Refused

Each message is one JSON datagram over a Unix socket, whose path the launcher passes in `REPRIEVE_LAUNCHER`. Without a
launcher, sending does nothing. Sending never disturbs training: when the launcher does not read, step reports are lost
at once and other messages after a second.

The receiver ignores messages of unknown kinds, of newer protocol versions and fields that it does not know, and drops
malformed messages. A new kind or an optional field therefore needs no new `VERSION`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

VERSION = 1

LAUNCHER_SOCKET = "REPRIEVE_LAUNCHER"
"""The environment variable with the path of the launcher's socket."""
START_OVER = "REPRIEVE_START_OVER"
"""The environment variable with the id of a request to start over, which is carried out once in each folder."""
DRILL = "REPRIEVE_DRILL"
"""The environment variable with the scratch folder of `reprieve drill`, which leaves the run's checkpoints alone."""

TEMPORARY_FOLDERS = ("/tmp", "/var/tmp")  # noqa: S108 - a folder with a random name is created there
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the same; writable where the root file system is read-only
STEP_REPORT_INTERVAL_S = 0.2
_SEND_TIMEOUT_S = 1.0
_MAX_TEXT_LENGTH = 8_000
"""Characters of one text: a datagram must fit into the socket's buffer."""
_MAX_DATAGRAM_BYTES = 2**16
_NO_RANK = -1


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages. `event` is the kind's name on the wire."""

    event: ClassVar[str]


# From a rank


@dataclass(frozen=True, kw_only=True)
class Starting(Message):
    """The rank sets up its session."""

    event = "starting"
    checkpoints: str


@dataclass(frozen=True, kw_only=True)
class Started(Message):
    """The rank is about to train, or has nothing left to train."""

    event = "started"
    checkpoints: str | None = None
    checkpoint: str | None = None
    """The path of the checkpoint that it resumes from."""
    resumed: int | None = None
    """The step of that checkpoint."""
    finished: bool = False


@dataclass(frozen=True, kw_only=True)
class Restored(Message):
    """Only in a drill: fingerprints of the parts of the state that are in memory again."""

    event = "restored"
    fingerprints: dict[str, str]
    fingerprint_s: float


@dataclass(frozen=True, kw_only=True)
class Step(Message):
    """The last completed step. Also sent during evaluations, as a sign of life."""

    event = "step"
    step: int
    done: float | None = None
    """The completed fraction of the training, from 0 to 1."""
    eta_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Saved(Message):
    """A checkpoint is durable."""

    event = "saved"
    step: int
    path: str = ""
    bytes: int = 0
    began: float
    """When the save began, by the monotonic clock."""
    took: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stopping(Message):
    """The rank received a stop request."""

    event = "stopping"
    reason: str
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Stopped(Message):
    """The rank completed its stop and exits."""

    event = "stopped"
    step: int
    saved: bool
    """Whether this step is in a checkpoint."""
    starts_over: bool = False
    """The next start does not find that checkpoint by itself."""
    times: dict[str, float] = field(default_factory=dict)
    """When the stages of the stop were reached, by the monotonic clock: signal, agreed, durable, left."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Only in a drill: of the parts of the saved state."""
    fingerprint_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Finished(Message):
    """Training is complete."""

    event = "finished"
    step: int


@dataclass(frozen=True, kw_only=True)
class Refused(Message):
    """A permanent failure: the run cannot start, and restarting will not help."""

    event = "refused"
    error: str


# From any process under the launcher


@dataclass(frozen=True, kw_only=True)
class TorchImported(Message):
    """The process imported torch, so it probably trains."""

    event = "torch"
    undecided: bool = False
    """Its script imports a library that may protect the training later."""


@dataclass(frozen=True, kw_only=True)
class Protected(Message):
    """The process loaded what protects its training."""

    event = "protected"


# From torchrun


@dataclass(frozen=True, kw_only=True)
class Terminated(Message):
    """SIGTERM ended a rank, or was sent to torchrun itself."""

    event = "terminated"


@dataclass(frozen=True, kw_only=True)
class Crashed(Message):
    """A rank failed. torchrun is about to end the others with SIGTERM, which is not a preemption."""

    event = "crashed"
    pids: list[int] = field(default_factory=list)
    """All ranks that this torchrun started."""


# From the command line


@dataclass(frozen=True, kw_only=True)
class Pause(Message):
    """`reprieve pause` requests a stop of the run."""

    event = "pause"


_KINDS: Mapping[str, type[Message]] = {kind.event: kind for kind in Message.__subclasses__()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_dict_of(kind: type, value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


_TYPE_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int),
    "float": _is_number,
    "str": lambda value: isinstance(value, str),
    "int | None": lambda value: value is None or isinstance(value, int),
    "float | None": lambda value: value is None or _is_number(value),
    "str | None": lambda value: value is None or isinstance(value, str),
    "list[int]": lambda value: isinstance(value, list) and all(isinstance(item, int) for item in value),
    "dict[str, str]": lambda value: _is_dict_of(str, value),
    "dict[str, float]": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
}
"""By the annotation of a field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A message with its sender, as one datagram."""

    message: Message
    pid: int
    at: float
    """When it was sent, by the monotonic clock, which all processes of a machine share."""
    rank: int = _NO_RANK
    """-1: the sender is not a rank, or not yet."""
    world_size: int = 0

    def to_json(self) -> bytes:
        content = {
            name: value[:_MAX_TEXT_LENGTH] if isinstance(value, str) else value
            for name, value in asdict(self.message).items()
        }
        sender = {"pid": self.pid, "at": self.at, "rank": self.rank, "world_size": self.world_size}
        return json.dumps({"version": VERSION, "event": self.message.event, **sender, **content}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Report | None:
        """Return None for a datagram that is malformed, of an unknown kind or of a newer version."""
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or not isinstance(event := content.get("event"), str):
            return None
        version = content.get("version", VERSION)
        kind = _KINDS.get(event)
        if kind is None or not isinstance(version, int) or version > VERSION:
            return None
        try:
            return cls(message=kind(**_known_fields(kind, content)), **_known_fields(cls, content))
        except TypeError:  # a field is missing, or has another type
            return None


def _known_fields(kind: type[Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the fields that `kind` has. Raises TypeError for a value of another type."""
    known: dict[str, Any] = {}
    for entry in fields(kind):
        has_type = _TYPE_CHECKS.get(str(entry.type))
        if has_type is not None and entry.name in content:
            if not has_type(content[entry.name]):
                raise TypeError(entry.name)
            known[entry.name] = content[entry.name]
    return known


class Reporter:
    """Sends the messages of one process to its launcher, from any thread. A forked child sends nothing."""

    def __init__(self, rank: int = _NO_RANK, world_size: int = 0, path: str | None = None) -> None:
        """`path`: the launcher's socket; default: from the environment."""
        self._rank, self._world_size = rank, world_size
        self._path = path if path is not None else os.environ.get(LAUNCHER_SOCKET, "")
        self._socket: socket.socket | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        if self._path:
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    @property
    def has_launcher(self) -> bool:
        return self._socket is not None

    def send(self, message: Message, *, wait: bool = True) -> bool:
        """Send a message and return whether it was sent. `wait`: up to a second while the launcher does not read."""
        if self._socket is None or os.getpid() != self._pid:
            return False
        report = Report(
            message=message, pid=self._pid, at=time.monotonic(), rank=self._rank, world_size=self._world_size
        )
        try:
            with self._lock:
                self._socket.settimeout(_SEND_TIMEOUT_S if wait else 0.0)
                self._socket.sendto(report.to_json(), self._path)
        except OSError:  # the launcher is gone or busy
            return False
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def send_once(message: Message, path: str | None = None) -> bool:
    """Send a message from a process that is not a rank, or not yet. `path`: as for `Reporter`."""
    with contextlib.closing(Reporter(path=path)) as reporter:
        return reporter.send(message)


class Listener:
    """The launcher's end: a socket in a folder that only this user can enter."""

    def __init__(self) -> None:
        self._folder = make_temporary_folder()
        self.path = self._folder / "launcher"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.socket.bind(str(self.path))

    def read(self) -> list[Report]:
        """Return all reports that have arrived since the last call, without waiting."""
        reports: list[Report] = []
        while True:
            try:
                data = self.socket.recv(_MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return reports
            if (report := Report.from_json(data)) is not None:
                reports.append(report)

    def close(self) -> None:
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def make_temporary_folder() -> Path:
    """Not by tempfile alone, which falls back to the working directory: that may be a volume without sockets."""
    for folder in filter(None, (os.environ.get("TMPDIR"), *TEMPORARY_FOLDERS)):
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="reprieve-", dir=folder))
    return Path(tempfile.mkdtemp(prefix="reprieve-", dir=_SHARED_MEMORY))
