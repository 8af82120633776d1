"""Kubeflow Trainer's status server, as far as a pod sees it: on loopback, with or without TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJ0cmFpbmVyIn0.c2VjcmV0"
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/mine/trainjobs/job/status"
MAX_BYTES = 1 << 16


class StatusServer:
    """Accepts each POST to its path that has its token, and keeps the bodies."""

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        self.bodies: list[str] = []
        self.refused: list[int] = []
        self.status = 200
        self.token = TOKEN
        self.hang = threading.Event()
        self.hang.set()
        handler = type("OwnHandler", (_Handler,), {"rig": self})
        self._server = HTTPServer(("127.0.0.1", 0), handler)
        scheme = "http"
        if certificate is not None:
            scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{scheme}://localhost:{self._server.server_port}{PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def environment(self, folder: Path, **more: str) -> dict[str, str]:
        """Return the variables that the controller sets in a pod."""
        (folder / "token").write_text(self.token + "\n")
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": self.url,
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
            **more,
        }

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    rig: StatusServer

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        data = self.rfile.read(size).decode()
        self.rig.hang.wait(20)
        status = self.rig.status
        if self.path != PATH:
            status = 404
        elif self.headers["Authorization"] != f"Bearer {self.rig.token}":
            status = 403
        elif self.headers["Content-Type"] != "application/json" or size > MAX_BYTES:
            status = 422
        if status == 200:
            self.rig.bodies.append(data)
        else:
            self.rig.refused.append(status)
        response = data.encode() if status == 200 else b'{"kind": "Status"}'
        self.send_response(status)
        if status in (301, 302, 307):
            self.send_header("Location", f"http://127.0.0.1:{self.rig._server.server_port}/stolen")
        self.send_header("Content-Length", str(len(response)))
        self.end_headers()
        self.wfile.write(response)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate for localhost. The file is also its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    certificate, key = folder / "ca.crt", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key
