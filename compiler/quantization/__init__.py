"""Quantisation that is measured: options, calibration text, algorithms on arrays, and the gate on quality."""
