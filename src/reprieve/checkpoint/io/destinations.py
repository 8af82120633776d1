"""Where restored bytes go: memory of CPU tensors and of GPUs. The counterpart of the sources in `format/layout.py`."""

from __future__ import annotations

import ctypes

import torch

from reprieve.checkpoint.buffers.block_pool import Block
from reprieve.checkpoint.format.layout import flat_bytes
from reprieve.checkpoint.io.reader import Destination


class HostDestination:
    """Memory of a CPU tensor or storage; `owner` keeps it alive."""

    __slots__ = ("address", "owner")
    asynchronous = False

    def __init__(self, address: int, owner: object) -> None:
        self.address = address
        self.owner = owner

    def put(self, block: Block, at: int, start: int, stop: int) -> None:
        ctypes.memmove(self.address + start, block.address + at, stop - start)

    def finish(self) -> None:
        pass


class DeviceDestination:
    """Memory of a GPU, as a flat uint8 tensor."""

    __slots__ = ("flat",)
    asynchronous = True

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def put(self, block: Block, at: int, start: int, stop: int) -> None:
        source = torch.frombuffer(block.view, dtype=torch.uint8, count=stop - start, offset=at)
        self.flat[start:stop].copy_(source, non_blocking=block.pinned)

    def finish(self) -> None:
        torch.cuda.current_stream(self.flat.device).synchronize()


def destination_of(storage: torch.UntypedStorage) -> Destination:
    """Return a destination for all bytes of a storage."""
    if storage.device.type == "cpu":
        return HostDestination(storage.data_ptr(), storage)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return DeviceDestination(flat.set_(storage))


def tensor_destination(tensor: torch.Tensor) -> Destination:
    """Return a destination for the bytes of a contiguous tensor."""
    if tensor.device.type == "cpu":
        return HostDestination(tensor.data_ptr(), tensor)
    return DeviceDestination(flat_bytes(tensor))
