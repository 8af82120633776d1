"""The manifest: the last file written, and what makes a folder a checkpoint.

`reprieve-manifest.json` is `{"manifest": {…}, "xxh3_128": "…"}`, where the checksum is over the canonical JSON of the
first value (sorted keys, no spaces, ASCII). It lists every other file of the checkpoint with size and checksums.
docs/format.md describes it for other implementations.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES
from reprieve.checkpoint.format.checksum import digest_of, file_digest
from reprieve.errors import InvalidCheckpoint
from reprieve.storage.disk import DAMAGE, PAGE

MANIFEST = "reprieve-manifest.json"
SENTINEL = "checkpoint-is-incomplete.txt"
ARCHIVE_MARK = b"reprieve: "
"""The start of the comment at the end of Reprieve's torch files."""
FORMAT = "reprieve-checkpoint"
VERSION = 1

_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest records about one file of a checkpoint."""

    bytes: int
    xxh3_128: str
    """The file's checksum, computed from the blocks' checksums."""
    blocks: Sequence[str]
    """The XXH3-128 of each block of the file. The last block may be shorter."""
    starts: Sequence[int] | None = None
    """Where each block starts, in a file that several ranks wrote; None if every `block_bytes`."""

    @classmethod
    def of(cls, size: int, blocks: Sequence[str], starts: Sequence[int] | None = None) -> FileEntry:
        return cls(size, file_digest(blocks), tuple(blocks), None if starts is None else tuple(starts))

    def edges(self, block_bytes: int) -> list[int]:
        """Return where the blocks start, and where the last block ends."""
        if self.starts is None:
            return [*range(0, self.bytes, block_bytes), self.bytes]
        return [*self.starts, self.bytes]

    def _check(self, name: str, block_bytes: int) -> None:
        if type(self.bytes) is not int or self.bytes < 0:
            raise InvalidCheckpoint(f"{MANIFEST} has no sensible size for {name}")
        if self.starts is not None and not (
            isinstance(self.starts, list | tuple)
            and all(type(start) is int and start % PAGE == 0 for start in self.starts)
            and list(self.starts[:1]) == [0] * bool(self.bytes)
        ):
            raise InvalidCheckpoint(f"{MANIFEST} has no sensible starts of blocks for {name}")
        # Computed before `edges` builds a list: a hostile size must not become a list of that length.
        expected = -(-self.bytes // block_bytes) if self.starts is None else len(self.starts)
        blocks = self.blocks if isinstance(self.blocks, list | tuple) else []
        if len(blocks) != expected or not all(isinstance(text, str) and _DIGEST.fullmatch(text) for text in blocks):
            raise InvalidCheckpoint(f"{MANIFEST} does not have a checksum for each block of {name}")
        edges = itertools.pairwise(self.edges(block_bytes))
        if any(not 0 < after - before <= block_bytes for before, after in edges):
            raise InvalidCheckpoint(f"{MANIFEST} has blocks of {name} that are empty or too large")
        if self.xxh3_128 != file_digest(self.blocks):
            raise InvalidCheckpoint(f"{MANIFEST}: the checksum of {name} does not match those of its blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's manifest."""

    step: int
    epoch: float | None = None
    created: str
    """When the save began, in UTC and ISO 8601."""
    run: str
    attempt: int
    parent: str | None = None
    """The name of the checkpoint that this attempt resumed from; None after a fresh start."""
    world_size: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    state: Sequence[str] = ()
    """The names of the saved objects."""
    unrequested: bool = False
    """Whether a stop or Reprieve's own schedule requested the save, not the script's save strategy."""
    number: int | None = None
    """Its number among all checkpoints that the run has made, from 1 on; removed ones count. None: older versions."""
    files: Mapping[str, FileEntry]

    @property
    def size(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def encode(self) -> bytes:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for entry in body["files"].values():
            if entry["starts"] is None:
                del entry["starts"]
        if not self.unrequested:
            del body["unrequested"]
        if self.number is None:
            del body["number"]
        document = {"manifest": body, "xxh3_128": digest_of(_canonical(body))}
        return json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Parse a manifest. Raises InvalidCheckpoint unless every part of it is valid."""
        try:
            document = json.loads(data)
            body, digest = document["manifest"], document["xxh3_128"]
            expected = digest_of(_canonical(body))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidCheckpoint(f"{MANIFEST} is not readable: {error}") from error
        if digest != expected:
            raise InvalidCheckpoint(f"{MANIFEST} does not match its own checksum")
        if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
            raise InvalidCheckpoint(f"{MANIFEST} is not a manifest of Reprieve")
        version = body.pop("version", None)
        if version != VERSION:
            raise InvalidCheckpoint(f"{MANIFEST} has version {version}; this Reprieve reads version {VERSION}")
        try:
            files = {_checked_name(name): FileEntry(**entry) for name, entry in body.pop("files").items()}
            manifest = cls(files=files, **body)
        except (TypeError, AttributeError, KeyError) as error:
            raise InvalidCheckpoint(f"{MANIFEST} has fields that this version does not know: {error}") from error
        manifest._check()
        if manifest.encode() != data:
            raise InvalidCheckpoint(f"{MANIFEST} is not in canonical form: its bytes were changed")
        return manifest

    def _check(self) -> None:
        for name, is_valid in {
            "step": type(self.step) is int and self.step >= 0,
            "epoch": self.epoch is None or type(self.epoch) in (int, float),
            "created": _is_timestamp(self.created),
            "run": isinstance(self.run, str),
            "attempt": type(self.attempt) is int,
            "parent": self.parent is None or isinstance(self.parent, str),
            "world_size": type(self.world_size) is int,
            "versions": isinstance(self.versions, dict)
            and all(isinstance(value, str) for value in self.versions.values()),
            "metrics": isinstance(self.metrics, dict)
            and all(type(value) in (int, float) for value in self.metrics.values()),
            "block_bytes": type(self.block_bytes) is int and self.block_bytes >= 1,
            "state": isinstance(self.state, list | tuple) and all(isinstance(name, str) for name in self.state),
            "unrequested": type(self.unrequested) is bool,
            "number": self.number is None or (type(self.number) is int and self.number >= 1),
        }.items():
            if not is_valid:
                raise InvalidCheckpoint(f"{MANIFEST} has no sensible {name}")
        for name, entry in self.files.items():
            entry._check(name, self.block_bytes)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder; FileNotFoundError where there is none."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        raise InvalidCheckpoint(f"{MANIFEST} cannot be read: {error.strerror}", path=folder) from error
    try:
        return Manifest.decode(data)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(error.reason, path=folder) from error


def _checked_name(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or str(path) != name or ".." in path.parts or "\\" in name or "\0" in name:
        raise InvalidCheckpoint(f"{MANIFEST} names a file outside of the checkpoint: {name!r}")
    return name


def _is_timestamp(text: object) -> bool:
    try:
        return isinstance(text, str) and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
