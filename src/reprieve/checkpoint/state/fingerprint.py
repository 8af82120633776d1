"""Fingerprints of a training state, one for each part: equal ones hold the same bits.

`reprieve drill` compares those at a stop with those after the restart. Each rank has its own, of what it holds itself:
there are no collectives here.
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
    """The named parts of a state, and the random numbers."""
    captured = state.captured(rng=rng)
    parts: dict[str, Any] = {}
    for name, tensors in captured.modules.items():
        # DDP overwrites the buffers of other ranks with rank 0's at the next step: only those of rank 0 are saved.
        skipped = captured.buffers[name] if rank != 0 and name not in state.own_buffers else set()
        entries = {**tensors, **captured.extras[name]}
        parts[name] = {key: value for key, value in entries.items() if key not in skipped}
    return parts | {RANDOM_NUMBERS if name == RNG else name: tree for name, tree in captured.trees.items()}


def fingerprints(parts: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprint of each part."""
    found = {}
    for name, part in parts.items():
        digest = xxhash.xxh3_128()
        _add(digest, part)
        found[name] = str(digest.hexdigest())
    return found


def _add(digest: Any, value: Any) -> None:
    """Every value with its kind and length before it: different values must not look the same."""
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)} ".encode())
        for key, item in sorted(value.items(), key=lambda item: repr(item[0])):
            digest.update(repr(key).encode())
            _add(digest, item)
    elif isinstance(value, list | tuple):  # which of the two may change on the way through a file
        digest.update(f"sequence {len(value)} ".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, Set):
        _add(digest, sorted(value, key=repr))
    elif isinstance(value, bytes):
        digest.update(f"bytes {len(value)} ".encode() + value)
    elif hasattr(value, "tobytes"):  # numpy's
        digest.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
    else:
        # Objects without a representation of their own show their address, which is another one in each process.
        digest.update(f"{type(value).__name__} {_ADDRESS.sub('', repr(value))} ".encode())


def _add_tensor(digest: Any, value: torch.Tensor) -> None:
    value = local_part(value) if is_sharded(value) else value
    digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
    plain = value.detach().cpu().contiguous()
    if plain.nbytes:
        digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
