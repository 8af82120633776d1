"""Fingerprints of the parts of a training state: parts with equal fingerprints have the same bits.

`reprieve drill` compares the fingerprints at a stop with those after the restart. Each rank takes them of what it holds
itself; there are no collectives here.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Set
from typing import Any

import torch
import xxhash

from reprieve.checkpoint.format.file_names import RNG
from reprieve.checkpoint.format.shards import is_sharded, local_part
from reprieve.checkpoint.state.state import State

RANDOM_NUMBERS = "random numbers"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def parts_of(state: State, rank: int, *, rng: bool = True) -> dict[str, Any]:
    """Return the parts of a state by name, the random number generators among them."""
    captured = state.captured(rng=rng)
    parts: dict[str, Any] = {}
    for name, tensors in captured.modules.items():
        # DDP overwrites the other ranks' buffers with rank 0's at the next step, so only those of rank 0 are saved.
        skipped = captured.buffers[name] if rank != 0 and name not in state.own_buffers else set()
        entries = {**tensors, **captured.extras[name]}
        parts[name] = {key: value for key, value in entries.items() if key not in skipped}
    return parts | {RANDOM_NUMBERS if name == RNG else name: tree for name, tree in captured.trees.items()}


def fingerprints(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprint of each part."""
    result = {}
    for name, part in parts.items():
        digest = xxhash.xxh3_128()
        _add(digest, part)
        result[name] = str(digest.hexdigest())
    return result


def _add(digest: Any, value: Any) -> None:
    """Hash a value after its type and length, so that different values do not hash alike."""
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)} ".encode())
        for key, item in sorted(value.items(), key=lambda item: repr(item[0])):
            digest.update(repr(key).encode())
            _add(digest, item)
    elif isinstance(value, list | tuple):  # a file may turn one into the other
        digest.update(f"sequence {len(value)} ".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, Set):
        _add(digest, sorted(value, key=repr))
    elif isinstance(value, bytes):
        digest.update(f"bytes {len(value)} ".encode() + value)
    elif hasattr(value, "tobytes"):  # numpy arrays and scalars
        digest.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
    else:
        # The default repr contains the object's address, which differs between processes.
        digest.update(f"{type(value).__name__} {_ADDRESS.sub('', repr(value))} ".encode())


def _add_tensor(digest: Any, value: torch.Tensor) -> None:
    value = local_part(value) if is_sharded(value) else value
    digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
    plain = value.detach().cpu().contiguous()
    if plain.nbytes:
        digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
