"""The nodes of a cluster: a containerd and a kubelet each, in a mount namespace of their own.

All nodes are on this machine and share the cluster's network namespace, where each has an address. The folders that
containerd and the kubelet insist on (`/var/lib/kubelet`, `/run/containerd`) are private to the mount namespace, and so
is every mount that they make: it ends with the last process of the node, and the host never sees it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

from tests.cluster.rig import cgroups
from tests.cluster.rig.certificates import Certificates
from tests.cluster.rig.errors import RigError
from tests.cluster.rig.layout import BuildOutput, Instance
from tests.cluster.rig.network import DNS_SERVICE_ADDRESS, NODE_ADDRESSES, pod_network_configuration
from tests.cluster.rig.prerequisites import CNI_PLUGINS, SYSTEM_PATH, find_command
from tests.cluster.rig.processes import Processes, clean_environment

PRIVATE_FOLDERS = ("/run/containerd", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers", "/var/log/pods")
"""Mount points on the host, which `down` removes when they are empty."""
CONTAINERD_CONFIGURATION = """\
version = 3
root = "{root}"
# Its socket has the same path on all nodes of all clusters of a machine, and nothing uses it.
[plugins."io.containerd.nri.v1.nri"]
  disable = true
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  netns_mounts_under_state_dir = true
  # Root in a virtual machine may lack CAP_SYS_RESOURCE. Without this setting every pod then fails, with a message that
  # does not name the cause: "can't get final child's PID from pipe: EOF".
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{plugins}"]
  conf_dir = "{network}"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
    SystemdCgroup = false
"""


class Node:
    """Starts one node of a cluster."""

    def __init__(self, name: str, instance: Instance, output: BuildOutput, processes: Processes) -> None:
        self.name = name
        self._instance = instance
        self._output = output
        self._processes = processes
        self._folder = instance.state / "nodes" / name
        self._containerd_configuration = self._folder / "containerd.toml"

    def start_containerd(self) -> None:
        """Make the mount namespace of the node and start containerd in it."""
        network = self._folder / "network"
        network.mkdir(parents=True)
        (network / "pods.conflist").write_text(pod_network_configuration(self._instance))
        self._containerd_configuration.write_text(
            CONTAINERD_CONFIGURATION.format(root=self._folder / "containerd", plugins=CNI_PLUGINS, network=network)
        )
        self._processes.start(
            f"{self.name}-containerd",
            [
                "sh",
                "-c",
                self._private_mounts_script(),
                "sh",
                str(self._binary("containerd")),
                "--config",
                str(self._containerd_configuration),
            ],
            prefix=["unshare", "--mount", "--propagation", "slave"],
            # The shim of the same release must come first.
            environment={"PATH": f"{self._binary('containerd').parent}:{SYSTEM_PATH}"},
        )

    def containerd_answers(self) -> bool:
        try:
            self._ctr("version")
        except RigError:
            return False
        return True

    def import_images(self, parts: list[str]) -> None:
        for part in parts:
            for archive in self._output.images(part):
                self.import_image(archive)

    def import_image(self, archive: Path) -> None:
        self._ctr("--namespace=k8s.io", "images", "import", str(archive))

    def start_kubelet(self, certificates: Certificates) -> None:
        address = NODE_ADDRESSES[self.name]
        (self._folder / "resolv.conf").touch()
        configuration = self._folder / "kubelet.json"
        configuration.write_text(json.dumps(self._kubelet_configuration(address, certificates), indent=2))
        self._processes.start(
            f"{self.name}-kubelet",
            [
                str(self._binary("kubelet")),
                f"--kubeconfig={certificates.kubeconfig(self.name)}",
                f"--config={configuration}",
                f"--hostname-override={self.name}",
                f"--node-ip={address}",
            ],
            prefix=self._inside(),
        )

    def _kubelet_configuration(self, address: str, certificates: Certificates) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": address,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": certificates.certificate("authority")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroups.make_node_cgroup(self._instance, self.name),
            "failCgroupV1": not cgroups.is_version_1(),
            "failSwapOn": False,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDNS": [DNS_SERVICE_ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self._folder / "resolv.conf"),
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            # Controllers wait for certificates in a secret volume: for 107 s with the default of 1 min.
            "syncFrequency": "2s",
            "makeIPTablesUtilChains": False,
        }

    def _private_mounts_script(self) -> str:
        """Hide the host's folders behind the node's own, then become the command in the arguments."""
        lines = ["set -e", "mount --make-rshared /"]
        for path in PRIVATE_FOLDERS:
            own = self._folder / path.strip("/").replace("/", "-")
            own.mkdir()
            Path(path).mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(str(own))} {path}")
        return "\n".join([*lines, 'exec "$@"'])

    def _inside(self) -> list[str]:
        """The command prefix that enters the node's mount namespace, which its containerd holds."""
        found = cgroups.find_processes(self._instance, "containerd", str(self._containerd_configuration))
        if not found:
            raise RigError(f"containerd of {self.name} does not run")
        return [find_command("nsenter") or "nsenter", f"--mount=/proc/{found[0]}/ns/mnt", "--"]

    def _ctr(self, *arguments: str) -> None:
        done = subprocess.run(
            [*self._inside(), str(self._binary("ctr")), *arguments],
            env=clean_environment({}),
            cwd="/",
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RigError(f"ctr {' '.join(arguments)} on {self.name}: {done.stderr.strip()}")

    def _binary(self, name: str) -> Path:
        return self._output.binary(name)


def remove_mount_points() -> None:
    """Remove the folders that `start_containerd` may have made on the host, where nothing is in them."""
    for path in PRIVATE_FOLDERS:
        if os.path.isdir(path) and not os.listdir(path):
            os.rmdir(path)
