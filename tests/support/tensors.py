"""Tensors of every dtype and layout, and modules with tied weights."""

from __future__ import annotations

import torch
from torch import nn

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # torch 2.7
]  # fmt: skip
BASE = torch.arange(48.0).reshape(4, 3, 2, 2)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor whose every bit is random, so that it contains NaNs with payloads too."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def tied_linears(*, tie: bool = True, hook: bool = False, width: int = 600) -> nn.Sequential:
    """Return two layers that share a weight of 1.4 MB: more than the reader hashes at a time."""
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    if tie:
        model[1].weight = model[0].weight
    if hook:
        model.register_load_state_dict_post_hook(lambda module, keys: None)
    return model
