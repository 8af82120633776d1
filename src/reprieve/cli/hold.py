"""`reprieve hold`: an idle first process for pods whose training is started by kubectl exec.

Put it first in the container: command: ["reprieve", "hold"]. When the pod is stopped, it passes SIGTERM on to every
process that `kubectl exec` has started there, waits until they have saved and ended, and exits with 143. Without it,
they would be killed.

exit codes:
  143   stopped, by SIGTERM
  42    permanent failure: a wrong setting, or it is not the first process of a container

example: reprieve hold --grace-period 2m
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from reprieve.launch.hold import Hold
from reprieve.preemption.deadline import resolve_grace_period
from reprieve.settings import SETTINGS, option_of, resolve

_GRACE = SETTINGS["grace_period"]


def arguments(parser: ArgumentParser) -> None:
    option = option_of("grace_period")
    parser.add_argument(option, metavar=_GRACE.metavar, help=f"time from SIGTERM until the kill [{_GRACE.env}]")


def main(args: Namespace) -> int:
    settings = resolve({"grace_period": args.grace_period})
    return Hold(resolve_grace_period(settings.grace_period)).run()
