"""Builds images of the project with buildah, for the nodes of the cluster: no container daemon, and no registry.

The storage is the test session's own. Base images come from the archives of the rig.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pip

from tests.cluster.rig.layout import PYTHON_IMAGE_PART, build_output
from tests.cluster.rig.prerequisites import find_command, install_packages
from tests.support.places import ROOT

BASE = "localhost/python-with-pip:1"


class ImageBuilder:
    """Builds images below a folder."""

    def __init__(self, folder: Path) -> None:
        if find_command("buildah") is None:
            install_packages(["buildah"])
        self._folder = folder
        storage = {"driver": "overlay", "graphroot": str(folder / "graph"), "runroot": str(folder / "run")}
        lines = [f"{name} = {json.dumps(value)}" for name, value in storage.items()]
        (folder / "storage.conf").write_text("\n".join(["[storage]", *lines]))
        (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')

    def base(self) -> str:
        """Return the image `localhost/python:1` of the rig with the pip of this environment."""
        [archive] = build_output().images(PYTHON_IMAGE_PART)
        self._buildah("pull", self._policy, f"oci-archive:{archive}")
        context = self._folder / "base"
        packages = "/usr/lib/python3/dist-packages/pip"
        shutil.copytree(Path(pip.__file__).parent, context / "pip", ignore=shutil.ignore_patterns("__pycache__"))
        (context / "Dockerfile").write_text(f"FROM localhost/python:1\nCOPY pip {packages}\n")
        # In one layer: the rig's image has no history, and buildah refuses to add to that.
        self.build(context, BASE, "--squash")
        return BASE

    def build(self, context: Path, name: str, *options: str, arguments: dict[str, str] | None = None) -> str:
        """Build the Dockerfile of a folder, and return what the build printed. `arguments`: its build arguments."""
        given = [f"--build-arg={key}={value}" for key, value in (arguments or {}).items()]
        how = ("--isolation=chroot", "--pull-never", self._policy)
        return self._buildah("bud", *how, *options, *given, f"--tag={name}", str(context))

    def archive(self, name: str) -> Path:
        """Return the image as a file that nodes import."""
        path = self._folder / "image.tar"
        path.unlink(missing_ok=True)
        self._buildah("push", self._policy, name, f"oci-archive:{path}:{name}")
        return path

    def size_mb(self, name: str) -> float:
        """Return the size of an image as buildah lists it: unpacked."""
        [found] = json.loads(self._buildah("images", "--json", name))
        size, unit = found["size"].split()
        return float(size) * {"MB": 1, "GB": 1000}[unit]

    def close(self) -> None:
        """Remove what the builds have mounted: the folder can be deleted then."""
        subprocess.run(["umount", str(self._folder / "graph/overlay")], capture_output=True)

    @property
    def _policy(self) -> str:
        return f"--signature-policy={self._folder / 'policy.json'}"

    def _buildah(self, *arguments: str) -> str:
        environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(self._folder / "storage.conf")}
        done = subprocess.run(
            [find_command("buildah") or "buildah", *arguments], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"buildah {' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr


@contextmanager
def built_image(source: Path, name: str, extras: str = "") -> Iterator[ImageBuilder]:
    """Build the Dockerfile of a folder with this checkout's wheel, and return the builder that has the image.

    `extras` of the wheel, such as `[operator]`.
    """
    with tempfile.TemporaryDirectory(prefix="reprieve-image-") as temporary:
        folder = Path(temporary)
        context = folder / source.name
        shutil.copytree(source, context, ignore=shutil.ignore_patterns(".env", "wheels"))
        wheel = build_wheels(context / "wheels", extras)
        builder = ImageBuilder(folder)
        try:
            arguments = {
                "BASE": builder.base(),
                "REPRIEVE": f"/context/wheels/{wheel}{extras}",
                "PIP_OPTIONS": "--no-index --find-links=/context/wheels",
            }
            builder.build(context, name, arguments=arguments)
            yield builder
        finally:
            builder.close()


def build_wheels(target: Path, extras: str = "") -> str:
    """Build the wheel of this checkout, beside those of what it needs, and return its name."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", f"--constraint={ROOT / 'constraints.txt'}"]
    subprocess.run([*pip, f"--wheel-dir={target}", f"{ROOT}{extras}"], check=True)
    [wheel] = target.glob("reprieve-*.whl")
    return wheel.name
