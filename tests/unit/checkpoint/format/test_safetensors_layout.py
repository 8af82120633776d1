"""Safetensors files that the engine writes, read by the reference implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from reprieve import Checkpointer, StateError
from reprieve.checkpoint.format.safetensors_layout import can_hold, layout_safetensors
from tests.support.helpers import bits, write_layouts
from tests.support.tensors import BASE, DTYPES, random_bits

SUPPORTED = [dtype for dtype in DTYPES if can_hold(torch.empty(0, dtype=dtype))]


def write_model(folder: Path, tensors: dict[str, torch.Tensor], shard_bytes: int = 10**9) -> Path:
    write_layouts(folder, layout_safetensors("model", tensors, shard_bytes=shard_bytes))
    return folder / "model.safetensors"


def test_supported_dtypes() -> None:
    assert set(DTYPES) - set(SUPPORTED) == {torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
    assert not can_hold(torch.eye(2).to_sparse())
    assert not can_hold(3)


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": random_bits(dtype, 3, 5), "scalar": random_bits(dtype), "empty": random_bits(dtype, 0, 4)}
    path = write_model(tmp_path, tensors)
    got = load_file(path)
    assert set(got) == set(tensors)
    for key, tensor in tensors.items():
        assert (got[key].dtype, got[key].shape) == (tensor.dtype, tensor.shape)
        assert bits(got[key]) == bits(tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert bits(file.get_slice("x")[1:3]) == bits(tensors["x"][1:3])


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(BASE.transpose(0, 1), id="transposed"),
        pytest.param(BASE.contiguous(memory_format=torch.channels_last), id="channels_last"),
        pytest.param(BASE[::2, 1:, :, 1], id="strided"),
        pytest.param(torch.arange(3.0).expand(4, 3), id="expanded"),
        pytest.param(torch.complex(BASE, -BASE).conj(), id="conj"),
        pytest.param(torch.complex(BASE, -BASE).conj().imag, id="neg"),
        pytest.param(torch.randn(1500, 1300).t(), id="large-transposed"),
        pytest.param(torch.randn(3, 700_000)[:, ::2], id="rows-above-the-piece"),
        pytest.param(torch.randn(1300, 1500).t()[None], id="one-row"),
    ],
)
def test_views_keep_their_values(tmp_path: Path, view: torch.Tensor) -> None:
    got = load_file(write_model(tmp_path, {"before": torch.ones(3), "view": view}))
    assert torch.equal(got["view"], view)


def test_tensors_larger_than_the_ring(tmp_path: Path) -> None:
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), "large": torch.randn(40_000_000), "t": torch.randn(99, 98).t()}
    got = load_file(write_model(tmp_path, tensors))
    assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())


def test_each_tensor_is_aligned_to_its_type(tmp_path: Path) -> None:
    path = write_model(tmp_path, {f"{number}": random_bits(dtype, 3) for number, dtype in enumerate(SUPPORTED)})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 64 == 0
    for key, entry in header.items():
        if key != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % SUPPORTED[int(key)].itemsize == 0


def test_tied_tensors_are_stored_once_in_the_stock_way(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    path = write_model(tmp_path, model.state_dict())
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["embed.weight"]
        assert file.metadata()["head.weight"] == "embed.weight"
    other = Tied()
    assert load_model(other, path) == (set(), [])
    assert torch.equal(other.head.weight, model.embed.weight)


def test_overlapping_views_are_written_separately(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    square = torch.arange(9.0).reshape(3, 3)
    tensors = {"base": base, "head": base[:6], "tail": base[3:], "square": square, "turned": square.t()}
    got = load_file(write_model(tmp_path, tensors))
    assert {key: value.tolist() for key, value in got.items()} == {key: t.tolist() for key, t in tensors.items()}


def test_a_tensor_and_its_conjugate_are_not_tied(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j])
    got = load_file(write_model(tmp_path, {"a": number, "b": number.conj()}))
    assert got["b"].tolist() == [1 - 2j]


def test_shards_with_the_stock_index(tmp_path: Path) -> None:
    tensors = {f"layer.{number}": torch.randn(100) for number in range(10)} | {"huge": torch.randn(1000)}
    write_model(tmp_path, tensors, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 8000
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert shards == [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    assert len(shards) == 6
    for key, shard in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / shard)[key], tensors[key])
    assert set(index["weight_map"]) == set(tensors)


def test_a_sharded_model_is_restored(tmp_path: Path) -> None:
    model, other = (nn.Sequential(*[nn.Linear(10, 10) for _ in range(5)]) for _ in range(2))
    with Checkpointer(tmp_path, model=model, shard_bytes="1kB") as checkpointer:
        path = checkpointer.save(1).path
        assert (path / "model.safetensors.index.json").exists()
    with Checkpointer(tmp_path, model=other) as checkpointer:
        checkpointer.restore()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(saved, restored) for saved, restored in pairs)


def test_a_meta_tensor_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"model\.safetensors: 0\.weight is on the meta device"):
        Checkpointer(tmp_path, model=nn.Sequential(nn.Linear(2, 2, bias=False, device="meta")))


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert load_file(write_model(tmp_path, {})) == {}
