"""Few random tokens: what they are fitted to is not the point here."""

from __future__ import annotations

import pytest

from compiler.quantization import decide


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "RANDOM_TOKENS", 384)
