"""One pass over a checkpoint's files: reads boxes of saved chunks into live tensors.

`add` takes the items of the load plan one by one; `run` reads the blocks that contain them, each once, and then hands
the results to the planner. What cannot go into live memory directly goes through buffers: `StorageReader` watches
`buffered_bytes` and starts another pass before that grows too large.
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
from reprieve.adapters.dcp.regions import Box, bounce_buffer, make_targets
from reprieve.adapters.dcp.saved_checkpoint import SavedCheckpoint
from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.foreign.file_reader import FileReader
from reprieve.checkpoint.io.destinations import HostDestination
from reprieve.checkpoint.io.reader import Target
from reprieve.errors import InvalidCheckpoint, StateMismatch


class LoadPass:
    """The items that are read in one pass."""

    def __init__(self, checkpoint: SavedCheckpoint, planner: LoadPlanner) -> None:
        self.buffered_bytes = 0
        """Bytes of buffers that this pass holds."""
        self._checkpoint = checkpoint
        self._planner = planner
        self._pool = BlockPool()
        self._reader = checkpoint.open(self._pool)
        self._after_read: list[Callable[[], None]] = []
        self._checked_files: dict[Path, FileReader] = {}

    def __enter__(self) -> LoadPass:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.__exit__(*exc)
        for file in self._checked_files.values():
            file.__exit__(None, None, None)

    def add(self, item: ReadItem) -> None:
        self._checkpoint.check(item.storage_index, self._open_for_check)
        if item.type == LoadItemType.BYTE_IO:
            self._add_bytes(item)
        else:
            self._add_tensor(item)

    def run(self) -> None:
        self._reader.run()
        for action in self._after_read:
            action()

    def _open_for_check(self, path: Path) -> FileReader:
        if path not in self._checked_files:
            self._checked_files[path] = FileReader(path)
        return self._checked_files[path]

    def _read(self, item: ReadItem, offset: int, targets: Iterable[Target]) -> None:
        """Read these targets, which count from `offset` of the item."""
        info = self._checkpoint.info(item.storage_index)
        file = self._checkpoint.file(self._reader, info.relative_path)
        for target in targets:
            start = info.offset + offset + target.offset
            if start + target.length > min(file.size, info.offset + info.length):
                raise file.bad(f"is cut short: {item.storage_index.fqn!r} extends to byte {start + target.length:,}")
            file.targets.append(Target(start, target.length, target.destination))

    def _add_bytes(self, item: ReadItem) -> None:
        length = self._checkpoint.info(item.storage_index).length
        buffer = bytearray(length)
        self.buffered_bytes += length
        if buffer:
            memory = (ctypes.c_char * length).from_buffer(buffer)
            self._read(item, 0, [Target(0, length, HostDestination(ctypes.addressof(memory), memory))])
        self._after_read.append(partial(self._hand_over, item, buffer))

    def _hand_over(self, item: ReadItem, buffer: bytearray) -> None:
        if self._checkpoint.weights_only and _unpickles_unchecked(self._planner):
            _check_item(item.storage_index.fqn, bytes(buffer), self._checkpoint.path)
        self._planner.load_bytes(item, io.BytesIO(buffer))

    def _add_tensor(self, item: ReadItem) -> None:
        into = self._planner.resolve_tensor(item).detach()
        lengths = tuple(item.lengths)
        if tuple(into.shape) != lengths:
            raise StateMismatch(f"{item.dest_index.fqn}: {lengths} planned, but the tensor has {tuple(into.shape)}")
        self._pool.pinned |= into.is_cuda
        if _copies_on(self._planner):
            self.buffered_bytes += into.nbytes
        found = self._checkpoint.tensor(self._reader, item.storage_index)
        if isinstance(found, PlainTensor):
            self._read_plain(item, found, into)
        else:
            tensor, targets = found
            self.buffered_bytes += sum(target.length for target in targets)
            self._read(item, 0, targets)
            self._copy_later(item, tensor, into)
        self._after_read.append(partial(self._planner.commit_tensor, item, into))

    def _read_plain(self, item: ReadItem, found: PlainTensor, into: torch.Tensor) -> None:
        box = Box(found.shape, found.dtype, tuple(item.storage_offsets), tuple(item.lengths))
        if not box.fits:
            raise InvalidCheckpoint(
                f"{item.storage_index.fqn!r} is smaller than .metadata says", path=self._checkpoint.path
            )
        targets = make_targets(box, into)
        if targets is None:
            bounce = bounce_buffer(box)
            targets = make_targets(box, bounce)
            if targets is None:  # very many small runs: read the whole chunk and cut the box out afterwards
                box = box.whole
                bounce = bounce_buffer(box)
                targets = make_targets(box, bounce) or []
            self.buffered_bytes += bounce.nbytes
            self._copy_later(item, bounce, into)
        self._read(item, found.start, targets)

    def _copy_later(self, item: ReadItem, bounce: torch.Tensor, into: torch.Tensor) -> None:
        def copy() -> None:
            box = bounce
            if tuple(bounce.shape) != tuple(item.lengths):
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    box = box.narrow(dim, offset, length)
            into.copy_(box)

        self._after_read.append(copy)


def _copies_on(planner: LoadPlanner) -> bool:
    """Whether the planner copies loaded tensors on, so that the tensors to fill are buffers too."""
    return getattr(type(planner), "commit_tensor", None) is not DefaultLoadPlanner.commit_tensor


def _unpickles_unchecked(planner: LoadPlanner) -> bool:
    """Whether the planner is DCP's own, which calls torch.load(weights_only=False). Another reads its own format."""
    return getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes


_safe_items: set[bytes] = set()
"""Items that passed `_check_item`: most of those that are not tensors are the same few numbers."""


def _check_item(name: str, data: bytes, path: Path) -> None:
    if data in _safe_items:
        return
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile or damaged pickle can raise anything
        raise InvalidCheckpoint(
            f"{name!r} is refused: {error}. If you trust it, use StorageReader(…, weights_only=False)", path=path
        ) from error
    if len(data) < 4096 and len(_safe_items) < 1000:
        _safe_items.add(data)
