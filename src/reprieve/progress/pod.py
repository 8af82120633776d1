"""Facts about the Kubernetes pod that this process runs in."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping

from reprieve.host import in_pod

LOOPBACK = "127.0.0.1"


def addresses(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the addresses to listen on: loopback (for `kubectl port-forward`), and in a pod its own address.

    Never all addresses: a pod with the host's network would open a port on every network of its node.
    """
    listed = [LOOPBACK]
    if in_pod(env):
        own = env.get("POD_IP", "").strip() or _address_of_hostname()
        if own and not _is_loopback(own):
            listed.append(own)
    return listed


def print_protected(env: Mapping[str, str] = os.environ) -> None:
    """Print the lines that Kubeflow users look for in the log of a pod. Only call this where SIGTERM leads to a save.
    Outside of pods it prints nothing."""
    if in_pod(env) or any(name.startswith("KUBEFLOW_") for name in env):
        print(
            "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM\n[Kubeflow] JIT checkpointing enabled",
            file=sys.stderr,
            flush=True,
        )


def _address_of_hostname() -> str | None:
    """The kubelet writes the pod's name and address into /etc/hosts, so this needs no name server."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
