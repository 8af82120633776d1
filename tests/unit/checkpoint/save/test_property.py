"""Random states, saved and loaded: equal bit for bit, in both formats, whatever fails on the way."""

from __future__ import annotations

import contextlib
import copy
import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from reprieve import Checkpointer, StorageError, StorageFull
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.verify import verify
from tests.support.helpers import FailingDisk, assert_same, pool
from tests.support.tensors import DTYPES, random_bits

pytestmark = pytest.mark.soak

MODULE = nn.Module()


@st.composite
def tensors(draw: st.DrawFn, *, expanded: bool = True) -> torch.Tensor:
    """Any dtype, up to three dimensions, and any memory layout."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    kinds = ["plain", "turned", "every other", "in the middle", *(["expanded"] if expanded else [])]
    match draw(st.sampled_from(kinds)):
        case "turned":
            return random_bits(dtype, *shape).permute(tuple(reversed(range(len(shape)))))
        case "every other":
            return random_bits(dtype, *shape, 6)[..., ::2]
        case "in the middle":
            return random_bits(dtype, 3, *shape)[1]
        case "expanded":
            return random_bits(dtype, *shape, 1).expand(*shape, 3)
    return random_bits(dtype, *shape)


@st.composite
def families(draw: st.DrawFn, *, expanded: bool = True) -> list[torch.Tensor]:
    """Tensors of which some are the same object, or share memory."""
    members = draw(st.lists(tensors(expanded=expanded), min_size=1, max_size=4))
    for _ in range(draw(st.integers(0, 3))):
        other = draw(st.sampled_from(members))
        members.append(other if draw(st.booleans()) or other.dim() == 0 else other[draw(st.integers(0, 1)) :])
    return members


PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text(max_size=20)
    | st.binary(min_size=1, max_size=20)
)  # fmt: skip


@st.composite
def trees(draw: st.DrawFn) -> dict[Any, Any]:
    leaves = PLAIN | st.sampled_from(draw(families()))
    inner = st.recursive(
        leaves,
        lambda nodes: (
            st.lists(nodes, max_size=4)
            | st.lists(nodes, max_size=4).map(tuple)
            | st.dictionaries(st.text(max_size=8) | st.integers(), nodes, max_size=4)
        ),
        max_leaves=12,
    )
    return draw(st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=5))


@st.composite
def modules(draw: st.DrawFn) -> nn.Module:
    names = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=8)
    names |= st.sampled_from(["pt", "format"])  # what safetensors' metadata has in it: {"format": "pt"}
    names = names.filter(lambda name: not hasattr(MODULE, name) and name != "0")
    root, part = nn.Module(), nn.Module()
    root.add_module("0", part)
    members = draw(families(expanded=False))  # an expanded buffer cannot be loaded into, by torch neither
    for name in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        into, tensor = draw(st.sampled_from([root, part])), draw(st.sampled_from(members))
        if tensor.dtype.is_floating_point and draw(st.booleans()):
            into.register_parameter(name, nn.Parameter(tensor))
        else:
            into.register_buffer(name, tensor)
    return root


@contextlib.contextmanager
def folder() -> Any:
    root = Path(tempfile.mkdtemp(prefix="property-"))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".checkpoint")]


def blank(module: nn.Module) -> nn.Module:
    """The same shapes, strides and sharing, with nothing in them."""
    module = copy.deepcopy(module)
    for value in module.state_dict().values():
        value.untyped_storage().fill_(0)
    return module


@given(modules(), trees(), trees())
def test_saved_and_loaded_it_is_the_same(module: nn.Module, tree: dict[Any, Any], values: dict[str, Any]) -> None:
    want = copy.deepcopy((module.state_dict(), tree, values))
    with folder() as root:
        with Checkpointer(root, model=module, tree=tree) as checkpointer:
            path = checkpointer.save(1, values=values).path
        live, live_tree = blank(module), {"something": "else"}
        with Checkpointer(root, model=live, tree=live_tree) as checkpointer:
            result = checkpointer.restore()
        assert_same(dict(live.state_dict()), dict(want[0]))
        assert_same(live_tree, want[1])
        assert_same(result.values, want[2])

        with Checkpointer(root, model=module, tree=tree) as checkpointer:
            checkpointer.restore()  # into memory that is laid out as what was saved
        assert_same((dict(module.state_dict()), tree), (dict(want[0]), want[1]))

        assert_same(torch.load(path / "tree.pt", weights_only=True), want[1])
        plain = load_file(path / "model.safetensors")
        for key, value in plain.items():
            assert_same(value, want[0][key])


@given(
    modules(),
    trees(),
    st.integers(0, 24),
    st.sampled_from([errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([64, "5GB"]),
)
def test_whatever_fails_the_one_before_is_there(
    module: nn.Module, tree: dict[Any, Any], at: int, code: int, forever: bool, background: bool, shard_bytes: Any
) -> None:
    want = {2: copy.deepcopy((dict(module.state_dict()), tree)), 1: ({}, {"of": "step 1"})}
    live, live_tree = blank(module), dict[Any, Any]()
    want[1][0].update(copy.deepcopy(dict(live.state_dict())))

    def check(root: Path, step: int) -> None:
        with Checkpointer(root, keep=None, model=live, tree=live_tree) as checkpointer:
            assert leftovers(root) == []
            assert checkpointer.restore().step == step
            assert all(verify(info.path, pool) for info in list_checkpoints(root))
        assert_same((dict(live.state_dict()), live_tree), want[step])

    with folder() as root:
        disk = FailingDisk()
        of_step_1 = blank(module), dict(want[1][1])
        with Checkpointer(root, keep=None, model=of_step_1[0], tree=of_step_1[1], shard_bytes=shard_bytes) as first:
            first.save(1)
        checkpointer = Checkpointer(root, keep=None, model=module, tree=tree, disk=disk, shard_bytes=shard_bytes)
        checkpointer.warm_up(wait=True)
        disk.at, disk.code, disk.forever = disk.calls + at, code, forever
        try:
            checkpointer.save(2, background=background)
            checkpointer.wait()
        except StorageError as error:
            assert disk.failed
            assert isinstance(error, StorageFull) == (code in (errno.ENOSPC, errno.EDQUOT))
            assert str(root) in str(error)
        else:
            # What fails without an error is only the clean-up of what is gone anyway.
            assert (root / "checkpoint-2").exists()
        verify(root / "checkpoint-1", pool)
        with tempfile.TemporaryDirectory(prefix="property-") as copied:
            # As a process would find it that starts after this one was killed here.
            found = 2 if (root / "checkpoint-2").exists() else 1
            check(Path(shutil.copytree(root, Path(copied) / "copy")), found)
        disk.at = -1
        assert checkpointer.save(2).path.exists(), "training goes on, and so does the next save"
        checkpointer.close()
        assert leftovers(root) == []
        check(root, 2)
