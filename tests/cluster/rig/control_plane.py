"""The processes that a cluster has once: etcd, API server, controller manager, scheduler, kube-proxy, CoreDNS.

They run on the host, in the cluster's network namespace, and talk through the address of the bridge: pods reach the
API server there too. One kube-proxy is enough for all nodes, because they share the network namespace.
"""

from __future__ import annotations

import json

from tests.cluster.rig.certificates import FRONT_PROXY, Certificates
from tests.cluster.rig.kubectl import Kubectl
from tests.cluster.rig.layout import BuildOutput, Instance
from tests.cluster.rig.network import (
    CONTROL_PLANE_ADDRESS,
    CONTROL_PLANE_NODE,
    DNS_SERVICE_ADDRESS,
    SERVICE_SUBNET,
    SUBNET,
)
from tests.cluster.rig.processes import Processes

ETCD_CLIENTS = "http://127.0.0.1:2379"
ETCD_PEERS = "http://127.0.0.1:2380"
DNS_PORT = 10053
COREFILE = """\
cluster.local:{port} {{
  bind {address}
  errors
  kubernetes cluster.local {{
    kubeconfig {kubeconfig} test
    ttl 1
  }}
}}
.:{port} {{
  bind {address}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""
"""Nothing outside the cluster can be resolved: pods have no way out."""
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Request",
            "verbs": ["create", "update", "patch"],
            "resources": [{"group": "trainer.kubeflow.org", "resources": ["trainjobs"]}],
        },
        {"level": "None"},
    ],
}
"""Record who writes TrainJobs, and what."""


class ControlPlane:
    """Starts the control plane of one cluster."""

    def __init__(
        self, instance: Instance, output: BuildOutput, certificates: Certificates, processes: Processes
    ) -> None:
        self._instance = instance
        self._output = output
        self._certificates = certificates
        self._processes = processes

    def start_api(self) -> None:
        """Start etcd and the API server, which retries until etcd answers."""
        certificates = self._certificates
        self._start(
            "etcd",
            f"--data-dir={self._instance.state / 'etcd'}",
            f"--listen-client-urls={ETCD_CLIENTS}",
            f"--advertise-client-urls={ETCD_CLIENTS}",
            f"--listen-peer-urls={ETCD_PEERS}",
            f"--initial-advertise-peer-urls={ETCD_PEERS}",
            f"--initial-cluster=default={ETCD_PEERS}",
            "--unsafe-no-fsync",
        )
        authority = certificates.certificate("authority")
        audit_policy = self._instance.state / "audit-policy.json"
        audit_policy.write_text(json.dumps(AUDIT_POLICY))
        self._start(
            "kube-apiserver",
            f"--audit-policy-file={audit_policy}",
            f"--audit-log-path={self._instance.written_jobs}",
            f"--bind-address={CONTROL_PLANE_ADDRESS}",
            f"--advertise-address={CONTROL_PLANE_ADDRESS}",
            f"--etcd-servers={ETCD_CLIENTS}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--service-cluster-ip-range={SERVICE_SUBNET}",
            # Calls of webhooks go to the address of a pod: the host has no route to services before kube-proxy runs.
            "--enable-aggregator-routing=true",
            f"--client-ca-file={authority}",
            f"--tls-cert-file={certificates.certificate('api')}",
            f"--tls-private-key-file={certificates.key('api')}",
            f"--kubelet-client-certificate={certificates.certificate('api-to-kubelet')}",
            f"--kubelet-client-key={certificates.key('api-to-kubelet')}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificates.path('tokens.pub')}",
            f"--service-account-signing-key-file={certificates.key('tokens')}",
            # Kueue serves an API of its own behind the API server.
            f"--requestheader-client-ca-file={authority}",
            f"--requestheader-allowed-names={FRONT_PROXY}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={certificates.certificate(FRONT_PROXY)}",
            f"--proxy-client-key-file={certificates.key(FRONT_PROXY)}",
        )

    def start_controllers(self) -> None:
        """Start what needs an API server that answers."""
        certificates = self._certificates
        self._start(
            "kube-controller-manager",
            *self._kubeconfig_flags("controller-manager"),
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={certificates.key('tokens')}",
            f"--root-ca-file={certificates.certificate('authority')}",
            f"--cluster-signing-cert-file={certificates.certificate('authority')}",
            f"--cluster-signing-key-file={certificates.key('authority')}",
        )
        self._start("kube-scheduler", *self._kubeconfig_flags("scheduler"))

    def start_proxy(self) -> None:
        """Start kube-proxy, which waits for its node in ever longer steps: the node should exist."""
        self._start(
            "kube-proxy",
            f"--kubeconfig={self._certificates.kubeconfig('proxy')}",
            f"--hostname-override={CONTROL_PLANE_NODE}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={SUBNET}",
            f"--bind-address={CONTROL_PLANE_ADDRESS}",
            "--healthz-bind-address=127.0.0.1:10256",
            # Otherwise it sets a limit for the whole machine.
            "--conntrack-max-per-core=0",
        )

    def start_dns(self, kubectl: Kubectl) -> None:
        """Start CoreDNS, behind the service address that the kubelets give to pods."""
        kubectl.apply(*_dns_objects())
        corefile = self._instance.state / "Corefile"
        corefile.write_text(
            COREFILE.format(
                address=CONTROL_PLANE_ADDRESS, port=DNS_PORT, kubeconfig=self._certificates.kubeconfig("dns")
            )
        )
        self._start("coredns", "-conf", str(corefile))

    def _kubeconfig_flags(self, name: str) -> list[str]:
        kubeconfig = self._certificates.kubeconfig(name)
        return [
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        ]

    def _start(self, name: str, *arguments: str) -> None:
        self._processes.start(name, [str(self._output.binary(name)), *arguments])


def _dns_objects() -> list[dict[str, object]]:
    ports = [
        {"name": "dns", "port": 53, "targetPort": DNS_PORT, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "targetPort": DNS_PORT, "protocol": "TCP"},
    ]
    watched = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": {"name": "dns"}, "rules": watched},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "dns"},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "dns"},
            "subjects": [{"apiGroup": group, "kind": "User", "name": "dns"}],
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {"clusterIP": DNS_SERVICE_ADDRESS, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns-host",
                "namespace": "kube-system",
                "labels": {"kubernetes.io/service-name": "kube-dns"},
            },
            "addressType": "IPv4",
            "ports": [{"name": port["name"], "port": DNS_PORT, "protocol": port["protocol"]} for port in ports],
            "endpoints": [{"addresses": [CONTROL_PLANE_ADDRESS], "conditions": {"ready": True}}],
        },
    ]
