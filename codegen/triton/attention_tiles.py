"""Tile shapes of attention: rows and keys that a program works on at a time."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.triton.devices import Device


@dataclass(frozen=True)
class AttentionTile:
    """rows: tokens times query heads that share a key/value head. keys: of one turn of the loop."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 2


COMBINED_ROWS = 16  # of a program that takes parts together


def prefill_tile(device: Device, width: int, element_bytes: int) -> AttentionTile:
    """width: of heads, rounded up to a power of two. element_bytes: of what the cache holds."""
    if device.interpreted:
        return AttentionTile(128, 128, 1)
    return AttentionTile(64, 64, 4)


def decode_tile(device: Device, width: int, element_bytes: int, rows: int) -> AttentionTile:
    """rows: as many as a request's may be."""
    if device.interpreted:
        return AttentionTile(min(rows, 128), 128, 1)
    return AttentionTile(min(rows, 128), 64, 4)
