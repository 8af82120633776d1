"""Nodes without Reprieve, or with another version, are named before a worker gets the callback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.cloudpickle
from ray.exceptions import GetTimeoutError

from reprieve import __version__
from reprieve.adapters.ray import node_check
from reprieve.adapters.ray.node_check import check_nodes, version_probe, version_problem
from reprieve.errors import ConfigError


class FakeWorker:
    """A worker on a node that can load some version of Reprieve."""

    def __init__(self, node_ip: str, version: str | None) -> None:
        self.metadata = SimpleNamespace(node_ip=node_ip)
        self._version = version

    def execute_async(self, probe: Callable[[], str | None]) -> str | None:
        assert probe() == __version__  # it works in this process
        return self._version


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check.ray, "get", lambda answers, timeout: answers)


def test_equal_versions_pass() -> None:
    check_nodes([FakeWorker("10.0.0.1", __version__), FakeWorker("10.0.0.2", __version__)])


def test_a_node_without_reprieve_is_named_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as refused:
        check_nodes([FakeWorker("10.0.0.1", __version__), FakeWorker("10.0.0.2", None), FakeWorker("10.0.0.2", None)])
    message = str(refused.value)
    assert message.count("10.0.0.2 has none") == 1 and "10.0.0.1" not in message
    assert f'ray.init(runtime_env={{"pip": ["reprieve=={__version__}"]}})' in message


def test_another_version_is_named() -> None:
    problem = version_problem([("10.0.0.2", "0.0.1"), ("10.0.0.1", None)])
    assert problem is not None
    assert "10.0.0.1 has none, 10.0.0.2 has 0.0.1" in problem


@pytest.mark.parametrize(
    "error", [GetTimeoutError("too slow"), ray.exceptions.RayActorError(), OSError("gone")], ids=repr
)
def test_a_check_that_fails_is_logged_and_the_run_continues(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits: list[float] = []

    def get(answers: Any, timeout: float) -> None:
        limits.append(timeout)
        raise error

    monkeypatch.setattr(node_check.ray, "get", get)
    check_nodes([FakeWorker("10.0.0.1", None)])
    assert limits == [30.0]
    assert "could not check the version of Reprieve" in caplog.text


def test_the_question_needs_no_reprieve_to_be_unpickled() -> None:
    """In a process where neither reprieve nor this folder can be imported."""
    pickled = ray.cloudpickle.dumps(version_probe())
    code = "import pickle, sys; sys.modules['reprieve'] = None; print(pickle.load(sys.stdin.buffer)())"
    ray_folder = str(next(iter(ray.__path__))).removesuffix("/ray")
    program = f"import sys; sys.path.append({ray_folder!r}); import ray.cloudpickle; {code}"
    done = subprocess.run([sys.executable, "-I", "-c", program], input=pickled, capture_output=True)
    assert done.stdout.strip() == b"None", done.stderr.decode()
