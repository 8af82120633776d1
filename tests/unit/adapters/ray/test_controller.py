"""When the controller ends a run for its driver: once all workers are ready for it, or at the deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray.train
import ray.util
from ray.train.v2.api.exceptions import WorkerGroupError

from reprieve.adapters.ray import controller, internals
from reprieve.adapters.ray.config import JITCheckpointConfig, resolve_config
from reprieve.adapters.ray.controller import DriverStopped, RunController, generation_store
from reprieve.adapters.ray.messages import DRIVER_STOP, PARKED, SAVED, DriverStop
from reprieve.ranks.store import prefixed
from reprieve.ranks.torch_store import TorchStore
from reprieve.run_state import RunState


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


def save(live: RunController, step: int, generation: int = 1) -> None:
    store = generation_store(live.address, generation)
    store.set(SAVED, str(step).encode())
    store.close()


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


def test_what_an_earlier_stop_saved_is_not_called_saved_at_this_one(live: RunController) -> None:
    save(live, 100)
    live.begin_generation(2)  # and it trains on
    stop_driver(live, deadline_s=0.5)
    with pytest.raises(DriverStopped, match="nothing new is saved") as stopped:
        live.polled()
    assert stopped.value.saved_step is None


def test_what_the_generation_before_saved_is_saved_if_no_worker_has_trained_since(live: RunController) -> None:
    save(live, 100)
    live.begin_generation(2)
    stop_driver(live)
    with pytest.raises(DriverStopped, match="step 100 is saved"):
        live.raise_if_nothing_to_save()


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, RunState.FINISHED, None),
        (WorkerGroupError("2 failed", {1: ValueError("of the user")}), RunState.FAILED, "ValueError: of the user"),
        (internals.ControllerError(OSError("the disk is full")), RunState.FAILED, "OSError: the disk is full"),
    ],
    ids=str,
)
def test_the_end_of_a_run_is_published(
    live: RunController, error: Exception | None, state: RunState, reason: str | None
) -> None:
    live.progress.reported({"step": 4}, None)
    live.finished(error)
    progress = live.progress.snapshot()
    assert (progress.state, progress.reason, progress.step) == (state, reason, 4)


def test_a_stopped_run_is_not_published_as_failed(live: RunController) -> None:
    stop_driver(live, deadline_s=0.5)
    with pytest.raises(DriverStopped) as stopped:
        live.polled()
    live.finished(stopped.value)
    assert live.progress.snapshot().state == RunState.STOPPED


def test_an_aborted_run_is_published_as_failed(live: RunController) -> None:
    live.aborted()
    progress = live.progress.snapshot()
    assert (progress.state, progress.reason) == (RunState.FAILED, "the run was aborted")


def test_a_stop_is_logged_in_one_line(live: RunController, caplog: pytest.LogCaptureFixture) -> None:
    """Ray logs what ends a run with its traceback. A stop is no error."""
    policy = internals.failure_policy.DefaultFailurePolicy(ray.train.FailureConfig())
    with caplog.at_level("INFO", logger=internals.failure_policy.__name__):
        policy.make_decision(DriverStopped(RuntimeError("SIGTERM"), saved_step=7))
        policy.make_decision(internals.ControllerError(RuntimeError("the disk is full")))
    stop, failure = caplog.records
    assert stop.getMessage() == "the run is stopped: SIGTERM; step 7 is saved. The same name and storage path resume it"
    assert stop.exc_info is None and failure.exc_info is not None
