"""llama.cpp's quantiser. Run by an environment that has llama-cpp-python, not imported.

usage: quantize_gguf.py SOURCE.gguf OUT.gguf Q8_0|Q4_0
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp as lib

FILE_TYPES = {"Q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0}

if __name__ == "__main__":
    source, out, type_name = sys.argv[1:]
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[type_name], 2
    code = lib.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params))
    sys.exit(f"llama_model_quantize returned {code}" if code else 0)
