"""Act-order: groups of columns that are not beside each other, put there."""

from __future__ import annotations

import numpy as np

from compiler.weights import Array, WeightError

OTHER_ORDER = (
    "Quantise the model without act-order (desc_act=false), or compile the one that it was made from"
)


def group_order(groups: Array, group_size: int, where: str) -> Array | None:
    """The columns in the order of their groups, from the group of each [K]; None: they are already.

    Raises WeightError where a group other than the last is not of group_size.
    """
    size = group_size or len(groups)
    regular = np.arange(len(groups)) // max(size, 1)
    if np.array_equal(groups, regular):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], regular):
        what = f"its g_idx does not put {size} columns into each group"
        raise WeightError(what, where=where, todo=OTHER_ORDER)
    return order
