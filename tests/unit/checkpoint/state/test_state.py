"""Saving and restoring a training state: exact where it fits, otherwise an error that names what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from reprieve import Checkpointer, ConfigError, NoValidCheckpoint, StateMismatch, UnsafeState
from reprieve.checkpoint.state.state import State
from tests.support.helpers import assert_same, copied, restored, saved, small_model, train

# Optimizers, schedulers, scalers


class EightBit(torch.optim.Optimizer):
    """An optimizer like those of bitsandbytes: uint8 state, which stock load_state_dict would turn into floats."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            state["quantised"] = torch.randint(0, 256, param.shape, dtype=torch.uint8)
            state["scale"] = torch.rand(1)
            param.data -= 0.1 * param.grad

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__setstate__({"state": {}, "param_groups": self.param_groups})
        for number, param in enumerate(self.param_groups[0]["params"]):
            self.state[param] = state_dict["state"][number]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adamw-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw-tensor-lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "8-bit": EightBit,
}


@pytest.mark.parametrize("populated", [False, True], ids=["fresh", "populated"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_continues_exactly(tmp_path: Path, kind: str, populated: bool) -> None:
    model = small_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer)
    path = saved(tmp_path, model=model, optimizer=optimizer)
    assert_same(torch.load(path / "optimizer.pt", weights_only=True), optimizer.state_dict())
    expected = train(model, optimizer, 3)

    torch.manual_seed(99)
    other = small_model()
    other_optimizer = OPTIMIZERS[kind](other.parameters())
    if populated:
        train(other, other_optimizer)
    result = restored(tmp_path, model=other, optimizer=other_optimizer)
    assert result.step == 1
    assert train(other, other_optimizer, 3) == expected
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


def test_schedulers_and_a_scaler(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        schedules = torch.optim.lr_scheduler
        return {
            "optimizer": optimizer,
            "lambda_lr": schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            "multi": schedules.MultiStepLR(optimizer, [2, 4]),
            "chain": schedules.SequentialLR(
                optimizer, [schedules.ConstantLR(optimizer), schedules.CosineAnnealingLR(optimizer, 5)], [2]
            ),
            "cycle": schedules.OneCycleLR(optimizer, 1.0, 10),
            "plateau": schedules.ReduceLROnPlateau(optimizer),
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
        }

    source, other = make(), make()
    source["optimizer"].step()
    for name in ("lambda_lr", "multi", "chain", "cycle"):
        source[name].step()
    source["plateau"].step(0.5)
    source["scaler"].scale(torch.ones(()))
    source["scaler"].update(2.0)
    path = saved(tmp_path, **source)
    assert torch.load(path / "lambda_lr.pt", weights_only=True)["lr_lambdas"] == [None], "functions are not saved"
    restored(tmp_path, **other)
    for name, thing in source.items():
        assert other[name].state_dict() == thing.state_dict(), name
    assert other["scaler"].get_scale() == 2.0


# Strict


def test_missing_and_unexpected_keys_are_named(tmp_path: Path) -> None:
    saved(tmp_path, model=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    other = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    before = copied(other)
    with pytest.raises(StateMismatch) as caught:
        restored(tmp_path, model=other)
    text = str(caught.value)
    assert "missing in the checkpoint: c.bias, c.weight" in text
    assert "only in the checkpoint: b.bias, b.weight" in text
    assert_same(copied(other), before)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(3, 2), r"model\.weight was saved as torch\.float32 \(2, 2\), this run has torch\.float32 \(2, 3\)"),
        (nn.Linear(2, 2, dtype=torch.bfloat16), r"torch\.bfloat16 \(2, 2\)|torch\.bfloat16 \(2,\)"),
    ],
    ids=["shape", "dtype"],
)
def test_a_different_model_is_refused(tmp_path: Path, other: nn.Module, words: str) -> None:
    extra = nn.Linear(2, 2)
    saved(tmp_path, extra=extra, model=nn.Linear(2, 2))
    live = nn.Linear(2, 2)
    before = copied(other), copied(live)
    with pytest.raises(StateMismatch, match=words):
        restored(tmp_path, extra=live, model=other)
    assert_same((copied(other), copied(live)), before)


def test_different_object_names_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, model=nn.Linear(2, 2), ema={"x": 1})
    with pytest.raises(StateMismatch, match="missing in the checkpoint: extra; only in the checkpoint: ema"):
        restored(tmp_path, model=nn.Linear(2, 2), extra={})


def test_not_strict_loads_what_fits(tmp_path: Path) -> None:
    source = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    saved(tmp_path, model=source, note={"x": 1})
    other = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    before = other["c"].weight.clone()
    fresh: dict[str, Any] = {"y": 2}
    with Checkpointer(tmp_path, model=other, new=fresh, strict=False) as checkpointer:
        checkpointer.restore()
    assert torch.equal(other["a"].weight, source["a"].weight)
    assert torch.equal(other["c"].weight, before)
    assert fresh == {"y": 2}


def test_not_strict_leaves_a_new_module_unchanged(tmp_path: Path) -> None:
    saved(tmp_path, model=nn.Linear(2, 2))
    with Checkpointer(tmp_path, model=nn.Linear(2, 2), ema=nn.Linear(2, 2), strict=False) as checkpointer:
        assert checkpointer.restore() is not None


class Refuses:
    """An object that does not accept its saved state."""

    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("another version of me")


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("saved_thing", "live_thing"),
    [
        (lambda: momentum(nn.Linear(2, 2)), lambda: momentum(nn.Linear(2, 2, bias=False))),
        (lambda: {"a": 1}, lambda: [1]),
        (lambda: torch.ones(2), lambda: torch.ones(3)),
        (torch.Generator, lambda: {}),
    ],
    ids=["optimizer", "dict-list", "tensor", "generator"],
)
def test_a_mismatch_of_any_object_leaves_the_model_unchanged(
    tmp_path: Path, saved_thing: Callable[[], object], live_thing: Callable[[], object]
) -> None:
    saved(tmp_path, model=nn.Linear(2, 2), thing=saved_thing())
    live = nn.Linear(2, 2)
    before = copied(live)
    with pytest.raises(StateMismatch):
        restored(
            tmp_path, model=live, **({} if isinstance(saved_thing(), torch.Generator) else {"thing": live_thing()})
        )
    assert_same(copied(live), before)


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    saved(tmp_path, thing=Refuses())
    with pytest.raises(StateMismatch, match="thing does not accept what was saved: another version of me"):
        restored(tmp_path, thing=Refuses())


# Plain values


def test_plain_values_are_restored_in_place(tmp_path: Path) -> None:
    counts: dict[str, Any] = {"n": 1, "t": torch.ones(2), "deep": [{"x": torch.zeros(3)}]}
    log: list[Any] = ["a", (1, 2.5)]
    tensor = torch.arange(4.0)
    saved(tmp_path, counts=counts, log=log, tensor=tensor)
    expected = {"n": 1, "t": torch.ones(2), "deep": [{"x": torch.zeros(3)}]}
    counts["n"], counts["more"] = 2, 3
    counts["t"].zero_()
    counts["deep"][0]["x"].fill_(7)
    log.append("b")
    tensor.zero_()
    restored(tmp_path, counts=counts, log=log, tensor=tensor)
    assert_same(counts, expected)
    assert log == ["a", (1, 2.5)]
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_sparse_tensor_does_not_affect_the_next_torch_load(tmp_path: Path) -> None:
    """torch keeps a list of sparse tensors that its next load validates."""
    saved(tmp_path, state={"s": torch.eye(3).to_sparse()})
    assert torch._utils._sparse_tensors_to_validate == []
    restored(tmp_path, state={"s": torch.zeros(3, 3).to_sparse()})
    assert torch._utils._sparse_tensors_to_validate == []


def test_a_sparse_tensor_with_impossible_indices_is_refused(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,), check_invariants=False)
    sparse._indices()[0, 1] = 1_000_000
    saved(tmp_path, state={"s": sparse})
    with pytest.raises(NoValidCheckpoint, match="impossible sparse tensor"):
        restored(tmp_path, state={"s": torch.zeros(2).to_sparse()})


def test_a_sparse_tensor_in_a_plain_dict(tmp_path: Path) -> None:
    state = {"s": torch.eye(3).to_sparse()}
    saved(tmp_path, state=state)
    restored(tmp_path, state=state)
    assert torch.equal(state["s"].to_dense(), torch.eye(3))


def test_values_are_restored_with_step_epoch_and_metrics(tmp_path: Path) -> None:
    values = {"batch": 17, "seen": {"a": torch.arange(3)}, "note": "grüße"}
    with Checkpointer(tmp_path, model=nn.Linear(2, 2)) as checkpointer:
        checkpointer.save(3, epoch=1.5, metrics={"loss": 0.25, "odd": float("nan")}, values=values)
    result = restored(tmp_path, model=nn.Linear(2, 2))
    assert (result.step, result.epoch, result.metrics) == (3, 1.5, {"loss": 0.25})
    assert_same(result.values, values)


@pytest.mark.parametrize("name", ["rng_state", "values", "a/b", "..", "", ".hidden", "a b"])
def test_names_that_cannot_be_file_names(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a part of the state"):
        State({name: {}})


def test_what_cannot_be_restored_in_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="count is a int"):
        State({"count": 3})


@pytest.mark.parametrize(
    "details", [{"step": np.int64(3)}, {"step": 3, "epoch": np.float32(0.5)}], ids=["step", "epoch"]
)
def test_numpy_numbers(tmp_path: Path, details: dict[str, Any]) -> None:
    with Checkpointer(tmp_path, model=nn.Linear(2, 2)) as checkpointer:
        assert checkpointer.save(**details).path.name == "checkpoint-3"


# State that could be saved but not loaded


class Custom:
    pass


class HasCustom:
    def __init__(self) -> None:
        self.later = False

    def state_dict(self) -> dict[str, Any]:
        return {"x": Custom()} if self.later else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ExtraCustom(nn.Module):
    def get_extra_state(self) -> Any:
        return Custom()

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("state", "file"),
    [({"things": {"x": Custom()}}, r"things\.pt"), ({"model": ExtraCustom()}, r"model\.extra\.pt")],
    ids=["plain", "extra-state"],
)
def test_unsafe_state_is_found_at_start_up(tmp_path: Path, state: dict[str, Any], file: str) -> None:
    with pytest.raises(UnsafeState, match=rf"(?s){file}.*Custom"):
        Checkpointer(tmp_path / "run", **state)
    assert not (tmp_path / "run").exists()


def test_unsafe_state_that_appears_later_is_found_at_the_first_save(tmp_path: Path) -> None:
    thing = HasCustom()
    with Checkpointer(tmp_path, thing=thing) as checkpointer:
        thing.later = True
        with pytest.raises(UnsafeState, match=r"(?s)thing\.pt.*Custom"):
            checkpointer.save(1)
        assert checkpointer.checkpoints() == []


def test_unsafe_values_are_found_at_the_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=nn.Linear(2, 2)) as checkpointer:
        checkpointer.save(1)
        with pytest.raises(UnsafeState, match=r"(?s)values\.pt.*Custom"):
            checkpointer.save(2, values={"x": Custom()})


def test_types_that_the_user_allowed_are_allowed(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Custom]):
        saved(tmp_path, things={"x": Custom()})
        live: dict[str, Any] = {}
        restored(tmp_path, things=live)
    assert isinstance(live["x"], Custom)
