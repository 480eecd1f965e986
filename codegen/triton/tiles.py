"""Tile shapes of linears: rows by columns of y that a program makes, and how much of K it takes at a time.

Up to 16 rows (decode) time is that of reading the weights once: 16 rows, few columns, and a deep pipeline. On
sm_90 such a tile multiplies with mma.sync, which takes 16 rows, since wgmma and tcgen05 take 64. The bytes in
flight have to cover rate times latency: about 3 MB for 3.35 TB/s and 0.8 us; a tile of 32 columns keeps
32 KiB of weights or more in flight, two programs fit on an SM, and 128 programs make 4 MB.

Columns get fewer until the programs fill most SMs. Splitting K instead would need a second launch that adds
the parts up, about 2 us more. One program reads its 16 columns of 2K bytes at the 25 to 60 GB/s that an SM
gets: 0.8 to 2 us at K = 1536, 2.4 to 6 us at K = 4864. With N so small that 16 columns leave SMs idle
(N < 2112 on 132 SMs), K is of that size too, and what a split could save is less than its launch costs. So
nothing is split, and each sum has one order.

Above 16 rows the weights' bytes are shared by more rows, and above a few hundred the matrix units are the
bound: of a tile's reads from L2, 128 by 256 makes 85 operations per byte in bf16, 128 by 128 makes 64, 64 by
64 makes 32. Wide tiles are taken where there are enough of them for the SMs.

These are bounds from published rates; the tiles were chosen by them and by what the binaries take (registers,
shared memory, no spills), and have not been timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from codegen.triton.devices import Device
from codegen.triton.schedule import power_of_two

# Steps are told apart by their rows: up to 16, 64, 512 and more. Tiles are picked for so many rows.
DESIGN_ROWS: tuple[tuple[int | None, int], ...] = ((16, 16), (64, 64), (512, 256), (None, 2048))
# Of linears of several experts: by the rows of an expert on average.
EXPERT_ROWS: tuple[tuple[int | None, int], ...] = ((16, 16), (256, 64), (None, 512))
BUSY = 2 / 3  # of the SMs: as many programs are enough
MOST_STAGES = 8


@dataclass(frozen=True)
class LinearTile:
    """m rows by n columns, k of K at a time. A gated linear's tile has n columns of either half.

    gated: of gated linears, where this tile with half the columns spills or all but does.
    parts: how many pieces of its columns a program finishes one after the other (1 or 2).
    group: tiles of rows that run together under the same columns. clamped: rows past the last are read as the
    last, without a mask: AMD's masked loads are branches, and its L1 merges reads of one row. On NVIDIA a
    masked copy to shared memory reads nothing.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    parts: int = 1
    group: int = 8
    clamped: bool = False
    gated: LinearTile | None = None


def linear_tiles(
    device: Device,
    n: int,
    k: int,
    *,
    gated: bool = False,
    wide: bool = False,
    aligned: bool = True,
    invariant: bool = False,
    experts: int | None = None,
) -> list[tuple[int | None, LinearTile]]:
    """(most rows, tile) for steps of growing size; the last is for all others.

    n: columns of y. wide: whether factors are multiplied as f32. aligned: whether every row of x and w can be
    read 16 bytes at a time. invariant: one tile for all steps. experts: of so many, each of n columns, where
    there are several; rows are then those of one of them.
    """
    if device.interpreted:
        ranges = [(None, 1)] if invariant else [(16, 16), (None, 64)]
        return [(most, _interpreted(n, k, rows)) for most, rows in ranges]
    listed = TILES[device.arch, wide] if aligned else UNALIGNED
    return pick_tiles(device, listed, n, k, gated, invariant, experts)


def pick_tiles(
    device: Device,
    listed: Sequence[LinearTile],
    n: int,
    k: int,
    gated: bool,
    invariant: bool,
    experts: int | None = None,
) -> list[tuple[int | None, LinearTile]]:
    """linear_tiles of those that are listed, from wide to narrow."""
    listed = [_gated(t) if gated else t for t in listed]
    found = [
        (most, _fit_k(_widest(device, _of_rows(listed, rows), n, rows, experts or 1), k))
        for most, rows in (DESIGN_ROWS if experts is None else EXPERT_ROWS)
    ]
    if invariant:
        return [(None, found[1][1])]
    last_of_its_kind = [
        i for i, (_, tile) in enumerate(found) if i + 1 == len(found) or tile != found[i + 1][1]
    ]
    return [found[i] for i in last_of_its_kind]


def _of_rows(listed: Sequence[LinearTile], rows: int) -> list[LinearTile]:
    """The tiles for steps of so many rows: 16 by 16, and else at least 64 by 64."""
    return [t for t in listed if (t.m == 16) == (rows == 16) and t.m <= rows]


def _widest(device: Device, listed: Sequence[LinearTile], n: int, rows: int, matrices: int) -> LinearTile:
    """The first tile of which there are enough, or the last."""
    for tile in listed:
        if matrices * -(-rows // tile.m) * -(-n // tile.n) >= BUSY * device.num_sms:
            return tile
    return listed[-1]


def _gated(tile: LinearTile) -> LinearTile:
    """The same tile cut in halves, gate and up."""
    return tile.gated or replace(tile, n=max(16, tile.n // 2))


def _fit_k(tile: LinearTile, k: int) -> LinearTile:
    """A half or a quarter of the tile's k where that divides K, with as many bytes in flight."""
    for part in (1, 2, 4):
        if tile.k // part >= 32 and k % (tile.k // part) == 0:
            stages = min(MOST_STAGES, 1 + (tile.num_stages - 1) * part)
            return replace(tile, k=tile.k // part, num_stages=stages)
    return tile


def _interpreted(n: int, k: int, rows: int) -> LinearTile:
    """For the interpreter, whose time goes by programs and not by their work.

    It multiplies by numpy's matmul, in which a row's bits depend on its place in a tile: invariant tiles have
    one row there. On a device all rows of a tile are summed alike.
    """
    return LinearTile(rows, min(2048, power_of_two(n)), min(1024, power_of_two(k)), 1, 1)


# Rows that are not aligned are read element by element, through registers: small tiles, whatever the device.
UNALIGNED = (
    LinearTile(64, 64, 32, 8, 2),
    LinearTile(16, 32, 64, 4, 2),
)
# By architecture and width of the factors, from wide to narrow: m, n, k, warps, stages, parts.
TILES: dict[tuple[str, bool], tuple[LinearTile, ...]] = {
    ("sm_80", False): (
        LinearTile(128, 128, 64, 8, 3),
        LinearTile(64, 128, 64, 4, 4, parts=2),
        LinearTile(64, 64, 64, 4, 4, gated=LinearTile(64, 32, 64, 8, 4)),
        LinearTile(64, 32, 128, 4, 4),
        LinearTile(16, 64, 128, 4, 5),
        LinearTile(16, 32, 256, 4, 4),
        LinearTile(16, 16, 256, 2, 5),
    ),
    ("sm_80", True): (
        LinearTile(64, 64, 32, 8, 3),
        LinearTile(64, 32, 32, 4, 4),
        LinearTile(16, 64, 64, 4, 4),
        LinearTile(16, 32, 128, 4, 4, gated=LinearTile(16, 16, 64, 4, 7)),
        LinearTile(16, 16, 64, 2, 8),
    ),
    ("sm_90", False): (
        LinearTile(128, 256, 64, 8, 4, parts=2),
        LinearTile(128, 128, 64, 8, 4),
        LinearTile(64, 128, 64, 4, 4),
        LinearTile(64, 64, 64, 4, 4),
        LinearTile(64, 32, 128, 4, 4),
        LinearTile(16, 64, 128, 4, 6),
        LinearTile(16, 32, 128, 4, 8),
        LinearTile(16, 16, 256, 2, 6),
    ),
    ("sm_90", True): (
        LinearTile(128, 128, 32, 8, 3, parts=2),
        LinearTile(64, 64, 32, 4, 3),
        LinearTile(64, 32, 32, 4, 4),
        LinearTile(16, 64, 64, 4, 5),
        LinearTile(16, 32, 128, 4, 5, gated=LinearTile(16, 16, 64, 4, 8)),
        LinearTile(16, 16, 64, 2, 8),
    ),
    ("gfx942", False): (
        LinearTile(128, 128, 64, 8, 2, clamped=True),
        LinearTile(64, 128, 64, 4, 2, clamped=True),
        LinearTile(64, 64, 64, 4, 2, clamped=True),
        LinearTile(64, 32, 128, 4, 2, clamped=True),
        LinearTile(16, 64, 128, 4, 2, clamped=True),
        LinearTile(16, 32, 256, 4, 2, clamped=True),
        LinearTile(16, 16, 512, 2, 2, clamped=True),
    ),
    ("gfx942", True): (
        LinearTile(128, 128, 32, 8, 2, clamped=True),
        LinearTile(64, 64, 32, 4, 2, clamped=True),
        LinearTile(64, 32, 32, 4, 2, clamped=True),
        LinearTile(16, 64, 64, 4, 2, clamped=True),
        LinearTile(16, 32, 128, 4, 2, clamped=True),
        LinearTile(16, 16, 256, 2, 2, clamped=True),
    ),
}  # fmt: skip
TILES |= {("sm_100", wide): TILES["sm_90", wide] for wide in (False, True)}
