"""Tile shapes of linears with quantised weights.

As for linears (codegen.triton.tiles): up to 16 rows time is that of reading the weights, which have a quarter
or half of the bytes, and above them the matrix units are the bound. What differs is that codes pass through
registers, where they become factors: those of a tile take registers beside its sums, so tiles are smaller. Up
to 16 rows programs have few columns and much of K: loads are 16 bytes wide from 32 codes of 4 bits on.
Products of codes themselves (integers, e4m3) are scaled for each group, so k is a group at most.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.triton.devices import Device
from codegen.triton.schedule import power_of_two
from codegen.triton.tiles import MOST_STAGES, LinearTile, pick_tiles

NARROW, WIDE, CODES = "narrow", "wide", "codes"  # factors: bf16 or f16; f32; the codes themselves


def qlinear_tiles(
    device: Device,
    kind: str,
    n: int,
    k: int,
    most_k: int,
    *,
    gated: bool,
    invariant: bool,
    experts: int | None = None,
) -> list[tuple[int | None, LinearTile]]:
    """(most rows, tile) as of linear_tiles. most_k: elements of K that a tile takes at a time, at most."""
    if device.interpreted:
        ranges = [(None, 1)] if invariant else [(16, 16), (None, 64)]
        width = min(most_k, 1024, power_of_two(k))
        return [(most, LinearTile(m, min(2048, power_of_two(n)), width, 1, 1)) for most, m in ranges]
    found = pick_tiles(device, TILES[device.arch, kind], n, k, gated, invariant, experts)
    return [(most, _fit(tile, most_k)) for most, tile in found]


def _fit(tile: LinearTile, most_k: int) -> LinearTile:
    """With less of K at a time and as many bytes in flight."""
    if tile.k <= most_k:
        return tile
    stages = min(MOST_STAGES, 1 + (tile.num_stages - 1) * (tile.k // most_k)) if tile.num_stages > 2 else 2
    return replace(tile, k=most_k, num_stages=stages)


TILES: dict[tuple[str, str], tuple[LinearTile, ...]] = {
    ("sm_80", NARROW): (
        LinearTile(128, 128, 64, 8, 3),
        LinearTile(64, 64, 64, 4, 4),
        LinearTile(16, 64, 256, 4, 4),
        LinearTile(16, 32, 256, 4, 5, gated=LinearTile(16, 16, 128, 4, 6)),
    ),
    ("sm_80", WIDE): (LinearTile(64, 64, 32, 8, 3), LinearTile(16, 32, 64, 4, 5)),
    ("sm_80", CODES): (
        LinearTile(128, 128, 64, 8, 3),
        LinearTile(64, 64, 128, 4, 3),
        LinearTile(16, 64, 128, 4, 5),
        LinearTile(16, 32, 128, 4, 6),
    ),
    ("sm_90", NARROW): (
        LinearTile(128, 128, 64, 8, 3),
        LinearTile(64, 64, 64, 4, 4),
        LinearTile(16, 64, 256, 4, 5),
        LinearTile(16, 32, 256, 4, 6, gated=LinearTile(16, 16, 128, 4, 6)),
    ),
    ("sm_90", CODES): (
        LinearTile(128, 128, 128, 8, 3),
        LinearTile(64, 64, 128, 4, 3),
        LinearTile(16, 64, 128, 4, 5),
        LinearTile(16, 32, 128, 4, 6),
    ),
    ("gfx942", NARROW): (
        LinearTile(128, 128, 64, 8, 2, clamped=True),
        LinearTile(64, 64, 64, 4, 2, clamped=True),
        LinearTile(16, 64, 256, 4, 2, clamped=True, gated=LinearTile(16, 32, 128, 4, 2, clamped=True)),
    ),
    ("gfx942", WIDE): (
        LinearTile(64, 64, 32, 4, 2, clamped=True),
        LinearTile(16, 32, 64, 4, 2, clamped=True),
    ),
    ("gfx942", CODES): (
        LinearTile(128, 128, 64, 8, 2, clamped=True, gated=LinearTile(64, 32, 64, 4, 2, clamped=True)),
        LinearTile(64, 64, 64, 4, 2, clamped=True),
        LinearTile(16, 64, 128, 4, 2, clamped=True),
    ),
}  # fmt: skip
TILES["sm_90", WIDE] = TILES["sm_80", WIDE]
TILES |= {("sm_100", kind): TILES["sm_90", kind] for kind in (NARROW, WIDE, CODES)}
