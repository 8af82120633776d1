"""One number for a whole training state, as this process has it: two that are equal hold the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from reprieve.checkpoint.shards import is_sharded, local_part
from reprieve.checkpoint.state import State


def fingerprint(state: State) -> str:
    digest = xxhash.xxh3_128()
    captured = state.captured()
    _add(digest, {"modules": captured.modules, "extras": captured.extras, "trees": captured.trees})
    return str(digest.hexdigest())


def _add(digest: Any, value: Any) -> None:
    """Every part with its type and length before it: what is different must not look the same."""
    digest.update(f"{type(value).__name__} {len(value) if isinstance(value, Mapping | list | tuple) else 0} ".encode())
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif hasattr(value, "tobytes"):  # numpy's
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for key, one in sorted(value.items(), key=lambda item: repr(item[0])):
            digest.update(repr(key).encode())
            _add(digest, one)
    elif isinstance(value, list | tuple):
        for one in value:
            _add(digest, one)
    elif isinstance(value, bytes):
        digest.update(value)
    else:
        digest.update(repr(value).encode())


def _add_tensor(digest: Any, value: torch.Tensor) -> None:
    value = local_part(value) if is_sharded(value) else value
    digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
    plain = value.detach().cpu().contiguous()
    if plain.nbytes:
        digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
