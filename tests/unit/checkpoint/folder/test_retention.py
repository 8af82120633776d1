"""Which checkpoints may be removed, and that no others are."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprieve import Checkpointer, ConfigError, Fenced, InvalidCheckpoint, StorageError
from reprieve.checkpoint.folder import lease
from reprieve.checkpoint.folder.catalog import CheckpointInfo, list_checkpoints
from reprieve.checkpoint.folder.pruning import Pruner
from reprieve.checkpoint.folder.retention import Retention, reading
from reprieve.checkpoint.folder.verify import verify
from reprieve.storage.disk import Disk
from tests.support.helpers import FailingDisk, manifest, pool, small_model, train


def found(step: int, problem: str | None = None, **metrics: float) -> CheckpointInfo:
    known = manifest(step, metrics=metrics)
    return CheckpointInfo(Path(f"checkpoint-{step}"), step, known, problem, 1, datetime.now(timezone.utc))


def removable(candidates: list[CheckpointInfo], **rules: Any) -> list[int]:
    newest = max((info.step for info in candidates if info.problem is None), default=0)
    return [info.step for info in Retention(**rules).removable(candidates, "r", newest)]


HERE = [found(step) for step in (60, 50, 40, 30, 20, 10)]


def test_the_last_so_many() -> None:
    assert removable(HERE, keep=2) == [10, 20, 30, 40]
    assert removable(HERE, keep=1) == [10, 20, 30, 40, 50]
    assert (
        removable(HERE, keep=6) == removable(HERE, keep=7) == removable(HERE, keep=None) == removable([], keep=1) == []
    )


def test_a_pinned_one_stays_and_counts() -> None:
    def removable_beside(*pinned: int, keep: int) -> list[int]:
        return [info.step for info in Retention(keep=keep).removable(HERE, "r", 60, pinned)]

    assert removable_beside(20, keep=2) == [10, 30, 40, 50]
    assert removable_beside(20, keep=3) == [10, 30, 40]
    assert removable_beside(20, keep=1) == [10, 30, 40, 50], "the newest and the best stay, whatever the limit"
    assert removable_beside(20, 30, keep=2) == [10, 40, 50]
    assert removable_beside(70, keep=2) == [10, 20, 30, 40], "one that is not there does not count"


def test_besides_every_kth() -> None:
    assert removable(HERE, keep=1, keep_every=20) == [10, 30, 50]


def test_besides_the_best() -> None:
    scored = [found(step, loss=abs(step - 25)) for step in (40, 30, 21, 5)]
    assert removable(scored, keep=1, best=("loss", "min")) == [5, 30]
    assert removable(scored, keep=1, best=("loss", "max")) == [21, 30]
    assert removable(scored, keep=1, best=("accuracy", "max")) == [5, 21, 30]


def test_besides_what_the_script_requested() -> None:
    mixed = [replace(info, manifest=manifest(info.step, unrequested=info.step != 30)) for info in HERE]
    assert removable(mixed, keep=2, keep_requested=True) == [10, 20, 40]
    assert removable(mixed, keep=2) == [10, 20, 30, 40]
    assert removable(HERE, keep=2, keep_requested=True) == []


def test_an_invalid_one_neither_counts_nor_goes() -> None:
    mixed = [found(60, "torn"), found(50), found(40, "torn"), found(30), found(20)]
    assert removable(mixed, keep=2) == [20]
    assert removable([found(60, "torn"), found(50)], keep=1) == []


@pytest.mark.parametrize(
    "rules", [{"keep": 0}, {"keep": -1}, {"keep_every": 0}, {"best": ("loss", "low")}, {"best": ("loss",)}]
)
def test_bad_rules_are_refused(rules: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(rules))):
        Retention(**rules)
    with pytest.raises(ConfigError):
        Checkpointer(tmp_path / "run", model=small_model(), **rules)
    assert not (tmp_path / "run").exists()


def steps(root: Path) -> list[int]:
    return [info.step for info in list_checkpoints(root)]


def test_a_run_keeps_what_it_should(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=small_model(), keep=2, keep_every=4, best=("loss", "min")) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, metrics={"loss": abs(step - 2.9)})
        checkpointer.wait()
        assert steps(tmp_path) == [7, 6, 4, 3]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".check")) == []


@pytest.mark.parametrize("rules", [{"keep": 1}, {"keep": 2, "pinned": 1}], ids=str)
def test_a_checkpoint_stays_that_appears_while_the_one_before_it_is_pruned(
    rules: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that blocks training is visible for a moment before retention knows that it is the newest. If another
    thread prunes in this moment, it finds a checkpoint too many."""
    model = small_model()
    with Checkpointer(tmp_path, keep=rules["keep"], model=model) as checkpointer:
        checkpointer.pin(rules.get("pinned"))
        for step in (1, 2, 3):
            checkpointer.save(step)
            checkpointer.wait()
        saved = Pruner.saved

        def prune_first(pruner: Pruner, step: int | None) -> None:
            checkpointer._saver.background.run_now(checkpointer._saver._prune)
            assert (tmp_path / "checkpoint-4").exists()
            saved(pruner, step)

        monkeypatch.setattr(Pruner, "saved", prune_first)
        checkpointer.save(4)
        assert checkpointer.checkpoints()[0].step == 4
        monkeypatch.setattr(Pruner, "saved", saved)
    assert list_checkpoints(tmp_path)[0].step == 4


def test_saves_without_a_pause_do_not_keep_retention_from_running(tmp_path: Path) -> None:
    """A read-back yields to a save that blocks training, but not to the next one as well."""
    with Checkpointer(tmp_path, model=nn.Linear(512, 512), keep=None) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
        pruner = Pruner(Disk(), tmp_path, Retention(keep=1))
        pruner.newest = 3
        with pruner.giving_way(9):
            for remaining in ([3, 2, 1], [3]):
                pruner.prune(checkpointer._lease)  # type: ignore[arg-type]
                assert steps(tmp_path) == remaining


def test_a_full_disk_waits_for_what_is_about_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two checkpoints: the third save fits only if the first was removed."""
    size = 0

    def free_bytes(_folder: Path) -> int:
        return int(2.9 * size) - size * len(steps(tmp_path)) if size else 1 << 30

    monkeypatch.setattr("reprieve.checkpoint.folder.disk_space.free_bytes", free_bytes)
    with Checkpointer(tmp_path, model=nn.Linear(256, 256), keep=1, rng=False) as checkpointer:
        size = checkpointer.save(1).bytes
        checkpointer.save(2)
        checkpointer.save(3)
        assert 1 not in steps(tmp_path)
    with Checkpointer(tmp_path, model=nn.Linear(256, 256), keep=2, rng=False) as checkpointer:
        checkpointer.save(4)
    with Checkpointer(tmp_path, model=nn.Linear(256, 256), keep=1, rng=False) as checkpointer:
        checkpointer.restore()
        checkpointer.save(5)
        assert steps(tmp_path) == [5, 4]


def test_little_room_is_said_once_the_size_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start there is room for four: the optimizer, twice as large as the model, has no state yet."""
    monkeypatch.setattr("reprieve.checkpoint.folder.disk_space.free_bytes", lambda _folder: 1_500_000)
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, keep=3) as checkpointer:
        assert "has room for fewer" not in caplog.text
        train(model, optimizer, width=256)
        for step in (1, 2):
            checkpointer.save(step)
        assert caplog.text.count("has room for fewer than keep + 1 = 4 checkpoints of 8") == 1
    caplog.clear()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, keep=3) as checkpointer:
        assert "has room for fewer" in caplog.text, "the newest checkpoint tells the size"
        checkpointer.save(3)
    assert caplog.text.count("has room for fewer") == 1


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EMFILE])
def test_nothing_goes_when_the_newest_cannot_be_read_back_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def refused(*_: object, **__: object) -> CheckpointInfo:
        raise OSError(code, os.strerror(code))

    with Checkpointer(tmp_path, model=small_model(), keep=1) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr("reprieve.checkpoint.folder.pruning.verify", refused)
            checkpointer.save(1)
            checkpointer.save(2)
            checkpointer.wait()
        assert steps(tmp_path) == [2, 1]
        assert (
            f"no checkpoint is removed: the newest one failed verification when read back: [Errno {code}]"
            in caplog.text
        )
        checkpointer.save(3)
    assert steps(tmp_path) == [3]


def test_what_is_older_than_the_restored_one_need_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object, **__: object) -> CheckpointInfo:
        raise InvalidCheckpoint("cannot be read back")

    with Checkpointer(tmp_path, model=small_model(), keep=3) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
    monkeypatch.setattr("reprieve.checkpoint.folder.pruning.verify", unreadable)
    with Checkpointer(tmp_path, model=small_model(), keep=1) as checkpointer:
        checkpointer.restore()
        assert steps(tmp_path) == [3, 2, 1], "a restore removes nothing"
        checkpointer.save(4)
    assert steps(tmp_path) == [4, 3], "3 was read in full; 4 was not"


def test_nothing_goes_when_the_newest_cannot_be_read_back(tmp_path: Path) -> None:
    class Rots(Disk):
        """What is committed as step 3 is not what was written."""

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name == "checkpoint-3":
                file = target / "model.safetensors"
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)

    with Checkpointer(tmp_path, model=small_model(), keep=1, disk=Rots()) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
            checkpointer.wait()
        assert steps(tmp_path) == [3, 2], "1 went after 2 was verified; 2 is the only good one"
        checkpointer.save(4)
        checkpointer.wait()
        assert steps(tmp_path) == [4]


def test_one_that_is_read_stays_until_the_next_time(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=small_model(), keep=1) as checkpointer:
        first = checkpointer.save(1).path
        with reading(first), reading(first):
            checkpointer.save(2)
            checkpointer.wait()
            assert verify(first, pool).step == 1
        checkpointer.save(3)
        checkpointer.wait()
        assert steps(tmp_path) == [3]


def test_one_that_another_process_reads_stays(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from reprieve.checkpoint.folder.retention import reading\n"
        "with reading(Path(sys.argv[1])): print('reading', flush=True); sys.stdin.read()"
    )
    with Checkpointer(tmp_path, model=small_model(), keep=1) as checkpointer:
        first = checkpointer.save(1).path
        reader = subprocess.Popen(
            [sys.executable, "-c", code, str(first)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        checkpointer.save(2)
        checkpointer.wait()
        assert steps(tmp_path) == [2, 1]
        reader.communicate(b"")
        checkpointer.save(3)
        checkpointer.wait()
        assert steps(tmp_path) == [3]


def test_a_removal_that_was_cut_short_leaves_nothing_that_looks_valid(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=small_model(), keep=None) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
    for at in range(30):
        disk = FailingDisk(at, forever=True)
        from reprieve.checkpoint.folder.commit import remove
        from reprieve.checkpoint.folder.startup import clean_up

        try:
            remove(disk, tmp_path / "checkpoint-1")
            break
        except OSError:
            pass
        for info in list_checkpoints(tmp_path):
            verify(info.path, pool)
        if not (tmp_path / "checkpoint-1").exists():
            assert clean_up(Disk(), tmp_path) == [".checkpoint-1.deleting"]
            with Checkpointer(tmp_path, model=small_model(), keep=None) as checkpointer:
                checkpointer.save(1)
    else:
        pytest.fail("never finished")
    assert steps(tmp_path) == [3, 2]


def test_an_error_while_removing_is_a_storage_error(tmp_path: Path) -> None:
    class Stuck(Disk):
        def rename(self, source: Path, target: Path) -> None:
            if target.name.endswith(".deleting"):
                raise OSError(errno.EIO, "stuck", str(target))
            super().rename(source, target)

    with Checkpointer(tmp_path, model=small_model(), keep=1, disk=Stuck()) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
        with pytest.raises(StorageError):
            checkpointer.wait()


class SlowToRemove(Disk):
    """A removal does not end before `go` is set; `removing` is set while it waits for that."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.removing = threading.Event()

    def remove(self, path: Path) -> None:
        if ".deleting" in str(path):
            self.removing.set()
            assert self.go.wait(30)
        super().remove(path)


def test_a_removal_that_takes_long_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_COMMIT_WAIT", timedelta(milliseconds=100))
    disk = SlowToRemove()
    checkpointer = Checkpointer(tmp_path, name="r", model=small_model(), keep=1, disk=disk)
    checkpointer.save(1)
    checkpointer.save(2)
    assert disk.removing.wait(30)
    checkpointer.save(3)
    checkpointer.release()
    with Checkpointer(tmp_path, name="r", model=small_model(), keep=None) as second:
        assert second.attempt == 2
        assert not (tmp_path / ".checkpoint-1.deleting").exists(), "who takes over removes it, too"
        disk.go.set()
        with pytest.raises(Fenced):
            checkpointer.wait()
    assert steps(tmp_path) == [3, 2], "an attempt that was fenced removes nothing more"


def test_what_was_just_saved_is_not_removed_for_another_run(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, name="old", model=small_model(), keep=3) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save(step)
    with Checkpointer(tmp_path, name="new", model=small_model(), keep=3) as checkpointer:
        path = checkpointer.save(1).path
        checkpointer.wait()
        assert path.exists()


def test_what_was_just_saved_is_not_removed_for_higher_steps(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=small_model(), keep=1) as checkpointer:
        checkpointer.save(100)
        path = checkpointer.save(1).path
        checkpointer.wait()
        assert path.exists()


def test_checkpoints_of_another_run_are_not_removed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, name="old", model=small_model()) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path, name="new", model=small_model(), keep=1) as checkpointer:
        checkpointer.save(2)
        checkpointer.wait()
    assert steps(tmp_path) == [2, 1]
