"""From a checkpoint to an engine artifact: import, passes, code generation, packing, building."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiler.explanation import Explanation
    from compiler.flight import Preflight
    from compiler.progress import Progress


def compile(
    source: Any,
    out: str | Path,
    *,
    target: str | Sequence[str] = "cpu",
    dtype: str | None = None,
    max_context: int | None = None,
    block: int | None = None,
    isa: Sequence[str] | None = None,
    invariant: bool = False,
    weights: bool = True,
    check: bool = False,
    dump_ir: str | Path | None = None,
    cache: bool = True,
    force: bool = False,
    quantize: str = "none",
    group: int | None = None,
    algorithm: str | None = None,
    symmetric: bool = True,
    keep: str | Sequence[str] = (),
    activations: str | None = None,
    kv: str | None = None,
    calibration: str | Path | None = None,
    max_kl: float | None = None,
    draft: str | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compile a checkpoint into the artifact directory `out` and return its path.

    source: a Hugging Face directory, a GGUF or ONNX file, a torch.nn.Module (a torch.fx.GraphModule too) or
    an exported program. target: what it
    will run on, one or several of cpu, cuda:sm_80, cuda:sm_90, cuda:sm_100, hip:gfx942 and
    triton-interpret; no GPU is needed to compile for one. dtype: of what linears multiply and of the KV
    cache, f32 or bf16; sums are f32. Default bf16 where all targets are GPUs, else f32. max_context: the
    longest sequence, default the model's own. block: tokens of a KV block, 8, 16, 32 or 64, which changes
    no bit of what the CPU computes; default 16, but 64 for a cache of int4 or int2, whose keys share scales
    over a block. isa: the ISA levels to build for cpu, default v4, v3 and baseline, and v4-vnni-bf16 for
    bf16 linears. invariant: GPUs' kernels keep one order of accumulation whatever they are batched with, as
    the CPU's always do. weights: False for shapes alone, from a directory that need only hold config.json:
    to inspect and to measure. check: run the reference interpreter before and after every pass, and against
    the compiled forward. dump_ir: a directory that gets the graph after every pass; the artifact keeps them
    too. cache: False builds every kernel anew, where else those that were built before are found by content
    in $OCTAVO_CACHE. force: replace a directory at `out` that is not an artifact. An artifact is replaced
    in any case, and only when the new one is whole.

    quantize: weights as int4, int8 or fp8, as auto, int4 where a layer bears it, as own, the codes that a
    checkpoint comes with (docs/checkpoints.md), or none, floats, of such a checkpoint too. The output layer
    and the embedding table stay at int8 beside int4. group: inputs of a matrix that share a scale, 32, 64
    or 128, and of int8 0 for all; default 32. algorithm: rtn rounds to the nearest; gptq, the default of
    int4, and awq fit weights to text. symmetric: False gives groups of int4 an offset too. keep: patterns
    of module paths whose matrices are left as they are, or PATTERN=FORMAT, the first that matches.
    activations: what linears read, int8 in groups of 32 (the default beside int weights where a CPU is
    compiled for), int8-token, fp8 or none. kv: the cache, f32, bf16, int8, fp8, int4, or int2, which is an
    experiment; default dtype. calibration: a text file to fit to; default some pages that come with Octavo.
    max_kl: the mean KL, in nats, of the quantised model from what it was, past which it is refused; default
    by format (docs/quantization.md).

    draft: self:int4 bundles the model's own weights as int4, for the CPU, which drafts tokens that the model
    verifies (runtime.load with draft="self"); algorithm and calibration are the draft's too.

    example_inputs: arguments of one call of a module, a sequence or a mapping from keywords, where its
    signature does not tell what they are: ids [B,S], positions, a padding mask of ones, and constants.

    Raises compiler.errors.CompileError with what was wrong, where, and what to do.
    """
    # Imported here so that `import compiler`, which every subcommand does, needs neither sympy nor torch.
    from compiler import arguments
    from compiler.driver import compile_artifact
    from compiler.options import Options

    arguments.check(
        out=out, target=target, dtype=dtype, max_context=max_context, block=block, isa=isa,
        invariant=invariant, weights=weights, check=check, dump_ir=dump_ir, cache=cache, force=force,
        quantize=quantize, group=group, algorithm=algorithm, symmetric=symmetric, keep=keep,
        activations=activations, kv=kv, calibration=calibration, max_kl=max_kl, draft=draft,
        example_inputs=example_inputs,
    )  # fmt: skip
    folder = None if dump_ir is None else Path(dump_ir)
    quantization = arguments.quantization(
        quantize, group, algorithm, symmetric, keep, activations, kv, calibration, max_kl
    )
    return compile_artifact(
        source,
        Path(out),
        target,
        Options(
            dtype, max_context, block, weights, check, folder, cache, quantization, draft, example_inputs
        ),
        isa=isa,
        invariant=invariant,
        force=force,
        progress=progress,
    )


def preflight(
    source: Any,
    out: str | Path,
    *,
    target: str | Sequence[str] = "cpu",
    dtype: str | None = None,
    max_context: int | None = None,
    block: int | None = None,
    isa: Sequence[str] | None = None,
    invariant: bool = False,
    weights: bool = True,
    check: bool = False,
    cache: bool = True,
    force: bool = False,
    quantize: str = "none",
    group: int | None = None,
    algorithm: str | None = None,
    symmetric: bool = True,
    keep: str | Sequence[str] = (),
    activations: str | None = None,
    kv: str | None = None,
    calibration: str | Path | None = None,
    max_kl: float | None = None,
    draft: str | None = None,
) -> Preflight:
    """What `compile` would read, write and take, from the checkpoint's headers; nothing is written.

    It prints as the lines that `octavo compile` starts with; `.json` is all of it. Raises
    compiler.errors.CompileError where a compile could not begin.
    """
    from compiler import arguments
    from compiler.driver import plan_compile
    from compiler.options import Options

    arguments.check(
        out=out, target=target, dtype=dtype, max_context=max_context, block=block, isa=isa,
        invariant=invariant, weights=weights, check=check, cache=cache, force=force, quantize=quantize,
        group=group, algorithm=algorithm, symmetric=symmetric, keep=keep, activations=activations, kv=kv,
        calibration=calibration, max_kl=max_kl,
    )  # fmt: skip
    quantization = arguments.quantization(
        quantize, group, algorithm, symmetric, keep, activations, kv, calibration, max_kl
    )
    options = Options(dtype, max_context, block, weights, check, None, cache, quantization, draft)
    return plan_compile(source, Path(out), target, options, isa=isa, invariant=invariant, force=force)


def explain(
    source: Any,
    *,
    dtype: str = "f32",
    max_context: int | None = None,
    block: int = 16,
    layer: int | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """What the compiler recognises in a model, layer by layer, and the first reason if it refuses it.

    source: as for compile, and besides an artifact's directory, the path of a graph's text (NAME.ir), and a
    directory that holds no more than a config.json. dtype, block: of the KV cache, as compiled. layer: the
    number of a layer whose ops are wanted too. The result prints as text; `.json` is all of it, and
    `.refused` None where the model can be compiled.

    Raises compiler.errors.CompileError where there is no model to explain.
    """
    from compiler import arguments
    from compiler.explanation import Asked
    from compiler.explanation import explain as explain_source

    arguments.check(dtype=dtype, max_context=max_context, block=block, layer=layer)
    return explain_source(source, Asked(dtype, max_context, block, layer), progress)
