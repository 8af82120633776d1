"""Every version that the test cluster is made of, and what is compiled from it.

This file and the Go sources in `builder/sources/` determine the build output: their digest names its folder. Modules
that agree on client-go are compiled together, because the shared libraries are most of the work (524 s together
instead of 720 s apart on 2 cores).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "builder" / "sources"
"""Go programs of our own: a CoreDNS with the plugins that the cluster needs, and the process of a pod's sandbox."""

KUBERNETES = "v1.36.3"
KUBERNETES_LIBRARIES = "v0.36.3"
"""client-go and the other staging modules have numbers of their own."""
CONTAINERD = "v2.4.2"
DEBIAN = "bookworm"
"""The release in the image `localhost/python:1`."""
MINIMUM_GO = (1, 26)
"""Kubernetes 1.36 needs it."""


@dataclass(frozen=True, kw_only=True)
class Binary:
    """One program and the Go package that it is compiled from."""

    name: str
    package: str


@dataclass(frozen=True, kw_only=True)
class Manifests:
    """A folder of manifests that a module contains."""

    name: str
    module: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """Binaries that are compiled in one Go module."""

    name: str
    modules: dict[str, str]
    """Module path and version."""
    binaries: tuple[Binary, ...]
    images: tuple[str, ...] = ()
    """Binaries that run in pods: each becomes the image `localhost/<name>:1`."""
    manifests: tuple[Manifests, ...] = ()
    tags: tuple[str, ...] = ()
    variables: dict[str, str] | None = None
    """Go variables that are set at link time: the programs report these as their version."""
    checksums_of: str = ""
    """The module whose own go.sum is trusted too (its zip is in the checksum database, but a dependency is not)."""


def _kubernetes(name: str) -> Binary:
    return Binary(name=name, package=f"k8s.io/kubernetes/cmd/{name}")


def _containerd(name: str) -> Binary:
    return Binary(name=name, package=f"github.com/containerd/containerd/v2/cmd/{name}")


PARTS = (
    Part(
        name="kubernetes",
        modules={
            "k8s.io/kubernetes": KUBERNETES,
            "go.etcd.io/etcd/server/v3": "v3.6.8",
            "github.com/coredns/coredns": "v1.14.2",
            "sigs.k8s.io/jobset": "v0.12.0",
            "github.com/kubeflow/trainer/v2": "v2.3.0",
            "github.com/kubeflow/training-operator": "v1.9.4",
            "helm.sh/helm/v3": "v3.22.0",
        },
        binaries=(
            _kubernetes("kube-apiserver"),
            _kubernetes("kube-controller-manager"),
            _kubernetes("kube-scheduler"),
            _kubernetes("kube-proxy"),
            _kubernetes("kubelet"),
            _kubernetes("kubectl"),
            Binary(name="etcd", package="go.etcd.io/etcd/server/v3"),
            Binary(name="coredns", package="./coredns"),
            Binary(name="pause", package="./pause"),
            Binary(name="jobset", package="sigs.k8s.io/jobset"),
            Binary(name="trainer", package="github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"),
            Binary(name="training-operator", package="github.com/kubeflow/training-operator/cmd/training-operator.v1"),
            Binary(name="helm", package="helm.sh/helm/v3/cmd/helm"),
        ),
        images=("pause", "jobset", "trainer", "training-operator"),
        manifests=(
            Manifests(name="jobset", module="sigs.k8s.io/jobset", folder="config"),
            Manifests(name="trainer", module="github.com/kubeflow/trainer/v2", folder="manifests"),
            Manifests(name="training-operator", module="github.com/kubeflow/training-operator", folder="manifests"),
        ),
        variables={
            "k8s.io/component-base/version.gitVersion": KUBERNETES,
            "k8s.io/component-base/version.gitMajor": "1",
            "k8s.io/component-base/version.gitMinor": "36",
            "k8s.io/client-go/pkg/version.gitVersion": KUBERNETES,
        },
    ),
    Part(
        name="containerd",
        modules={"github.com/containerd/containerd/v2": CONTAINERD},
        binaries=(_containerd("containerd"), _containerd("containerd-shim-runc-v2"), _containerd("ctr")),
        tags=("no_btrfs", "no_devmapper", "no_zfs", "no_aufs", "no_tracing"),
        variables={"github.com/containerd/containerd/v2/version.Version": CONTAINERD},
    ),
    # In a module of its own, so that it links the Trainer types of its release, as upstream's image does.
    Part(
        name="kueue",
        modules={"sigs.k8s.io/kueue": "v0.19.2"},
        binaries=(Binary(name="kueue", package="sigs.k8s.io/kueue/cmd/kueue"),),
        images=("kueue",),
        manifests=(Manifests(name="kueue", module="sigs.k8s.io/kueue", folder="config"),),
        checksums_of="sigs.k8s.io/kueue",
    ),
    # It tests the alert rules. They need no service discovery, which is most of Prometheus.
    Part(
        name="prometheus",
        modules={"github.com/prometheus/prometheus": "v0.315.0"},
        binaries=(Binary(name="promtool", package="github.com/prometheus/prometheus/cmd/promtool"),),
        tags=("remove_all_sd",),
        variables={"github.com/prometheus/common/version.Version": "3.15.0"},
    ),
)
FULL_LANE_ONLY = ("kueue", "prometheus")
"""Compiled for `make test-cluster-full` only: Kueue alone takes 254 s."""


def digest() -> str:
    """The name of the folder with the build output."""
    total = hashlib.sha256()
    for path in [Path(__file__), *sorted(SOURCES.rglob("*.go"))]:
        total.update(path.read_bytes())
    return total.hexdigest()[:12]
