"""Compiles one part of the test cluster: writes a Go module, builds its binaries, copies manifests out of it.

Modules come from the Go module proxy and are checked against Go's checksum database. Everything a part needs later is
copied into its output folder, so that `up` depends on no Go installation and no module cache.
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.cluster.rig.console import report
from tests.cluster.rig.errors import RigError
from tests.cluster.rig.versions import KUBERNETES_LIBRARIES, SOURCES, Part

REPORT_EVERY_S = 20
STAGING_VERSION = "v0.0.0"
"""k8s.io/kubernetes requires its staging modules at this version, and replaces them by folders of its repository."""


def compile_part(part: Part, output: Path) -> None:
    """Fill `output` with `bin/` and `manifests/`."""
    module = output / "module"
    shutil.copytree(SOURCES, module)
    _write_go_mod(part, module)
    _build(part, module, output / "bin")
    for manifests in part.manifests:
        source = _download(f"{manifests.module}@{part.modules[manifests.module]}", module)
        _copy_writable(source / manifests.folder, output / "manifests" / manifests.name)
    shutil.rmtree(module)


def _write_go_mod(part: Part, module: Path) -> None:
    lines = ["module cluster", f"go {_go(['env', 'GOVERSION'], module).strip().removeprefix('go')}"]
    lines += [f"require {path} {version}" for path, version in part.modules.items()]
    if kubernetes := part.modules.get("k8s.io/kubernetes"):
        source = _download(f"k8s.io/kubernetes@{kubernetes}", module)
        requirements = json.loads(_go(["mod", "edit", "-json", str(source / "go.mod")], module))["Require"]
        lines += [
            f"replace {required['Path']} => {required['Path']} {KUBERNETES_LIBRARIES}"
            for required in requirements
            if required["Version"] == STAGING_VERSION
        ]
    (module / "go.mod").write_text("\n".join(lines) + "\n")
    if part.checksums_of:
        source = _download(f"{part.checksums_of}@{part.modules[part.checksums_of]}", module)
        shutil.copyfile(source / "go.sum", module / "go.sum")


def _build(part: Part, module: Path, output: Path) -> None:
    """Compile all binaries of a part at once, and name them as `part.binaries` does."""
    compiled = module / "compiled"
    compiled.mkdir()
    flags = ["-s", "-w", *(f"-X {name}={value}" for name, value in (part.variables or {}).items())]
    command = ["go", "build", "-v", "-trimpath", "-o", f"{compiled}/", "-ldflags", " ".join(flags)]
    command += ["-tags", ",".join(part.tags)] if part.tags else []
    _run_with_progress(part.name, [*command, *(binary.package for binary in part.binaries)], module)
    output.mkdir()
    for binary in part.binaries:
        (compiled / _compiled_name(binary.package)).rename(output / binary.name)


def _compiled_name(package: str) -> str:
    """What Go calls the binary of a package: its last element that is no major version."""
    *_, before, last = package.split("/")
    return before if last.startswith("v") and last[1:].isdigit() else last


def _run_with_progress(name: str, command: list[str], folder: Path) -> None:
    began = reported = time.monotonic()
    packages = 0
    last_lines: collections.deque[str] = collections.deque(maxlen=30)
    with subprocess.Popen(
        command, cwd=folder, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            last_lines.append(line)
            packages += not line.startswith("go: ")
            if time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                report(f"{name}: {packages} packages compiled after {reported - began:.0f} s")
    if process.returncode:
        raise RigError(f"cannot compile {name}:\n{''.join(last_lines)}")


def _download(module: str, folder: Path) -> Path:
    """The folder of a module in the module cache."""
    return Path(json.loads(_go(["mod", "download", "-json", module], folder))["Dir"])


def _go(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(["go", *arguments], cwd=folder, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        raise RigError(f"go {' '.join(arguments)} failed:\n{done.stderr or done.stdout}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Static binaries; dependencies are resolved from the requirements; the installed Go, or none."""
    return {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-buildvcs=false -mod=mod",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }


def _copy_writable(source: Path, target: Path) -> None:
    """The module cache is read-only, and so would be a plain copy of it."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        folder.chmod(0o755)
