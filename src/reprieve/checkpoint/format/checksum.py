"""The two checksums of the engine: XXH3-128 for what we verify, CRC-32 for what zip readers expect.

A file's checksum is the XXH3-128 of its blocks' checksums, one after the other: blocks can then be hashed in
any order, by several threads or ranks, and one bad block can be named. It guards against accidents, not against people.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import xxhash

try:
    from isal.isal_zlib import crc32, crc32_combine
except ImportError:  # no wheel for this platform: a third of the speed, the same numbers
    from reprieve.checkpoint.format.crc_combine import crc32_combine

    crc32 = zlib.crc32

__all__ = ["BlockHash", "combined_crc", "crc32", "digest_of", "file_digest"]

BlockHash = xxhash.xxh3_128


def digest_of(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(blocks: Iterable[str]) -> str:
    """The file's checksum from its blocks' checksums (32 hex digits each)."""
    return digest_of(bytes.fromhex("".join(blocks)))


def combined_crc(stretches: Iterable[Sequence[int]]) -> int:
    """The CRC-32 of neighbouring stretches (offset, length, CRC-32), given in any order."""
    crc = 0
    for _, length, own in sorted(tuple(stretch) for stretch in stretches):
        crc = crc32_combine(crc, own, length)
    return crc
