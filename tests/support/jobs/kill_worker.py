"""A process that is killed: for each number n a child runs a job and gets SIGKILL before its n-th change to the disk.

    python -m tests.support.jobs.kill_worker FOLDER FIRST STEP

Children are forked from a process that has torch imported and no thread running, so one costs 0.1 s, not 5. Numbers
FIRST, FIRST + STEP, … until a child lives to the end. How many changes there are depends a little on the order of the
writer's threads, so the changes that a job makes only once or twice (`RARE`) are also killed by name, before the first
of them. Prints one JSON line for each: the call before which it was killed, the last step that `save` returned for, and
what was found afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import torch

from reprieve.storage.disk import Disk
from tests.powercut.rigs.promise import Job, check_promise

SAVES = 4
RARE = ("exchange", "remove_folder")


class Killing(Disk):
    """Ends its own process, as hard as can be, before the n-th change."""

    VERBS = (
        "make_folder", "create", "write", "truncate", "flush", "flush_folder", "rename", "exchange", "remove",
        "remove_folder",
    )  # fmt: skip

    def __init__(self, at: int, verb: str | None, report: int) -> None:
        self.left = at
        self.verb = verb  # counts only these changes
        self.report = report
        self.lock = threading.Lock()

    def _about_to(self, verb: str) -> None:
        with self.lock:  # several writer threads
            self.left -= self.verb in (None, verb)
            if self.left < 0:
                os.write(self.report, f"killed {verb}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)


def _wrapped(verb: str) -> Any:
    def method(self: Killing, *args: Any) -> Any:
        self._about_to(verb)
        return getattr(Disk, verb)(self, *args)

    return method


for _verb in Killing.VERBS:
    setattr(Killing, _verb, _wrapped(_verb))


def job(root: Path, at: int, verb: str | None, report: int) -> None:
    """Saves in the foreground and in the background, with a retention pass after each; and replaces one."""
    state = Job()
    with state.checkpointer(root, keep=1, disk=Killing(at, verb, report)) as checkpointer:
        checkpointer.warm_up(wait=True)
        for step in range(1, SAVES + 1):
            checkpointer.save(state.at(step).extra["seen"], background=step % 2 == 0).wait()
            os.write(report, f"saved {step}\n".encode())
        checkpointer.save(SAVES, replace=True)


def killed_before(root: Path, at: int, rare: str | None) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            job(root, at, rare, writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as lines:
        words = [line.split() for line in lines]
    _, status = os.waitpid(child, 0)
    returned = max([int(word[1]) for word in words if word[0] == "saved"], default=0)
    verb = next((word[1] for word in words if word[0] == "killed"), None)
    return {"at": at, "before": verb, "returned": returned, "status": status}


def kill_and_check(root: Path, at: int, rare: str | None = None) -> dict[str, Any]:
    root.parent.mkdir()
    result = killed_before(root, at, rare)
    try:
        if root.is_dir():
            result["newest"] = check_promise(root, result["returned"])
        else:
            assert result["returned"] == 0
    except Exception as error:  # noqa: BLE001 - whatever the check raises is its verdict
        result["broken"] = repr(error)
    print(json.dumps(result), flush=True)
    shutil.rmtree(root.parent)
    return result


def main() -> None:
    top, first, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    for verb in RARE:
        kill_and_check(top / verb / "checkpoints", 0, verb)
    for at in count(first, stride):
        if os.WIFEXITED(kill_and_check(top / str(at) / "checkpoints", at)["status"]):
            return


if __name__ == "__main__":
    main()
