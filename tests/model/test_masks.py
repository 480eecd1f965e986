"""Masks that are not causal are run right or refused, and so is what mixes tokens outside attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import compiler
from compiler.errors import CompileError
from tests.model import tiny
from tests.model.harness import Stepper


def positions(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Query positions [S, 1] and key positions [1, S]."""
    at = torch.arange(length, device=device)
    return at[:, None], at[None, :]


def dilated(length: int, device: torch.device) -> torch.Tensor:
    """Every third key, and the two before: no window, no chunk."""
    q, k = positions(length, device)
    return (k > q) | (((q - k) % 3 != 0) & (q - k > 2))


class RandomTable(nn.Module):
    """A random mask that never looks ahead, kept as a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        hidden = torch.rand(tiny.CONTEXT, tiny.CONTEXT, generator=torch.Generator().manual_seed(5)) < 0.5
        hidden.fill_diagonal_(False)
        self.register_buffer("hidden", hidden | torch.ones_like(hidden).triu(1))

    def forward(self, length: int, device: torch.device) -> torch.Tensor:
        return self.hidden[:length, :length]


def ahead_by_one(length: int, device: torch.device) -> torch.Tensor:
    q, k = positions(length, device)
    return k > q + 1


def everything(length: int, device: torch.device) -> torch.Tensor:
    q, k = positions(length, device)
    return k > q + length


def ahead_from_far(length: int, device: torch.device) -> torch.Tensor:
    """Causal up to position 99, and not after: only looking at every position finds it."""
    q, k = positions(length, device)
    return (k > q) & (q < 100)


@pytest.mark.parametrize(
    "mask",
    [dilated, RandomTable()],  # test_user_modules has windows and chunks
    ids=lambda m: type(m).__name__ if isinstance(m, nn.Module) else m.__name__,
)
def test_a_mask_that_never_looks_ahead_is_run_right(mask: tiny.Mask, tmp_path: Path) -> None:
    model = tiny.build_plain(mask)
    out = tiny.compiled(model, tmp_path / "m.octavo")
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB, 100).tolist()
    expected = tiny.reference_logits(model, ids).numpy()
    causal = tiny.reference_logits(tiny.build_plain(), ids).numpy()
    found = Stepper(out, tiny.CONTEXT).run([ids[:37], ids[37:70], ids[70:71], ids[71:]])
    assert np.abs(found - expected).max() < 1e-4 * expected.std()
    assert np.abs(found - causal).max() > 0.1 * expected.std()  # the mask matters


@pytest.mark.parametrize("mask", [ahead_by_one, everything, ahead_from_far])
def test_a_mask_that_looks_ahead_is_refused_where_it_is(mask: tiny.Mask, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"attention\.0"):
        compiler.compile(
            tiny.build_plain(mask), tmp_path / "m.octavo", max_context=tiny.CONTEXT, isa=tiny.ISA
        )
    assert not (tmp_path / "m.octavo").exists()


class CausalConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(96, 96, 3, groups=96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class Delayed(nn.Module):
    """Half of each row from the token before, as a learned start before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now, before = x.split(48, dim=-1)
        return torch.cat([now, torch.cat([self.start, before[:, :-1]], dim=1)], dim=-1)


@pytest.mark.parametrize("mix", [CausalConv, Delayed])
def test_what_reads_the_tokens_just_before_is_run_right(mix: type[nn.Module], tmp_path: Path) -> None:
    model = tiny.build_plain(mix=mix())
    stepper = Stepper(tiny.compiled(model, tmp_path / "m.octavo"), tiny.CONTEXT)
    ids = [int(i) for i in np.random.default_rng(3).integers(3, tiny.VOCAB, 40)]
    want = tiny.reference_logits(model, ids).numpy()
    whole = stepper.logits(ids)
    assert np.abs(whole - want).max() < 1e-4 * want.std()
    np.testing.assert_array_equal(stepper.run([ids[:1], ids[1:18], ids[18:19], ids[19:]]), whole)


class LogScale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.log(torch.tensor(x.shape[1], dtype=torch.float32, device=x.device) + 1.0)


class MeanOverTime(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=1, keepdim=True)


class LastPosition(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.shape[1] - 1)


@pytest.mark.parametrize("mix", [LogScale, MeanOverTime, LastPosition])
def test_what_mixes_tokens_or_depends_on_the_length_is_refused_where_it_is(
    mix: type[nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=r"\bmix\b"):
        compiler.compile(tiny.build_plain(mix=mix()), tmp_path / "m.octavo", max_context=tiny.CONTEXT)
    assert not (tmp_path / "m.octavo").exists()
