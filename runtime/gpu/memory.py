"""What an executor takes of a device's memory, and weights on their way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import ResourceError
from runtime.gpu.device import Array, Device
from runtime.weights import Weights

ALIGNMENT = 256  # of every weight, as of what a device allocates
PIECE_BYTES = 16 << 20  # of weights that are copied at once


@dataclass(frozen=True)
class Needs:
    """Bytes of device memory, by what they are for."""

    weights: int
    arena: int
    logits: int
    cache: int
    inputs: int

    @property
    def total(self) -> int:
        return self.weights + self.arena + self.logits + self.cache + self.inputs

    def check(self, free: int, name: str) -> None:
        """Raises ResourceError where a device has less free."""
        if self.total > free:
            raise ResourceError(
                f"{name} has {_mib(free)} MiB of memory free; this takes {_mib(self.total)}: weights "
                f"{_mib(self.weights)}, arena {_mib(self.arena)}, logits {_mib(self.logits)}, KV cache "
                f"{_mib(self.cache)}, inputs {_mib(self.inputs)}",
                todo="Use smaller kv_memory, max_step_tokens or max_requests, or free memory",
            )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def weight_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each weight lies in one allocation, and its bytes."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, at


def upload_weights(device: Device, weights: Weights, address: int, offsets: Sequence[int]) -> list[int]:
    """The weights' addresses, once they are there. A piece is read from the file while another is copied."""
    halves = device.host_array(2 * PIECE_BYTES).reshape(2, PIECE_BYTES)
    turn = 0
    for tensor, offset in zip(weights.tensors, offsets, strict=True):
        for at in range(0, tensor.size, PIECE_BYTES):
            piece = _filled(halves[turn], tensor[at : at + PIECE_BYTES])
            device.synchronize()  # the other half is free again
            device.upload(address + offset + at, piece)
            turn = 1 - turn
    device.synchronize()
    device.free_host(halves)
    return [address + offset for offset in offsets]


def _filled(half: Array, source: Array) -> Array:
    half[: source.size] = source
    return half[: source.size]
