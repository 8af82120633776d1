"""Layouts of safetensors files: an 8-byte length, a JSON header, the tensors' bytes.

As in the reference implementation, tensors are ordered by element size, then name, so that each is aligned to its own
type. A tensor with several names (tied weights) is stored once; the header's metadata maps the other names to it, as
`safetensors.torch.save_model` does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import torch

from reprieve.checkpoint.format.layout import FileLayout, LayoutBuilder, alignment_of, bytes_layout
from reprieve.checkpoint.format.shards import is_sharded, whole_bytes
from reprieve.errors import StateError

_FORMAT = "format"
"""A key of the header's metadata: a tensor of this name cannot be tied to another."""

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}

DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in _NAMES.items() if hasattr(torch, name)}
"""The dtypes that the format can hold, by its names for them. Other tensors go into a torch file."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def can_hold(value: object) -> bool:
    """Return whether the value is a plain tensor of a dtype that safetensors has."""
    return (
        isinstance(value, torch.Tensor)
        # Subclasses carry more than their bytes, except sharded tensors.
        and (type(value) in (torch.Tensor, torch.nn.Parameter) or is_sharded(value))
        and value.dtype in _CODES
        and value.layout is torch.strided
        and not value.is_quantized
    )


def layout_safetensors(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    shard_bytes: int,
    ties: Mapping[str, str] | None = None,
    of_rank_0: Collection[str] = (),
) -> list[FileLayout]:
    """Lay out `name.safetensors`, or above `shard_bytes` `name-00001-of-0000n.safetensors` with the stock index file.

    `ties`: names of tensors that are known to be another name's tensor. Other ties are found by their memory.
    `of_rank_0`: tensors that differ between ranks, of which rank 0's are written.
    """
    kept, tied = _fold_ties(tensors, ties or {})
    metadata = {_FORMAT: "pt", **tied}
    shards = _split(kept, shard_bytes)
    if len(shards) == 1:
        return [layout_one(f"{name}.safetensors", shards[0], metadata, of_rank_0)]
    names = [f"{name}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": sum(whole_bytes(tensor) for tensor in kept.values())},
        "weight_map": {key: file for file, shard in zip(names, shards, strict=True) for key in shard},
    }
    layouts = [layout_one(file, shard, metadata, of_rank_0) for file, shard in zip(names, shards, strict=True)]
    return [*layouts, bytes_layout(f"{name}.safetensors.index.json", json.dumps(index, indent=2).encode() + b"\n")]


def layout_one(
    name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None, of_rank_0: Collection[str] = ()
) -> FileLayout:
    """Lay out one file with tensors of exactly these names."""
    # Rank 0's tensors are side by side: the longer the runs, the more evenly ranks can divide them.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0] in of_rank_0, item[0]))
    header: dict[str, object] = {"__metadata__": metadata} if metadata is not None else {}
    position = 0
    for key, tensor in ordered:
        if tensor.is_meta:
            raise StateError(
                f"{name}: {key} is on the meta device and has no data to save: materialize the model "
                "(`to_empty`, then initialize or load it) before the first save"
            )
        header[key] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + whole_bytes(tensor)],
        }
        position += whole_bytes(tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment_of(position))
    builder = LayoutBuilder(name)
    builder.add_bytes(len(text).to_bytes(8, "little") + text)
    for key, tensor in ordered:
        builder.add_tensor(key, tensor, holders=(0,) if key in of_rank_0 else None)
    return builder.build()


def _fold_ties(
    tensors: Mapping[str, torch.Tensor], ties: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors under their first names, and the first name of each other name.

    Views that overlap without being the same tensor stay separate. Loading into a live model needs only their values.
    """
    kept: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for key, tensor in tensors.items():
        if ties.get(key) in kept and key != _FORMAT:
            tied[key] = ties[key]
            continue
        # Memory does not identify a sharded tensor: a rank may hold none of it.
        if tensor.nbytes == 0 or tensor.is_meta or key == _FORMAT or is_sharded(tensor):
            kept[key] = tensor
            continue
        lazy = tensor.is_conj(), tensor.is_neg()  # views whose values differ from their memory
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy)
        if identity in first:
            tied[key] = first[identity]
        else:
            first[identity] = key
            kept[key] = tensor
    return kept, tied


def _split(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for key, tensor in tensors.items():
        size = whole_bytes(tensor)
        if used and used + size > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][key] = tensor
        used += size
    return shards
