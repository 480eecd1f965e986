"""What each axis of a value is made of, while a mixture of experts is read from its sum back to its scores.

An axis is a product of atoms, the outermost first; one of size 1 is of none. The atoms are the tokens, the
experts, the slots of a token, and features. Only the sizes of tokens depend on the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from ir.dims import Dim, free_names, normalize, product
from ir.graph import Arg, Value
from ir.rewrite import View
from passes.match import shape

_ids = count()


@dataclass(frozen=True)
class Atom:
    """kind: "t", "e", "k" or "f". number: tells features of one size apart."""

    kind: str
    size: Dim
    number: int = 0


Axis = tuple[Atom, ...]
Layout = tuple[Axis, ...]


class Unseen(Exception):
    """Why a value is not seen to be a mixture of experts."""


def feature(size: Dim) -> Axis:
    return () if size == 1 else (Atom("f", size, next(_ids)),)


def layout_of(sizes: Sequence[Dim]) -> Layout:
    """Of a value that has tokens and features alone. Raises Unseen."""
    if sum(bool(free_names(d)) for d in sizes) > 1:
        raise Unseen("its tokens are more than one axis")
    return tuple((Atom("t", d),) if free_names(d) else feature(d) for d in sizes)


def fitted(layout: Layout, sizes: Sequence[Dim]) -> Layout:
    """The layout of an operand of these sizes, which broadcasts to what has `layout`. Raises Unseen."""
    found = tuple(() if d == 1 else a for a, d in zip(layout[len(layout) - len(sizes) :], sizes, strict=True))
    if any(_size(a) != d for a, d in zip(found, sizes, strict=True)):
        raise Unseen(f"{list(sizes)} is not of tokens, experts and features as what reads it is")
    return found


def regrouped(layout: Layout, sizes: Sequence[Dim]) -> Layout:
    """The same atoms as axes of other sizes, as a reshape has them. Raises Unseen."""
    atoms, found = [a for axis in layout for a in axis], list[Axis]()
    for size in sizes:
        axis: Axis = ()
        while atoms and _size(axis) != size:
            axis = (*axis, atoms.pop(0))
        if _size(axis) != size:
            raise Unseen(f"the reshape to {list(sizes)} breaks up experts, tokens or features")
        found.append(axis)
    if atoms:
        raise Unseen(f"the reshape to {list(sizes)} breaks up experts, tokens or features")
    return tuple(found)


def _size(axis: Axis) -> Dim:
    return normalize(product(tuple(a.size for a in axis)))


def has(layout: Layout, kind: str) -> bool:
    return any(a.kind == kind for axis in layout for a in axis)


def of_kind(layout: Layout, kind: str) -> tuple[Atom, ...]:
    return tuple(a for axis in layout for a in axis if a.kind == kind)


def features(layout: Layout) -> tuple[Atom, ...]:
    return of_kind(layout, "f")


def transposed(layout: Layout, perm: Sequence[int]) -> Layout:
    """Of what is transposed to this layout."""
    before = {at: axis for axis, at in zip(layout, perm, strict=True)}
    return tuple(before[at] for at in range(len(layout)))


def arranged(view: View, arg: Arg, layout: Layout, order: Iterable[Atom], sizes: Sequence[Dim]) -> Value:
    """A value with its atoms in another order, as axes of these sizes. Raises Unseen."""
    atoms, order = [a for axis in layout for a in axis], list(order)
    if len(atoms) != len(order) or set(atoms) != set(order):
        raise Unseen("its axes are not those of what reads it")
    if atoms == order:
        return _shaped(view, arg, tuple(sizes))
    apart = _shaped(view, arg, tuple(a.size for a in atoms))
    value = view.op("transpose", apart, perm=tuple(atoms.index(a) for a in order))
    return _shaped(view, value, tuple(sizes))


def _shaped(view: View, arg: Arg, sizes: tuple[Dim, ...]) -> Value:
    if isinstance(arg, Value) and shape(arg) == sizes:
        return arg
    return view.op("reshape", arg, shape=sizes)
