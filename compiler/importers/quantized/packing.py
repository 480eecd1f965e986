"""Codes of 2, 3, 4 or 8 bits in 32-bit words: the first element is in the lowest bits."""

from __future__ import annotations

import numpy as np

from compiler.weights import Array

WORD_BITS = 32


def unpack(words: Array, bits: int, count: int) -> Array:
    """uint8 [R, count] from int32 words [R, W]: the elements of a row follow each other without a gap."""
    packed = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return packed[:, :count]
    if bits in (2, 4):
        mask = np.uint8((1 << bits) - 1)
        fields = [(packed >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
        return np.stack(fields, -1).reshape(len(packed), packed.shape[1] * len(fields))[:, :count]
    single = np.unpackbits(packed, axis=-1, count=count * bits, bitorder="little")
    return np.packbits(single.reshape(len(packed), count, bits), axis=-1, bitorder="little")[..., 0]


def unpack_columns(words: Array, bits: int, lo: int, hi: int) -> Array:
    """Elements lo..hi of each row of words [R, W], as columns: uint8 [hi - lo, R]."""
    first = lo * bits // WORD_BITS
    while first * WORD_BITS % bits:  # a word that starts inside an element
        first -= 1
    skipped = lo - first * WORD_BITS // bits
    last = -(-hi * bits // WORD_BITS)
    return unpack(words[:, first:last], bits, skipped + hi - lo)[:, skipped:].T


def signed(codes: Array) -> Array:
    """Codes 0..255 around 128 as i8 around 0."""
    return (codes ^ np.uint8(128)).view(np.int8)
