"""A start uses the newest valid checkpoint; others are passed over with a reason, and never lost."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from reprieve import Checkpointer, InvalidCheckpoint, NoValidCheckpoint, StorageError, StorageFull
from reprieve.checkpoint.folder.catalog import inspect_checkpoint, list_checkpoints
from reprieve.checkpoint.folder.lease import FolderLease
from reprieve.checkpoint.folder.verify import verify
from reprieve.checkpoint.format.checksum import digest_of
from reprieve.checkpoint.format.manifest import MANIFEST, SENTINEL, read_manifest
from reprieve.checkpoint.io import reader
from tests.support.helpers import copied, entry_of, pool, rewrite_manifest, small_model, train
from tests.support.tensors import tied_linears


class Counter(nn.Module):
    """A model whose weights show which checkpoint it came from."""

    def __init__(self, step: int = 0) -> None:
        super().__init__()
        self.register_buffer("step", torch.full((1000,), step))

    def __int__(self) -> int:
        assert (self.step == self.step[0]).all(), "a mixture"
        return int(self.step[0])


def run_with(root: Path, *steps: int, run: str = "r") -> None:
    with Checkpointer(root, name=run, keep=None, model=(model := Counter())) as checkpointer:
        for step in steps:
            model.step.fill_(step)
            checkpointer.save(step)


def resumed(root: Path, run: str | None = "r", **options: Any) -> tuple[int, Any]:
    with Checkpointer(root, name=run, keep=None, model=(model := Counter()), **options) as checkpointer:
        result = checkpointer.restore()
        return int(model), result


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def test_a_missing_or_empty_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert resumed(tmp_path / "deep/down/run")[1] is None
    assert resumed(tmp_path / "deep/down/run")[1] is None


def test_the_newest_is_taken(tmp_path: Path) -> None:
    run_with(tmp_path, 9, 10, 100)
    value, result = resumed(tmp_path)
    assert (value, result.step, result.path.name, result.passed_over) == (100, 100, "checkpoint-100", [])


def test_the_next_save_says_what_it_came_from(tmp_path: Path) -> None:
    run_with(tmp_path, 1)
    with Checkpointer(tmp_path, name="r", model=Counter()) as checkpointer:
        checkpointer.restore()
        path = checkpointer.save(2).path
    manifest = read_manifest(path)
    assert (manifest.run, manifest.attempt, manifest.parent) == ("r", 2, "checkpoint-1")
    assert manifest.versions["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: flip(folder / "model.safetensors"), "is damaged: block 0"),
        (lambda folder: flip(folder / "rng_state.pth"), "is damaged: block 0"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: os.truncate(folder / "rng_state.pth", 10), "has 10 bytes instead of"),
        (lambda folder: (folder / MANIFEST).unlink(), f"{MANIFEST} is missing"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "is not readable"),
        (lambda folder: flip(folder / MANIFEST), MANIFEST),
        (lambda folder: rewrite_manifest(folder, step=2), "belongs to checkpoint-2"),
    ],
    ids=["model", "rng", "missing", "short", "no-manifest", "torn-manifest", "manifest", "step"],
)
def test_a_bad_newest_one_is_passed_over_and_set_aside(tmp_path: Path, damage: Any, reason: str) -> None:
    run_with(tmp_path, 1, 2, 3)
    damage(tmp_path / "checkpoint-3")
    value, result = resumed(tmp_path)
    assert (value, result.step) == (2, 2)
    assert [info.name for info in result.passed_over] == ["checkpoint-3"]
    assert reason in result.passed_over[0].reason
    found = list_checkpoints(tmp_path)
    assert [info.path.name for info in found] == ["checkpoint-2", "checkpoint-1", "checkpoint-3.set-aside"]
    assert found[-1].problem.startswith("quarantined: ")
    assert reason in found[-1].problem
    assert resumed(tmp_path)[0] == 2


def test_two_bad_ones_of_the_same_step_are_both_kept(tmp_path: Path) -> None:
    run_with(tmp_path, 1)
    for _ in range(2):
        run_with(tmp_path, 2)
        flip(tmp_path / "checkpoint-2/model.safetensors")
        assert resumed(tmp_path)[0] == 1
    assert [info.path.name for info in list_checkpoints(tmp_path)[1:]] == [
        "checkpoint-2.set-aside",
        "checkpoint-2.set-aside-2",
    ]


def test_nothing_valid_is_an_error_that_lists_everything(tmp_path: Path) -> None:
    run_with(tmp_path, 1, 2)
    flip(tmp_path / "checkpoint-1/model.safetensors")
    (tmp_path / "checkpoint-2/model.safetensors").unlink()
    with pytest.raises(NoValidCheckpoint, match=r"(?s)checkpoint-2: .*missing.*checkpoint-1: .*damaged.*fresh=True"):
        resumed(tmp_path)
    assert len(list_checkpoints(tmp_path)) == 2, "nothing was deleted"


def test_nothing_valid_is_an_error_again_at_the_next_start(tmp_path: Path) -> None:
    run_with(tmp_path, 1)
    flip(tmp_path / "checkpoint-1/model.safetensors")
    for _ in range(2):
        with pytest.raises(NoValidCheckpoint):
            resumed(tmp_path)


def test_fresh_moves_everything_and_starts_over(tmp_path: Path) -> None:
    run_with(tmp_path, 1, 2)
    for number in (1, 2):
        value, result = resumed(tmp_path, fresh=True)
        assert (value, result) == (0, None)
        assert (tmp_path / f"previous-{number}").exists() or number == 2
        run_with(tmp_path, 3)
    assert sorted(path.name for path in (tmp_path / "previous-1").iterdir()) == ["checkpoint-1", "checkpoint-2"]
    verify(tmp_path / "previous-1/checkpoint-2", pool)
    assert [path.name for path in (tmp_path / "previous-2").iterdir()] == ["checkpoint-3"]


def test_a_request_to_start_over_with_an_id_is_carried_out_once(tmp_path: Path) -> None:
    """A pod that is preempted and comes back must not lose what it trained since."""
    run_with(tmp_path, 1, 2, run="old")
    assert resumed(tmp_path, "uid", fresh="uid") == (0, None)
    assert resumed(tmp_path, "uid", fresh="uid") == (0, None), "nothing saved yet"
    run_with(tmp_path, 3, run="uid")
    assert resumed(tmp_path, "uid", fresh="uid")[0] == 3
    assert sorted(path.name for path in (tmp_path / "previous-1").iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert resumed(tmp_path, "another", fresh="another") == (0, None)
    assert [path.name for path in (tmp_path / "previous-2").iterdir()] == ["checkpoint-3"]


def test_a_start_over_that_is_killed_between_its_steps_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(tmp_path, 1, run="old")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FolderLease, "mark_started_over", killed)
        resumed(tmp_path, "uid", fresh="uid")
    assert resumed(tmp_path, "uid", fresh="uid") == (0, None)
    run_with(tmp_path, 3, run="uid")
    assert resumed(tmp_path, "uid", fresh="uid")[0] == 3


def test_leftovers_of_a_dead_attempt_go(tmp_path: Path) -> None:
    run_with(tmp_path, 1)
    for name in (".checkpoint-5.saving", ".checkpoint-6.deleting"):
        shutil.copytree(tmp_path / "checkpoint-1", tmp_path / name)
    foreign = tmp_path / "checkpoint-7"
    foreign.mkdir()
    (foreign / SENTINEL).touch()
    (foreign / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").touch()
    assert resumed(tmp_path)[0] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".reprieve", "checkpoint-1", "notes.txt"]


def test_one_that_is_there_already_and_valid_is_kept(tmp_path: Path) -> None:
    run_with(tmp_path, 1)
    before = (tmp_path / "checkpoint-1" / MANIFEST).read_bytes()
    with Checkpointer(tmp_path, name="r", model=Counter(77)) as checkpointer:
        save = checkpointer.save(1)
    assert "valid" in save.skipped
    assert (tmp_path / "checkpoint-1" / MANIFEST).read_bytes() == before
    assert resumed(tmp_path)[0] == 1


def test_one_that_is_there_already_and_not_valid_is_set_aside(tmp_path: Path) -> None:
    run_with(tmp_path, 1)
    (tmp_path / "checkpoint-1/model.safetensors").unlink()
    run_with(tmp_path, 1)
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-1.set-aside"]
    assert resumed(tmp_path)[0] == 1


def test_one_that_is_there_already_and_damaged_is_set_aside(tmp_path: Path) -> None:
    run_with(tmp_path, 1)
    flip(tmp_path / "checkpoint-1/model.safetensors")
    run_with(tmp_path, 1)
    verify(tmp_path / "checkpoint-1", pool)


def test_one_of_another_run_does_not_count_as_saved(tmp_path: Path) -> None:
    run_with(tmp_path, 1, run="other")
    with Checkpointer(tmp_path, name="r", model=Counter(77)) as checkpointer:
        assert checkpointer.save(1).skipped is None
    of_run, of_other_run = list_checkpoints(tmp_path)
    assert of_run.manifest is not None and (of_run.path.name, of_run.manifest.run) == ("checkpoint-1", "r")
    assert of_other_run.path.name == "checkpoint-1.set-aside"
    assert of_other_run.problem == "quarantined: run 'r' saved the same step; this one is of run 'other'"
    assert resumed(tmp_path)[0] == 77


def test_checkpoints_of_another_run_are_not_used_and_not_moved(tmp_path: Path) -> None:
    run_with(tmp_path, 1, 2, run="other")
    with pytest.raises(NoValidCheckpoint, match="written by run 'other', this is run 'mine'"):
        resumed(tmp_path, "mine")
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-1"]
    run_with(tmp_path, 1, run="other")


def test_without_a_name_the_run_of_the_folder_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(tmp_path, 1, run="named")
    assert resumed(tmp_path, None)[0] == 1
    monkeypatch.setenv("REPRIEVE_RUN", "from-outside")
    with pytest.raises(NoValidCheckpoint, match="from-outside"):
        resumed(tmp_path, None)


def test_space_is_checked_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reprieve.checkpoint.folder import disk_space

    with Checkpointer(tmp_path, model=Counter()) as checkpointer:
        monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 5000)
        with pytest.raises(StorageFull, match=rf"{tmp_path}: .* needed, 5 kB free"):
            checkpointer.save(1)
        monkeypatch.undo()
        checkpointer.save(1)


def test_after_close_there_is_no_saving(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, model=Counter())
    checkpointer.close()
    checkpointer.close()


def test_a_save_after_close_is_an_error_of_ours(tmp_path: Path) -> None:
    from reprieve import ReprieveError

    checkpointer = Checkpointer(tmp_path, model=Counter())
    checkpointer.close()
    with pytest.raises(ReprieveError):
        checkpointer.save(1)
    assert list_checkpoints(tmp_path) == []


# What an attacker could leave


def evil_pickle(flag: Path) -> bytes:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.system, (f"touch {flag}",))

    return pickle.dumps({"state": {}, "x": Evil()}, protocol=2)


def test_a_hostile_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    root, flag = tmp_path / "run", tmp_path / "executed"
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(root, name="r", model=model, optimizer=optimizer) as checkpointer:
        good, bad = checkpointer.save(1).path, checkpointer.save(2).path
    with zipfile.ZipFile(bad / "optimizer.pt", "w") as archive:
        archive.writestr("archive/data.pkl", evil_pickle(flag))
        archive.writestr("archive/version", "3\n")
    files = {**read_manifest(bad).files, "optimizer.pt": entry_of(bad / "optimizer.pt")}
    rewrite_manifest(bad, files=files)
    verify(bad, pool)  # as far as bytes go it is what the manifest says
    with Checkpointer(root, name="r", model=model, optimizer=optimizer) as checkpointer:
        result = checkpointer.restore()
    assert result.path == good
    assert "refused" in result.passed_over[0].reason
    assert "system" in result.passed_over[0].reason
    assert not flag.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "", "a//b", "./x", "a\\b", "a/.."])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    run_with(tmp_path, 1, 2)
    folder = tmp_path / "checkpoint-2"
    (tmp_path / "outside").write_bytes(b"secret")
    files = {**read_manifest(folder).files, name: entry_of(tmp_path / "outside")}
    rewrite_manifest(folder, files=files)
    with pytest.raises(InvalidCheckpoint, match="outside of the checkpoint"):
        verify(folder, pool)
    assert resumed(tmp_path)[0] == 1


def test_a_link_is_refused(tmp_path: Path) -> None:
    run_with(tmp_path, 1, 2, 3, 4)
    file = tmp_path / "checkpoint-4/model.safetensors"
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert inspect_checkpoint(tmp_path / "checkpoint-4").problem == "model.safetensors is not a plain file"

    folder = tmp_path / "checkpoint-3"
    manifest = read_manifest(folder)
    (tmp_path / "out").mkdir()
    shutil.move(folder / "model.safetensors", tmp_path / "out/model.safetensors")
    (folder / "sub").symlink_to(tmp_path / "out")
    files = dict(manifest.files)
    files["sub/model.safetensors"] = files.pop("model.safetensors")
    (folder / MANIFEST).write_bytes(replace(manifest, files=files).encode())
    assert inspect_checkpoint(folder).problem == "sub/model.safetensors leads out of the checkpoint"

    shutil.move(tmp_path / "checkpoint-2", tmp_path / "moved")
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "moved")
    assert inspect_checkpoint(tmp_path / "checkpoint-2").problem == "not a folder"
    assert resumed(tmp_path)[0] == 1


def hostile(folder: Path, **changes: Any) -> None:
    """A manifest in the right format, with a valid checksum: only its content is wrong."""
    document = json.loads((folder / MANIFEST).read_bytes())
    document["manifest"].update(changes)
    canonical = json.dumps(document["manifest"], sort_keys=True, separators=(",", ":")).encode()
    document["xxh3_128"] = digest_of(canonical)
    (folder / MANIFEST).write_text(json.dumps(document, sort_keys=True, indent=1) + "\n")


def test_a_manifest_that_is_only_rewritten_is_valid(tmp_path: Path) -> None:
    run_with(tmp_path, 1, 2)
    hostile(tmp_path / "checkpoint-2")
    assert resumed(tmp_path)[0] == 2


ENTRY = {"bytes": 5, "xxh3_128": "0" * 32, "blocks": ["0" * 32]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "is not a manifest of Reprieve"),
        ({"version": 2}, "has version 2"),
        ({"surprise": 1}, "has fields that this version does not know"),
        ({"step": -1}, "no sensible step"),
        ({"step": True}, "no sensible step"),
        ({"step": "2"}, "no sensible step"),
        ({"created": "yesterday"}, "no sensible created"),
        ({"created": 5}, "no sensible created"),
        ({"block_bytes": 0}, "no sensible block_bytes"),
        ({"block_bytes": 1}, "does not have a checksum for each block"),
        ({"block_bytes": 2**40}, "uses blocks of"),
        ({"files": []}, "has fields that this version does not know"),
        ({"files": {"x": {}}}, "has fields that this version does not know"),
        ({"files": {"x": ENTRY}}, "does not match those of its blocks"),
        ({"files": {"x": {**ENTRY, "bytes": -1}}}, "no sensible size"),
        ({"files": {"x": {**ENTRY, "blocks": []}}}, "does not have a checksum for each block"),
        ({"files": {"x": {**ENTRY, "blocks": ["x"]}}}, "does not have a checksum for each block"),
        ({"files": {"x": {**ENTRY, "blocks": 3}}}, "does not have a checksum for each block"),
        ({"files": {"x": {**ENTRY, "blocks": [7]}}}, "does not have a checksum for each block"),
    ],
    ids=str,
)
def test_a_manifest_with_nonsense_in_it_is_invalid(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    run_with(tmp_path, 1, 2)
    hostile(tmp_path / "checkpoint-2", **changes)
    value, result = resumed(tmp_path)
    assert value == 1
    assert reason in result.passed_over[0].reason


# What cannot be read for now


def refuse(monkeypatch: pytest.MonkeyPatch, code: int, where: str) -> None:
    """Reading checkpoint-3 is refused: its manifest, or opening or reading its files."""

    def in_place_of(module: Any, name: str) -> None:
        real = getattr(module, name)

        def fail(what: Any, *args: Any, **options: Any) -> Any:
            path = what if isinstance(what, Path) else what.path
            if path.parent.name == "checkpoint-3" and (name != "read_bytes" or path.name == MANIFEST):
                raise OSError(code, os.strerror(code), str(path))
            return real(what, *args, **options)

        monkeypatch.setattr(module, name, fail)

    monkeypatch.setattr(reader, "read_from_cache", lambda *_: False)
    in_place_of(*{"manifest": (Path, "read_bytes"), "files": (Path, "lstat"), "open": (reader, "open_for_reading"),
                  "read": (reader, "read_into")}[where])  # fmt: skip


@pytest.mark.parametrize("where", ["manifest", "files", "open", "read"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ESTALE, errno.ENOMEM, errno.ETIMEDOUT, errno.EIO])
def test_what_the_storage_refuses_for_now_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, where: str
) -> None:
    run_with(tmp_path, 1, 2, 3)
    with monkeypatch.context() as patch:
        refuse(patch, code, where)
        if code == errno.EIO:  # the disk says that it has lost it
            assert resumed(tmp_path)[0] == 2
            return
        with pytest.raises(StorageError) as caught:
            resumed(tmp_path)
        assert caught.value.errno == code
        shown = list_checkpoints(tmp_path)
        assert [info.path.name for info in shown] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"], (
            "nothing was moved"
        )
        if where in ("manifest", "files"):
            assert shown[0].problem == f"cannot be read: {os.strerror(code)}"
    assert resumed(tmp_path)[0] == 3


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_stock_checkpoint_that_is_refused_for_now_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    run_with(tmp_path, 1)
    stock_checkpoint(tmp_path)

    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("reprieve.checkpoint.folder.foreign.checker.FileReader", refused)
    if code == errno.EIO:
        assert resumed(tmp_path)[0] == 1
        return
    with pytest.raises(StorageError):
        resumed(tmp_path)
    assert list_checkpoints(tmp_path)[0].path.name == "checkpoint-5"


def test_one_that_is_not_there_cannot_be_verified(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path, model=Counter()) as checkpointer,
        pytest.raises(InvalidCheckpoint, match="checkpoint-7: there is no such checkpoint"),
    ):
        checkpointer.verify(7)


# Written by stock code


def stock_checkpoint(root: Path, step: int = 5) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """What transformers' Trainer leaves: model, optimizer, scheduler and random numbers, without a manifest."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer)
    scheduler.step()
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(states, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return model, optimizer, scheduler


@pytest.mark.parametrize("torch_model", [False, True], ids=["safetensors", "pytorch_model.bin"])
def test_a_stock_checkpoint_is_resumed(tmp_path: Path, torch_model: bool) -> None:
    model, optimizer, scheduler = stock_checkpoint(tmp_path)
    if torch_model:
        (tmp_path / "checkpoint-5/model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "checkpoint-5/pytorch_model.bin")
    want = random.random(), np.random.rand(), torch.rand(1).item()
    losses = train(model, optimizer, 3)
    other = small_model()
    its_optimizer = torch.optim.AdamW(other.parameters())
    its_scheduler = torch.optim.lr_scheduler.StepLR(its_optimizer, 2)
    with Checkpointer(tmp_path, model=other, optimizer=its_optimizer, scheduler=its_scheduler) as checkpointer:
        result = checkpointer.restore()
        assert (result.step, result.epoch) == (5, None)
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == want
        assert train(other, its_optimizer, 3) == losses
        assert its_scheduler.state_dict() == scheduler.state_dict()
        assert read_manifest(checkpointer.save(6).path).parent == "checkpoint-5"


@pytest.mark.parametrize("core", ["core", "_core"], ids=["numpy 1", "numpy 2"])
def test_a_stock_checkpoint_of_either_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    """numpy 1 and 2 pickle an array under different names."""
    with monkeypatch.context() as patch:
        patch.setattr(np.empty(0).__reduce__()[0], "__module__", f"numpy.{core}.multiarray")
        model, optimizer, _ = stock_checkpoint(tmp_path)
    with zipfile.ZipFile(tmp_path / "checkpoint-5/rng_state.pth") as archive:
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    assert f"numpy.{core}.multiarray\n_reconstruct".encode() in pickled
    want = np.random.rand()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        result = checkpointer.restore()
    assert (result.step, result.passed_over, np.random.rand()) == (5, [], want)


def test_a_torn_stock_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run_with(tmp_path, 1)
    stock_checkpoint(tmp_path)
    os.truncate(tmp_path / "checkpoint-5/optimizer.pt", 100)
    value, result = resumed(tmp_path)
    assert value == 1
    assert result.passed_over[0].reason.startswith("optimizer.pt: ")


@pytest.mark.usefixtures("nan_in_fresh_memory")
def test_tied_weights_of_stock_torch_into_an_untied_model(tmp_path: Path) -> None:
    model, other = tied_linears(), tied_linears(tie=False)
    (tmp_path / "checkpoint-1").mkdir()
    torch.save(model.state_dict(), tmp_path / "checkpoint-1/model.pt")
    with Checkpointer(tmp_path, model=other, rng=False) as checkpointer:
        checkpointer.restore()
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].weight, model[0].weight)


def test_a_stock_torch_model_in_channels_last(tmp_path: Path) -> None:
    model, other = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    (tmp_path / "checkpoint-1").mkdir()
    torch.save(model.state_dict(), tmp_path / "checkpoint-1/model.pt")
    with Checkpointer(tmp_path, model=other, rng=False) as checkpointer:
        checkpointer.restore()
    assert torch.equal(other.weight, model.weight)


def test_a_stock_checkpoint_of_that_step_is_kept(tmp_path: Path) -> None:
    model, *_ = stock_checkpoint(tmp_path)
    with Checkpointer(tmp_path, model=model) as checkpointer:
        checkpointer.save(5)
    assert not (tmp_path / "checkpoint-5.set-aside").exists()


def test_a_mixture_is_never_left(tmp_path: Path) -> None:
    """A bad block at the end of a large file: the blocks before it have been put into the model already."""
    model = nn.Linear(4000, 3000, bias=False)
    want = copied(model)
    with Checkpointer(tmp_path, model=model) as checkpointer:
        checkpointer.save(1)
        model.weight.data += 1
        flip(checkpointer.save(2).path / "model.safetensors")
    model.weight.data += 1
    with Checkpointer(tmp_path, model=model) as checkpointer:
        assert checkpointer.restore().step == 1
    assert torch.equal(model.weight, want["weight"])
