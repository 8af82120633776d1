"""Makes image archives without a container daemon and without a registry: one layer, in the OCI layout.

Images are called `localhost/NAME:1` and are imported on every node; pods use them with `imagePullPolicy: Never`.
`localhost/python:1` is a Debian with Python alone: torch comes from the environment on the host, mounted read-only.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

from tests.cluster.rig.errors import RigError
from tests.cluster.rig.prerequisites import find_command
from tests.cluster.rig.versions import DEBIAN

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
NONROOT = "65532:65532"
"""The user of upstream's controller images."""
NOT_NEEDED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man")


def binary_image(binary: Path, target: Path) -> None:
    """`localhost/<binary>:1`: nothing but a static binary at `/manager`."""

    def add_files(layer: tarfile.TarFile) -> None:
        for folder, mode in (("etc", 0o755), ("tmp", 0o1777)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            layer.addfile(entry)
        _add_bytes(layer, "etc/passwd", b"root:x:0:0::/:\nnonroot:x:65532:65532::/:\n")
        entry = layer.gettarinfo(str(binary), "manager")
        entry.mode = 0o755
        with binary.open("rb") as content:
            layer.addfile(entry, content)

    _write_archive(target, f"localhost/{binary.name}:1", add_files, {"Entrypoint": ["/manager"], "User": NONROOT})


def python_image(target: Path) -> None:
    """`localhost/python:1`: a minimal Debian with its Python."""
    root = target.with_suffix(".rootfs")
    command = ["debootstrap", "--variant=minbase", "--include=python3,ca-certificates", DEBIAN, str(root)]
    done = subprocess.run([find_command("debootstrap") or "debootstrap", *command[1:]], capture_output=True, text=True)
    if done.returncode:
        raise RigError(f"`{' '.join(command)}` failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    for folder in NOT_NEEDED:
        shutil.rmtree(root / folder)
    # Python may be mounted below it (pyenv), and pods run as other users too.
    (root / "root").chmod(0o755)

    def add_files(layer: tarfile.TarFile) -> None:
        for path in sorted(root.iterdir()):
            layer.add(path, path.name)

    _write_archive(target, "localhost/python:1", add_files, {"Cmd": ["python3"]})
    shutil.rmtree(root)


def _write_archive(
    target: Path, name: str, add_files: Callable[[tarfile.TarFile], None], settings: dict[str, object]
) -> None:
    layer_file = target.with_suffix(".layer")
    with tarfile.open(layer_file, "w", format=tarfile.PAX_FORMAT) as layer:
        add_files(layer)
    layer_digest = _digest_of(layer_file)
    config = json.dumps(
        {
            "architecture": ARCHITECTURES[platform.machine()],
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
            "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"], **settings},
        }
    ).encode()
    manifest_type = "application/vnd.oci.image.manifest.v1+json"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": manifest_type,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **_descriptor(config)},
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar",
                    "digest": layer_digest,
                    "size": layer_file.stat().st_size,
                }
            ],
        }
    ).encode()
    entry = {"mediaType": manifest_type, **_descriptor(manifest), "annotations": {"io.containerd.image.name": name}}
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    with tarfile.open(target, "w") as archive:
        _add_bytes(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add_bytes(archive, "index.json", index)
        for blob in (config, manifest):
            _add_bytes(archive, _blob_path(_descriptor(blob)["digest"]), blob)
        archive.add(layer_file, _blob_path(layer_digest))
    layer_file.unlink()


def _descriptor(blob: bytes) -> dict[str, object]:
    return {"digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}


def _blob_path(digest: object) -> str:
    return f"blobs/{str(digest).replace(':', '/')}"


def _digest_of(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return f"sha256:{total.hexdigest()}"


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))
