"""What an executor takes of a device's memory, and weights on their way there."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.gpu.device import Array, Device
from runtime.gpu.plan import Plan
from runtime.gpu.sampler import sampler_bytes
from runtime.gpu.steps import step_bytes
from runtime.limits import Limits
from runtime.manifest import KVGroup, Model
from runtime.memory.plan import Workspace
from runtime.weights import Weights

ALIGNMENT = 256  # of every weight, as of what a device allocates
PIECE_BYTES = 16 << 20  # of weights that are copied at once


def count_workspace(plan: Plan, limits: Limits, model: Model, groups: Sequence[KVGroup]) -> Workspace:
    """Device memory for steps up to the limits, beside weights and blocks."""
    rows = limits.max_rows
    return Workspace(
        arena=sum(plan.buffer_bytes(limits.max_step_tokens, limits.max_requests, rows)),
        logits=rows * model.vocab_size * 4,
        sampler=sampler_bytes(rows, model.vocab_size, plan.sample_scratch),
        inputs=step_bytes(limits, len(groups), table_width(model, groups)),
    )


def table_width(model: Model, groups: Sequence[KVGroup]) -> int:
    """Blocks of a request of the whole context."""
    return -(-model.max_context // groups[0].block) if groups else 1


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
