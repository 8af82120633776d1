"""What every test may count on: no network, random numbers that are the same each time, one profile for Hypothesis."""

from __future__ import annotations

import os
import random

# Before transformers is imported by anybody: no test looks for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before torch is: there are virtual machines that announce AMX and do not let it be used. A product of two bfloat16
# matrices ends a process there, with SIGILL (seen on Firecracker, torch 2.13).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

SOAK = os.environ.get("REPRIEVE_SOAK") == "1"
"""The long versions of the randomised tests."""

# A slow disk is no finding: what an example may take is bounded by the test's own timeout.
settings.register_profile("default", deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
settings.register_profile("soak", settings.get_profile("default"), max_examples=3000)
settings.load_profile("soak" if SOAK else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the CPU, torch 2.6 has no FSDP2, 2.7 has none of two dimensions, and 2.8 and 2.9 put strided shards together
    in the wrong order."""
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
    """For tests that only the soak run has time for."""
    if not SOAK:
        pytest.skip("a long one: set REPRIEVE_SOAK=1")
