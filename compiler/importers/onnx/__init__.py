"""ONNX files -> the IR: `load_onnx` is what the other importers' `load` calls."""
