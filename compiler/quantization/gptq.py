"""GPTQ (arXiv 2210.17323): round a matrix's inputs one by one, and let those after it make up for the error.

With X the inputs and H = X^T X, the error of the outputs is tr(E H E^T) for E = W - Q. Once input i is
rounded with error e, the others are best moved by -e U[i, i+1:] / U[i, i], where H^-1 = U^T U and U is
upper triangular. The scales of a group are found when its first input is reached, from weights that have
taken up the errors before them; there, an input weighs 1 / U[i, i]^2, which is what its error costs.
"""

from __future__ import annotations

import numpy as np

from compiler.quantization.grid import Array, Grid, Params, Quantized, UnfitError, check_finite, stored

DAMPING = 0.1  # of the mean square of an input, added to each: the text seen is not all text
MORE_DAMPING = 10  # times as much, where H cannot be factored


def gptq(w: Array, hessian: Array, grid: Grid, *, damping: float = DAMPING) -> Quantized:
    """w [N, K] on the grid, least in tr(E H E^T) for the hessian H [K, K] of the matrix's inputs.

    Raises UnfitError for NaN and infinities in either.
    """
    check_finite(w)
    inputs = np.array(w.T, np.float32, order="C")  # [K, N], a copy: it takes up errors
    upper = inverse_factor(hessian, damping)
    codes, params = np.empty_like(inputs), []
    for a, b in grid.groups(len(inputs)):
        diagonal = np.diag(upper)[a:b]
        params.append(grid.fit(inputs[a:b], np.square(diagonal.min() / diagonal)))
        errors = _round_group(inputs[a:b], upper[a:b, a:b], grid, params[-1], codes[a:b])
        inputs[b:] -= upper[a:b, b:].T @ errors
    return stored(grid, codes, params)


def _round_group(w: Array, upper: Array, grid: Grid, params: Params, codes: Array) -> Array:
    """Fill the codes of a group w [g, N], which takes up its own errors; returns them over U's diagonal."""
    errors = np.empty_like(w)
    for i in range(len(w)):
        codes[i] = grid.codes(w[i], params)
        errors[i] = (w[i] - grid.values(codes[i], params)) / upper[i, i]
        w[i + 1 :] -= upper[i, i + 1 :, None] * errors[i]
    return errors


def inverse_factor(hessian: Array, damping: float) -> Array:
    """U, upper triangular with H^-1 = U^T U, of the damped hessian, in f32.

    An input that is always 0 has a row of zeros: it is given the others' mean, so that its weights are
    rounded by themselves. Raises UnfitError where H is not finite.
    """
    if not np.isfinite(hessian).all():
        raise UnfitError("its inputs on the calibration text are not finite")
    h = np.array(hessian, np.float64)
    diagonal = np.diag(h).copy()
    mean = float(diagonal.mean()) or 1.0
    h[np.diag_indices_from(h)] += np.where(diagonal > 0, damping * mean, mean)
    while True:
        try:
            lower = np.linalg.cholesky(h[::-1, ::-1])  # H = R R^T with R = lower reversed, so U = R^-1
            return np.linalg.inv(lower[::-1, ::-1]).astype(np.float32)
        except np.linalg.LinAlgError:
            damping = MORE_DAMPING * max(damping, DAMPING)
            h[np.diag_indices_from(h)] += damping * mean


def output_error(w: Array, q: Array, hessian: Array) -> float:
    """The relative error of the matrix's outputs over the text: sqrt(tr(E H E^T) / tr(W H W^T))."""
    norm, error = (float(np.sum((m @ hessian) * m, dtype=np.float64)) for m in (w, w - q))
    return float(np.sqrt(max(error, 0.0) / norm)) if norm > 0 else 0.0
