"""Pods with a read-only root file system, no /tmp, no HOME and a uid without a name: a run trains, saves and stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import containers
from tests.support.launch_kit import REPRIEVE, Lab, Launched, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(containers.why_not() is not None, reason=str(containers.why_not())),
]


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A job in a folder that other users can enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="reprieve-test-"))
    folder.chmod(0o755)
    lab = Lab(folder)
    del lab.env["REPRIEVE_STATE_DIR"]
    yield lab
    shutil.rmtree(folder)


def give(folder: Path, uid: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid)


def start(lab: Lab, command: list[str], **container: object) -> Launched:
    give(lab.folder, int(container.get("uid", containers.UID)))  # type: ignore[call-overload]
    words = [*REPRIEVE, "run", *command]
    return Launched(lab, containers.restricted(words, writable=lab.folder, **container))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "read_only", "uid"),
    [(1, True, 0), (1, False, containers.UID), (2, True, containers.UID)],
    ids=["read-only", "a random uid", "both"],
)
def test_it_trains_saves_and_stops(lab: Lab, ranks: int, read_only: bool, uid: int) -> None:
    options = {"steps": 200, "step_s": 0.2}
    command = lab.torchrun(ranks, **options) if ranks > 1 else lab.python(**options)
    launched = start(lab, command, read_only=read_only, uid=uid)
    until(lambda: lab.steps() >= 3, launched)
    launched.terminate()
    ended = launched.wait()
    assert ended.code == 143, str(ended)
    assert "saved at step" in lab.exit_message()
    problem = "Read-only file system" if read_only else "Permission denied"
    assert ended.err.count(f"the run record cannot be written: {problem}") == 1, str(ended)
    scratch = re.search(r"temporary files go to (/dev/shm/reprieve-\w+)", ended.err)
    assert (scratch is not None) == read_only, str(ended)
    assert scratch is None or not Path(scratch[1]).exists(), "nothing is left behind"


def test_a_folder_that_the_uid_may_not_write_to(lab: Lab) -> None:
    """The volume belongs to root. A restart would not help."""
    script = "import reprieve, torch; reprieve.Run('checkpoints', model=torch.nn.Linear(1, 1))"
    words = ["env", f"--chdir={lab.job}", *REPRIEVE, "run", sys.executable, "-c", script]
    (lab.folder / "exit-message").chmod(0o666)
    ended = Launched(lab, containers.restricted(words, writable=lab.folder)).wait()
    assert ended.code == 42, str(ended)
    for part in (f"uid {containers.UID}", str(lab.job / "checkpoints"), "fsGroup"):
        assert part in lab.exit_message(), lab.termination()


def test_in_a_pod_there_is_no_second_copy_of_the_log(lab: Lab) -> None:
    lab.env |= {"REPRIEVE_STATE_DIR": str(lab.folder / "state")}
    for in_pod in (False, True):
        if in_pod:
            lab.env["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"
        ended = lab.run(["echo", "trained"], "--name", f"run-{in_pod}")
        assert ended.code == 0 and ended.out == "trained\n", str(ended)
        assert (lab.folder / "state" / "runs" / f"run-{in_pod}" / "log").exists() is not in_pod
    assert json.loads((lab.folder / "state" / "runs" / "run-True" / "run.json").read_text())["exit_code"] == 0
    assert "kubectl logs" in lab.reprieve("logs", "run-True", code=2).err
