"""The demo model in the forms that the peers read, all from one file and made once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def gguf(source: Path, folder: Path, type_name: str) -> Path:
    """The GGUF file `source` with its matrices as F32, F16, BF16, Q8_0 or Q4_0.

    Beside Q4_0, embeddings and head whose rows are no multiple of 256 long are Q8_0, as llama.cpp has them.
    Raises ValueError for others: llama.cpp writes Q6_K then, see quantized_gguf.
    """
    return _once(_as_gguf(source, folder, type_name), lambda path: _write_gguf(source, path, type_name))


def quantized_gguf(source: Path, folder: Path, type_name: str, python: Path) -> Path:
    """The same as Q8_0 or Q4_0 by llama.cpp's own quantiser. python: of an environment with it."""
    exact = source if _is_float(source) else gguf(source, folder, "F32")
    command = [python, Path(__file__).parent / "quantize_gguf.py", exact]
    return _once(
        _as_gguf(source, folder, type_name),
        lambda path: _quiet([*command, path, type_name]),
    )


def huggingface(source: Path, folder: Path) -> Path:
    """A Hugging Face directory with the weights of a GGUF file, f32."""
    return _once(folder / f"{source.stem}.huggingface", lambda path: _write_huggingface(source, path))


def onnx(source: Path, folder: Path, python: Path) -> Path:
    """What onnxruntime-genai's own builder makes of the model in fp32. python: of an environment with it."""
    model = huggingface(source, folder)

    def build(path: Path) -> None:
        options = ["-m", "none", "-i", model, "-o", path, "-p", "fp32", "-e", "cpu", "-c", folder / "cache"]
        subprocess.run([python, "-m", "onnxruntime_genai.models.builder", *options], check=True)

    return _once(folder / f"{source.stem}.onnx-fp32", build)


def _as_gguf(source: Path, folder: Path, type_name: str) -> Path:
    return folder / f"{source.stem}.as-{type_name}.gguf"


def _quiet(command: list[Any]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _is_float(source: Path) -> bool:
    from gguf import GGUFReader

    return all(tensor.tensor_type.name in ("F32", "F16", "BF16") for tensor in GGUFReader(source).tensors)


def _once(path: Path, write: Callable[[Path], None]) -> Path:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"part-{path.name}")
        print(f"writing {path}", file=sys.stderr)
        write(part)
        part.rename(path)
    return path


def _write_gguf(source: Path, path: Path, type_name: str) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    wanted = GGMLQuantizationType[type_name]
    file_type = "ALL_F32" if type_name == "F32" else f"MOSTLY_{type_name}"
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = int(LlamaFileType[file_type]) if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        stored = wanted if weights.ndim > 1 else GGMLQuantizationType.F32  # norms stay as they are
        if type_name == "Q4_0" and tensor.name in ("token_embd.weight", "output.weight"):
            if weights.shape[-1] % 256 == 0:
                raise ValueError(f"{tensor.name}: llama.cpp writes it as Q6_K; have it quantise the file")
            stored = GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, quantize(weights, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_huggingface(source: Path, path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(path)
    options = {"gguf_file": source.name, "dtype": torch.float32}
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, **options)
    model.hf_quantizer = None  # transformers would refuse to save weights that it dequantised
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(path)
