"""Cells of the notebooks without a cluster: what they install, submit, connect with, and do without an answer."""

from __future__ import annotations

import ast
import http.server
import importlib.metadata
import json
import linecache
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from packaging.requirements import Requirement

from reprieve.kubeflow import PeriodicCheckpointConfig, TransformersTrainer
from tests.support.places import ROOT
from tests.support.status_server import make_certificate
from tests.support.train_jobs import RUNTIME

EXAMPLES = ROOT / "examples/kubeflow"
IN_THE_IMAGE = {"torch"}
"""Of the runtime reprieve-torch."""


@pytest.fixture(scope="module")
def cells() -> dict[str, str]:
    """Of the notebook for OpenShift AI."""
    return code_of("jit-checkpointing.ipynb")


def code_of(notebook: str) -> dict[str, str]:
    content = nbformat.read(EXAMPLES / notebook, as_version=4)
    return {each.id: each.source for each in content.cells if each.cell_type == "code"}


def run(source: str, variables: dict[str, Any]) -> None:
    """Execute a cell, and keep its source, as IPython does: functions are submitted with it."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), variables)


def imported(source: str) -> set[str]:
    """The packages that a text imports, without those of Python."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


class Client:
    def train(self, *, runtime: str, trainer: TransformersTrainer) -> str:
        self.trainer = trainer
        return "job"


def test_pods_install_what_the_function_imports(cells: dict[str, str]) -> None:
    client = Client()
    variables: dict[str, Any] = {
        "client": client,
        "TransformersTrainer": TransformersTrainer,
        "PeriodicCheckpointConfig": PeriodicCheckpointConfig,
    }
    for name in ("cell-01", "cell-09", "cell-11"):
        run(cells[name], variables)
    assert imported(cells["cell-09"]) == {"torch", "transformers"}
    packages = client.trainer.request().packages
    assert imported(cells["cell-09"]) - IN_THE_IMAGE <= set(packages)
    assert "accelerate" in packages, "transformers' Trainer needs it"


def test_the_workbench_installs_what_its_cells_import(cells: dict[str, str]) -> None:
    """An image without PyTorch."""
    [line] = cells["cell-03"].splitlines()
    installed = {Requirement(word.strip('"')).name for word in line.split()[3:]}
    extras = {extra for word in line.split()[3:] for extra in Requirement(word.strip('"')).extras}
    for _ in range(3):  # an extra may name others
        for each in map(Requirement, importlib.metadata.requires("reprieve") or ()):
            if each.marker is not None and any(each.marker.evaluate({"extra": extra}) for extra in extras):
                installed.add(each.name)
                extras |= each.extras if each.name == "reprieve" else set()
    brought = {"kubeflow": "kubernetes"}
    """Packages that the SDK brings."""
    installed |= {brought[name] for name in installed & brought.keys()}
    cells_of_workbench = [source for name, source in cells.items() if name not in ("cell-03", "cell-09")]
    assert set().union(*map(imported, cells_of_workbench)) <= installed
    assert "torch" in installed, "the last cells use the model"


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str | None]]]:
    """An API server with a certificate of its own: its URL, the certificate, and the tokens that it gets."""
    tokens: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers["Authorization"])
            is_runtimes = self.path.partition("?")[0].endswith("/clustertrainingruntimes")
            body = json.dumps({"items": [RUNTIME] if is_runtimes else [], "metadata": {}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    certificate, key = make_certificate(tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"https://localhost:{server.server_port}", certificate, tokens
    server.shutdown()
    server.server_close()


def test_a_workbench_connects_with_its_variables(
    cells: dict[str, str],
    api_server: tuple[str, Path, list[str | None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, certificate, tokens = api_server
    monkeypatch.setenv("KUBECONFIG", "/absent")
    monkeypatch.setenv("OPENSHIFT_API_URL", url)
    monkeypatch.setenv("NOTEBOOK_USER_TOKEN", "sha256~secret")
    monkeypatch.setenv("OPENSHIFT_CA_FILE", str(certificate))
    run(cells["cell-05"], {"NAMESPACE": "team"})
    assert capsys.readouterr().out == "['reprieve-torch']\n"
    assert set(tokens) == {"Bearer sha256~secret"}


NO_ANSWER_AT_FIRST = """
echo >> {calls}
case $(wc -l < {calls}) in
  1) exit 22 ;;
  2) echo null ;;
  3) echo '{{"state": "Running", "step": 2}}' ;;
  4) exit 22 ;;
  *) echo '{{"state": "Running", "step": 3}}' ;;
esac
"""


def test_an_api_that_does_not_answer_is_no_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cell follows the job until the third step."""
    variables = {"RAW": NO_ANSWER_AT_FIRST.format(calls=tmp_path / "calls"), "POLL_S": 0.001, "PAUSE_AT_STEP": 3}
    run("import subprocess\n" + code_of("trl-gpt2-checkpointing.ipynb")["cell-09"], variables)
    assert [ast.literal_eval(line)["step"] for line in capsys.readouterr().out.splitlines()] == [2, 3]
