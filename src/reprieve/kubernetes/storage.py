"""Where the checkpoints of a TrainJob go: a folder, a claim, an object store with a claim to fall back to."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import Any

from reprieve.errors import ConfigError
from reprieve.kubernetes.fields import OBJECT_NAME, Fields
from reprieve.kubernetes.names import MOUNT_PATH

CLAIM_SCHEME = "pvc"
OBJECT_STORES = ("s3",)
"""Accepted with a claim to fall back to: this version writes to mounted folders only."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimMount:
    """A PersistentVolumeClaim and where pods mount it."""

    claim: str
    path: str
    sub_path: str = ""

    def to_json(self) -> Object:
        found = {"claimName": self.claim, "mountPath": self.path}
        return {**found, "subPath": self.sub_path} if self.sub_path else found


def parse_storage(storage: Fields, beside: Fields) -> tuple[str, ClaimMount | None]:
    """Return where checkpoints go, and the claim that holds them or that they fall back to."""
    where = f"{storage.where}.uri"
    uri = storage.text("uri", "").strip()
    inside, outside = _claim(storage.child("persistentVolume")), _claim(beside)
    if inside and outside and inside != outside:
        raise ConfigError(f"{beside.where}: storage.persistentVolume names another claim: keep one of the two")
    scheme = uri.partition("://")[0].lower() if "://" in uri else ""
    _check_uri(uri, where)
    if scheme in OBJECT_STORES:
        if not _BUCKET.fullmatch(uri.partition("://")[2].partition("/")[0]):
            raise ConfigError(f"{where}: {uri} names no bucket: write {scheme}://BUCKET/PREFIX")
        if outside is None and inside is None:
            raise ConfigError(
                f"{where}: this version does not write to {scheme}:// yet: name a claim in "
                f"{beside.where}.claimName, to which checkpoints go instead"
            )
        return uri, outside or inside
    volume = inside or outside
    if scheme == CLAIM_SCHEME:
        return _claim_uri(uri, volume, where)
    if scheme == "file":
        uri = uri.partition("://")[2]
    elif scheme:
        raise ConfigError(
            f"{where}: {scheme}:// is not known: write a folder, pvc://CLAIM/FOLDER or s3://BUCKET/PREFIX"
        )
    if not uri and volume is not None:
        uri = posixpath.join(volume.path, "checkpoints")
    if uri and (uri := _folder(uri, where)) == "/":
        raise ConfigError(f"{where}: / is no folder for checkpoints: write /workspace/checkpoints")
    if volume is not None and not is_below(uri, volume.path):
        raise ConfigError(
            f"{where}: {uri} is not in the volume, which is mounted at {volume.path}: write "
            f"{posixpath.join(volume.path, posixpath.basename(uri))}"
        )
    return uri, volume


def _claim_uri(uri: str, volume: ClaimMount | None, where: str) -> tuple[str, ClaimMount]:
    """`pvc://claim/folder`: the claim, and the folder in it."""
    claim, _, folder = uri.partition("://")[2].partition("/")
    if not OBJECT_NAME.fullmatch(claim):
        raise ConfigError(f"{where}: {uri} names no claim: write pvc://CLAIM/FOLDER")
    if volume is not None and volume.claim != claim:
        raise ConfigError(f"{where}: {uri} and persistentVolume.claimName {volume.claim} disagree: keep one of the two")
    volume = volume or ClaimMount(claim=claim, path=MOUNT_PATH)
    return _folder(posixpath.join(volume.path, folder.strip("/") or "checkpoints"), where), volume


def _claim(found: Fields) -> ClaimMount | None:
    found.check_names(("claimName", "mountPath", "subPath"))
    if not found.values:
        return None
    claim = found.object_name("claimName")
    if not claim:
        raise ConfigError(f"{found.where}.claimName: there is none: name the PersistentVolumeClaim")
    sub_path = found.text("subPath", "").strip("/")
    _check_characters(sub_path, f"{found.where}.subPath")
    if ".." in sub_path.split("/"):
        raise ConfigError(f"{found.where}.subPath: {sub_path} leaves the volume: write it without ..")
    path = _folder(found.text("mountPath", "") or MOUNT_PATH, f"{found.where}.mountPath")
    if path == "/":
        raise ConfigError(f"{found.where}.mountPath: / would hide the image: write {MOUNT_PATH}")
    return ClaimMount(claim=claim, path=path, sub_path=sub_path)


def _check_uri(uri: str, where: str) -> None:
    """Check what is the same for all schemes. The message has no credentials: it is logged."""
    _check_characters(uri, where)
    scheme, separator, rest = uri.partition("://")
    host, _, path = rest.partition("/")
    if separator and "@" in host:
        raise ConfigError(f"{where}: it has credentials: write it without them, and name a Secret in secretRef.name")
    if separator and ".." in path.split("/"):
        raise ConfigError(f"{where}: {uri} is not a URI without ..: write {scheme}://{host}/FOLDER")


def _check_characters(text: str, where: str) -> None:
    if _CONTROL_CHARACTER.search(text):
        raise ConfigError(f"{where}: it has a control character, such as a line break: write it without")


def _folder(path: str, where: str) -> str:
    _check_characters(path, where)
    if not path.startswith("/") or ".." in path.split("/"):
        raise ConfigError(f"{where}: {path} is not an absolute path without ..: write /workspace/checkpoints")
    return posixpath.normpath("/" + path.lstrip("/"))


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
