"""`reprieve operator crd`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import reprieve.kubernetes
import reprieve.operator
from reprieve.cli import execute
from tests.support.kubernetes_server import KubernetesServer
from tests.support.train_job_crd import upstream_definition

CRDS = "customresourcedefinitions"
NAME = "trainjobs.trainer.kubeflow.org"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        server.put(CRDS, upstream_definition())
        yield server


def test_check_install_and_remove(server: KubernetesServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["operator", "crd", "--check"]) == 1
    assert "missing: spec.checkpointing\n" in capsys.readouterr().out
    assert execute(["operator", "crd", "--install"]) == 0
    assert capsys.readouterr().out == f"{NAME} has spec.checkpointing\n"
    assert execute(["operator", "crd", "--install"]) == 0
    assert capsys.readouterr().out == f"{NAME} has spec.checkpointing already\n"
    assert execute(["operator", "crd", "--check"]) == 0
    assert capsys.readouterr().out == f"{NAME} has spec.checkpointing\n"
    assert execute(["operator", "crd", "--remove", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"changed": True, "installed": False, "name": NAME}
    assert server.get(CRDS, NAME)["spec"] == upstream_definition()["spec"]


def test_a_cluster_without_trainer(server: KubernetesServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.objects.clear()
    assert execute(["operator", "crd", "--install", "--context", server.context]) == 2
    assert f'error: cannot get CustomResourceDefinition {NAME}: {CRDS} "{NAME}" not found' in capsys.readouterr().err


@pytest.mark.parametrize("package", ["lightkube", "httpx2", "starlette", "uvicorn", "cryptography"])
def test_without_the_extra(package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for package_of_ours in ("kubernetes", "operator"):
        monkeypatch.setattr(reprieve, package_of_ours, getattr(reprieve, package_of_ours))  # and back again
    for name in [name for name in sys.modules if name.startswith(("reprieve.operator", "reprieve.kubernetes"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert execute(["operator"]) == 2
    expected = f"error: reprieve operator needs {package}, which is not installed: pip install 'reprieve[operator]'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--certificate-life", "3s"], "--certificate-life: use 10s or more"),
        (["--certificate-life", "soon"], "'soon' is not a duration"),
        (["--port", "99999"], "--port 99999: use 1 to 65535"),
    ],
)
def test_options_that_cannot_be_right(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["operator", *options]) == 2
    assert message in capsys.readouterr().err
