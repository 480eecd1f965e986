"""From a checkpoint to an engine artifact: import, passes, code generation, packing, building."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiler.driver import Progress


def compile(
    source: Any,
    out: str | Path,
    *,
    target: str = "cpu",
    dtype: str = "f32",
    max_context: int | None = None,
    isa: Sequence[str] | None = None,
    check: bool = False,
    dump_ir: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Compile a checkpoint into the artifact directory `out` and return its path.

    source: a Hugging Face directory, a GGUF file, a torch.nn.Module or an exported program. dtype: of
    what linears multiply and of the KV cache, f32 or bf16; sums are f32. max_context: the longest sequence,
    default the model's own. isa: the ISA levels to build, default v4, v3 and baseline, and v4-vnni-bf16 for
    bf16 linears. check: run the reference interpreter before and after every pass, and against the compiled
    forward. dump_ir: a directory that gets the graph after every pass; the artifact keeps them too. force:
    replace a directory at `out` that is not an artifact. An artifact is replaced in any case, and only when
    the new one is whole.

    Raises compiler.errors.CompileError with what was wrong, where, and what to do.
    """
    # Imported here so that `import compiler`, which every subcommand does, needs neither sympy nor torch.
    from compiler.driver import compile_artifact

    return compile_artifact(
        source,
        Path(out),
        target=target,
        dtype=dtype,
        max_context=max_context,
        isa=isa,
        check=check,
        dump_ir=None if dump_ir is None else Path(dump_ir),
        force=force,
        progress=progress,
    )
