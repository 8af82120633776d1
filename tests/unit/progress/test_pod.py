"""Facts about a pod, and the addresses that a server in it listens on."""

from __future__ import annotations

import socket

import pytest

from reprieve.progress import pod

PROMETHEUS_ACCEPTS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def test_outside_a_pod_on_loopback_alone() -> None:
    assert pod.addresses({"POD_IP": "10.0.0.7"}) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("env", "hosts", "found"),
    [
        ({"POD_IP": "10.0.0.7"}, ["10.9.9.9"], ["10.0.0.7", "127.0.0.1"]),
        ({"POD_IP": "fd00::7"}, ["10.9.9.9"], ["fd00::7", "::1"]),
        ({}, ["10.0.0.8"], ["10.0.0.8", "127.0.0.1"]),
        ({}, ["fd00::8"], ["fd00::8", "::1"]),
        ({}, ["fd00::8", "10.0.0.8"], ["10.0.0.8", "127.0.0.1"]),
        ({"POD_IP": " "}, ["10.0.0.8"], ["10.0.0.8", "127.0.0.1"]),
        ({}, ["127.0.1.1"], ["127.0.0.1"]),
        ({}, [], ["127.0.0.1"]),
    ],
)
def test_in_a_pod_on_its_own_address_too(
    env: dict[str, str], hosts: list[str], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hosts`: the addresses of the pod's name in /etc/hosts."""

    def look_up(name: str, port: None, family: int) -> list[tuple[object, ...]]:
        known = [host for host in hosts if (":" in host) == (family == socket.AF_INET6)]
        if not known:
            raise socket.gaierror("no such name")
        return [(family, 0, 0, "", (host, 0)) for host in known]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert pod.addresses({"KUBERNETES_SERVICE_HOST": "10.96.0.1", **env}) == found


@pytest.mark.parametrize(
    ("env", "printed"),
    [
        ({}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, True),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "https://x"}, True),
    ],
)
def test_what_people_look_for_in_the_log_of_a_pod(
    env: dict[str, str], printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.print_protected(env)
    lines = [
        "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM",
        "[Kubeflow] JIT checkpointing enabled",
    ]
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", lines if printed else [])
