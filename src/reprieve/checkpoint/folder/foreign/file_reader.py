"""Reads files of unknown origin, and checks safetensors and JSON files.

Used by `checker` for checkpoints that have no manifest. Each check raises InvalidCheckpoint with a reason that does not
name the file; `checker` adds the name. This module does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from reprieve.errors import InvalidCheckpoint

CHUNK_BYTES = 2**20  # stays in the cache between the read and its checksum

_HEADER_LIMIT_BYTES = 100_000_000  # the reference implementation's own limit

_DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
}
"""As of safetensors 0.8. Other types are refused: a flipped bit is far more likely than a new type."""


class FileReader:
    """One open file. `progress` is called with the bytes as they are read; the calls add up to the file's size."""

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self._file = path.open("rb", buffering=0)
        self._fd = self._file.fileno()
        self.size = os.fstat(self._fd).st_size
        self._progress = progress
        self._reported = 0
        self._buffer = memoryview(bytearray(min(self.size, CHUNK_BYTES)))

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if error is None:  # headers and padding, which were not reported
            self._report(self.size - self._reported)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes; InvalidCheckpoint if the file does not have them."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise InvalidCheckpoint(f"bytes {offset} to {offset + size} are needed, the file has {self.size}")
        data = bytearray(size)
        self._read_into(memoryview(data), offset)
        return bytes(data)

    def chunks(self, offset: int, size: int) -> Iterator[memoryview]:
        """These bytes in chunks, each valid until the next one is read."""
        while size:
            chunk = self._buffer[: min(size, len(self._buffer))]
            self._read_into(chunk, offset)
            self._report(len(chunk))
            yield chunk
            offset += len(chunk)
            size -= len(chunk)

    def read_through(self, offset: int, size: int) -> None:
        """Read these bytes only to see that the storage can still return them."""
        for _ in self.chunks(offset, size):
            pass

    def _read_into(self, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if count == 0:
                raise InvalidCheckpoint(f"the file ended at byte {offset + done} while it was read")
            done += count

    def _report(self, count: int) -> None:
        self._reported += count
        if self._progress is not None and count > 0:
            self._progress(count)


def check_safetensors(file: FileReader) -> frozenset[str]:
    """Check the header and read every byte. Returns the names of the tensors.

    The format has no checksum: a changed bit in the tensors' bytes, in a tensor's name or in the free-text metadata
    cannot be detected.
    """
    if file.size < 8:
        raise InvalidCheckpoint(f"cut short: {file.size} bytes, the safetensors header alone has 8 or more")
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > min(_HEADER_LIMIT_BYTES, file.size - 8):
        raise InvalidCheckpoint(f"damaged or cut short: a header of {length} bytes in a file of {file.size}")
    header = parse_json(file.read(8, length), unique_keys=True)
    if not isinstance(header, dict):
        raise InvalidCheckpoint("damaged: the safetensors header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise InvalidCheckpoint("damaged: the header's __metadata__ does not map names to texts")
    at = 0
    for begin, end, name in sorted(_tensor_range(name, entry) for name, entry in header.items()):
        if begin != at:
            raise InvalidCheckpoint(f"damaged: tensor {name!r} starts at {begin}, the one before it ends at {at}")
        at = end
    if 8 + length + at != file.size:
        raise InvalidCheckpoint(f"cut short or overlong: {file.size} bytes, its header describes {8 + length + at}")
    file.read_through(8 + length, at)
    return frozenset(header)


def _tensor_range(name: str, entry: object) -> tuple[int, int, str]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise InvalidCheckpoint(f"damaged: the entry of tensor {name!r} lacks dtype, shape or data_offsets")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise InvalidCheckpoint(f"damaged: shape or data_offsets of tensor {name!r} are not whole numbers")
    if dtype not in _DTYPE_BITS:
        raise InvalidCheckpoint(f"damaged, or newer than this Reprieve: tensor {name!r} has dtype {dtype!r}")
    if 8 * (end - begin) != _DTYPE_BITS[dtype] * math.prod(shape):
        raise InvalidCheckpoint(f"damaged: tensor {name!r} ({dtype}, {shape}) does not fill bytes {begin} to {end}")
    return begin, end, name


def parse_json(data: bytes, *, unique_keys: bool = False) -> object:
    """Parse JSON. NaN and Infinity are accepted: transformers writes them into its logs."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique if unique_keys else None)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"damaged or cut short: not JSON ({error})") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ValueError("a name appears twice")
    return items
