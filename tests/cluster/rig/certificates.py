"""Certificates and kubeconfigs of a cluster: one authority, a client certificate for each component."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.cluster.rig.errors import RigError
from tests.cluster.rig.layout import Instance
from tests.cluster.rig.network import API_SERVICE_ADDRESS, CONTROL_PLANE_ADDRESS, NODE_ADDRESSES

API_URL = f"https://{CONTROL_PLANE_ADDRESS}:6443"
VALID_DAYS = "30"
API_NAMES = (
    "DNS:localhost",
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
    "DNS:kubernetes.default.svc.cluster.local",
    f"IP:{CONTROL_PLANE_ADDRESS}",
    f"IP:{API_SERVICE_ADDRESS}",
)
FRONT_PROXY = "front-proxy"
CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "api-to-kubelet": "/O=system:masters/CN=api-to-kubelet",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
    "dns": "/CN=dns",
    FRONT_PROXY: f"/CN={FRONT_PROXY}",
}


class Certificates:
    """The folder with keys (`<name>.key`), certificates (`<name>.crt`) and kubeconfigs of a cluster."""

    def __init__(self, instance: Instance) -> None:
        self.folder = instance.state / "certificates"
        self.kubeconfigs = instance.admin_kubeconfig.parent

    def create(self) -> None:
        self.folder.mkdir(parents=True)
        self.kubeconfigs.mkdir(parents=True)
        self._make_authority()
        self._make("api", "/CN=kube-apiserver", API_NAMES)
        # Service account tokens are signed with it.
        _openssl("genrsa", "-out", self.key("tokens"), "2048")
        _openssl("rsa", "-in", self.key("tokens"), "-pubout", "-out", self.path("tokens.pub"))
        clients = {**CLIENTS, **{node: f"/O=system:nodes/CN=system:node:{node}" for node in NODE_ADDRESSES}}
        for name, subject in clients.items():
            self._make(name, subject)
            self._write_kubeconfig(name)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def certificate(self, name: str) -> str:
        return self.path(f"{name}.crt")

    def key(self, name: str) -> str:
        return self.path(f"{name}.key")

    def kubeconfig(self, name: str) -> Path:
        return self.kubeconfigs / name

    def _make_authority(self) -> None:
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
        self._make_key("authority")
        _openssl(
            *("req", "-x509", "-new", "-key", self.key("authority"), "-subj", "/CN=test-cluster", "-days", VALID_DAYS),
            *(argument for extension in extensions for argument in ("-addext", extension)),
            *("-out", self.certificate("authority")),
        )

    def _make(self, name: str, subject: str, alternative_names: tuple[str, ...] = ()) -> None:
        extensions = ["keyUsage=digitalSignature,keyEncipherment", "extendedKeyUsage=clientAuth,serverAuth"]
        if alternative_names:
            extensions.append(f"subjectAltName={','.join(alternative_names)}")
        self._make_key(name)
        (self.folder / "extensions").write_text("\n".join(extensions))
        request = self.path("request")
        _openssl("req", "-new", "-key", self.key(name), "-subj", subject, "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-days", VALID_DAYS, "-extfile", self.path("extensions")),
            *("-CA", self.certificate("authority"), "-CAkey", self.key("authority"), "-CAcreateserial"),
            *("-out", self.certificate(name)),
        )

    def _make_key(self, name: str) -> None:
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.key(name))

    def _write_kubeconfig(self, name: str) -> None:
        """JSON is YAML too."""
        cluster = {"server": API_URL, "certificate-authority": self.certificate("authority")}
        user = {"client-certificate": self.certificate(name), "client-key": self.key(name)}
        configuration = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        }
        self.kubeconfig(name).write_text(json.dumps(configuration, indent=2))


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RigError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")
