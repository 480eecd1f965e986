"""AWQ (arXiv 2306.00978): give the inputs that are large more of a grid's steps.

Each input's weights are multiplied by s and the input itself by 1 / s, with s its mean magnitude to a power
that is searched for; the matrix is then rounded to nearest, and its scales are fitted with what errors cost
there.
"""

from __future__ import annotations

import numpy as np

from compiler.quantization.gptq import output_error
from compiler.quantization.grid import Array, Grid, Quantized, check_finite
from compiler.quantization.rtn import round_to_nearest

POWERS = tuple(i / 10 for i in range(11))
SMALLEST = 1e-4  # of the mean magnitude: an input that is almost never set is scaled no further


def awq(w: Array, hessian: Array, magnitude: Array, grid: Grid) -> tuple[Quantized, Array | None]:
    """w [N, K] on the grid after scaling, and what its inputs are multiplied by [K]; None where nothing
    helps.

    magnitude: mean |x| of each input [K]. Raises UnfitError for NaN and infinities.
    """
    check_finite(w)
    plain, best, least = None, None, np.inf
    for power in POWERS:
        scale = input_scale(magnitude, power)
        found = round_to_nearest(w / scale, grid, search=False)
        error = output_error(w, found.values() * scale, hessian)
        if error < least:
            best, least = scale, error
    importance = np.diag(hessian)
    scale = np.ones_like(magnitude) if best is None else best
    floor = 1e-6 * float(importance.mean()) or 1.0
    fitted = round_to_nearest(w / scale, grid, (importance + floor) * np.square(scale))
    plain = round_to_nearest(w, grid, importance + floor)
    if output_error(w, plain.values(), hessian) <= output_error(w, fitted.values() * scale, hessian):
        return plain, None
    return fitted, scale.astype(np.float32)


def input_scale(magnitude: Array, power: float) -> Array:
    """What inputs are multiplied by: magnitude^-power, with a geometric mean of its extremes of 1."""
    mean = float(magnitude.mean()) or 1.0
    scale = np.power(np.maximum(magnitude / mean, SMALLEST), -power)
    return (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
