"""`reprieve run` as Kubernetes runs it: pods come and go, and only the checkpoint folder stays."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from reprieve.checkpoint.folder import attempts
from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.ranks.torch_store import TorchStore
from reprieve.run_state import RunState
from reprieve.storage.disk import Disk
from tests.support.launch_kit import LIMIT_S, Ended, Lab, until

STEPS = 30


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = Lab(tmp_path)
    lab.env |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "REPRIEVE_METRICS_PORT": "off", "REPRIEVE_RUN": "uid-1"}
    return lab


def new_pod(lab: Lab) -> None:
    """Lose what a container loses."""
    shutil.rmtree(lab.folder / "state", ignore_errors=True)


def stop_at(lab: Lab, step: int, **options: Any) -> Ended:
    launched = lab.start(lab.python(steps=STEPS, step_s=0.05, **options))
    until(lambda: lab.steps() >= step, launched)
    launched.terminate()
    return launched.wait()


def job_of(lab: Lab, nodes: int, node: int, port: int, **options: Any) -> list[str]:
    address = ("--master-addr=127.0.0.1", f"--master-port={port}")
    return lab.torchrun(1, f"--nnodes={nodes}", f"--node-rank={node}", *address, steps=STEPS, **options)


def test_a_rank_whose_peer_leaves_during_a_stop_was_preempted(lab: Lab) -> None:
    """SIGTERM reaches one node only, and its rank leaves in the middle of a step. The other node learns of the stop
    from the ranks' store, and its rank fails in the collective: that must not count as a failure."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = [lab.start(job_of(lab, 2, node, port, step_s=0.2, desert=True)) for node in range(2)]
    until(lambda: lab.steps(0) >= 3, limit_s=LIMIT_S)
    launched[1].terminate()
    ended = [node.wait() for node in launched]
    assert [node.code for node in ended] == [143, 143], "\n\n".join(map(str, ended))
    assert "is NOT SAVED" in ended[0].err, str(ended[0])


def predecessors_store() -> TorchStore:
    """A store in which two nodes have met: what torchrun on node 0 serves while its ranks still save."""
    store = TorchStore.serve()
    server = store._server
    assert server is not None
    for node in range(2):
        server.set(f"none/torchelastic/role_info/{node}", "{}")
        server.set(f"none/torchelastic/assigned_ranks/{node}", f"[{node}, 2, {node}, 2]")
    return store


def test_a_node_does_not_join_the_rendezvous_of_its_predecessor(lab: Lab) -> None:
    """Its ranks would start at once, and node 0 of the new start would wait for it without end."""
    store = predecessors_store()
    port = store.port
    with (lab.folder / "node-1").open("w+") as output:
        node_1 = lab.start(job_of(lab, 2, 1, port), stderr=output)
        until(lambda: "waiting up to 0:01:00" in (lab.folder / "node-1").read_text(), node_1)
        store.close()
        del store
        node_0 = lab.start(job_of(lab, 2, 0, port))
        assert [node_0.wait().code, node_1.wait().code] == [0, 0], (lab.folder / "node-1").read_text()
    assert lab.steps(0) == lab.steps(1) == STEPS


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_stop_while_the_predecessor_is_waited_for(lab: Lab, nodes: int) -> None:
    """A job of one node waits as well: the name of its pod leads to the old one, too."""
    store = predecessors_store()
    last = nodes - 1
    with (lab.folder / "output").open("w+") as output:
        node = lab.start(job_of(lab, nodes, last, store.port), stderr=output)
        until(lambda: f"start of node {last} still takes part" in (lab.folder / "output").read_text(), node)
        node.terminate()
        assert node.wait().code == 143
    assert lab.exit_message() == "stopped by SIGTERM before the next attempt"


def test_starting_over_is_for_the_first_pod_of_a_run(lab: Lab) -> None:
    checkpoints = lab.job / "checkpoints"
    lab.env["REPRIEVE_RUN"] = "uid-0"
    assert stop_at(lab, 3).code == 143
    (lab.job / "seen-0.jsonl").unlink()

    lab.env |= {"REPRIEVE_RUN": "uid-1", "CHECKPOINT_RESUME": "false"}
    new_pod(lab)
    assert stop_at(lab, 3).code == 143
    assert lab.seen()[0][0] == 1, "it started over"
    assert (checkpoints / "previous-1").is_dir()
    stopped_at = lab.steps()

    new_pod(lab)
    ended = lab.run(lab.python(steps=STEPS))
    assert ended.code == 0, str(ended)
    assert f"resuming from checkpoint-{stopped_at}" in ended.err, str(ended)
    assert not (checkpoints / "previous-2").exists()


def test_starting_over_without_a_run_name_is_refused(lab: Lab) -> None:
    del lab.env["REPRIEVE_RUN"]
    lab.env["CHECKPOINT_RESUME"] = "false"
    ended = lab.run(lab.python(steps=STEPS))
    assert ended.code == 42 and "CHECKPOINT_RESUME=false without REPRIEVE_RUN" in ended.err, str(ended)
    assert "metadata.labels['jobset.sigs.k8s.io/jobset-uid']" in lab.exit_message()
    assert not lab.seen(), "the command was not started"


def test_attempts_and_their_causes_survive_the_pod(lab: Lab) -> None:
    assert stop_at(lab, 3).code == 143
    new_pod(lab)
    launched = lab.start(lab.python(steps=STEPS, step_s=0.1))
    until(lambda: any(attempt.training for attempt in attempts.read(lab.job / "checkpoints")[1:]), launched)
    launched.process.send_signal(signal.SIGKILL)
    launched.wait()
    new_pod(lab)
    ended = lab.run(lab.python(steps=STEPS))
    assert ended.code == 0 and "was killed without notice, after step" in ended.err, str(ended)
    found = attempts.read(lab.job / "checkpoints")
    assert [attempt.cause for attempt in found] == [RunState.PREEMPTED, RunState.LOST, RunState.FINISHED]
    assert {attempt.run for attempt in found} == {"uid-1"}
    run = lab.only_run()
    assert run["attempts"] == 3
    assert {"preempted", "lost"} <= run["time"]["lost"].keys()


@pytest.mark.parametrize("folder_is_known", [True, False])
def test_a_pod_that_starts_while_its_predecessor_saves_does_not_take_it_for_lost(
    lab: Lab, tmp_path: Path, folder_is_known: bool
) -> None:
    checkpoints = lab.job / "checkpoints"
    if folder_is_known:
        lab.env["CHECKPOINT_URI"] = str(checkpoints)
    old = lab.start(lab.python(steps=1000, step_s=0.05, holds_saves=True))
    until(lambda: lab.steps() >= 3, old)
    hold, reached = lab.job / "hold", lab.job / "reached-0"
    hold.touch()
    old.terminate()
    until(lambda: list(checkpoints.glob(".checkpoint-*.saving*")), old)
    reached.unlink()
    stopped_at = lab.steps()
    lab.env["REPRIEVE_STATE_DIR"] = str(tmp_path / "new-pod")
    new = lab.start(lab.python(steps=stopped_at + 3))
    until(reached.exists, new)
    hold.unlink()
    assert old.wait().code == 143
    ended = new.wait()
    assert ended.code == 0 and "killed without notice" not in ended.err, str(ended)
    found = attempts.read(checkpoints)
    assert [(each.cause, each.to_step) for each in found] == [("preempted", stopped_at), ("finished", stopped_at + 3)]
    assert lab.only_run()["time"]["lost"].get("lost") is None


@pytest.mark.parametrize("folder_is_known", [True, False])
def test_a_run_that_fails_again_and_again_is_not_restarted_without_end(lab: Lab, folder_is_known: bool) -> None:
    """A crash of one node while another reports a stop looks like a preemption to JobSet, which never gives up then."""
    failed = AttemptRecord(0.0, training=1.0, ended=2.0, cause=RunState.FAILED, to_step=3, run="uid-1")
    (lab.job / "checkpoints/.reprieve").mkdir(parents=True)
    attempts.write(Disk(), lab.job / "checkpoints", [failed] * 5)
    if folder_is_known:
        lab.env["CHECKPOINT_URI"] = str(lab.job / "checkpoints")
    ended = lab.run(lab.python(steps=1000, step_s=0.1))
    assert ended.code == 42, str(ended)
    assert "permanent failure" in ended.err and "5 starts of run 'uid-1' in a row failed" in ended.err, str(ended)
    assert "no progress" in lab.exit_message()
    if folder_is_known:
        assert not lab.seen(), "the command was not started"

    lab.env["REPRIEVE_RUN"] = "uid-2"
    ended = lab.run(lab.python(steps=200))
    assert ended.code == 0, f"a new job is another run\n{ended}"


def test_the_whole_grace_period_is_used_and_the_exit_code_is_still_143(lab: Lab) -> None:
    """A save that takes longer than the grace period: the kubelet's SIGKILL would make it 137, and burn a retry."""
    lab.env["REPRIEVE_GRACE"] = "4"
    ended = stop_at(lab, 3, width=400_000, slow=200_000)
    assert ended.code == 143, str(ended)
    assert "NOT SAVED" in ended.err or "TOO SHORT" in ended.err, str(ended)
