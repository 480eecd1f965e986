"""Round to nearest, with scales searched for each group: no data is needed, a row may be done by itself."""

from __future__ import annotations

import numpy as np

from compiler.quantization.grid import Array, Grid, Quantized, check_finite, stored


def round_to_nearest(
    w: Array, grid: Grid, importance: Array | None = None, *, search: bool = True
) -> Quantized:
    """w [N, K] on the grid. importance [K]: how much an input's errors weigh, such as its mean square.

    search: False takes the range that just holds each group. Raises UnfitError for NaN and infinities.
    """
    check_finite(w)
    inputs = np.ascontiguousarray(w.T, np.float32)
    codes, params = np.empty_like(inputs), []
    for a, b in grid.groups(len(inputs)):
        found = grid.fit(inputs[a:b], None if importance is None else importance[a:b]) if search else None
        params.append(found or grid.plain(inputs[a:b]))
        codes[a:b] = grid.codes(inputs[a:b], params[-1])
    return stored(grid, codes, params)
