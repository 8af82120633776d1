"""Modules with tied weights, views, hooks, extra state or wrappers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprieve import StateError, StateMismatch
from tests.support.helpers import Odd, assert_same, copied, restored, saved
from tests.support.tensors import tied_linears


def test_tied_weights(tmp_path: Path) -> None:
    source, other = tied_linears(), tied_linears()
    saved(tmp_path, model=source)
    restored(tmp_path, model=other)
    assert torch.equal(other[1].weight, source[0].weight)
    assert other[1].weight is other[0].weight


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("hook", [False, True], ids=["plain", "load-hook"])
@pytest.mark.parametrize(
    "tie",
    [True, False],
    ids=["tied", "untied"],
)
def test_tied_weights_are_restored_into_any_model(tmp_path: Path, tie: bool, hook: bool) -> None:
    source, other = tied_linears(), tied_linears(tie=tie, hook=hook)
    saved(tmp_path, model=source)
    restored(tmp_path, model=other)
    assert torch.equal(other[0].weight, source[0].weight)
    assert torch.equal(other[1].weight, source[0].weight)


def test_views_are_restored_into_live_memory(tmp_path: Path) -> None:
    base, square = torch.randn(10), torch.randn(3, 3)
    buffers = {
        "turned": torch.randn(4, 5).t(), "head": base[:6], "tail": base[3:], "square": square, "squared": square.t(),
        "channels": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "steps": torch.randn(8)[::2], "scalar": torch.tensor(3),
        "none": torch.empty(0, 3), "flag": torch.tensor([True]),
        "wide": torch.randn(3, dtype=torch.complex128),
    }  # fmt: skip
    model = Odd(**buffers)
    expected = copied(model)
    addresses = {key: value.data_ptr() for key, value in model.state_dict().items()}
    path = saved(tmp_path, model=model)
    assert torch.load(path / "model.extra.pt", weights_only=True)["wide"].dtype is torch.complex128
    for value in model.state_dict().values():
        value.zero_()
    restored(tmp_path, model=model)
    assert_same(copied(model), expected)
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == addresses


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conj", "neg"])
def test_lazy_views_are_restored(tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Odd(x=view(torch.randn(5, dtype=torch.complex64)))
    expected = model.x.clone()
    saved(tmp_path, model=model)
    restored(tmp_path, model=model)
    assert torch.equal(model.x, expected)


def test_a_sparse_buffer_is_restored(tmp_path: Path) -> None:
    saved(tmp_path, model=Odd(x=torch.eye(3).to_sparse()))
    model = Odd(x=torch.zeros(3, 3).to_sparse())
    restored(tmp_path, model=model)
    assert torch.equal(model.x.to_dense(), torch.eye(3))


def test_a_buffer_named_like_a_value_of_the_metadata(tmp_path: Path) -> None:
    saved(tmp_path, model=Odd(pt=torch.ones(3)))
    restored(tmp_path, model=Odd(pt=torch.zeros(3)))


def test_a_dtype_that_differs_from_the_extra_file(tmp_path: Path) -> None:
    saved(tmp_path, model=Odd(x=torch.full((3,), 1 + 2j, dtype=torch.complex128)))
    with pytest.raises(StateMismatch, match=r"model\.x"):
        restored(tmp_path, model=Odd(x=torch.ones(3)))


def test_a_buffer_that_cannot_be_written_is_a_state_error(tmp_path: Path) -> None:
    model = Odd(x=torch.zeros(1).expand(3))
    saved(tmp_path, model=model)
    with pytest.raises(StateError):
        restored(tmp_path, model=model)


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.loaded: Any = None

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": 7, "scale": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_extra_state(tmp_path: Path) -> None:
    source, other = Extra(), Extra()
    path = saved(tmp_path, model=source)
    assert torch.load(path / "model.extra.pt", weights_only=True)["_extra_state"]["version"] == 7
    restored(tmp_path, model=other)
    assert_same(other.loaded, source.get_extra_state())
    assert torch.equal(other.weight, source.weight)


def test_load_hooks_run(tmp_path: Path) -> None:
    source, other = nn.Linear(2, 2), nn.Linear(2, 2)
    loaded: list[str] = []
    other.register_load_state_dict_pre_hook(lambda module, state, *rest: loaded.extend(state))
    other.register_load_state_dict_post_hook(lambda module, keys: loaded.append("after"))
    saved(tmp_path, model=source)
    restored(tmp_path, model=other)
    assert loaded == ["weight", "bias", "after"]
    assert torch.equal(other.weight, source.weight)


class Renames(nn.Linear):
    """A module that saves its weights under other names, as models with weight conversion do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"old.{key}": value for key, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({key[4:]: value for key, value in state.items()}, strict, assign)


def test_an_overridden_load_state_dict_is_used(tmp_path: Path) -> None:
    source, other = Renames(2, 2), Renames(2, 2)
    saved(tmp_path, model=source)
    restored(tmp_path, model=other)
    assert torch.equal(other.weight, source.weight)


class Scaled(nn.Linear):
    """A module whose state dict is a conversion of its weights."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_state_dict_that_is_a_conversion(tmp_path: Path) -> None:
    source, other = nn.Sequential(Scaled(2, 2)), nn.Sequential(Scaled(2, 2))
    saved(tmp_path, model=source)
    restored(tmp_path, model=other)
    assert torch.equal(other[0].weight, source[0].weight)


class Caches(nn.Linear):
    """A module that computes something from its weights when they are loaded."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.total = self.weight.sum().item()


def test_an_overridden_load_from_state_dict_is_used(tmp_path: Path) -> None:
    saved(tmp_path, model=nn.Sequential(Caches(2, 2)))
    other = nn.Sequential(Caches(2, 2))
    restored(tmp_path, model=other)
    assert other[0].total == other[0].weight.sum().item()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compile_adds_no_prefix_to_the_keys(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = nn.Linear(2, 2)
    path = saved(tmp_path / "compiled", model=torch.compile(model))
    assert set(load_file(path / "model.safetensors")) == {"weight", "bias"}
    other = nn.Linear(2, 2)
    restored(tmp_path / "compiled", model=torch.compile(other))
    assert torch.equal(model.weight, other.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_ddp_adds_no_prefix_to_the_keys(tmp_path: Path) -> None:
    import torch.distributed as dist
    from safetensors.torch import load_file

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = torch.compile(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
        path = saved(tmp_path / "run", model=wrapped)
        assert set(load_file(path / "model.safetensors")) == {"weight", "bias"}
        other = nn.Linear(2, 2)
        restored(tmp_path / "run", model=other)
        assert torch.equal(other.weight, wrapped.module.weight)
    finally:
        dist.destroy_process_group()
