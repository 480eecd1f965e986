"""What the sampler's kernels share: logits as ordered keys, noise, and the search for a threshold.

codegen/triton/sample.py describes the search and what its scratch holds.
"""

import triton
import triton.language as tl


@triton.jit
def logits_at(logits, logit_rows, q, id, V: tl.constexpr):
    """Of the row that q samples; -infinity past the vocabulary."""
    row = tl.load(logit_rows + q).to(tl.int64)
    return tl.load(logits + row * V + id, mask=id < V, other=float("-inf"))


@triton.jit
def has_order(top):
    """Whether a row's largest logit is a number; one with a NaN or infinity in it has infinity."""
    return (top > float("-inf")) & (top < float("inf"))


@triton.jit
def key_of(logit):
    """i32 in the order of the logits; both zeros have one key."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def logit_of(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(logit, top, temperature, UNIT: tl.constexpr):
    """exp((logit - top) / temperature) in units of 1 / UNIT, i64: sums do not depend on their order."""
    return (tl.exp((logit - top) / temperature) * UNIT).to(tl.int64)


@triton.jit
def share_of(mass, top_p):
    """The least mass, at least one, that is top_p of `mass`."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def narrowed(state, counts, masses, top_p, SPLITS: tl.constexpr, PAD: tl.constexpr, FAN: tl.constexpr):
    """A search after a pass: of its FAN parts the one in which the threshold lies.

    Also what lies above it (count, mass), what is needed, the search's mode, and the number of that part.
    """
    low = tl.load(state)
    high = tl.load(state + 1)
    split = tl.arange(0, PAD)[:, None]
    part = tl.arange(0, FAN)
    place = split * FAN + part[None, :]
    count = tl.sum(tl.load(counts + place, mask=split < SPLITS, other=0), axis=0).to(tl.int64)
    mass = tl.sum(tl.load(masses + place, mask=split < SPLITS, other=0), axis=0)
    need = tl.load(state + 4)
    need = tl.where(need > 0, need, share_of(tl.sum(tl.where(part == 0, mass, 0)), top_p))
    mode = tl.load(state + 5)
    above_count = tl.load(state + 2)
    above_mass = tl.load(state + 3)
    step = (high - low + FAN - 1) // FAN
    reached = tl.where(mode == 2, above_mass + mass, above_count + count) >= need
    last = tl.max(tl.where(reached & (low + part * step < high), part, 0))
    above_count += tl.sum(tl.where(part == last + 1, count, 0))
    above_mass += tl.sum(tl.where(part == last + 1, mass, 0))
    high = tl.minimum(low + (last + 1) * step, high)
    return low + last * step, high, above_count, above_mass, need, mode, last


@triton.jit
def part_counts(counts, split, last, inside, FAN: tl.constexpr):
    """How many logits a split has in part `last` of a pass, and how many above it."""
    most = tl.load(counts + split * FAN + last, mask=inside, other=0)
    above = tl.load(counts + split * FAN + last + 1, mask=inside & (split * 0 + last < FAN - 1), other=0)
    return most - above, above


@triton.jit
def equals_kept(above_count, above_mass, need, mode, mass):
    """How many logits at the threshold, each of `mass`, a finished search keeps: the ones of lowest id."""
    by_mass = (need - above_mass + mass - 1) // tl.maximum(mass, 1)
    return tl.where(mode == 2, by_mass, need - above_count)


@triton.jit
def philox(seed, x0, x1, x2):
    """The first word of Philox-4x32-10 (Salmon et al., SC'11) of the counter (x0, x1, x2, 0), all u32."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    x3 = x0 ^ x0
    for _ in tl.static_range(10):
        a = x0.to(tl.uint64) * 0xD2511F53
        b = x2.to(tl.uint64) * 0xCD9E8D57
        x0 = (b >> 32).to(tl.uint32) ^ x1 ^ k0
        x2 = (a >> 32).to(tl.uint32) ^ x3 ^ k1
        x1 = (b & 0xFFFFFFFF).to(tl.uint32)
        x3 = (a & 0xFFFFFFFF).to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return x0


@triton.jit
def gumbel(word):
    """-log(-log(u)) of u = (word >> 8 + 0.5) * 2^-24, which f32 does not hold where u > 1/2.

    There -log(u) is 2 artanh(s) with s = (1 - u) / (1 + u) up to 1/3, as a series.
    """
    n = (word >> 8).to(tl.int32)
    low = n < 0x800000
    x = (tl.where(low, n, 0xFFFFFF - n).to(tl.float32) + 0.5) * 5.9604644775390625e-08  # u or 1 - u, exactly
    s = x / (2.0 - x)
    s2 = s * s
    series = 1 / 17 * s2 + 1 / 15
    series = series * s2 + 1 / 13
    series = series * s2 + 1 / 11
    series = series * s2 + 1 / 9
    series = series * s2 + 1 / 7
    series = series * s2 + 1 / 5
    series = series * s2 + 1 / 3
    series = series * s2 + 1.0
    return -tl.log(tl.where(low, -tl.log(x), 2.0 * s * series))
