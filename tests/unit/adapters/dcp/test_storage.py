"""`reprieve.dcp` in one process: the files, what is refused, and what survives failures."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
import warnings
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

import reprieve
from reprieve.adapters.dcp import save_folder
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.folder import catalog
from reprieve.checkpoint.folder.verify import verify
from reprieve.checkpoint.format.manifest import MANIFEST, SENTINEL
from reprieve.dcp import StorageReader, StorageWriter
from reprieve.storage.disk import Disk, OpenFile
from tests.support.helpers import SOAK

FLIPS = 5_000 if SOAK else 400

pytestmark = [
    # These tests use one process without a group on purpose; and DCP logs what it raises.
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # DCP's own, in torch 2.6
]


def a_state(seed: int = 1) -> dict[str, Any]:
    """Return a state with every kind of tensor and value that is in use."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tied = some(40, 30)
    return {
        "model": {
            "weight": some(17, 31),
            "transposed": some(64, 32).t(),
            "view": some(10, 10)[2:5, 3:7],
            "channels_last": some(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "empty": torch.zeros(0, 5),
            "scalar": torch.tensor(3.5) * seed,
            "bf16": some(9, 9).bfloat16(),
            "float8": some(8, 8).to(torch.float8_e4m3fn),
            "complex": torch.complex(some(3, 3), some(3, 3)),
            "conjugate": torch.complex(some(3, 3), some(3, 3)).conj(),
            "bool": some(5) > 0,
            "uint16": torch.arange(10).to(torch.uint16) * seed,
            "parameter": torch.nn.Parameter(some(3, 3)),
            "tied": tied,
            "tied_too": tied,
        },
        "lr": 0.1 * seed,
        "list": [1, "ä", None, (1, 2), torch.ones(2)],
        "seed": seed,
    }


def empty_like(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: empty_like(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [empty_like(value) for value in tree]
    return torch.zeros(tree.shape, dtype=tree.dtype) if isinstance(tree, torch.Tensor) else None


def bits(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [bits(value) for value in tree]
    if not isinstance(tree, torch.Tensor):
        return tree
    flat = tree.detach().resolve_conj().contiguous().view(-1)
    return str(tree.dtype), tuple(tree.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def save(path: Path, seed: int = 1, **options: Any) -> dict[str, Any]:
    state = a_state(seed)
    dcp.save(state, storage_writer=StorageWriter(path, **options))
    save_folder.wait_for_removals()
    return state


def load(reader: Any, like: Any = None, **options: Any) -> Any:
    state = empty_like(a_state() if like is None else like)
    dcp.load(state, storage_reader=reader, **options)
    return state


@contextlib.contextmanager
def raises(kind: type[BaseException], match: str) -> Iterator[None]:
    """Expect an error that DCP has wrapped."""
    with pytest.raises(dcp.CheckpointException) as caught:
        yield
    (error, _) = caught.value.failures[0]
    assert isinstance(error, kind), error
    assert match in str(error)


# The files


def test_stock_and_reprieve_read_each_other(tmp_path: Path) -> None:
    state = save(tmp_path / "reprieve")
    assert bits(load(dcp.FileSystemReader(tmp_path / "reprieve"))) == bits(state)
    assert bits(load(StorageReader(tmp_path / "reprieve"))) == bits(state)
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    assert bits(load(StorageReader(tmp_path / "stock"))) == bits(state)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "many", single_file_per_rank=False))
    assert bits(load(StorageReader(tmp_path / "many"))) == bits(state)


def test_checkpoint_id_takes_the_place_of_the_path(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path / "a"), StorageReader(tmp_path / "a")
    for name in ("b", "c"):
        dcp.save(a_state(), checkpoint_id=tmp_path / name, storage_writer=writer)
        assert bits(load(reader, checkpoint_id=str(tmp_path / name))) == bits(a_state())
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


def test_every_item_is_an_archive_that_strict_tools_accept(tmp_path: Path) -> None:
    save(tmp_path / "reprieve")
    metadata = pickle.loads((tmp_path / "reprieve" / ".metadata").read_bytes())
    data = (tmp_path / "reprieve" / "__0_0.distcp").read_bytes()
    for index, info in metadata.storage_data.items():
        item = io.BytesIO(data[info.offset : info.offset + info.length])
        with zipfile.ZipFile(item) as archive:
            assert archive.testzip() is None
        item.seek(0)
        if index.offset is not None:
            assert info.offset % 64 == 0
            assert torch.load(item, weights_only=True).untyped_storage().nbytes() < 10_000, "only what the item names"


def test_metadata_needs_no_class_of_reprieve(tmp_path: Path) -> None:
    save(tmp_path / "reprieve")
    program = f"""
import sys, warnings
sys.modules["reprieve"] = None  # not installed
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
state = {{"seed": None, "model": {{"weight": torch.zeros(17, 31)}}}}
dcp.load(state, checkpoint_id={str(tmp_path / "reprieve")!r})
print(state["seed"], float(state["model"]["weight"].abs().sum()) > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True"]


def test_import_reprieve_leaves_dcp_alone() -> None:
    program = "import sys, reprieve; sys.exit('torch' in sys.modules or 'reprieve.dcp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_manifest_says_what_it_can(tmp_path: Path) -> None:
    save(tmp_path / "step-120")
    found = verify(tmp_path / "step-120", BlockPool())
    assert found.manifest is not None
    assert (found.manifest.step, found.manifest.world_size) == (120, 1)
    assert set(found.manifest.files) == {".metadata", "__0_0.distcp"}
    assert list(found.manifest.state) == ["list", "lr", "model", "seed"]
    assert found.manifest.versions["torch"] == torch.__version__


def test_metadata_of_many_blocks(tmp_path: Path) -> None:
    state = {f"{number}{'x' * 150_000}": torch.full((3,), float(number)) for number in range(250)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "it"))
    assert (tmp_path / "it" / ".metadata").stat().st_size > 2 * BLOCK_BYTES
    assert bits(load(StorageReader(tmp_path / "it"), state)) == bits(state)


# Damage that is detected


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "reprieve"
    dcp.save({"a": torch.randn(300, 7), "b": 3, "c": torch.zeros(5)}, storage_writer=StorageWriter(path))
    like = {"a": torch.zeros(300, 7), "b": 3, "c": torch.zeros(5)}
    data = {file: file.read_bytes() for file in path.iterdir()}
    chance, missed = random.Random(0), []
    logging.disable(logging.WARNING)
    try:
        for number in range(FLIPS):
            file = chance.choice(list(data))
            bit = chance.randrange(8 * len(data[file]))
            changed = bytearray(data[file])
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            try:
                load(StorageReader(path), like)
                missed.append((number, file.name, bit))
            except dcp.CheckpointException as error:
                assert isinstance(error.failures[0][0], reprieve.InvalidCheckpoint)
            file.write_bytes(data[file])
    finally:
        logging.disable(logging.NOTSET)
    assert missed == []
    load(StorageReader(path), like)


def test_flipped_bits_of_a_stock_checkpoint_are_found_by_their_crc(tmp_path: Path) -> None:
    path = tmp_path / "stock"
    dcp.save({"a": torch.randn(300, 70)}, checkpoint_id=path)
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)
    with raises(reprieve.InvalidCheckpoint, "__0_0.distcp: 'a' damaged: the CRC-32"):
        load(StorageReader(path), {"a": torch.zeros(300, 70)})


@pytest.mark.parametrize("what", ["data", "metadata", "manifest's file", "all"])
def test_what_is_missing_is_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "reprieve"
    save(path)
    name = {"data": "__0_0.distcp", "metadata": ".metadata", "manifest's file": "__0_0.distcp", "all": ".metadata"}[
        what
    ]
    if what == "all":
        shutil.rmtree(path)
    else:
        (path / name).unlink()
    if what == "manifest's file":
        (path / MANIFEST).unlink()
    with raises(reprieve.InvalidCheckpoint, name):
        load(StorageReader(path))


def test_a_save_that_never_finished_is_not_loaded(tmp_path: Path) -> None:
    save(tmp_path / "reprieve")
    (tmp_path / "reprieve" / SENTINEL).touch()
    with raises(reprieve.InvalidCheckpoint, "never finished"):
        load(StorageReader(tmp_path / "reprieve"))


# What is refused


class Evil:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_metadata_runs_no_code(tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "stock")
    file = tmp_path / "stock" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Evil(tmp_path / "ran")
    file.write_bytes(pickle.dumps(metadata))
    with raises(reprieve.InvalidCheckpoint, "posix.mkdir"):
        load(StorageReader(tmp_path / "stock"), {"a": torch.zeros(3)})
    assert not (tmp_path / "ran").exists()
    load(StorageReader(tmp_path / "stock", weights_only=False), {"a": torch.zeros(3)})
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("writer", [StorageWriter, dcp.FileSystemWriter])
def test_items_run_no_code(writer: Any, tmp_path: Path) -> None:
    dcp.save({"a": Evil(tmp_path / "ran")}, storage_writer=writer(tmp_path / "it"))
    with raises(reprieve.InvalidCheckpoint, "mkdir"):
        load(StorageReader(tmp_path / "it"), {"a": None})
    assert not (tmp_path / "ran").exists()
    load(StorageReader(tmp_path / "it", weights_only=False), {"a": None})
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", ""])
def test_metadata_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "stock")
    file = tmp_path / "stock" / ".metadata"
    metadata: Metadata = pickle.loads(file.read_bytes())
    assert metadata.storage_data is not None
    for info in metadata.storage_data.values():
        info.relative_path = name
    file.write_bytes(pickle.dumps(metadata))
    with raises(reprieve.InvalidCheckpoint, "outside the checkpoint"):
        load(StorageReader(tmp_path / "stock"), {"a": torch.zeros(3)})


def test_unusable_paths_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(reprieve.ConfigError, match="use_collectives"):
        StorageWriter(tmp_path / "a").set_up_storage_writer(True, rank=0, use_collectives=False)
    (tmp_path / "file").touch()
    with raises(reprieve.StorageError, "file where the folder should be"):
        save(tmp_path / "file")
    with pytest.raises(reprieve.ConfigError):
        StorageWriter("s3://bucket/x")
    assert not StorageWriter.validate_checkpoint_id("s3://bucket/x")
    assert StorageReader.validate_checkpoint_id(tmp_path)


# Planners


class Memory(bytearray):
    """Memory that is counted as long as a tensor uses it."""


class Casting(DefaultSavePlanner):
    """A planner from DCP's documentation that casts; its copies are counted."""

    alive: ClassVar[weakref.WeakValueDictionary[int, Memory]] = weakref.WeakValueDictionary()
    most = 0
    tell = True

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None and self.tell:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO:
            return data
        memory = Memory(data.numel() * 2)
        Casting.alive[id(memory)] = memory
        Casting.most = max(Casting.most, len(Casting.alive))
        return torch.frombuffer(memory, dtype=torch.float16).view(data.shape).copy_(data)


@pytest.mark.parametrize("tell", [True, False])
def test_a_planner_that_makes_tensors_on_request(tell: bool, tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(200, 300) for number in range(20)}
    planner = Casting()
    planner.tell, Casting.most = tell, 0
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "half"), planner=planner)
    assert Casting.most <= 2, "one at a time, not all at once"
    for reader in (StorageReader(tmp_path / "half"), dcp.FileSystemReader(tmp_path / "half")):
        found = load(reader, state)
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor.half().float()), "cast on the way in, cast back on the way out"


class Materialising(DefaultLoadPlanner):
    """A planner from DCP's documentation that loads to the CPU."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(tensor)


def test_a_planner_that_hands_tensors_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprieve.adapters.dcp.reader._MAX_BUFFERED_BYTES", 300_000)  # several passes
    state = {f"w{number}": torch.randn(200, 300) for number in range(7)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "it"))
    assert bits(load(StorageReader(tmp_path / "it"), state, planner=Materialising())) == bits(state)


def test_a_planner_that_caches_its_plan(tmp_path: Path) -> None:
    try:
        planner = DefaultSavePlanner(enable_plan_caching=True)
    except TypeError:
        pytest.skip("this torch does not cache plans")
    for seed in (1, 2, 3):
        dcp.save(a_state(seed), checkpoint_id=tmp_path / "it", storage_writer=StorageWriter("x"), planner=planner)
        assert bits(load(StorageReader(tmp_path / "it"))) == bits(a_state(seed))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_more_than_their_bytes(tmp_path: Path) -> None:
    state = {"quantised": torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "it"))
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    for reader in (
        dcp.FileSystemReader(tmp_path / "it"),
        StorageReader(tmp_path / "it"),
        StorageReader(tmp_path / "stock"),
    ):
        found = {"quantised": torch.quantize_per_tensor(torch.zeros(4, 4), 0.1, 0, torch.qint8)}
        dcp.load(found, storage_reader=reader)
        assert torch.equal(found["quantised"].int_repr(), state["quantised"].int_repr())


def test_a_load_into_another_type_and_of_a_part(tmp_path: Path) -> None:
    save(tmp_path / "reprieve")
    like = {"model": {"weight": torch.zeros(17, 31, dtype=torch.float64), "transposed": torch.zeros(64, 32).t()}}
    dcp.load(like, storage_reader=StorageReader(tmp_path / "reprieve"))
    assert torch.equal(like["model"]["weight"], a_state()["model"]["weight"].double())
    assert torch.equal(like["model"]["transposed"], a_state()["model"]["transposed"])


# Overwriting, leftovers


def test_a_new_one_takes_the_place_of_the_old_and_of_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "last"
    for seed, prepare in enumerate([path.mkdir, None, lambda: dcp.save(a_state(9), checkpoint_id=path)], start=1):
        if prepare is not None:
            prepare()
        (path / "config.json").write_text("{}") if seed > 1 else None
        save(path, seed)
        assert bits(load(StorageReader(path))) == bits(a_state(seed))
        assert sorted(os.listdir(tmp_path)) == ["last"]
        expected = {".metadata", "__0_0.distcp", MANIFEST, *(["config.json"] if seed > 1 else [])}
        assert set(os.listdir(path)) == expected
    (tmp_path / "link").symlink_to(path)
    save(tmp_path / "link", 7)
    assert (tmp_path / "link").is_symlink() and bits(load(StorageReader(path))) == bits(a_state(7))
    with raises(reprieve.CheckpointError, "overwrite=False"):
        save(path, 8, overwrite=False)
    assert bits(load(StorageReader(path))) == bits(a_state(7))


class FailsAt(Disk):
    """A disk on which the n-th change fails."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def __getattribute__(self, name: str) -> Any:
        if name in ("make_folder", "create", "write", "truncate", "flush", "flush_folder", "rename", "remove"):
            self.remaining -= 1
            if self.remaining == -1:
                raise OSError(5, "Input/output error")
        return super().__getattribute__(name)


def test_an_error_at_any_change_to_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "last"
    save(path, 1)
    failures = 0
    for at in range(100):
        disk = FailsAt(at)
        try:
            save(path, 2, disk=disk)
        except dcp.CheckpointException as error:
            failures += 1
            assert isinstance(error.failures[0][0], reprieve.StorageError)
            assert str(path) in str(error)
        found = bits(load(StorageReader(path)))
        assert found in (bits(a_state(1)), bits(a_state(2)))
        if found == bits(a_state(1)):
            assert sorted(os.listdir(tmp_path)) == ["last"], f"failed at change {at}, and left something"
        else:  # the failure came after the commit; the next save cleans up
            save(path, 1)
            assert sorted(os.listdir(tmp_path)) == ["last"]
        if disk.remaining >= 0:
            break
    assert failures > 10


def test_a_save_that_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "last"
    program = f"""
import sys
from pathlib import Path
from reprieve.adapters.dcp import save_folder
from reprieve.storage.disk import Disk
save_folder.begin(Disk(), Path({str(path)!r}), "another-save")
print("ready", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"ready\n"
        with raises(reprieve.FolderInUse, ".last.saving is being written by another process"):
            save(path)
        save(tmp_path / "other")
        assert save_folder.join(save_folder.saving_folder(path)) == "another-save"
        with pytest.raises(reprieve.CheckpointError, match="does not exist"):
            save_folder.join(save_folder.saving_folder(tmp_path / "other"))
    finally:
        other.stdin.close()
        other.stdout.close()
        other.wait()
    save(path)  # it is dead: what it left is in nobody's way
    assert sorted(os.listdir(tmp_path)) == ["last", "other"]


class Robbed(DefaultSavePlanner):
    """A writer that loses its folder to another save before it writes."""

    path = Path()

    def finish_plan(self, new_plan: Any) -> Any:
        save_folder.begin(Disk(), self.path, "another-save")  # in the same process, no lock distinguishes the two
        return super().finish_plan(new_plan)


@pytest.mark.parametrize("when", ["before it writes", "after it has written"])
def test_a_save_that_lost_its_folder_to_another_does_not_commit(when: str, tmp_path: Path) -> None:
    path = tmp_path / "last"
    save(path, 1)

    class Late(Disk):
        def flush(self, file: OpenFile) -> None:
            super().flush(file)
            if file.path.name.endswith(".distcp"):
                save_folder.begin(Disk(), path, "another-save")

    planner, disk = (Robbed(), None) if when == "before it writes" else (None, Late())
    if planner is not None:
        planner.path = path
    with raises(reprieve.Fenced, "has taken over"):
        dcp.save(a_state(2), storage_writer=StorageWriter(path, disk=disk), planner=planner)
    assert save_folder.join(save_folder.saving_folder(path)) == "another-save", "the other save is still there"
    assert bits(load(StorageReader(path))) == bits(a_state(1))


def test_a_crash_between_the_two_renames(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "last"
    save(path, 1)
    (path / "config.json").write_text("{}")
    save(tmp_path / "new", 2)
    path.rename(save_folder.replaced_folder(path))
    assert bits(load(StorageReader(path))) == bits(a_state(1)), "the old one, renamed"
    (tmp_path / "new").rename(save_folder.saving_folder(path))
    assert bits(load(StorageReader(path))) == bits(a_state(2)), "the new one was complete already"
    assert "a crash interrupted the commit" in caplog.text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(path, 3)
    assert sorted(os.listdir(tmp_path)) == ["last"]
    assert "config.json" in os.listdir(path)
    assert bits(load(StorageReader(path))) == bits(a_state(3))


def test_storage_that_does_not_let_us_look_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old checkpoint is not used in place of the newest."""
    path = tmp_path / "last"
    save(path, 1)
    save(tmp_path / "new", 2)
    path.rename(save_folder.replaced_folder(path))
    (tmp_path / "new").rename(save_folder.saving_folder(path))
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "read_manifest", _stale)
        with pytest.raises(dcp.CheckpointException, match="Stale"):
            load(StorageReader(path))
    assert bits(load(StorageReader(path))) == bits(a_state(2))


def _stale(path: Path) -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))


def test_foreign_folders_are_not_removed(tmp_path: Path) -> None:
    for name in (".notes.saving", ".notes.deleting", ".notes.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "diary.txt").write_text("dear")
    (tmp_path / ".notes.saving" / SENTINEL).write_text("save mine\n")
    save(tmp_path / "last")
    assert len(list(tmp_path.glob(".notes.*/diary.txt"))) == 3
