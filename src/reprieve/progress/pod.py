"""What a pod knows of itself."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"


def in_pod(env: Mapping[str, str] = os.environ) -> bool:
    return bool(env.get("KUBERNETES_SERVICE_HOST"))


def addresses(env: Mapping[str, str] = os.environ) -> list[str]:
    """Where a server listens. On loopback (`kubectl port-forward` comes from there), and in a pod on the pod's own
    address. Never on all of them: a pod with the host's network would open a port on every network of its node."""
    found = [LOOPBACK]
    if in_pod(env):
        own = env.get("POD_IP", "").strip() or _of_hostname()
        if own and not _is_loopback(own):
            found.append(own)
    return found


def say_protected(env: Mapping[str, str] = os.environ) -> None:
    """What people look for in the log of a pod. Only to be said when SIGTERM is heard and would be answered with a
    save; elsewhere nobody looks for it, and nothing is said."""
    if in_pod(env) or any(name.startswith("KUBEFLOW_") for name in env):
        print(
            "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM\n[Kubeflow] JIT checkpointing enabled",
            file=sys.stderr,
            flush=True,
        )


def _of_hostname() -> str | None:
    """The kubelet writes a pod's name and address into its /etc/hosts: no name server is asked."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
