"""Torch files that the engine writes: stock `torch.load`, `zipfile` and the engine's reader load the same."""

from __future__ import annotations

import mmap
import os
import struct
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reprieve import StateError
from reprieve.checkpoint.format.layout import Deferred
from reprieve.checkpoint.format.torch_layout import layout_torch
from reprieve.checkpoint.io.reader import Reader
from reprieve.checkpoint.restore.torch_reader import TorchFile
from tests.support.helpers import assert_same, bits, pool, write_layouts
from tests.support.tensors import BASE, DTYPES, random_bits


def write_tree(folder: Path, tree: Any) -> Path:
    write_layouts(folder, [layout_torch("state.pt", tree)])
    return folder / "state.pt"


def read_back(path: Path) -> Any:
    """Load a file through the engine's own reader."""
    with Reader(path.parent, pool) as reader:
        file = TorchFile(reader.open(path.name, None))
        storages: dict[str, torch.UntypedStorage] = {}

        def storage(key: str, size: int, _location: str) -> torch.UntypedStorage:
            if key not in storages:
                storages[key] = torch.UntypedStorage(size)
                file.read_into(key, storages[key])
            return storages[key]

        tree = file.load(storage)
        reader.run()
    return tree


def load_stock(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return torch.load(path, weights_only=True)


def load_every_way(path: Path) -> Iterator[Any]:
    yield load_stock(path)
    yield torch.load(path, weights_only=True, mmap=True)
    yield read_back(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tree = {"x": random_bits(dtype, 3, 5), "scalar": random_bits(dtype), "empty": random_bits(dtype, 0, 4)}
    for got in load_every_way(write_tree(tmp_path, tree)):
        assert_same(got, tree)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(BASE.transpose(0, 1), id="transposed"),
        pytest.param(BASE.contiguous(memory_format=torch.channels_last), id="channels_last"),
        pytest.param(BASE[::2, 1:, :, 1], id="strided"),
        pytest.param(BASE[2:], id="offset"),
        pytest.param(torch.arange(3.0).expand(4, 3), id="expanded"),
        pytest.param(torch.complex(BASE, -BASE).conj(), id="conj"),
        pytest.param(torch.complex(BASE, -BASE).conj().imag, id="neg"),
        pytest.param(torch.nn.Parameter(BASE[0]), id="parameter"),
    ],
)
def test_views_keep_values_and_strides(tmp_path: Path, view: torch.Tensor) -> None:
    for got in load_every_way(write_tree(tmp_path, [view])):
        assert_same(got, [view])
        assert (got[0].stride(), got[0].storage_offset()) == (view.stride(), view.storage_offset())


def test_tensors_share_memory_again(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    tree = {"base": base, "same": base, "head": base[:6], "tail": base[3:]}
    path = write_tree(tmp_path, tree)
    assert path.stat().st_size < 2000
    for got in (load_stock(path), read_back(path)):
        assert_same(got, tree)
        got["base"][4] = -1
        assert got["head"][4] == got["tail"][1] == -1


def test_memory_with_two_dtypes_is_refused_or_right(tmp_path: Path) -> None:
    """Stock torch.save: Cannot save multiple tensors or storages that view the same data as different types."""
    base = torch.arange(10.0)
    tree = {"base": base, "as_int": base.view(torch.int32)}
    try:
        path = write_tree(tmp_path, tree)
    except StateError:
        return
    assert_same(torch.load(path, weights_only=True), tree)


def test_nan_payloads_and_minus_zero_survive(tmp_path: Path) -> None:
    odd = torch.tensor([0x7FC00001, 0x7F800001, -0x00400000, -0x80000000], dtype=torch.int32).view(torch.float32)
    (payload,) = struct.unpack("d", struct.pack("Q", 0x7FF8_0000_DEAD_BEEF))
    tree = {"t": odd, "f": payload, "minus": -0.0, "inf": float("-inf")}
    for got in load_every_way(write_tree(tmp_path, tree)):
        assert_same(got, tree)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
def test_sparse(tmp_path: Path) -> None:
    dense = torch.eye(4)
    layouts = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))]
    for got in load_every_way(write_tree(tmp_path, layouts)):
        assert [tensor.layout for tensor in got] == [tensor.layout for tensor in layouts]
        assert all(torch.equal(tensor.to_dense(), dense) for tensor in got)


def test_plain_python_values(tmp_path: Path) -> None:
    from collections import Counter, OrderedDict

    tree = {
        "numbers": (0, -1, 2**31, 2**200, -(2**64), True, None, 1.5),
        "texts": ["", "grüße 🜚 \x00", "x" * 70_000, bytes(range(256))],
        "nested": [[], {}, (), ((),), {"": {1: {(1, "a"): []}}}],
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("hello"),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "set": {1, 2, 3},
    }
    path = write_tree(tmp_path, tree)
    for got in load_every_way(path):
        assert got == tree


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    tree = {"x": torch.arange(1000), "n": 3}
    assert write_tree(first, tree).read_bytes() == write_tree(second, tree).read_bytes()


def test_data_is_aligned_for_mmap(tmp_path: Path) -> None:
    path = write_tree(tmp_path, [torch.ones(size, dtype=torch.uint8) for size in range(1, 70)])
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name_length, extra_length = struct.unpack_from("<2H", data, info.header_offset + 26)
            assert (info.header_offset + 30 + name_length + extra_length) % 64 == 0


def test_tensors_larger_than_a_block_and_than_the_ring(tmp_path: Path) -> None:
    """150 MB against a ring of 128 MiB; the CRC runs over ten blocks, and two of them hold two tensors."""
    tree = {"small": torch.arange(5), "large": torch.randint(0, 256, (150_000_001,), dtype=torch.uint8), "end": 1}
    path = write_tree(tmp_path, {**tree, "after": torch.arange(7)})
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for got in (torch.load(path, weights_only=True, mmap=True), read_back(path)):
        assert torch.equal(got["large"], tree["large"])
        assert torch.equal(got["after"], torch.arange(7))


def test_more_records_than_a_zip_without_zip64_can_count(tmp_path: Path) -> None:
    path = write_tree(tmp_path, [torch.tensor(number) for number in range(66_000)])
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == 66_003
    assert torch.equal(torch.stack(torch.load(path, weights_only=True)), torch.arange(66_000))
    with Reader(tmp_path, pool) as reader:
        file = TorchFile(reader.open("state.pt", None))
        assert file.file.read(*file.range("data/65999")) == bits(torch.tensor(65_999))


def test_100_000_tiny_tensors_in_about_the_time_of_torch_save(tmp_path: Path) -> None:
    """CPU time, not wall time: another test may run beside this one, and disks differ."""
    tree = {number: torch.ones(2) for number in range(100_000)}
    start = time.process_time()
    path = write_tree(tmp_path, tree)
    ours = time.process_time()
    torch.save(tree, tmp_path / "stock.pt")
    assert ours - start < 2 * (time.process_time() - ours)
    assert path.stat().st_size < 30_000_000


def test_records_above_4_gib_by_their_headers(tmp_path: Path) -> None:
    """Only the headers of a 5 GiB layout are written, to a sparse file, which stock zipfile and torch read."""
    size = 5 * 2**30
    large = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.uint8)
    layout = layout_torch("state.pt", {"large": large, "after": torch.arange(3)})
    path = tmp_path / "state.pt"
    with path.open("wb") as file:
        for segment in layout.segments:
            if segment.length == size:
                continue
            data = (
                segment.render([0, 7]) if isinstance(segment, Deferred) else _bytes_of(segment.source, segment.length)
            )
            assert len(data) == segment.length
            file.seek(segment.offset)
            file.write(data)
        assert file.tell() == layout.size
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        after = archive.getinfo("archive/data/1")
    assert sizes["archive/data/0"] == size
    assert after.header_offset > size
    got = torch.load(path, weights_only=True, mmap=True)  # the data is holes: zeros
    assert got["large"].numel() == size
    assert torch.equal(got["after"], torch.arange(3))
    with Reader(tmp_path, pool) as reader:
        file = TorchFile(reader.open("state.pt", None))
        assert file.range("data/0")[1] - file.range("data/0")[0] == size
        start, stop = file.range("data/1")
        assert file.file.read(start, stop) == bits(torch.arange(3))


def _bytes_of(source: Any, length: int) -> bytes:
    class Block:
        memory = mmap.mmap(-1, max(length, 1))
        view = memoryview(memory)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    source.copy(Block, 0, 0, length)
    return bytes(Block.view[:length])


@pytest.mark.soak
@pytest.mark.usefixtures("soak")
def test_records_above_4_gib_for_real(tmp_path: Path) -> None:
    size = 4 * 2**30 + 12_345
    large = torch.zeros(size, dtype=torch.uint8)
    large[::4096] = 7
    path = write_tree(tmp_path, {"large": large, "after": torch.arange(3)})
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    got = read_back(path)
    assert torch.equal(got["large"], large)
    assert torch.equal(got["after"], torch.arange(3))


def test_files_are_written_without_direct_io_on_tmpfs() -> None:
    import tempfile

    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tree = {"x": torch.arange(100_000)}
        assert_same(load_stock(write_tree(Path(folder), tree)), tree)


def test_a_meta_tensor_is_an_error() -> None:
    with pytest.raises(StateError, match=r"state\.pt.*meta device"):
        layout_torch("state.pt", {"deep": {"down": torch.empty(2, 3, device="meta")}})


def test_a_meta_tensor_in_a_tree_is_named() -> None:
    with pytest.raises(StateError, match=r"deep.*down"):
        layout_torch("state.pt", {"deep": {"down": torch.empty(2, 3, device="meta")}})


def test_what_cannot_be_pickled_raises_an_error_with_the_file() -> None:
    with pytest.raises(StateError, match=r"state\.pt cannot be saved"):
        layout_torch("state.pt", {"x": lambda: None})
    with open(os.devnull) as file, pytest.raises(StateError, match=r"state\.pt cannot be saved"):
        layout_torch("state.pt", {"x": file})
