"""Facts about the Kubernetes pod that this process runs in."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping

from reprieve.host import in_pod

LOOPBACK = "127.0.0.1"
_LOOPBACK_V6 = "::1"


def addresses(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the addresses to listen on: in a pod its own address, and loopback (for `kubectl port-forward`) of the
    same family, because a pod with IPv6 may have no IPv4.

    Never all addresses: a pod with the host's network would open a port on every network of its node.
    """
    own = (env.get("POD_IP", "").strip() or _address_of_hostname()) if in_pod(env) else None
    if own is None or _is_loopback(own):
        return [LOOPBACK]
    return [own, _LOOPBACK_V6 if ":" in own else LOOPBACK]


def print_protected(env: Mapping[str, str] = os.environ) -> None:
    """Print the lines that Kubeflow users look for in the log of each pod. Only call this where SIGTERM leads to a
    save. Outside of pods, and on all but the first rank of a pod, it prints nothing."""
    if env.get("LOCAL_RANK", "0") != "0":
        return
    if in_pod(env) or any(name.startswith("KUBEFLOW_") for name in env):
        print(
            "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM\n[Kubeflow] JIT checkpointing enabled",
            file=sys.stderr,
            flush=True,
        )


def _address_of_hostname() -> str | None:
    """The kubelet writes the pod's name and address into /etc/hosts, so this needs no name server."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            return str(socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0])
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
