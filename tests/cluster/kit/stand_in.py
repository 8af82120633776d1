"""A trainer that only ends, as it is told: for tests of what Kubernetes and JobSet make of exit codes.

It runs in a pod with the image's own Python, as PID 1. Its plan is a list: what it does at each start, the last entry
for all further ones. It counts its starts in a folder of the machine, by node.

    {"exit": 1, "after_s": 1}                 ends by itself
    {"on_sigterm": 143, "after_s": 2}         waits; ends so long after SIGTERM
    {"on_sigterm": 143, "for_next": true}     the same, once its node was started again beside it
    {"on_sigterm": null}                      ignores SIGTERM
    {"allocate_mib": 512}                     takes memory until it is killed
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path


def main(folder: Path, plan: list[list[dict[str, object]]]) -> None:
    # Before its start is counted: a SIGTERM right after that waits for it. PID 1 would never get it without a handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    node = int(os.environ.get("PET_NODE_RANK") or 0)
    starts = folder / f"starts-{node}"
    with starts.open("a") as file:
        file.write(f"{time.time()}\n")
    number = _count(starts)
    steps = plan[min(node, len(plan) - 1)]
    behave(steps[min(number, len(steps)) - 1], lambda: _count(starts) > number)


def _count(starts: Path) -> int:
    return len(starts.read_text().splitlines())


def behave(step: dict[str, object], is_started_again: Callable[[], bool]) -> None:
    after_s = float(str(step.get("after_s", 0.0)))
    if "allocate_mib" in step:
        kept = [os.urandom(1 << 20) for _ in range(int(str(step["allocate_mib"])))]
        time.sleep(600 + len(kept))
    if "exit" in step:
        time.sleep(after_s)
        sys.exit(int(str(step["exit"])))
    code = step["on_sigterm"]
    if code is None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    signal.sigwait({signal.SIGTERM})
    while "for_next" in step and not is_started_again():
        time.sleep(0.1)
    time.sleep(after_s)
    sys.exit(int(str(code)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
