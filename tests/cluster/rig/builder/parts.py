"""`build`: makes the missing parts of the build output, one after the other.

A part is built in a temporary folder and renamed when it is complete: an interrupted build leaves no half-made part.
Output of other versions is removed when nobody has used it for two weeks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from tests.cluster.rig.builder.golang import compile_part
from tests.cluster.rig.builder.images import binary_image, python_image
from tests.cluster.rig.console import report
from tests.cluster.rig.layout import CACHE, PYTHON_IMAGE_PART, build_output, part_names
from tests.cluster.rig.prerequisites import check_go, check_machine
from tests.cluster.rig.versions import PARTS

UNFINISHED = ".unfinished-"
KEEP_UNUSED_S = 14 * 24 * 3600


def build(*, full: bool) -> None:
    """Build what is missing; with `full` also what only `make test-cluster-full` needs."""
    output = build_output()
    if not output.missing_parts(full=full):
        os.utime(output.root)
        report(f"{', '.join(part_names(full=full))}: already built")
        return
    check_machine()
    output.root.mkdir(parents=True, exist_ok=True)
    with (CACHE / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_leftovers(output.root)
        for name in output.missing_parts(full=full):
            _build_part(name, output.part(name))


def _build_part(name: str, target: Path) -> None:
    began = time.monotonic()
    report(f"{name}: building")
    unfinished = target.with_name(UNFINISHED + name)
    images = unfinished / "images"
    images.mkdir(parents=True)
    if name == PYTHON_IMAGE_PART:
        python_image(images / "python.tar")
    else:
        check_go()
        part = next(part for part in PARTS if part.name == name)
        compile_part(part, unfinished)
        for binary in part.images:
            binary_image(unfinished / "bin" / binary, images / f"{binary}.tar")
    unfinished.rename(target)
    report(f"{name}: built in {time.monotonic() - began:.0f} s")


def _remove_leftovers(root: Path) -> None:
    for folder in root.glob(f"{UNFINISHED}*"):
        shutil.rmtree(folder)
    for other in CACHE.iterdir():
        if other.is_dir() and other != root and time.time() - other.stat().st_mtime > KEEP_UNUSED_S:
            report(f"removing the output of older versions in {other}")
            shutil.rmtree(other)
