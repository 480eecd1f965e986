"""Tile shapes of attention: rows and keys that a program works on at a time.

Prefill's tiles are as large as registers allow without spills: the sums of a tile are rows x head size
floats, and before sm_90 its queries are held in registers as well; there a tile of fewer rows than keys takes
the fewest, because warps then share out its columns. f32 factors are made of several each ("tf32x3"), which
takes their registers twice. Few rows are enough where decode waits for memory anyway. The tiles that results
with invariant bits are made with hold the sums of two parts at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.triton.devices import Device


@dataclass(frozen=True)
class AttentionTile:
    """rows: tokens times query heads that share a key/value head. keys: of one turn of the loop.

    num_stages: up to 4 fetch one turn of the loop ahead and 5 two, because where keys lie is fetched first.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 2


COMBINED_ROWS = 16  # of a program that takes parts together
INTERPRETED = AttentionTile(128, 128, 1)

_Tiles = tuple[AttentionTile, AttentionTile, AttentionTile]  # prefill, decode, invariant
_SMALL = AttentionTile(16, 32, 8, 2)

# Architecture, bytes of an element -> by the widest head that they are for.
_TILES: dict[tuple[str, int], dict[int, _Tiles]] = {
    ("sm_80", 2): {
        128: (AttentionTile(32, 64, 4, 3), AttentionTile(16, 64, 4, 5), AttentionTile(16, 64, 4, 3)),
        256: (AttentionTile(16, 64, 4, 2), AttentionTile(16, 64, 4, 3), AttentionTile(16, 64, 4, 2)),
    },
    ("sm_90", 2): {
        128: (AttentionTile(128, 64, 8, 3), AttentionTile(16, 64, 4, 5), AttentionTile(64, 64, 4, 2)),
        256: (AttentionTile(64, 64, 8, 2), AttentionTile(16, 64, 4, 3), AttentionTile(16, 64, 4, 2)),
    },
    ("sm_100", 2): {
        128: (AttentionTile(128, 64, 8, 3), AttentionTile(16, 64, 4, 5), AttentionTile(64, 64, 4, 2)),
        256: (AttentionTile(64, 64, 8, 2), AttentionTile(16, 64, 4, 3), AttentionTile(16, 64, 4, 2)),
    },
    ("gfx942", 2): {
        128: (AttentionTile(64, 64, 4, 2), AttentionTile(16, 64, 4, 2), AttentionTile(64, 32, 4, 2)),
        256: (AttentionTile(64, 32, 4, 2), AttentionTile(16, 32, 4, 2), AttentionTile(16, 32, 4, 2)),
    },
    ("gfx942", 4): {
        128: (AttentionTile(64, 32, 4, 2), AttentionTile(16, 32, 4, 2), AttentionTile(16, 32, 4, 2)),
        256: (AttentionTile(16, 32, 4, 1), AttentionTile(16, 32, 4, 1), AttentionTile(16, 32, 4, 1)),
    },
}


def attention_tiles(device: Device, width: int, element_bytes: int) -> _Tiles:
    """Of prefill, of decode, and of both where bits are invariant.

    width: of heads, rounded up to a power of two. element_bytes: of what the cache holds.
    """
    if device.interpreted:
        return INTERPRETED, INTERPRETED, INTERPRETED
    table = _TILES.get((device.arch, element_bytes), {})
    fitting = [most for most in sorted(table) if width <= most]
    return table[fitting[0]] if fitting else (_SMALL, _SMALL, _SMALL)
