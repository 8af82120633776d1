"""The two checksums of the engine: XXH3-128 for verification, CRC-32 because zip readers expect it.

A file's checksum is the XXH3-128 of its blocks' checksums, one after the other. So threads and ranks can hash blocks in
any order, and an error message can name the damaged block. It protects against accidents, not against attackers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import xxhash

try:
    from isal.isal_zlib import crc32, crc32_combine
except ImportError:  # no wheel for this platform: the same values at a third of the speed
    from reprieve.checkpoint.format.crc_combine import crc32_combine

    crc32 = zlib.crc32

__all__ = ["BlockHash", "combined_crc", "crc32", "digest_of", "file_digest"]

BlockHash = xxhash.xxh3_128


def digest_of(data: bytes | memoryview) -> str:
    """Return the XXH3-128 of some bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(blocks: Iterable[str]) -> str:
    """Return a file's checksum, given its blocks' checksums (32 hex digits each)."""
    return digest_of(bytes.fromhex("".join(blocks)))


def combined_crc(parts: Iterable[Sequence[int]]) -> int:
    """Return the CRC-32 of contiguous parts (offset, length, CRC-32 of the part), given in any order."""
    crc = 0
    for _, length, part_crc in sorted(tuple(part) for part in parts):
        crc = crc32_combine(crc, part_crc, length)
    return crc
