"""The network of a cluster: a namespace of its own, with one bridge that all pods and nodes are on.

The host sees nothing of it but the namespace: bridge, veths, iptables chains and sysctls are inside, and go with it.
Clients enter it with `nsenter --net`. `ip netns exec` would mount a /sys without cgroups, which the kubelet needs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.cluster.rig.errors import RigError
from tests.cluster.rig.layout import Instance
from tests.cluster.rig.prerequisites import find_command

BRIDGE = "pods0"
SUBNET = "10.77.0.0/16"
NODE_ADDRESSES = {"node-a": "10.77.0.1", "node-b": "10.77.0.2"}
CONTROL_PLANE_NODE = "node-a"
CONTROL_PLANE_ADDRESS = NODE_ADDRESSES[CONTROL_PLANE_NODE]
FIRST_POD_ADDRESS = "10.77.1.1"
SERVICE_SUBNET = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
DNS_SERVICE_ADDRESS = "10.96.0.10"
SYSCTLS = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")
"""Without the second, a reply between two pods on the bridge would not pass the address translation of a service."""


def inside(instance: Instance) -> list[str]:
    """The command prefix that runs a command in the cluster's network namespace."""
    return [find_command("nsenter") or "nsenter", f"--net={instance.network_namespace_file}", "--"]


def create(instance: Instance) -> None:
    _run(["ip", "netns", "add", instance.network_namespace])
    prefix_length = SUBNET.partition("/")[2]
    commands = [
        ["link", "set", "lo", "up"],
        ["link", "add", BRIDGE, "type", "bridge"],
        *(["address", "add", f"{address}/{prefix_length}", "dev", BRIDGE] for address in NODE_ADDRESSES.values()),
        ["link", "set", BRIDGE, "up"],
        # Any route will do: the addresses of services are translated before a packet leaves.
        ["route", "add", SERVICE_SUBNET, "dev", BRIDGE],
    ]
    for command in commands:
        _run([*inside(instance), "ip", *command])
    if not Path("/proc/sys/net/bridge").exists():
        _run(["modprobe", "br_netfilter"])
    for name in SYSCTLS:
        _run([*inside(instance), "sh", "-c", f"echo 1 > /proc/sys/{name}"])


def remove(instance: Instance) -> None:
    if instance.network_namespace_file.exists():
        _run(["ip", "netns", "delete", instance.network_namespace])


def pod_network_configuration(instance: Instance) -> str:
    """The CNI configuration of every node. The nodes share the file of used addresses, as they share the bridge."""
    addresses = {
        "type": "host-local",
        "dataDir": str(instance.state / "addresses"),
        "ranges": [[{"subnet": SUBNET, "rangeStart": FIRST_POD_ADDRESS, "gateway": CONTROL_PLANE_ADDRESS}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": addresses,
    }
    return json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}, indent=2)


def _run(command: list[str]) -> None:
    done = subprocess.run([find_command(command[0]) or command[0], *command[1:]], capture_output=True, text=True)
    if done.returncode:
        raise RigError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
