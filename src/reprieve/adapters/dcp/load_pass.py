"""One pass over a checkpoint's files: boxes of saved pieces on one side, live tensors on the other.

Items are added one by one, each with where its bytes go; `run` reads the blocks that they lie in, each once, and then
tells the planner. What cannot go into live memory directly is held in memory in between: the caller looks at
`held` and starts another pass before that becomes too much.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from reprieve.adapters.dcp.item_archive import PlainTensor
from reprieve.adapters.dcp.regions import Box, in_between, targets_of
from reprieve.adapters.dcp.saved_checkpoint import SavedCheckpoint
from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.foreign.file_reader import FileReader
from reprieve.checkpoint.io.destinations import HostDestination
from reprieve.checkpoint.io.reader import Target
from reprieve.errors import InvalidCheckpoint, StateMismatch


class LoadPass:
    """Reads that are done in one pass."""

    def __init__(self, saved: SavedCheckpoint, planner: LoadPlanner) -> None:
        self.held = 0
        """Bytes of memory in between."""
        self._saved = saved
        self._planner = planner
        self._pool = BlockPool()
        self._reader = saved.open(self._pool)
        self._after: list[Callable[[], None]] = []
        self._to_check: dict[Path, FileReader] = {}

    def __enter__(self) -> LoadPass:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.__exit__(*exc)
        for file in self._to_check.values():
            file.__exit__(None, None, None)

    def add(self, item: ReadItem) -> None:
        self._saved.check(item.storage_index, self._open_to_check)
        if item.type == LoadItemType.BYTE_IO:
            self._add_bytes(item)
        else:
            self._add_tensor(item)

    def run(self) -> None:
        self._reader.run()
        for then in self._after:
            then()

    def _open_to_check(self, path: Path) -> FileReader:
        if path not in self._to_check:
            self._to_check[path] = FileReader(path)
        return self._to_check[path]

    def _read(self, item: ReadItem, offset: int, targets: Iterable[Target]) -> None:
        """Bytes from `offset` of the item on."""
        info = self._saved.info(item.storage_index)
        file = self._saved.file(self._reader, info.relative_path)
        for target in targets:
            start = info.offset + offset + target.offset
            if start + target.length > min(file.size, info.offset + info.length):
                raise file.bad(f"is cut short: {item.storage_index.fqn!r} goes on to byte {start + target.length:,}")
            file.targets.append(Target(start, target.length, target.sink))

    def _add_bytes(self, item: ReadItem) -> None:
        length = self._saved.info(item.storage_index).length
        buffer = bytearray(length)
        self.held += length
        if buffer:
            memory = (ctypes.c_char * length).from_buffer(buffer)
            self._read(item, 0, [Target(0, length, HostDestination(ctypes.addressof(memory), memory))])
        self._after.append(partial(self._hand_over, item, buffer))

    def _hand_over(self, item: ReadItem, buffer: bytearray) -> None:
        if self._saved.weights_only and _would_run_anything(self._planner):
            _check_safe(item.storage_index.fqn, bytes(buffer), self._saved.path)
        self._planner.load_bytes(item, io.BytesIO(buffer))

    def _add_tensor(self, item: ReadItem) -> None:
        into = self._planner.resolve_tensor(item).detach()
        lengths = tuple(item.lengths)
        if tuple(into.shape) != lengths:
            raise StateMismatch(f"{item.dest_index.fqn}: {lengths} wanted, and a tensor of {tuple(into.shape)} given")
        self._pool.pinned |= into.is_cuda
        if _makes_tensors(self._planner):
            self.held += into.nbytes
        found = self._saved.tensor(self._reader, item.storage_index)
        if isinstance(found, PlainTensor):
            self._read_plain(item, found, into)
        else:
            tensor, targets = found
            self.held += sum(target.length for target in targets)
            self._read(item, 0, targets)
            self._copy_later(item, tensor, into)
        self._after.append(partial(self._planner.commit_tensor, item, into))

    def _read_plain(self, item: ReadItem, found: PlainTensor, into: torch.Tensor) -> None:
        box = Box(found.shape, found.dtype, tuple(item.storage_offsets), tuple(item.lengths))
        if not box.fits:
            raise InvalidCheckpoint(f"{item.storage_index.fqn!r} is smaller than .metadata says", path=self._saved.path)
        targets = targets_of(box, into)
        if targets is None:
            between = in_between(box)
            targets = targets_of(box, between)
            if targets is None:  # very many small runs: the whole piece, and cut afterwards
                box = box.whole
                between = in_between(box)
                targets = targets_of(box, between) or []
            self.held += between.nbytes
            self._copy_later(item, between, into)
        self._read(item, found.start, targets)

    def _copy_later(self, item: ReadItem, between: torch.Tensor, into: torch.Tensor) -> None:
        def copy() -> None:
            box = between
            if tuple(between.shape) != tuple(item.lengths):
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    box = box.narrow(dim, offset, length)
            into.copy_(box)

        self._after.append(copy)


def _makes_tensors(planner: LoadPlanner) -> bool:
    """Does it take what was loaded on to somewhere else? Then what it gives us to fill is memory in between."""
    return getattr(type(planner), "commit_tensor", None) is not DefaultLoadPlanner.commit_tensor


def _would_run_anything(planner: LoadPlanner) -> bool:
    """DCP's own planner calls torch.load(weights_only=False). Another one reads what its own saver wrote."""
    return getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes


_known_safe: set[bytes] = set()
"""Most of the items that are not tensors are the same few numbers over and over."""


def _check_safe(name: str, data: bytes, path: Path) -> None:
    if data in _known_safe:
        return
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile or damaged pickle can make the machine fail in any way
        raise InvalidCheckpoint(
            f"{name!r} is refused: {error}. If you trust it, use StorageReader(…, weights_only=False)", path=path
        ) from error
    if len(data) < 4096 and len(_known_safe) < 1000:
        _known_safe.add(data)
