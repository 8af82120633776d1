"""Checks the structure of a `torch.save` archive: a whole file, or one of many archives in a `.distcp` file.

torch writes a zip whose records are stored, never compressed: `top/data.pkl` beside `top/data/<key>`. Python's zipfile
is lenient (it skips leading bytes, ignores counts and what follows the end) and reads one archive per file. A check has
to be strict and to find one archive among many, so this module reads the directory itself. It covers every bit that
decides what `torch.load` reads: directory against local headers, data by CRC-32, storages against data.pkl. It does not
cover what no reader uses: dates, attributes, versions, padding and a comment's text.
"""

from __future__ import annotations

import errno
import io
import lzma
import pickle
import struct
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from reprieve.checkpoint.folder.foreign.file_reader import FileReader
from reprieve.checkpoint.folder.foreign.pickle_scan import Global, PickleScan, scan_pickle
from reprieve.checkpoint.format.checksum import crc32
from reprieve.errors import InvalidCheckpoint, needing

ZIP_MAGIC = b"PK\x03\x04"

NUMPY_RNG_GLOBALS = frozenset(
    {
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",  # numpy 1
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.dtypes.UInt32DType",
    }
)
"""The globals of numpy's RNG state in a stock `rng_state.pth`; transformers allows the same."""

_ITEM_BYTES = {
    "Double": 8,
    "Float": 4,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Char": 1,
    "Byte": 1,
    "Bool": 1,
    "ComplexDouble": 16,
    "ComplexFloat": 8,
    "Untyped": 1,
    "QUInt8": 1,
    "QInt8": 1,
    "QInt32": 4,
    "QUInt4x2": 1,
    "QUInt2x4": 1,
}
_STORAGE_BYTES = {
    f"{module}.{kind}Storage": size for kind, size in _ITEM_BYTES.items() for module in ("torch", "torch.storage")
}

_MAX32, _MAX16 = 0xFFFFFFFF, 0xFFFF
_CRC_FOLLOWS, _UTF8 = 1 << 3, 1 << 11


def unsafe_globals(path: Path) -> list[str]:
    """The globals in a torch.save file that `torch.load(weights_only=True)` would refuse. Nothing is unpickled."""
    with path.open("rb") as file:
        return _unsafe_globals(file)


def check_torch_file(file: FileReader, *, allowed: Collection[str] | None = ()) -> None:
    """Check a torch.save file. `allowed`: globals to accept beside what weights_only accepts; None if the file is never
    unpickled."""
    magic = file.read(0, min(4, file.size))
    if magic[:1] == b"\x80":
        raise InvalidCheckpoint(
            "in torch's old format, which cannot be checked without running it; if you trust it, convert it once: "
            "torch.save(torch.load(PATH, weights_only=True), PATH)"
        )
    if magic != ZIP_MAGIC:
        raise InvalidCheckpoint("damaged or cut short: it does not start like a torch.save file")
    check_archive(file, 0, file.size, allowed=allowed)


def check_other_zip(file: FileReader, path: Path) -> None:
    """Check a zip whose name is not torch's: as a torch.save file if it is one, otherwise only its CRCs (.npz)."""
    try:
        with zipfile.ZipFile(path) as archive:
            is_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
            damaged = None if is_torch else archive.testzip()
    except OSError as error:
        if error.errno != errno.EINVAL:  # a damaged directory names an offset before the start of the file
            raise
        raise InvalidCheckpoint(f"damaged or cut short: {error}") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        struct.error,
        NotImplementedError,
        RuntimeError,
        EOFError,
        ValueError,
        OverflowError,
    ) as error:
        raise InvalidCheckpoint(f"damaged or cut short: {error}") from error
    if damaged is not None:
        raise InvalidCheckpoint(f"damaged: the CRC-32 of record {damaged!r} is wrong")
    if is_torch:
        check_torch_file(file)


@dataclass(frozen=True, slots=True)
class _Record:
    """One entry of the zip directory."""

    name: str
    raw_name: bytes
    flags: int
    crc: int
    size: int
    offset: int


def check_archive(file: FileReader, start: int, stop: int, *, allowed: Collection[str] | None) -> None:
    """Check that the bytes from start to stop are one whole torch.save archive."""
    records, directory_at = _read_directory(file, start, stop)
    tops = {name.partition("/")[0] for name in records}
    if len(tops) != 1:
        raise InvalidCheckpoint(f"not a torch.save file: {len(tops)} top folders, where torch writes one")
    top = tops.pop()
    if f"{top}/constants.pkl" in records:
        raise InvalidCheckpoint("a TorchScript archive, not a torch.save file")
    for needed in ("data.pkl", "version"):
        if f"{top}/{needed}" not in records:
            raise InvalidCheckpoint(f"not a torch.save file, or damaged: no record {needed!r}")
    data_at = _check_records(file, start, directory_at, list(records.values()))
    pickled_record = records[f"{top}/data.pkl"]
    pickled = file.read(data_at[pickled_record.name], pickled_record.size)
    _check_storages(scan_pickle(pickled), {name[len(top) + 1 :]: record.size for name, record in records.items()})
    if allowed is not None:
        # Only the pickle, as an archive of its own: the archive may be a part of a file, or many gigabytes.
        pickle_only = io.BytesIO()
        with zipfile.ZipFile(pickle_only, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/version", "3\n")
        pickle_only.seek(0)
        if refused := [name for name in _unsafe_globals(pickle_only) if name not in allowed]:
            raise InvalidCheckpoint(f"not trusted: loading it would run {', '.join(refused)}")


def _read_directory(file: FileReader, start: int, stop: int) -> tuple[dict[str, _Record], int]:
    """The records by name, and the offset of the directory."""
    # The last end record counts, as for torch's reader. torch writes no comment behind it, Reprieve a short one.
    tail = file.read(max(start, stop - 22 - _MAX16), min(stop - start, 22 + _MAX16))
    end_at = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - 18))
    if end_at < 0:
        raise InvalidCheckpoint("damaged or cut short: no zip directory at its end")
    at = stop - len(tail) + end_at
    disk, first_disk, count_here, count, length, offset, comment = struct.unpack_from("<4x4H2IH", tail, end_at)
    if at + 22 + comment != stop:
        raise InvalidCheckpoint("damaged or cut short: the zip end record is not at its end")
    if at - 20 >= start and (locator := file.read(at - 20, 20)).startswith(b"PK\x06\x07"):
        at -= 20 + 56
        if at < start or struct.unpack("<4xIQI", locator) != (0, at - start, 1):
            raise InvalidCheckpoint("damaged: the zip64 locator points elsewhere")
        magic, size, _, _, *numbers = struct.unpack("<4sQ2H2I4Q", file.read(at, 56))
        short = (disk, first_disk, count_here, count, length, offset)
        limits = (_MAX16, _MAX16, _MAX16, _MAX16, _MAX32, _MAX32)
        if (magic, size) != (b"PK\x06\x06", 44) or any(
            value not in (value64, limit) for value, value64, limit in zip(short, numbers, limits, strict=True)
        ):
            raise InvalidCheckpoint("damaged: the two zip end records differ")
        disk, first_disk, count_here, count, length, offset = numbers
    if disk or first_disk or count_here != count or start + offset + length != at:
        raise InvalidCheckpoint("damaged: the zip end record does not fit the file")
    directory = file.read(start + offset, length)
    records: dict[str, _Record] = {}
    position = 0
    names: set[str] = set()
    try:
        for _ in range(count):
            record, position = _parse_entry(directory, position)
            if record.name.lower() in names:  # torch's zip reader may take either, and ignore case
                raise InvalidCheckpoint(f"damaged: record {record.name!r} is there twice")
            names.add(record.name.lower())
            records[record.name] = record
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidCheckpoint(f"damaged zip directory ({error})") from error
    if position != len(directory) or not records:
        raise InvalidCheckpoint("damaged: the zip directory does not have the length it should")
    return records, start + offset


def _parse_entry(directory: bytes, at: int) -> tuple[_Record, int]:
    magic, flags, method, crc, stored, size, name_length, extra_length, comment_length, disk, offset = (
        struct.unpack_from("<4s4x2H4x3I4H6xI", directory, at)
    )
    name_at = at + 46
    extra_at = name_at + name_length
    end = extra_at + extra_length + comment_length
    if magic != b"PK\x01\x02" or end > len(directory):
        raise InvalidCheckpoint("damaged zip directory")
    raw_name = directory[name_at:extra_at]
    name = raw_name.decode()
    size, stored, offset = _zip64(directory[extra_at : extra_at + extra_length], size, stored, offset)
    if method or disk or flags & ~(_CRC_FOLLOWS | _UTF8) or stored != size:
        raise InvalidCheckpoint(f"damaged, or not written by torch: record {name!r} is compressed, encrypted or split")
    return _Record(name, raw_name, flags, crc, size, offset), end


def _zip64(extra: bytes, *numbers: int) -> list[int]:
    """The numbers, with those that do not fit into 32 bits taken from the extra field, which has them in this order."""
    if _MAX32 not in numbers:
        return list(numbers)
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            large = struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])
            return [next(large, (_MAX32,))[0] if number == _MAX32 else number for number in numbers]
        at += 4 + length
    return list(numbers)


def _check_records(file: FileReader, start: int, stop: int, records: list[_Record]) -> dict[str, int]:
    """Check each record's header, data and position among the others. Returns the offset of each record's data."""
    # torch.serialization.set_crc32_options(False) leaves every CRC of an archive 0: then there is nothing to compare
    # with, as in safetensors. If only some are 0, skip_data() wrote the archive with room for data to be filled in
    # later, and nothing shows whether that happened.
    without_crc = not any(record.crc for record in records)
    data_at: dict[str, int] = {}
    at = start
    for record in sorted(records, key=lambda record: record.offset):
        begin = start + record.offset
        if begin < at or (at == start and begin != start):
            raise InvalidCheckpoint(f"damaged: record {record.name!r} is not where the one before it ends")
        header = file.read(begin, 30 + len(record.raw_name))
        magic, method, crc, stored, size, name_length, extra_length = struct.unpack_from("<4s4xH4x3I2H", header)
        known = {0, _MAX32, record.size} if record.flags & _CRC_FOLLOWS else {_MAX32, record.size}
        if (
            (magic, method, name_length) != (ZIP_MAGIC, 0, len(record.raw_name))
            or header[30:] != record.raw_name
            or crc not in ({0, record.crc} if record.flags & _CRC_FOLLOWS else {record.crc})
            or stored != size
            or size not in known
        ):
            raise InvalidCheckpoint(f"damaged: the header of record {record.name!r} is not what the directory says")
        data_at[record.name] = begin + 30 + name_length + extra_length
        at = data_at[record.name] + record.size
        if at > stop:
            raise InvalidCheckpoint(f"damaged: record {record.name!r} runs into the directory")
        actual = 0
        for chunk in file.chunks(data_at[record.name], record.size):
            actual = crc32(chunk, actual)
        if actual != record.crc and not without_crc:
            unfilled = "" if record.crc else " (0: a file prepared with skip_data, perhaps never filled in)"
            raise InvalidCheckpoint(f"damaged: the CRC-32 of record {record.name!r} is wrong{unfilled}")
        if record.flags & _CRC_FOLLOWS:
            at += _descriptor_length(file.read(at, min(24, stop - at)), record)
    return data_at


def _descriptor_length(data: bytes, record: _Record) -> int:
    """The length of a data descriptor. miniz uses the long form for large records, and beyond 4 GiB for small ones."""
    for sizes in ("2Q", "2I"):
        if sizes == "2Q" or record.size <= _MAX32:
            expected = struct.pack(f"<4sI{sizes}", b"PK\x07\x08", record.crc, record.size, record.size)
            if data.startswith(expected):
                return len(expected)
    raise InvalidCheckpoint(f"damaged: what follows record {record.name!r} is not what the directory says")


def _check_storages(scan: PickleScan, sizes: dict[str, int]) -> None:
    for reference in scan.persistent_ids:
        match reference:
            case ("storage", Global(kind), str(key), _, int(count)) if count >= 0:
                needed = count * _STORAGE_BYTES.get(kind, 0)
            case _:
                raise InvalidCheckpoint("damaged: data.pkl refers to something that is not a storage")
        if sizes.get(f"data/{key}", -1) < needed:
            actual = f"has {sizes[f'data/{key}']}" if f"data/{key}" in sizes else "is missing"
            raise InvalidCheckpoint(f"damaged: data.pkl needs {needed} bytes of record 'data/{key}', which {actual}")


def _unsafe_globals(file: IO[bytes]) -> list[str]:
    with needing("verifying a checkpoint of other tools in torch's format"):
        from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        return sorted(get_unsafe_globals_in_checkpoint(file))
    except (pickle.UnpicklingError, EOFError, ValueError, RuntimeError) as error:
        raise InvalidCheckpoint(f"torch.load(weights_only=True) would refuse it: {error}") from error
