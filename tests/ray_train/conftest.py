"""One Ray cluster for all tests and their workers, on the loopback, with a random token.

`REPRIEVE_TEST_RAY=<address>` uses another one. Its workers are forked (tests/support/ray_forks.py), unless
`REPRIEVE_RAY_FORKS=0` is set.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ray_forks
from tests.support.places import HIDE_DEEPSPEED, ROOT
from tests.support.ray_lab import HOST, LIMIT_S, ROOMS, STARTS, RayLab, free_port, lock_path

_ADDRESS = "REPRIEVE_TEST_RAY"
JOBS = "REPRIEVE_TEST_RAY_JOBS"
"""The environment variable with the address of the cluster's dashboard, which takes jobs. Without it, there is none."""

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it kills workers for the memory that other processes take
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    **HIDE_DEEPSPEED,
}


def pytest_configure(config: pytest.Config) -> None:
    """Start the cluster before pytest-xdist starts its workers, which inherit the environment."""
    if hasattr(config, "workerinput") or _ADDRESS in os.environ or config.option.collectonly:
        return
    os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))
    # Unix sockets have short paths, so not below pytest's folders.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    if os.environ.get("REPRIEVE_RAY_FORKS") != "0":
        config.add_cleanup(ray_forks.start_server(folder).terminate)
    port = free_port()
    head = [
        "start",
        "--head",
        "--node-ip-address",
        HOST,
        "--port",
        str(port),
        "--ray-client-server-port",  # by default always the same, and a cluster whose port is taken ends itself
        str(free_port()),
        "--num-cpus",
        "32",
        "--resources",
        json.dumps(ROOMS),
        "--block",
    ]
    dashboard = ["--include-dashboard=false"]
    if JOBS in os.environ:
        os.environ[JOBS] = f"http://{HOST}:{(number := free_port())}"
        dashboard = ["--include-dashboard=true", "--dashboard-host", HOST, "--dashboard-port", str(number)]
    quiet = [*dashboard, "--disable-usage-stats", "--temp-dir", str(folder)]
    log = folder / "head.log"
    for left in reversed(range(STARTS)):
        with log.open("wb") as output:
            command = [sys.executable, "-m", "ray.scripts.scripts", *head, *quiet]
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        if RayLab.has_started(process, log):
            break
        RayLab.end(process)
        assert left, f"Ray did not start:\n{log.read_text(errors='replace')[-3000:]}"

    def end() -> None:
        RayLab.end(process)
        shutil.rmtree(folder, ignore_errors=True)
        lock_path(os.environ[_ADDRESS]).unlink(missing_ok=True)

    config.add_cleanup(end)
    os.environ[_ADDRESS] = f"{HOST}:{port}"


@pytest.fixture
def lab(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RayLab]:
    """A run of its own, which shows its output when it has not ended shortly before the limit of the test."""
    limit = request.node.get_closest_marker("timeout")
    limit_s = LIMIT_S if limit is None else 0.9 * limit.args[0]
    lab = RayLab(tmp_path, {**os.environ, "RAY_ADDRESS": os.environ[_ADDRESS]}, limit_s=limit_s)
    yield lab
    lab.close()
