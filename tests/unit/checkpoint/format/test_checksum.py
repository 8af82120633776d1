"""CRC-32s combined from those of parts."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reprieve.checkpoint.format import crc_combine
from reprieve.checkpoint.format.checksum import combined_crc, crc32

isal_zlib = pytest.importorskip("isal.isal_zlib")

CRCS = st.integers(0, 2**32 - 1)


@given(CRCS, CRCS, st.integers(0, 2**40) | st.integers(0, 2**63 - 1))
@example(0, 0, 0)
@example(2**32 - 1, 2**32 - 1, 2**63 - 1)
@example(1, 0, 1)
def test_the_fallback_equals_isal(first: int, second: int, length: int) -> None:
    assert crc_combine.crc32_combine(first, second, length) == isal_zlib.crc32_combine(first, second, length)


@given(st.lists(st.binary(max_size=300), max_size=12), st.randoms(use_true_random=False))
def test_parts_in_any_order(parts: list[bytes], chance: random.Random) -> None:
    """Also empty parts, and no parts at all. Ranks send lists, not tuples."""
    crc_parts, offset = [], 1000
    for part in parts:
        crc_parts.append([offset, len(part), crc32(part)])
        offset += len(part)
    chance.shuffle(crc_parts)
    assert combined_crc(crc_parts) == zlib.crc32(b"".join(parts))


def test_without_isal() -> None:
    """The values are the same where isal has no wheel."""
    program = """
import sys, zlib
sys.modules["isal"] = None
from reprieve.checkpoint.format import checksum
assert checksum.crc32 is zlib.crc32
parts = [b"one", b"", b"two" * 1000]
crc_parts = [(sum(map(len, parts[:n])), len(part), zlib.crc32(part)) for n, part in enumerate(parts)]
assert checksum.combined_crc(reversed(crc_parts)) == zlib.crc32(b"".join(parts))
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
