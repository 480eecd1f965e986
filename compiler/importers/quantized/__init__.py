"""Checkpoints that come quantised: their codes and scales as they are, unpacked when they are asked for.

A module per format; each ends in matrices (`matrix.py`), which a source holds beside plain arrays
(`source.py`), and whose parts a graph reads through `dequantize` (`keep.py`).
"""
