"""Combines the CRC-32s of two parts of a message, where isal, which does it in C, is missing.

Appending n zero bytes to a message multiplies its CRC by x^(8n) modulo the polynomial, over GF(2). The code goes
through the bits of n with x^8, x^16, x^32, …, so it takes 40 products for any length.
"""

from __future__ import annotations

_POLYNOMIAL = 0xEDB88320  # CRC-32's, with the lowest power in the highest bit


def crc32_combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A + B, given those of A and B and the length of B."""
    power = 1 << 23  # x^8
    while length:
        if length & 1:
            first = _times(power, first)
        power = _times(power, power)
        length >>= 1
    return first ^ second


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
