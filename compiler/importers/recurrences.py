"""Linear recurrences as one op: our functions in place of the published kernels' during one export.

transformers marks a function that a published kernel may replace with that kernel's name. Where a model's
code refers to one that is known here, it gets a function that calls the op octavo::recurrence, which only has
a shape, with what is done for each token alone before and after it as ordinary ops. So the export holds no
loop over chunks, whose number would be that of the trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from types import FunctionType
from typing import Any

from compiler.importers.context import Context
from compiler.importers.markers import IGNORED, NAME
from compiler.importers.refused import ImportRefused

_SCHEMA = (
    "recurrence(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta=None, Tensor? rates=None) -> Tensor"
)
EPS = 1e-6  # of the norms of queries and keys inside the kernels
TODO = "Leave it out: a sequence is computed from its start, in one call"

Inside = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """A call of a kernel: its published name, and the line that calls it."""

    kernel: str
    line: str

    def refuse(self, what: str) -> ImportRefused:
        where = f"{self.kernel} at {self.line}"
        return ImportRefused(what, where=where, todo=TODO).at(self.kernel, "", self.line)

    def check(self, given: dict[str, Any]) -> None:
        """given: arguments of no meaning here. Raises ImportRefused where one is not None, False or a flag of
        the model's forward."""
        for name, value in given.items():
            if value is not None and value is not False and name not in IGNORED:
                raise self.refuse(f"it takes the argument {name!r}, whose meaning is not known here")


@contextmanager
def recurrence_markers(model: Any, called: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, what a model's code calls as a published kernel of a recurrence calls octavo::recurrence.

    called: is told of each call.
    """
    import torch

    changed: list[tuple[dict[str, Any], str, Any]] = []
    with torch.library._scoped_library(NAME, "FRAGMENT") as library:
        library.define(_SCHEMA)
        torch.library.register_fake(f"{NAME}::recurrence", _shape, lib=library)
        library.impl("recurrence", compute, "CPU")
        try:
            for names in _namespaces(model):
                for name, function in list(names.items()):
                    kernel = kernel_name(function)
                    if kernel in KERNELS:
                        changed.append((names, name, function))
                        names[name] = partial(_call, kernel, function, called)
            yield
        finally:
            for names, name, function in changed:
                names[name] = function


def kernel_name(function: Any) -> str:
    """The published kernel that a function of transformers stands for; "" where it is none that does."""
    if not isinstance(function, FunctionType):
        return ""
    found = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    known = {"func_name", "package", "torch_function"} <= set(found)
    return str(found["func_name"].cell_contents) if known else ""


def _namespaces(model: Any) -> list[dict[str, Any]]:
    """Where the code of a model's classes looks up functions."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    modules = {each.__module__ for each in classes} & set(sys.modules)
    return [vars(sys.modules[name]) for name in sorted(modules)]


def _call(kernel: str, original: Any, called: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    inside = KERNELS[kernel]
    if inside is not _convolution:
        called()
    frame = sys._getframe(1)
    code = frame.f_code
    line = f"{PurePath(code.co_filename).name}, line {frame.f_lineno}, in {code.co_name}"
    return inside(Site(kernel, line), original, *args, **kwargs)


def _shape(q: Any, k: Any, v: Any, decay: Any, beta: Any = None, rates: Any = None) -> Any:
    """v [B,H,S,V] -> [B,S,H,V]."""
    return v.new_empty((v.shape[0], v.shape[2], v.shape[1], v.shape[3]))


def compute(q: Any, k: Any, v: Any, decay: Any, beta: Any = None, rates: Any = None) -> Any:
    """The recurrence of ir/ops/recurrence.py, token by token."""
    import torch

    heads = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(heads, 1) for x in (q, k))
    state = v.new_zeros((*v.shape[:2], k.shape[3], v.shape[3]))
    found: list[Any] = []
    for t in range(v.shape[2]):
        factors = decay[:, :, t, :, None] if rates is None else decay[:, :, t, None, :] * rates
        state = state * factors.exp()
        new = v[:, :, t]
        if beta is not None:
            new = beta[:, :, t] * (new - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state))
        state = state + k[:, :, t, :, None] * new[:, :, None]
        found.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(found, 1) if found else _shape(q, k, v, decay)


def _delta_rule(
    site: Site,
    _: Any,
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    chunk_size: int = 64,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> Any:
    """query, key [B,S,G,K], value [B,S,H,V], g [B,S,H] or [B,S,H,K], beta [B,S,H] -> [B,S,H,V], no state."""
    site.check({"initial_state": initial_state, "output_final_state": output_final_state, **others})
    q, k, v, decay, rate = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * ((x * x).sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay
    return _op()(q, k, v, decay, rate.unsqueeze(-1)).to(query.dtype), None


def _one_by_one(
    site: Site, original: Any, query: Any, key: Any, value: Any, g: Any, beta: Any, *args: Any, **kwargs: Any
) -> Any:
    """The same without a chunk_size before the other arguments."""
    return _delta_rule(site, original, query, key, value, g, beta, 1, *args, **kwargs)


def _chunk_scan(
    site: Site,
    _: Any,
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int,
    D: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> Any:
    """hidden_states [B,S,H,V], dt [B,S,H], A [H], B, C [B,S,G,K], D, dt_bias [H] -> [B,S,H,V]."""
    import torch

    site.check({"initial_states": initial_states, "return_final_states": return_final_states, **others})
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    x = hidden_states.float()
    steps = (A.float() * dt).unsqueeze(-1), dt.unsqueeze(-1) * x
    decay, v, k, q = (each.transpose(1, 2) for each in (*steps, B.float(), C.float()))
    y = _op()(q, k, v, decay)
    return y if D is None else y + D.unsqueeze(-1) * x


def _selective_scan(
    site: Site,
    _: Any,
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **others: Any,
) -> Any:
    """hidden_states, dt, z [B,V,S], A [V,K], B, C [B,K,S], D, delta_bias [V] -> [B,V,S]. The flags choose
    among ways to compute the same."""
    import torch

    site.check({"return_last_state": return_last_state, **others})
    if B.ndim != 3 or C.ndim != 3:
        raise site.refuse(f"B of {B.ndim} and C of {C.ndim} axes")
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = torch.nn.functional.softplus(dt) if delta_softplus else dt
    each = (dt.float() * hidden_states.float(), dt.float(), B.float(), C.float())
    v, decay, k, q = (x.transpose(1, 2).unsqueeze(1) for x in each)
    y = _op()(q, k, v, decay, None, A.float().t().unsqueeze(0))
    y = y.squeeze(2).transpose(1, 2).to(hidden_states.dtype)
    y = y if D is None else y + hidden_states * D[None, :, None]
    return y if z is None else y * torch.nn.functional.silu(z)


def _convolution(
    site: Site,
    original: Any,
    hidden_states: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    **others: Any,
) -> Any:
    """As transformers computes it, which leaves out what it does not know."""
    site.check(others)
    return original(hidden_states, weight, bias, activation)


def _op() -> Any:
    import torch

    return torch.ops.octavo.recurrence


KERNELS: dict[str, Inside] = {
    "chunk_gated_delta_rule": _delta_rule,
    "fused_recurrent_gated_delta_rule": _one_by_one,
    "chunk_kda": _delta_rule,
    "fused_recurrent_kda": _one_by_one,
    "mamba_chunk_scan_combined": _chunk_scan,
    "selective_scan_fn": _selective_scan,
    "causal_conv1d_fn": _convolution,
}


def convert_recurrence(
    c: Context, q: Any, k: Any, v: Any, decay: Any, beta: Any = None, rates: Any = None
) -> Any:
    """octavo::recurrence."""
    return c.op("recurrence", q, k, v, decay, beta, rates)
