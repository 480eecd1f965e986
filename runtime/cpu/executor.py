"""The CPU target's executor: the KV pools, and the compiled forwards that work on them.

Everything a step needs is taken once, here: the arena (sizes from plan.json), the logits, and the KV pools,
all of them anonymous memory that costs nothing until it is touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.artifact import Artifact
from runtime.cpu.abi import address
from runtime.cpu.forward import CpuForward
from runtime.kv.budget import swap_places
from runtime.limits import Limits
from runtime.manifest import CpuTarget, KVGroup
from runtime.memory.mapping import anonymous


class CpuExecutor(CpuForward):
    """See runtime.executor.Executor.

    swap_blocks: places for preempted requests' blocks, see runtime.kv.budget.swap_places. draft: the forward
    of the artifact's own draft on the same pools, for steps of a token of each request; None: it was not
    asked for. compiled: the artifact's draft, to run it in place of the target. move_weights: to huge pages,
    in a copy that takes as much memory as they do; not worth it for a few steps.
    """

    target = "cpu"

    def __init__(
        self,
        artifact: Artifact,
        limits: Limits,
        num_blocks: Sequence[int],
        threads: int,
        isa: str | None = None,
        *,
        swap_blocks: int = 0,
        draft: bool = False,
        compiled: CpuTarget | None = None,
        move_weights: bool = True,
    ) -> None:
        groups, target = artifact.manifest.kv_groups, compiled or artifact.cpu
        kernel = artifact.kernel(isa, target)
        places = swap_places([group.is_single for group in groups], swap_blocks, limits)
        artifact.weights()  # there are some
        pools = _blocks(num_blocks, groups, "the KV cache")
        self._places = _blocks(places, groups, "swapped blocks") if swap_blocks else []
        super().__init__(artifact, target, kernel, limits, pools, threads)
        self.draft: CpuForward | None = None
        try:
            if draft:
                self.draft = CpuForward(
                    artifact, artifact.draft(), artifact.draft_kernel(kernel.isa), limits.drafting, pools,
                    threads, self,
                )  # fmt: skip
        except BaseException:
            self.close()
            raise
        taken = sum(array.nbytes for array in (*pools, *self._places))
        for forward in (self, self.draft):
            if forward is not None and move_weights:
                forward.move_weights(taken)

    def copy_blocks(self, group: int, pairs: np.ndarray) -> None:
        data = address(self._pools[group])
        self._library.octavo_copy_blocks(self._handle, group, data, address(pairs), len(pairs))

    def swap_out(self, group: int, pairs: np.ndarray) -> None:
        self._places[group][pairs[:, 1]] = self._pools[group][pairs[:, 0]]

    def swap_in(self, group: int, pairs: np.ndarray) -> None:
        self._pools[group][pairs[:, 1]] = self._places[group][pairs[:, 0]]

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()
        super().close()
        self._places = []


def _blocks(counts: Sequence[int], groups: Sequence[KVGroup], what: str) -> list[np.ndarray]:
    """Of each group, bytes [blocks, block_bytes]."""
    return [
        anonymous(count * group.block_bytes, what).reshape(count, group.block_bytes)
        for count, group in zip(counts, groups, strict=True)
    ]
