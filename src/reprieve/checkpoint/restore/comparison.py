"""Compares the saved state with the live one while a restore is prepared, before a byte of live state changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from reprieve.checkpoint.restore.safetensors_header import TensorLocation
from reprieve.errors import StateMismatch

log = logging.getLogger("reprieve")


class Comparison:
    """The rules of one restore for what may differ. `strict` turns missing and unexpected keys into errors."""

    def __init__(self, folder: Path, *, strict: bool) -> None:
        self._folder = folder
        self.strict = strict

    def check_keys(self, what: str, saved: set[str], live: set[str]) -> None:
        """Raise StateMismatch, or log a warning, if the two sets of keys differ."""
        if saved == live:
            return
        lists = [
            f"{title}: {', '.join(sorted(keys)[:8])}{', …' if len(keys) > 8 else ''}"
            for title, keys in (("missing in the checkpoint", live - saved), ("only in the checkpoint", saved - live))
            if keys
        ]
        message = f"{self._folder} does not fit {what}. {'; '.join(lists)}"
        if self.strict:
            raise StateMismatch(f"{message}. Is it the checkpoint of another model? (strict=False loads what fits)")
        log.warning("%s", message)

    def check_tensor(self, name: str, saved: TensorLocation | torch.Tensor, live: Any) -> None:
        """Raise StateMismatch if the live value is not a tensor of the saved dtype and shape."""
        if not isinstance(live, torch.Tensor) or (live.dtype, live.shape) != (saved.dtype, saved.shape):
            raise StateMismatch(
                f"{self._folder}: {name} was saved as {saved.dtype} {tuple(saved.shape)}, "
                f"this run has {_describe(live)}: is it another model?"
            )

    def check_tree(self, name: str, saved: Any, live: Any) -> None:
        """Raise StateMismatch for what the object itself would refuse once other objects have been changed."""
        if isinstance(live, torch.Tensor | list) or isinstance(saved, torch.Tensor | list):
            if type(saved) is not type(live) or (
                isinstance(live, torch.Tensor) and (saved.dtype, saved.shape) != (live.dtype, live.shape)
            ):
                raise StateMismatch(f"{name} was saved as {_describe(saved)}, this run has {_describe(live)}")
        elif isinstance(live, dict) and isinstance(saved, dict) and "param_groups" in live and "param_groups" in saved:
            sizes = [[len(group["params"]) for group in tree["param_groups"]] for tree in (saved, live)]
            if sizes[0] != sizes[1]:
                raise StateMismatch(
                    f"{name} was saved with {sizes[0]} parameters in its groups, this run has {sizes[1]}: "
                    "is it the optimizer of another model?"
                )

    def report_missing(self, name: str, file: str) -> None:
        """Raise StateMismatch, or log a warning: the checkpoint has no file for this part of the state."""
        if self.strict:
            raise StateMismatch(
                f"{self._folder} has no {file}: {name} was not saved with it. Leave {name} out, or restore with "
                "strict=False to keep it as it is"
            )
        log.warning("%s has no %s: %s stays as it is", self._folder, file, name)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"a {type(value).__name__}"
