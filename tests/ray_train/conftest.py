"""One Ray cluster for all tests and their workers, on the loopback, with a random token.

`REPRIEVE_TEST_RAY=<address>` uses another one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.ray_lab import HOST, RayLab, free_port

_ADDRESS = "REPRIEVE_TEST_RAY"

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def pytest_configure(config: pytest.Config) -> None:
    """Start the cluster before pytest-xdist starts its workers, which inherit the environment."""
    if hasattr(config, "workerinput") or _ADDRESS in os.environ or config.option.collectonly:
        return
    os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))
    # Unix sockets have short paths, so not below pytest's folders.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    port = free_port()
    head = ["start", "--head", "--node-ip-address", HOST, "--port", str(port), "--num-cpus", "32", "--block"]
    quiet = ["--include-dashboard=false", "--disable-usage-stats", "--temp-dir", str(folder)]
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *head, *quiet], stdout=log, stderr=log, start_new_session=True
        )

    def end() -> None:
        RayLab.end(process)
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(end)
    os.environ[_ADDRESS] = f"{HOST}:{port}"
    RayLab.wait_for_cluster(os.environ[_ADDRESS], process, folder / "head.log")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RayLab]:
    """A run of its own."""
    lab = RayLab(tmp_path, {**os.environ, "RAY_ADDRESS": os.environ[_ADDRESS]})
    yield lab
    lab.close()
