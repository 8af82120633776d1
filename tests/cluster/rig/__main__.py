"""The command line of the rig: `python -m tests.cluster.rig build|up|down`."""

from __future__ import annotations

import argparse
import sys

from tests.cluster.rig import down, up
from tests.cluster.rig.builder.parts import build
from tests.cluster.rig.errors import RigError
from tests.cluster.rig.layout import default_instance


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.rig", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("build", "compile what is missing"),
        ("up", "start the cluster, and build it first if needed"),
        ("down", "remove the cluster, whatever state it is in"),
    ):
        command = commands.add_parser(name, help=summary)
        if name != "down":
            command.add_argument("--full", action="store_true", help="with Kueue")
    args = parser.parse_args()
    try:
        if args.command == "build":
            build(full=args.full)
        elif args.command == "up":
            up.start(default_instance(), full=args.full)
        else:
            down.stop(default_instance())
    except RigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
