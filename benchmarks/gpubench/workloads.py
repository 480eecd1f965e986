"""What is measured: models, of which there are shapes alone, and steps of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import compiler
from codegen.costs import StepShape
from runtime import Artifact
from runtime.manifest import KVGroup
from runtime.step import Step

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3-8b")
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A step: of each of `requests`, `tokens` new tokens after `cached` ones."""

    name: str
    requests: int
    cached: int
    tokens: int

    @property
    def shape(self) -> StepShape:
        requests, length = self.requests, self.cached + self.tokens
        return StepShape((self.tokens,) * requests, (length,) * requests, requests)

    @property
    def length(self) -> int:
        return self.cached + self.tokens

    def filling(self, tokens: int) -> list[Workload]:
        """Steps of one request that compute what is cached, `tokens` at a time."""
        starts = range(0, self.cached, tokens)
        return [Workload("fill", 1, at, min(tokens, self.cached - at)) for at in starts]

    def blocks(self, block: int) -> int:
        """Of one request."""
        return -(-self.length // block)

    def step(self, blocks: int, groups: list[KVGroup], vocab_size: int) -> Step:
        """Request r has the blocks from r * `blocks` on, in order."""
        block = groups[0].block
        requests = np.arange(self.requests, dtype=np.int32)
        pos = np.tile(np.arange(self.cached, self.length, dtype=np.int32), self.requests)
        starts = np.arange(self.requests + 1, dtype=np.int32) * self.tokens
        table = requests[:, None] * blocks + np.arange(blocks, dtype=np.int32)
        slots = (np.repeat(requests, self.tokens) * blocks * block + pos).astype(np.int32)
        ids = np.random.default_rng(0).integers(0, vocab_size, len(pos)).astype(np.int32)
        lens = np.full(self.requests, self.length, np.int32)
        rows = (starts[1:] - 1).astype(np.int32)
        return Step(ids, pos, starts, lens, rows, [slots] * len(groups), [table] * len(groups))


DECODE = Workload("decode", 1, 2047, 1)
DECODE_16 = Workload("decode of 16", 16, 2047, 1)
PREFILL = Workload("prefill", 1, 0, 2048)
WORKLOADS = (DECODE, DECODE_16, PREFILL)
TINY_WORKLOADS = (Workload("decode of 2", 2, 20, 1), Workload("prefill", 1, 0, 24))


def config_of(model: str) -> Path:
    return CONFIGS / model


def tiny_config(folder: Path) -> Path:
    """A model that the interpreter runs in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def compiled(config: Path, target: str, folder: Path) -> Artifact:
    """Compiled for a target, without weights."""
    out = folder / f"{config.name}.octavo"
    compiler.compile(config, out, target=target, weights=False)
    return Artifact.open(out)
