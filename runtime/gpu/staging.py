"""Arrays that lie in device memory and in host memory in the same layout, so that one copy moves them all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from runtime.gpu.device import Array, Device

ALIGNMENT = 64  # of every array; kernels count on 16

Shapes = Mapping[str, tuple[tuple[int, ...], type[np.generic]]]  # name -> (shape, element type)


@dataclass(frozen=True, slots=True)
class Area:
    """A piece of device memory, and one of (pinned) host memory."""

    device: Device
    address: int
    host: Array  # u8

    @staticmethod
    def of(device: Device, num_bytes: int, what: str) -> Area:
        return Area(device, device.allocate(num_bytes, what), device.host_array(num_bytes))

    def lay_out(self, shapes: Shapes) -> Staged:
        """Arrays from the area's start on."""
        addresses: dict[str, int] = {}
        arrays: dict[str, Array] = {}
        at = 0
        for name, (shape, dtype) in shapes.items():
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            addresses[name] = self.address + at
            arrays[name] = self.host[at : at + num_bytes].view(dtype).reshape(shape)
            at += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return Staged(self.device, self.address, self.host[:at], addresses, arrays)


@dataclass(frozen=True, slots=True)
class Staged:
    """addresses: on the device. arrays: on the host. Others of the same area overlap these."""

    device: Device
    address: int
    host: Array  # u8, all of them
    addresses: Mapping[str, int]
    arrays: Mapping[str, Array]

    def upload(self) -> None:
        """Start the copy to the device; the arrays must stay until synchronize()."""
        self.device.upload(self.address, self.host)

    def download(self) -> None:
        """Start the copy to the host; it is there after synchronize()."""
        self.device.download(self.host, self.address)


def array_bytes(shapes: Shapes) -> dict[str, int]:
    """Bytes of each array."""
    return {name: math.prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype) in shapes.items()}


def staged_bytes(shapes: Shapes) -> int:
    """Bytes of an area that holds these arrays."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in array_bytes(shapes).values())
