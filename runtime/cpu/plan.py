"""plan.json of the CPU target."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import ArtifactError
from runtime.limits import Limits
from runtime.manifest import Fields, parse_json
from runtime.weights import Tensor, parse_read


@dataclass(frozen=True)
class Plan:
    """Bytes of the arena per token, row and request of a step (rounded up to 16), and fixed.

    weights: what the library reads of them, in its order; None in artifacts of earlier versions.
    """

    per_token: int
    per_row: int
    per_request: int
    fixed: int
    weights: tuple[Tensor, ...] | None = None

    @staticmethod
    def parse(data: bytes, where: str) -> Plan:
        top = Fields(parse_json(data, where), where)
        arena = top.object("arena")
        extra = set(arena.value) - {"T", "Q", "R", ""}
        if extra:
            raise ArtifactError(
                f"arena has an unknown term {min(extra)!r}", where=where, todo="Compile again"
            )
        values = (arena.integer(k, 0, 2**48) if k in arena.value else 0 for k in ("T", "Q", "R", ""))
        return Plan(*values, weights=parse_read(top))

    def arena_bytes(self, limits: Limits) -> int:
        def up(size: int) -> int:
            return -(-size // 16) * 16

        return (
            self.per_token * up(limits.max_step_tokens)
            + self.per_row * up(limits.max_rows)
            + self.per_request * up(limits.max_requests)
            + self.fixed
        )
