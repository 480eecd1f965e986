"""GGUF's quantised types as codes and scales (ggml's block formats).

Blocks of 32: Q4_0 (f16 d, codes), Q4_1 (d, m, codes), Q5_0 (d, high bits, codes), Q5_1 (d, m, high bits,
codes), Q8_0 (d, codes). Blocks of 256: Q4_K and Q5_K have 8 groups, each of a scale d * sc and an offset
-dmin * m with sc and m of 6 bits; Q6_K has 16 groups of a scale d * sc with sc of i8. A product of f16 and at
most 8 bits is exact in f32. Codes of 5 and 6 bits are given as i8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from compiler.importers.quantized.matrix import CODES, OFFSET, SCALE, Grid
from compiler.weights import Array
from ir.types import DType


@dataclass(frozen=True)
class Format:
    """A type. block_bytes, block: bytes and elements of a block; group_size: elements of a scale.

    split: blocks [B, block_bytes] -> codes [B, block], scales [B, groups], offsets [B, groups] if has_offset.
    """

    block_bytes: int
    block: int
    group_size: int
    codes: DType
    scale: DType
    zero: int
    has_offset: bool
    split: Callable[[Array], tuple[Array, ...]]


def parts(form: Format, rows: Array) -> Iterator[Array]:
    """Codes [R, K], scales [R, G] and offsets of rows of bytes [R, K / block * block_bytes]."""
    per_row = rows.shape[1] // form.block_bytes
    blocks = rows.reshape(len(rows) * per_row, form.block_bytes)
    return (a.reshape(len(rows), per_row * a.shape[1]) for a in form.split(blocks))


class GgufMatrix:
    """A matrix of a file. data: bytes [N, K / block * block_bytes]; rows: which stored row each row is."""

    order = None

    def __init__(self, form: Format, data: Array, rows: Array) -> None:
        self._form, self._data, self._rows = form, data, rows
        shape = len(rows), data.shape[1] // form.block_bytes * form.block
        offset = form.scale if form.has_offset else None
        self.grid = Grid(shape, form.codes, form.group_size, form.scale, form.zero, offset=offset)

    def rows(self, part: str, lo: int, hi: int) -> Array:
        found = parts(self._form, self._data[self._rows[lo:hi]])
        named: dict[str, Array] = dict(zip((CODES, SCALE, OFFSET), found, strict=False))
        return np.ascontiguousarray(named[part])


def _half(blocks: Array, at: int) -> Array:
    """[B, 1] of f16 at a byte of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _nibbles(packed: Array) -> Array:
    """[B, n] -> [B, 2n]: all low halves of bytes, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], -1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """Bit 4 of each of 32 codes, from the 32 bits at a byte of each block."""
    return np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Array) -> tuple[Array, ...]:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0)


def _q4_1(blocks: Array) -> tuple[Array, ...]:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Array) -> tuple[Array, ...]:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return codes.view(np.int8) - np.int8(16), _half(blocks, 0)


def _q5_1(blocks: Array) -> tuple[Array, ...]:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return codes.view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Array) -> tuple[Array, ...]:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0)


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """(sc, m) [B, 8] from 12 bytes: of groups 0-3 the low 6 bits of bytes 0-3 and 4-7, of groups 4-7 the
    halves of bytes 8-11 with the top 2 bits of those."""
    first, second, halves = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    low, two = np.uint8(63), np.uint8(6)
    sc = [first & low, (halves & np.uint8(15)) | (first >> two << np.uint8(4))]
    m = [second & low, (halves >> np.uint8(4)) | (second >> two << np.uint8(4))]
    return np.concatenate(sc, -1), np.concatenate(m, -1)


def _scales_k(blocks: Array) -> tuple[Array, Array]:
    """Scales and offsets [B, 8] of Q4_K and Q5_K, f32."""
    sc, m = _six_bits(blocks[:, 4:16])
    d, dmin = (_half(blocks, at).astype(np.float32) for at in (0, 2))
    with np.errstate(all="ignore"):
        return d * sc.astype(np.float32), -(dmin * m.astype(np.float32))


def _q4_k(blocks: Array) -> tuple[Array, ...]:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return codes.reshape(len(blocks), 256), *_scales_k(blocks)


def _q5_k(blocks: Array) -> tuple[Array, ...]:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(len(blocks), 8, 32)
    # byte j of 32 holds bit 4 of element j of each of the 8 groups
    bits = np.stack([(blocks[:, 16:48] >> np.uint8(g)) & np.uint8(1) for g in range(8)], 1)
    codes = (codes | bits << np.uint8(4)).reshape(len(blocks), 256)
    return codes.view(np.int8), *_scales_k(blocks)


def _q6_k(blocks: Array) -> tuple[Array, ...]:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(len(blocks), 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = (pairs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & np.uint8(3)
    codes = (low | high << np.uint8(4)).reshape(len(blocks), 256).view(np.int8) - np.int8(32)
    with np.errstate(all="ignore"):
        scales = _half(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes, scales


FORMATS: dict[str, Format] = {
    "Q4_0": Format(18, 32, 32, DType.U4, DType.F16, 8, False, _q4_0),
    "Q4_1": Format(20, 32, 32, DType.U4, DType.F16, 0, True, _q4_1),
    "Q5_0": Format(22, 32, 32, DType.I8, DType.F16, 0, False, _q5_0),
    "Q5_1": Format(24, 32, 32, DType.I8, DType.F16, 0, True, _q5_1),
    "Q8_0": Format(34, 32, 32, DType.I8, DType.F16, 0, False, _q8_0),
    "Q4_K": Format(144, 256, 32, DType.U4, DType.F32, 0, True, _q4_k),
    "Q5_K": Format(176, 256, 32, DType.I8, DType.F32, 0, True, _q5_k),
    "Q6_K": Format(210, 256, 16, DType.I8, DType.F32, 0, False, _q6_k),
}
