"""Tile shapes: what each kernel works on at a time, picked for the device and the op's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.triton.devices import Device


@dataclass(frozen=True)
class RowTile:
    """Rows, and elements of a row, that a program of a row-wise kernel works on."""

    rows: int
    block: int
    num_warps: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def row_tile(device: Device, width: int, most: int = 1024) -> RowTile:
    """A tile for copies and other work in which columns do not depend on each other."""
    block = min(power_of_two(width), most)
    if device.interpreted:
        return RowTile(16, block, 1)
    rows = max(1, 512 // block)
    return RowTile(rows, block, max(1, min(8, rows * block // (device.warp_size * 8))))


def whole_rows(device: Device, width: int, most: int = 16384) -> RowTile:
    """A tile for work in which a row's columns depend on each other: whole rows, up to `most` at a time."""
    block = min(power_of_two(width), most)
    if device.interpreted:
        return RowTile(max(1, min(64, 65536 // block)), block, 1)
    rows = max(1, 1024 // block)
    return RowTile(rows, block, max(1, min(16, rows * block // (device.warp_size * 16))))
