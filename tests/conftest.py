"""What every test relies on: no network, the same random numbers each time, one Hypothesis profile."""

# ruff: noqa: E402 - some things come before all imports
from __future__ import annotations

import atexit
import gc
import os
import random

from tests.support.places import SITE

# Until all tests are collected: imports leave no garbage, and looking for it takes a third of their time.
gc.disable()
atexit.register(gc.freeze)
# Before anything imports transformers: no test uses the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before anything imports torch: some virtual machines announce AMX but do not allow it. Multiplying two bfloat16
# matrices there ends the process with SIGILL (seen on Firecracker, torch 2.13).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# For all processes that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from reprieve.testing.huge_pages import use_huge_pages

SOAK = os.environ.get("REPRIEVE_SOAK") == "1"
"""Whether to run the long versions of the randomised tests."""

# A slow disk is no failure: the timeout of the test limits what its examples take.
settings.register_profile("default", deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
settings.register_profile("soak", settings.get_profile("default"), max_examples=3000)
settings.load_profile("soak" if SOAK else "default")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    use_huge_pages()  # many tests fork this process
    if session.config.getoption("loadgroup", False):
        # Otherwise each worker would set up the fixtures of all groups, and nobody would notice.
        grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
        assert all("@" in item.nodeid for item in grouped), "pytest-xdist does not know the groups of this pytest"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take the group, which xdist appends, out of the name: `--last-failed` without xdist finds the test then."""
    if "xdist_group" in report.keywords and "PYTEST_XDIST_WORKER" not in os.environ:
        report.nodeid = report.nodeid.rpartition("@")[0] or report.nodeid


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of FSDP on old versions of torch.

    On the CPU, torch 2.6 has no FSDP2, 2.7 has no two-dimensional FSDP2, and 2.8 and 2.9 reassemble strided shards in
    the wrong order.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        for item in items:
            if item.get_closest_marker("fsdp") or "fsdp" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="shards on the CPU: torch 2.10 and newer"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def soak() -> None:
    """Skip the test outside the soak run."""
    if not SOAK:
        pytest.skip("a long one: set REPRIEVE_SOAK=1")
