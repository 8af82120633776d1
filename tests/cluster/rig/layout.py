"""Where everything of the test cluster is: the build output, and the names that one running cluster owns.

All names on the machine derive from the name of the cluster, so that `down` finds what belongs to it without any
record of what `up` did. Clusters with different names do not see each other: each has its own network namespace.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.rig.errors import RigError
from tests.cluster.rig.versions import FULL_LANE_ONLY, PARTS, digest

CACHE = Path("~/.cache/reprieve/cluster").expanduser()
STATE = Path("/var/lib/reprieve-cluster")
"""Short, because the path of a Unix socket has at most 107 bytes."""
PYTHON_IMAGE_PART = "python-image"
NAME_PATTERN = r"[a-z][a-z0-9-]{0,19}"


@dataclass(frozen=True)
class BuildOutput:
    """The folder that `build` fills and `up` reads. Each part is a folder that appears when it is complete."""

    root: Path

    def part(self, name: str) -> Path:
        return self.root / name

    def binary(self, name: str) -> Path:
        for part in PARTS:
            if any(binary.name == name for binary in part.binaries):
                return self.part(part.name) / "bin" / name
        raise KeyError(name)

    def manifests(self, name: str) -> Path:
        for part in PARTS:
            if any(manifests.name == name for manifests in part.manifests):
                return self.part(part.name) / "manifests" / name
        raise KeyError(name)

    def images(self, part: str) -> list[Path]:
        """The image archives of a part, which every node imports."""
        return sorted(self.part(part).glob("images/*.tar"))

    def missing_parts(self, *, full: bool) -> list[str]:
        return [name for name in part_names(full=full) if not self.part(name).is_dir()]


def part_names(*, full: bool) -> list[str]:
    """The names of all parts in the order in which they are built."""
    return [part.name for part in PARTS if full or part.name not in FULL_LANE_ONLY] + [PYTHON_IMAGE_PART]


def build_output() -> BuildOutput:
    return BuildOutput(CACHE / digest())


@dataclass(frozen=True)
class Instance:
    """One running cluster: its state folder, network namespace and cgroup."""

    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME_PATTERN, self.name):
            raise RigError(f"{self.name!r} is no name for a cluster: use at most 20 of a-z, 0-9 and -")

    @property
    def state(self) -> Path:
        return STATE / self.name

    @property
    def network_namespace(self) -> str:
        return f"reprieve-{self.name}"

    @property
    def network_namespace_file(self) -> Path:
        return Path("/run/netns") / self.network_namespace

    @property
    def cgroup(self) -> str:
        """The path below every cgroup hierarchy. All processes of the cluster are in it, those of pods included."""
        return f"reprieve-{self.name}"

    @property
    def admin_kubeconfig(self) -> Path:
        return self.state / "kubeconfigs" / "admin"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def written_jobs(self) -> Path:
        """The API server's record of everything that was written to TrainJobs: audit events, a line each."""
        return self.logs / "written-trainjobs.jsonl"

    @property
    def lock(self) -> Path:
        """Held by `up`. It stays behind: removing a lock file would let two processes hold the lock."""
        return CACHE / f"{self.name}.lock"

    @property
    def users(self) -> Path:
        """A lock that every test session shares while it uses the cluster."""
        return CACHE / f"{self.name}.users"


def default_instance() -> Instance:
    """Another cluster on the same machine needs another name: `REPRIEVE_CLUSTER=mine make cluster-up`."""
    return Instance(os.environ.get("REPRIEVE_CLUSTER", "default"))
