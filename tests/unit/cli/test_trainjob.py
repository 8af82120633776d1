"""`reprieve status|pause|resume|logs|ls trainjob/NAME`: what they print, and their exit codes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reprieve.cli import execute
from tests.support.kubernetes_server import KubernetesServer
from tests.support.stored_jobs import PATH, ago, ended_pod, job_pod, stop_all_pods, stored_job, when

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        server.missing.add("workloads")
        yield server


def progress(age_s: float = 5, **fields: Any) -> dict[str, Any]:
    """A block of the operator."""
    return {
        "state": "Running",
        "step": 150,
        "totalSteps": 300,
        "percentComplete": "50.0",
        "estimatedTimeRemaining": "45m",
        "loss": "0.4523",
        "currentEpoch": "1.50",
        "totalEpochs": 3,
        "lastUpdateTime": ago(age_s),
        "checkpointing": {"latestCheckpoint": PATH, "checkpointsCreated": 3},
        **fields,
    }


def is_suspended(server: KubernetesServer) -> bool:
    return bool(server.get("trainjobs", "finetune", "system")["spec"]["suspend"])


def test_one_job_in_full(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job(trainingProgress=progress()))
    server.put("pods", job_pod("finetune-node-0-0"))
    assert execute(["status", "trainjob/finetune"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "system/finetune", "Running", "step 150/300 (50.0 %)", "1.50 of 3", "0.4523", "45m", PATH, "3 created",
        "s ago, from the operator", "finetune-node-0-0 Running",
    ):  # fmt: skip
        assert text in shown, shown


def test_old_data_is_marked_as_such(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job(trainingProgress=progress(age_s=100)))
    server.put("pods", job_pod("a"))
    assert execute(["status", "trainjob/finetune"]) == 0
    shown = capsys.readouterr().out
    assert "Running (stale)" in shown and "2 min ago" in shown


def test_a_job_that_has_reported_nothing_has_no_age(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job(trainingProgress={"state": "Pending", "reason": "waits for quota of Kueue"}))
    assert execute(["status", "trainjob/finetune"]) == 0
    assert "updated" not in capsys.readouterr().out


def test_all_jobs(server: KubernetesServer, capsys: Capture) -> None:
    for words in (["status", "trainjobs"], ["status", "trainjob"]):
        assert execute(words) == 0
        found = capsys.readouterr()
        assert (found.out, "no TrainJobs here" in found.err) == ("", True)
    server.put("trainjobs", stored_job("a", trainingProgress=progress()))
    server.put("trainjobs", stored_job("b"))
    assert execute(["status", "trainjobs"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["trainjob", "state", "step", "done", "left", "checkpoint", "updated"]
    assert rows[0].split()[:6] == ["a", "Running", "150", "50%", "45m", "checkpoint-57"]
    assert rows[1].split() == ["b", "Pending"]


def test_status_as_json(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job(trainingProgress=progress()))
    assert execute(["status", "trainjob/finetune", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["stale"], found["source"]) == ("Running", False, "operator")
    assert found["progress"]["step"] == 150 and found["progress"]["loss"] == "0.4523"
    assert execute(["status", "trainjobs", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["finetune"]


def _wait_until_shown(server: KubernetesServer) -> None:
    """A request that begins now gets what is stored now; the one after it begins when its answer is printed."""

    def reads() -> int:
        return sum(each.startswith("GET") and "trainjobs/finetune" in each for each in server.requests)

    before = reads()
    when(lambda: reads() >= before + 2, lambda: None).join()


@pytest.mark.parametrize(("end", "code"), [("Complete", 0), ("Failed", 1)])
def test_a_job_is_followed_until_it_ends(
    server: KubernetesServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch, end: str, code: int
) -> None:
    monkeypatch.setattr("reprieve.cli.trainjob.status.POLL_S", 0.05)
    server.put("trainjobs", stored_job(trainingProgress=progress()))
    conditions = [{"type": end, "status": "True", "message": "because"}]

    def train() -> None:
        _wait_until_shown(server)
        for step in (151, 152):
            server.put("trainjobs", stored_job(trainingProgress=progress(step=step)))
            _wait_until_shown(server)
        server.put("trainjobs", stored_job(trainingProgress=progress(step=152), conditions=conditions))

    trainer = threading.Thread(target=train)
    trainer.start()
    assert execute(["status", "-w", "trainjob/finetune"]) == code
    trainer.join()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4, "a line for each change"
    assert "Running  step 150/300 (50.0 %)  loss 0.4523  45m left  checkpoint-57" in lines[0]
    assert ("Succeeded" if code == 0 else "Failed") in lines[-1]


def test_a_pause_names_the_step_and_the_way_back(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("finetune-node-0-0"))
    kubelets = when(lambda: is_suspended(server), lambda: stop_all_pods(server))
    assert execute(["pause", "trainjob/finetune", "--namespace", "system", "--reason", "budget"]) == 0
    kubelets.join()
    message = capsys.readouterr().err
    assert "finetune is paused: saved at step 57 (checkpoint-57); all pods stopped within" in message
    assert "reprieve resume trainjob/finetune --namespace system" in message
    assert execute(["status", "trainjob/finetune"]) == 0
    assert "paused by reprieve pause at" in (shown := capsys.readouterr().out) and "(budget)" in shown
    assert execute(["pause", "trainjob/finetune"]) == 0
    assert "finetune was paused already" in capsys.readouterr().err
    assert execute(["resume", "trainjob/finetune"]) == 0
    assert "finetune resumes. Follow it with: reprieve status --watch trainjob/finetune" in capsys.readouterr().err
    assert not is_suspended(server)


def test_a_pause_that_could_not_save_fails(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("finetune-node-0-0"))
    kubelets = when(lambda: is_suspended(server), lambda: stop_all_pods(server, saved=False, message="disk full"))
    assert execute(["pause", "trainjob/finetune", "--json"]) == 1
    kubelets.join()
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["saved"], found["checkpoint"], found["message"]) == (57, False, PATH, "disk full")


def test_a_pause_without_waiting(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("a"))
    assert execute(["pause", "trainjob/finetune", "--no-wait"]) == 0
    assert "finetune saves and stops" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["pause", "resume", "status", "logs", "ls"])
def test_a_user_without_rights_gets_the_message_of_the_api_server(
    server: KubernetesServer, capsys: Capture, verb: str
) -> None:
    server.put("trainjobs", stored_job())
    server.forbidden.add("trainjobs")
    assert execute([verb, "trainjob/finetune"]) == 2
    assert 'trainjobs is forbidden: User "tester" cannot GET trainjobs' in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["pause", "resume", "status", "logs", "ls"])
def test_a_name_that_does_not_exist(server: KubernetesServer, capsys: Capture, verb: str) -> None:
    server.put("trainjobs", stored_job())
    assert execute([verb, "trainjob/finetun"]) == 2
    assert "no TrainJob finetun in namespace system: did you mean finetune?" in capsys.readouterr().err


def test_a_job_that_somebody_else_has_suspended_is_not_resumed(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", {**stored_job(), "spec": {"suspend": True}})
    assert execute(["resume", "trainjob/finetune"]) == 2
    assert "finetune was not paused by Reprieve: it is suspended" in capsys.readouterr().err
    assert is_suspended(server)


def test_logs(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("a", rank=0))
    server.put("pods", job_pod("b", rank=1))
    server.logs |= {"a": "of rank 0\n", "b": "of rank 1\n"}
    assert execute(["logs", "trainjob/finetune"]) == 0
    assert capsys.readouterr().out == "of rank 0\n"
    assert execute(["logs", "trainjob/finetune", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "of rank 1\n"
    assert execute(["logs", "trainjob/finetune", "--rank", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rank": 1, "line": "of rank 1"}


def test_pods_that_a_user_may_not_read_have_no_log(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job(trainingProgress=progress()))
    server.put("pods", job_pod("a"))
    server.forbidden.add("pods")
    assert execute(["logs", "trainjob/finetune"]) == 2
    assert 'pods is forbidden: User "tester" cannot GET pods' in capsys.readouterr().err


def test_a_resume_as_json(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job())
    assert execute(["pause", "trainjob/finetune"]) == 0
    capsys.readouterr()
    assert execute(["resume", "trainjob/finetune", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["state"], found["pausedBy"]) == ("finetune", "Pending", None)


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_job_that_has_ended(server: KubernetesServer, capsys: Capture, verb: str) -> None:
    server.put("trainjobs", stored_job(conditions=[{"type": "Complete", "status": "True"}]))
    assert execute([verb, "trainjob/finetune"]) == 2
    assert "finetune has ended (Complete)" in capsys.readouterr().err
    assert not is_suspended(server)


def test_checkpoints(server: KubernetesServer, capsys: Capture) -> None:
    available = [
        {"path": PATH, "step": 57, "created": "2026-11-19T05:00:00Z", "bytes": 1_000_000, "valid": True},
        {"path": "/workspace/checkpoints/checkpoint-40", "step": 40, "valid": False, "reason": "damaged"},
    ]
    checkpointing = {"latestCheckpoint": PATH, "availableCheckpoints": available}
    server.put("trainjobs", stored_job(trainingProgress=progress(checkpointing=checkpointing)))
    assert execute(["ls", "trainjob/finetune"]) == 0
    _, newest, older = capsys.readouterr().out.splitlines()
    assert newest.split()[:2] == [PATH, "57"] and newest.rstrip().endswith("1 MB  valid")
    assert older.rstrip().endswith("damaged")
    assert execute(["ls", "trainjob/finetune", "--json"]) == 0
    assert [each["valid"] for each in json.loads(capsys.readouterr().out)] == [True, False]
    server.put("trainjobs", stored_job())
    assert execute(["ls", "trainjob/finetune"]) == 0
    assert "finetune has reported no checkpoints" in capsys.readouterr().err


def test_a_pod_that_has_ended_still_shows_its_step(server: KubernetesServer, capsys: Capture) -> None:
    server.put("trainjobs", stored_job(conditions=[{"type": "Complete", "status": "True"}]))
    server.put("pods", ended_pod(job_pod("a"), 0, state="finished"))
    assert execute(["status", "trainjob/finetune"]) == 0
    shown = capsys.readouterr().out
    assert "Succeeded" in shown and "step 57" in shown and "from the termination message of rank 0" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pause", "train-1", "--namespace", "team"], "--namespace is for TrainJobs: write trainjob/train-1"),
        (["pause", "train-1", "--reason", "x"], "--reason is for TrainJobs"),
        (["status", "-w"], "--watch is for TrainJobs: write trainjob/NAME"),
        (["status", "-w", "trainjobs"], "--watch is for one job"),
        (["pause", "trainjob"], "which one? write trainjob/NAME; reprieve status trainjobs lists them"),
        (["resume", "trainjob"], "which one? write trainjob/NAME"),
        (["ls", "folder", "--context", "x"], "--context is for TrainJobs"),
    ],
)
def test_options_and_names_that_do_not_go_together(capsys: Capture, words: list[str], message: str) -> None:
    assert execute(words) == 2
    assert message in capsys.readouterr().err


def test_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    for verb in ("status", "resume"):
        assert execute([verb, "trainjob/finetune"]) == 2
        assert "no cluster to connect to" in capsys.readouterr().err
