"""CRCs put together from those of stretches."""

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
def test_the_slow_way_is_the_fast_way(first: int, second: int, length: int) -> None:
    assert crc_combine.crc32_combine(first, second, length) == isal_zlib.crc32_combine(first, second, length)


@given(st.lists(st.binary(max_size=300), max_size=12), st.randoms(use_true_random=False))
def test_stretches_in_any_order(stretches: list[bytes], chance: random.Random) -> None:
    """Empty ones, too, and none at all; as the ranks tell them, in lists."""
    known, at = [], 1000
    for stretch in stretches:
        known.append([at, len(stretch), crc32(stretch)])
        at += len(stretch)
    whole = zlib.crc32(b"".join(stretches))
    chance.shuffle(known)
    assert combined_crc(known) == whole


def test_without_the_library() -> None:
    """The same numbers where there is no wheel."""
    program = """
import sys, zlib
sys.modules["isal"] = None
from reprieve.checkpoint.format import checksum
assert checksum.crc32 is zlib.crc32
parts = [b"one", b"", b"two" * 1000]
stretches = [(sum(map(len, parts[:n])), len(part), zlib.crc32(part)) for n, part in enumerate(parts)]
assert checksum.combined_crc(reversed(stretches)) == zlib.crc32(b"".join(parts))
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
