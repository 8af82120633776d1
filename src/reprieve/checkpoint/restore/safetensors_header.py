"""Reads the header of a safetensors file through the verifying reader: the location of each tensor."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from reprieve.checkpoint.format.safetensors_layout import DTYPES
from reprieve.checkpoint.io.reader import CheckpointFile

_HEADER_LIMIT = 100_000_000  # safetensors' own


@dataclass(slots=True)
class TensorLocation:
    """The place of a tensor's bytes in a file."""

    file: CheckpointFile
    start: int
    dtype: torch.dtype
    shape: torch.Size


def read_header(file: CheckpointFile) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    """The location of each tensor, and the metadata of the file."""
    length = int.from_bytes(file.read(0, min(8, file.size)), "little")
    if not 2 <= length <= min(_HEADER_LIMIT, file.size - 8):
        raise file.bad("has no safetensors header")
    base = 8 + length
    locations: dict[str, TensorLocation] = {}
    try:
        header = json.loads(file.read(8, base))
        metadata = header.pop("__metadata__", {})
        for key, entry in header.items():
            start, stop = entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            if not 0 <= start <= stop <= file.size - base or stop - start != shape.numel() * dtype.itemsize:
                raise file.bad(f"has impossible offsets for {key}")
            locations[key] = TensorLocation(file, base + start, dtype, shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise file.bad(f"has a header that is not readable: {error!r}") from error
    return locations, metadata
