"""A saved tree is loaded over the memory of the live one, if they are the same; else nothing of that is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reprieve.checkpoint.blocks import BlockPool
from reprieve.checkpoint.matching import load_over
from reprieve.checkpoint.reader import Reader
from reprieve.checkpoint.torch_file import tensors_in
from reprieve.checkpoint.torch_load import TorchFile


def _tree() -> dict[str, Any]:
    return {
        "state": {number: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 5)} for number in range(3)},
        "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}],
    }


def _loaded(folder: Path, saved: Any, live: Any) -> Any:
    torch.save(saved, folder / "tree.pt")
    with Reader(folder, BlockPool()) as reader:
        return load_over(TorchFile(reader.open("tree.pt", None)), live)


def test_the_same_tree(tmp_path: Path) -> None:
    saved, live = _tree(), _tree()
    saved["param_groups"][0]["lr"] = 0.01
    found = _loaded(tmp_path, saved, live)
    assert found is not None
    tree, storages = found
    assert tree["param_groups"] == saved["param_groups"]
    for path, tensor in tensors_in(tree):
        assert tensor.data_ptr() == dict(tensors_in(live))[path].data_ptr()
    assert len(storages) == 6


def _shape(tree: dict[str, Any]) -> None:
    tree["state"][1]["exp_avg"] = torch.ones(5, 4)


def _kind(tree: dict[str, Any]) -> None:
    tree["state"][1]["exp_avg"] = torch.ones(4, 5, dtype=torch.int32)


def _order(tree: dict[str, Any]) -> None:
    tree["state"][1] = dict(reversed(tree["state"][1].items()))


def _fewer(tree: dict[str, Any]) -> None:
    del tree["state"][2]


def _more(tree: dict[str, Any]) -> None:
    tree["state"][3] = {"step": torch.tensor(1.0)}


def _tied(tree: dict[str, Any]) -> None:
    tree["state"][1]["exp_avg"] = tree["state"][0]["exp_avg"]


def _view(tree: dict[str, Any]) -> None:
    tree["state"][1]["exp_avg"] = torch.ones(5, 4).t()


def _elsewhere(tree: dict[str, Any]) -> None:
    tree["state"]["x"] = tree["state"].pop(2)


@pytest.mark.parametrize("change", [_shape, _kind, _order, _fewer, _more, _tied, _view, _elsewhere])
@pytest.mark.parametrize("changed", ["saved", "live"])
def test_another_tree(tmp_path: Path, change: Callable[[dict[str, Any]], None], changed: str) -> None:
    trees = {"saved": _tree(), "live": _tree()}
    change(trees[changed])
    before = [tensor.clone() for _, tensor in tensors_in(trees["live"])]
    assert _loaded(tmp_path, trees["saved"], trees["live"]) is None
    for (_, tensor), then in zip(tensors_in(trees["live"]), before, strict=True):
        assert torch.equal(tensor, then)


def test_a_live_tree_without_tensors(tmp_path: Path) -> None:
    assert _loaded(tmp_path, _tree(), {"state": {}, "param_groups": []}) is None
