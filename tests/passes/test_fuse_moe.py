"""fuse_moe: mixtures that compute every expert become ones that compute those chosen, and what keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from passes.canonicalize import Canonicalize
from passes.cse import Cse
from passes.fuse_epilogue import FuseEpilogue
from passes.fuse_moe import FuseMoe
from passes.match import shape
from passes.merge_linears import MergeLinears
from tests.passes.checks import apply, expect, graph_text, refuse

E, K, H, N = 5, 3, 8, 6
HEAD = f"graph @g(%x: f32[1,S,{H}], %other: i32[1,S,{K}]) dims {{S: 1..64}} {{"
body = partial(graph_text, HEAD)
ROUTER = [
    f"%r = linear %x, @router: f32[{E},{H}] : f32[1,S,{E}]",
    f"%p = softmax %r {{axis=2}} : f32[1,S,{E}]",
    f"%w, %i = topk %p {{k={K}}} : f32[1,S,{K}], i32[1,S,{K}]",
]


def expert(e: int, x: str = "%x", bias: bool = False, activation: str = "silu") -> list[str]:
    """%y{e}: a gated expert with matrices of its own."""
    b = [f", @b{e}: f32[{N}]", f", @c{e}: f32[{H}]"] if bias else ["", ""]
    return [
        f"%g{e} = linear {x}, @g{e}: f32[{N},{H}]{b[0]} : f32[1,S,{N}]",
        f"%u{e} = linear {x}, @u{e}: f32[{N},{H}] : f32[1,S,{N}]",
        f"%s{e} = {activation} %g{e} : f32[1,S,{N}]",
        f"%h{e} = mul %s{e}, %u{e} : f32[1,S,{N}]",
        f"%y{e} = linear %h{e}, @d{e}: f32[{H},{N}]{b[1]} : f32[1,S,{H}]",
    ]


def experts(**options: object) -> list[str]:
    return [line for e in range(E) for line in expert(e, **options)]  # type: ignore[arg-type]


def share_by_mask(e: int, indices: str = "%i") -> list[str]:
    """%c{e} [1,S,1]: the weight of the slot that chose the expert, else 0."""
    return [
        f"%m{e} = eq {indices}, {e} : bool[1,S,{K}]",
        f'%f{e} = cast %m{e} {{dtype="f32"}} : f32[1,S,{K}]',
        f"%a{e} = mul %w, %f{e} : f32[1,S,{K}]",
        f"%c{e} = sum %a{e} {{axes=[2], keepdims=true}} : f32[1,S,1]",
    ]


def share_by_where(e: int) -> list[str]:
    return [
        f"%m{e} = eq %i, {e} : bool[1,S,{K}]",
        f"%a{e} = where %m{e}, %w, 0.0 : f32[1,S,{K}]",
        f"%c{e} = sum %a{e} {{axes=[2], keepdims=true}} : f32[1,S,1]",
    ]


HITS = [
    f'%n = iota {{size={E}, dtype="i32"}} : i32[{E}]',
    f"%ik = reshape %i {{shape=[1,S,{K},1]}} : i32[1,S,{K},1]",
    f"%hit = eq %ik, %n : bool[1,S,{K},{E}]",
    f"%wk = reshape %w {{shape=[1,S,{K},1]}} : f32[1,S,{K},1]",
]
SCATTER = [
    *HITS,
    f"%given = where %hit, %wk, -inf : f32[1,S,{K},{E}]",
    f"%most = max %given {{axes=[2]}} : f32[1,S,{E}]",
    f'%hiti = cast %hit {{dtype="i32"}} : i32[1,S,{K},{E}]',
    f"%anyi = max %hiti {{axes=[2]}} : i32[1,S,{E}]",
    f'%any = cast %anyi {{dtype="bool"}} : bool[1,S,{E}]',
]
SHARES = [*SCATTER, f"%c = where %any, %most, {{}} : f32[1,S,{E}]"]  # {}: of experts not chosen


def share_by_slice(e: int) -> list[str]:
    return [f"%c{e} = slice %c {{axis=2, start={e}, stop={e + 1}}} : f32[1,S,1]"]


def chain(first: str = "") -> list[str]:
    """%z: first, and each expert's share of its value."""
    terms = [f"%t{e} = mul %c{e}, %y{e} : f32[1,S,{H}]" for e in range(E)]
    names = [*([first] if first else []), *(f"%t{e}" for e in range(E))]
    sums, total = list[str](), names[0]
    for n, term in enumerate(names[1:]):
        name = "%z" if n == len(names) - 2 else f"%sum{n}"
        sums.append(f"{name} = add {total}, {term} : f32[1,S,{H}]")
        total = name
    return [*terms, *sums]


def of_all(lines_of: object) -> list[str]:
    return [line for e in range(E) for line in lines_of(e)]  # type: ignore[operator]


STACKED = [
    *(f"%s{e}x = reshape %y{e} {{shape=[1,S,1,{H}]}} : f32[1,S,1,{H}]" for e in range(E)),
    f"%ys = concat {', '.join(f'%s{e}x' for e in range(E))} {{axis=2}} : f32[1,S,{E},{H}]",
]
ONE_HOT = [
    *HITS,
    f'%hot = cast %hit {{dtype="f32"}} : f32[1,S,{K},{E}]',
    f"%hw = mul %hot, %wk : f32[1,S,{K},{E}]",
    f"%c = sum %hw {{axes=[2]}} : f32[1,S,{E}]",
]
WEIGHED = [
    f"%ce = reshape %c {{shape=[1,S,{E},1]}} : f32[1,S,{E},1]",
    f"%cy = mul %ce, %ys : f32[1,S,{E},{H}]",
    f"%z = sum %cy {{axes=[2]}} : f32[1,S,{H}]",
]
CONTRACTED = [
    f"%ce = reshape %c {{shape=[1,S,1,{E}]}} : f32[1,S,1,{E}]",
    f"%cy = matmul %ce, %ys : f32[1,S,1,{H}]",
    f"%z = reshape %cy {{shape=[1,S,{H}]}} : f32[1,S,{H}]",
]
MASKED = [  # all scores, those not chosen times 0, as shares of their sum
    *HITS[:3],
    f'%hot = cast %hit {{dtype="f32"}} : f32[1,S,{K},{E}]',
    f"%mask = sum %hot {{axes=[2]}} : f32[1,S,{E}]",
    f"%pm = mul %p, %mask : f32[1,S,{E}]",
    "%sum = sum %pm {axes=[2], keepdims=true} : f32[1,S,1]",
    f"%c = div %pm, %sum : f32[1,S,{E}]",
]
PICKED = [
    f"%yt = transpose %ys {{perm=[0,1,3,2]}} : f32[1,S,{H},{E}]",
    f"%ij = reshape %i {{shape=[1,S,1,{K}]}} : i32[1,S,1,{K}]",
    f"%ie = expand %ij {{shape=[1,S,{H},{K}]}} : i32[1,S,{H},{K}]",
    f"%py = take_along %yt, %ie : f32[1,S,{H},{K}]",
    f"%wj = reshape %w {{shape=[1,S,1,{K}]}} : f32[1,S,1,{K}]",
    f"%pw = mul %py, %wj : f32[1,S,{H},{K}]",
    f"%z = sum %pw {{axes=[3]}} : f32[1,S,{H}]",
]


def stacks(x: str = "%x1") -> list[str]:
    """%ys [1,S,E,H] of products with matrices [E,K,N], the experts before the tokens."""
    return [
        f"%x1 = reshape %x {{shape=[1,1,S,{H}]}} : f32[1,1,S,{H}]",
        f"%g = matmul {x}, @g: f32[{E},{H},{N}] : f32[1,{E},S,{N}]",
        f"%gl = gelu %g : f32[1,{E},S,{N}]",
        f"%y1 = matmul %gl, @d: f32[{E},{N},{H}] : f32[1,{E},S,{H}]",
        f"%ys = transpose %y1 {{perm=[0,2,1,3]}} : f32[1,S,{E},{H}]",
    ]


def flattened(low: str = "-inf", bias: Sequence[str] = ()) -> list[str]:
    """Rows of all experts as one axis [E*S,H], each times a share that is 0 for who did not choose it."""
    return [
        *SCATTER,
        f"%cl = where %any, %most, {low} : f32[1,S,{E}]",
        f"%cs = sigmoid %cl : f32[1,S,{E}]",
        f"%ct = transpose %cs {{perm=[2,0,1]}} : f32[{E},1,S]",
        f"%cf = reshape %ct {{shape=[{E}*S,1]}} : f32[{E}*S,1]",
        f"%x1 = reshape %x {{shape=[1,S,{H}]}} : f32[1,S,{H}]",
        f"%xe = expand %x1 {{shape=[{E},S,{H}]}} : f32[{E},S,{H}]",
        f"%xf = reshape %xe {{shape=[{E}*S,{H}]}} : f32[{E}*S,{H}]",
        f"%xs = mul %xf, %cf : f32[{E}*S,{H}]",
        f"%xb = reshape %xs {{shape=[{E},S,{H}]}} : f32[{E},S,{H}]",
        f"%g = matmul %xb, @gu: f32[{E},{H},{2 * N}] : f32[{E},S,{2 * N}]",
        f"%g1, %u1 = split %g {{axis=2, sizes=[{N},{N}]}} : f32[{E},S,{N}], f32[{E},S,{N}]",
        f"%gl = silu %g1 : f32[{E},S,{N}]",
        f"%h1 = mul %gl, %u1 : f32[{E},S,{N}]",
        *(bias or [f"%y0 = matmul %h1, @d: f32[{E},{N},{H}] : f32[{E},S,{H}]"]),
        f"%yf = reshape %y0 {{shape=[{E}*S,{H}]}} : f32[{E}*S,{H}]",
        f"%yb = reshape %yf {{shape=[{E},S,{H}]}} : f32[{E},S,{H}]",
        f"%ysum = sum %yb {{axes=[0]}} : f32[S,{H}]",
        f"%z = reshape %ysum {{shape=[1,S,{H}]}} : f32[1,S,{H}]",
    ]


MIXTURES = {
    "masks": [*experts(), *of_all(share_by_mask), *chain()],
    "masks and biases": [*experts(bias=True), *of_all(share_by_mask), *chain()],
    "where": [*experts(), *of_all(share_by_where), *chain()],
    "after a residual": [*experts(), *of_all(share_by_mask), *chain("%x")],
    "slices of scattered weights": [*SHARES, *experts(), *of_all(share_by_slice), *chain()],
    "one-hot": [*ONE_HOT, *experts(), *STACKED, *WEIGHED],
    "one-hot and a product": [*ONE_HOT, *experts(), *STACKED, *CONTRACTED],
    "scattered weights": [*SHARES, *experts(), *STACKED, *WEIGHED],
    "masked scores": [*MASKED, *experts(), *STACKED, *WEIGHED],
    "gathered": [*experts(bias=True), *STACKED, *PICKED],
    "stacks": [*SHARES, *stacks(), *WEIGHED],
    "rows of all experts": flattened(),
}
MIXTURES = {name: [line.replace("{}", "0.0") for line in lines] for name, lines in MIXTURES.items()}


@pytest.mark.parametrize("name", MIXTURES)
def test_only_chosen_experts_are_computed(name: str) -> None:
    found = apply(FuseMoe(), body(*ROUTER, *MIXTURES[name]))
    kinds = [op.kind for op in found.graph.ops]
    assert found.count >= 1 and "moe_linear" in kinds
    assert kinds.count("linear") == 1 and "matmul" not in kinds  # the router
    for op in (op for op in found.graph.ops if op.kind == "moe_linear"):
        assert op.attr("num_experts") == E and shape(op.out)[-2] == K
    assert apply(FuseMoe(), found.graph).count == 0  # once only


@pytest.mark.parametrize("name", ["masks", "one-hot", "rows of all experts"])
def test_gate_and_up_then_become_one_product(name: str) -> None:
    graph = apply(FuseMoe(), body(*ROUTER, *MIXTURES[name])).graph
    for step in (Cse(), MergeLinears(), Canonicalize(), FuseEpilogue()):
        graph = apply(step, graph).graph
    gated = [op.attr("gated", False) for op in graph.ops if op.kind == "moe_linear"]
    assert gated == [True, False]


def test_as_text() -> None:
    lines = [
        "%r = linear %x0, @r: f32[2,4] : f32[1,S,2]",
        "%w, %i = topk %r {k=1} : f32[1,S,1], i32[1,S,1]",
        *(f"%y{e} = linear %x0, @w{e}: f32[3,4] : f32[1,S,3] // e.{e}" for e in (0, 1)),
        *(f"%m{e} = eq %i, {e} : bool[1,S,1]" for e in (0, 1)),
        *(f"%t{e} = where %m{e}, %y{e}, 0.0 : f32[1,S,3]" for e in (0, 1)),
        "%z = add %t0, %t1 : f32[1,S,3] // moe",
    ]
    after = [
        *lines[:2],
        "%v1 = concat @w0: f32[3,4], @w1: f32[3,4] {axis=0} : f32[6,4] // moe",
        "%v2 = reshape %x0 {shape=[1, S, 1, 4]} : f32[1,S,1,4] // moe",
        "%v3 = reshape %v2 {shape=[1, S, 4]} : f32[1,S,4] // moe",
        "%v4 = moe_linear %v3, %v1, %i {num_experts=2} : f32[1,S,1,3] // moe",
        "%z = sum %v4 {axes=[2]} : f32[1,S,3] // moe",
    ]
    head = "graph @g(%x0: f32[1,S,4]) dims {S: 1..64} {"
    found = expect(FuseMoe(), graph_text(head, *lines), graph_text(head, *after))
    assert found.count == 1 and not found.misses


def test_each_slot_by_itself() -> None:
    """Comparisons with one slot at a time: a mixture of one expert for each."""
    lines = [f"%i{j} = slice %i {{axis=2, start={j}, stop={j + 1}}} : i32[1,S,1]" for j in range(2)]
    lines += [f"%w{j} = slice %w {{axis=2, start={j}, stop={j + 1}}} : f32[1,S,1]" for j in range(2)]
    terms = list[str]()
    for e in range(E):
        for j in range(2):
            lines += [
                f"%m{e}{j} = eq %i{j}, {e} : bool[1,S,1]",
                f'%f{e}{j} = cast %m{e}{j} {{dtype="f32"}} : f32[1,S,1]',
                f"%c{e}{j} = mul %w{j}, %f{e}{j} : f32[1,S,1]",
                f"%t{e}{j} = mul %c{e}{j}, %y{e} : f32[1,S,{H}]",
            ]
            terms.append(f"%t{e}{j}")
    total, sums = terms[0], list[str]()
    for n, term in enumerate(terms[1:]):
        name = "%z" if n == len(terms) - 2 else f"%sum{n}"
        sums.append(f"{name} = add {total}, {term} : f32[1,S,{H}]")
        total = name
    found = apply(FuseMoe(), body(*ROUTER, *experts(), *lines, *sums))
    assert [op.kind for op in found.graph.ops].count("moe_linear") == 6
    assert [op.kind for op in found.graph.ops].count("linear") == 1


def test_what_all_slots_share_counts_once_for_each() -> None:
    """A sum over the experts that some slot chose of what does not depend on them."""
    lines = [*SCATTER, f"%ae = reshape %any {{shape=[1,S,{E},1]}} : bool[1,S,{E},1]"]
    lines += [f"%x1 = reshape %x {{shape=[1,S,1,{H}]}} : f32[1,S,1,{H}]"]
    lines += [f"%xe = where %ae, %x1, 0.0 : f32[1,S,{E},{H}]", f"%z = sum %xe {{axes=[2]}} : f32[1,S,{H}]"]
    assert apply(FuseMoe(), body(*ROUTER, *lines)).count == 1


BIASED = [
    f"%y9 = matmul %h1, @d: f32[{E},{N},{H}] : f32[{E},S,{H}]",
    f"%y0 = add %y9, @b: f32[{E},1,{H}] : f32[{E},S,{H}]",
]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (flattened("0.0"), "is not seen to be 0"),  # sigmoid(0) is a half
        (flattened(bias=BIASED), "is not seen to be 0"),  # a bias is given whatever the rows are
        ([*SHARES, *experts(), *STACKED, *WEIGHED], "is not seen to be 0"),
        ([*experts(), *of_all(share_by_mask), *chain()], "not computed alike"),
        ([*experts(), *of_all(share_by_mask), *chain()], "differ in shape"),
        ([*experts(), *of_all(share_by_mask), *chain()], "has a bias|have a bias"),
        ([*experts(), *of_all(share_by_mask), *chain()], "differs between"),
    ],
)
def test_what_keeps_every_expert(lines: list[str], reason: str) -> None:
    text = "\n".join(line.replace("{}", "1.0") for line in lines)
    if reason == "not computed alike":
        text = text.replace("%s2 = silu", "%s2 = gelu")
    if reason == "differ in shape":
        for name in "gud":
            wide = f"[{N + 1},{H}]" if name != "d" else f"[{H},{N + 1}]"
            text = text.replace(f"@{name}2: f32[{N},{H}]", f"@{name}2: f32{wide}")
            text = text.replace(f"@{name}2: f32[{H},{N}]", f"@{name}2: f32{wide}")
        for name in "gush":
            text = text.replace(f"%{name}2 =", f"%{name}2 @=")
        text = "\n".join(
            line.replace(" @=", " =").replace(f"f32[1,S,{N}]", f"f32[1,S,{N + 1}]") if " @=" in line else line
            for line in text.splitlines()
        )
    if "bias" in reason:
        text = text.replace(f"@d2: f32[{H},{N}]", f"@d2: f32[{H},{N}], @b2: f32[{H}]")
        reason = "have none"
    if reason == "differs between":
        text = text.replace("%c3 = sum %a3", "%c3 = max %a3")
        reason = "not computed alike"
    refuse(FuseMoe(), body(*ROUTER, *text.splitlines()), reason)


@pytest.mark.parametrize(
    "lines",
    [
        [
            *experts(),
            *(line for e in range(E) for line in share_by_mask(e, "%other")),
            *chain(),
        ],  # may repeat
        [*experts(), *of_all(share_by_mask), *chain()[:-2], f"%z = mul %sum{E - 4}, 1.0 : f32[1,S,{H}]"],
    ],
    ids=["given indices", "an expert is left out"],
)
def test_what_is_no_mixture_is_left_alone(lines: list[str]) -> None:
    found = apply(FuseMoe(), body(*ROUTER, *lines))
    assert found.count == 0 and not any(op.kind == "moe_linear" for op in found.graph.ops)


def test_indices_as_numbers_that_do_not_tell_experts_apart_are_no_choice() -> None:
    narrow = [f'%i8 = cast %i {{dtype="i8"}} : i8[1,S,{K}]']
    masks = [line for e in range(E) for line in share_by_mask(e, "%i8")]
    assert apply(FuseMoe(), body(*ROUTER, *experts(), *narrow, *masks, *chain())).count == 0
    wide = [f'%if = cast %i {{dtype="f32"}} : f32[1,S,{K}]']
    masks = [line for e in range(E) for line in share_by_mask(e, "%if")]
    assert apply(FuseMoe(), body(*ROUTER, *experts(), *wide, *masks, *chain())).count == 1


def test_constants_of_other_places_are_not_stacked() -> None:
    """One number for an expert and a row of them for another."""
    own = [f"%q{e} = add %y{e}, @k{e}: f32[{H}] : f32[1,S,{H}]" for e in range(E)]
    shares = of_all(share_by_mask)
    terms = [line.replace("%y", "%q") for line in chain()]
    assert apply(FuseMoe(), body(*ROUTER, *experts(), *own, *shares, *terms)).count == 1
    odd = [line.replace(f"@k2: f32[{H}]", "@k2: f32[1]") for line in own]
    refuse(FuseMoe(), body(*ROUTER, *experts(), *odd, *shares, *terms), "differ in shape")
