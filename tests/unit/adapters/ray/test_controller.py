"""When the controller ends a run for its driver: once all workers are ready for it, or at the deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray.util

from reprieve.adapters.ray import controller, internals
from reprieve.adapters.ray.config import JITCheckpointConfig, resolve_config
from reprieve.adapters.ray.controller import DriverStopped, RunController, generation_store
from reprieve.adapters.ray.messages import DRIVER_STOP, PARKED, DriverStop
from reprieve.ranks.store import prefixed
from reprieve.ranks.torch_store import TorchStore


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunController]:
    """The controller of a run with two workers."""
    keys: dict[str, bytes] = {}
    monkeypatch.setattr(internals, "put_key", keys.__setitem__)
    monkeypatch.setattr(internals, "get_key", keys.get)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(RunController, "_running", None)
    monkeypatch.setattr(controller, "show_logs", lambda rank: None)
    live = RunController.start("run", resolve_config(JITCheckpointConfig(enabled=True), {}))
    assert live is not None
    assert live.begin_generation(2) == 1
    yield live


def stop_driver(live: RunController, deadline_s: float | None = None) -> None:
    """As the driver does it."""
    store = prefixed(TorchStore(live.address.host, live.address.port), live.address.secret)
    deadline = None if deadline_s is None else time.time() + deadline_s
    store.set(DRIVER_STOP, DriverStop(reason="SIGTERM", deadline=deadline).to_json())
    store.close()
    end = time.monotonic() + 20
    while live._driver_stop is None:
        assert time.monotonic() < end
        time.sleep(0.01)


def park(live: RunController, generation: int = 1) -> None:
    store = generation_store(live.address, generation)
    store.add(PARKED, 1)
    store.close()


def test_a_run_that_is_not_stopped_continues(live: RunController) -> None:
    park(live)
    park(live)  # preempted workers: the driver continues
    live.polled()
    assert live.begin_generation(2) == 2


def test_the_run_ends_when_the_last_worker_is_ready(live: RunController) -> None:
    stop_driver(live)
    live.polled()
    park(live)
    live.polled()
    park(live)
    with pytest.raises(DriverStopped) as stopped:
        live.polled()
    assert stopped.value.code == 143


def test_workers_of_an_earlier_generation_do_not_count(live: RunController) -> None:
    park(live, 1)
    park(live, 1)
    live.begin_generation(2)
    stop_driver(live)
    live.polled()


def test_the_deadline_of_the_driver_ends_the_run_with_an_error(
    live: RunController, caplog: pytest.LogCaptureFixture
) -> None:
    stop_driver(live, deadline_s=0.5)
    with pytest.raises(DriverStopped):
        live.polled()
    assert "not all workers have saved before the deadline of the driver" in caplog.text


def test_no_new_group_starts_for_a_stopped_driver(live: RunController) -> None:
    stop_driver(live, deadline_s=60)
    with pytest.raises(DriverStopped):
        live.begin_generation(2)
    with pytest.raises(DriverStopped):
        live.raise_if_nothing_to_save()
