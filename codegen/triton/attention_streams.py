"""What attention's templates ask of a stream of a cache: how it lies, and what makes factors of it."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.triton.kv_layout import StreamLayout
from codegen.triton.schedule import power_of_two


@dataclass(frozen=True)
class StreamHooks(StreamLayout):
    """What templates ask of a stream. type: of factors; converted: what makes a loaded element, or code, one.
    tile_keys: of a tile.
    """

    type: str
    converted: str
    tile_keys: int

    @property
    def width(self) -> int:
        """Its heads' size as tiles have it."""
        return max(16, power_of_two(self.size))

    @property
    def lanes(self) -> int:
        """Of a loaded row."""
        return self.width if self.channels else self.width // self.per

    @property
    def block(self) -> int:
        return self.kv.block

    @property
    def quantized(self) -> bool:
        return self.stream.is_quantized

    @property
    def minimum(self) -> bool:
        return self.stream.has_minimum

    @property
    def scaled(self) -> bool:
        """Whether scales multiply scores or weights."""
        return self.quantized and not self.channels

    @property
    def arrays(self) -> list[str]:
        """What there is beside codes."""
        return [part.rpartition(".")[2] for part in self.stream.parts[1:]]

    @property
    def cast(self) -> str:
        return "" if self.quantized else self.converted.removeprefix("CODE")

    @property
    def decode(self) -> str:
        return self.converted

    @property
    def one_block(self) -> bool:
        """Whether a tile's keys are of one block."""
        return self.block % self.tile_keys == 0
