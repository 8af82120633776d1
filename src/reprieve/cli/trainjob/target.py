"""Which TrainJob a command is for: `trainjob/NAME`, in a namespace of a cluster.

Other names mean runs, or folders, of this machine.
"""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprieve.errors import ConfigError, needing

if TYPE_CHECKING:
    from reprieve.kubernetes.jobs.train_jobs import TrainJobs

KINDS = ("trainjob", "trainjobs")


@dataclass(frozen=True, slots=True)
class Target:
    """A TrainJob, or all of a namespace."""

    name: str
    """Empty: all."""
    namespace: str | None
    """None: that of the context."""
    context: str | None

    def command(self, verb: str) -> str:
        """Return the command line of a verb for the same job."""
        options = [
            f" --{option} {value}"
            for option, value in (("namespace", self.namespace), ("context", self.context))
            if value is not None
        ]
        return f"reprieve {verb} trainjob/{self.name}{''.join(options)}"


def names_train_job(text: str) -> bool:
    kind, slash, name = text.partition("/")
    return kind in KINDS and bool(name or not slash)


def add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("for trainjob/NAME")
    group.add_argument("--namespace", metavar="NAME", help="of the TrainJob [the context's]")
    group.add_argument("--context", metavar="NAME", help="of the kubeconfig [the current one]")


def find_target(text: str | None, args: Namespace, *options: str) -> Target | None:
    """Return the TrainJob that an argument means; None: it means a run, or a folder, of this machine.

    `options`: further ones that are only for TrainJobs.
    """
    if text is not None and names_train_job(text):
        return Target(text.partition("/")[2], args.namespace, args.context)
    for option in ("namespace", "context", *options):
        if getattr(args, option) not in (None, False):
            raise ConfigError(f"--{option} is for TrainJobs: write trainjob/{text or 'NAME'}")
    return None


def find_job(text: str, args: Namespace, *options: str) -> Target | None:
    """As `find_target`, for a verb that is for one job."""
    target = find_target(text, args, *options)
    if target is not None and not target.name:
        raise ConfigError("which one? write trainjob/NAME; reprieve status trainjobs lists them")
    return target


@contextlib.contextmanager
def connected(target: Target, verb: str) -> Iterator[TrainJobs]:
    """Give the TrainJobs of the target's namespace."""
    with needing(f"reprieve {verb} trainjob"):
        from reprieve.kubernetes.jobs.api_cluster import ApiCluster
        from reprieve.kubernetes.jobs.train_jobs import TrainJobs
    with ApiCluster(context=target.context, namespace=target.namespace) as cluster:
        yield TrainJobs(cluster, by=f"reprieve {verb}")
