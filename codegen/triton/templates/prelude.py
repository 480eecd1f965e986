"""The start of every generated kernels.py: what kernels have in common.

Arithmetic is in f32 where nothing else is said.
"""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    u = x * x
    tail = -0.0538750034 + u * (0.0211157149 + u * -0.00627577157)
    near = size + size * u * (-0.333333304 + u * (0.133329227 + u * tail))
    y = tl.where(size < 0.55, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0.0, -y, y)


@triton.jit
def relu(x):
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def softplus(x):
    e = tl.exp(-tl.abs(x))
    tail = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (0.3333333333333333 - 0.25 * e))), tl.log(1.0 + e))
    return tl.where(x > 0.0, x, 0.0) + tail


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def sin_turned(x, turns):
    """The sine of x and `turns` quarter turns; in f64 until the angle is small, for it may be a position."""
    wide = x.to(tl.float64)
    quarters = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - quarters * 1.5707963267341256 - quarters * 6.077100506303966e-11).to(tl.float32)
    quadrant = quarters.to(tl.int32) + turns
    u = r * r
    sine = r + r * u * (-0.166666642 + u * (0.00833271386 + u * -0.00019583214))
    cosine = 1.0 - u * (0.5 - u * (0.0416666641 + u * (-0.00138882685 + u * 2.45432476e-05)))
    y = tl.where((quadrant & 1) == 0, sine, cosine)
    return tl.where((quadrant & 2) == 0, y, -y)


@triton.jit
def sin(x):
    return sin_turned(x, 0)


@triton.jit
def cos(x):
    return sin_turned(x, 1)


@triton.jit
def power(x, y):
    """x to the y; f64 inside, because the exponent multiplies the error of the logarithm."""
    size = tl.exp(y.to(tl.float64) * tl.log(tl.abs(x).to(tl.float64))).to(tl.float32)
    size = tl.where(y == 0.0, 1.0, size)
    odd = y - 2.0 * tl.floor(y * 0.5) == 1.0
    negative = tl.where(tl.floor(y) == y, tl.where(odd, -size, size), float("nan"))
    return tl.where(x < 0.0, negative, size)


@triton.jit
def floor_quotient(x, y):
    """x // y of integers, rounded down; the hardware rounds towards 0."""
    quotient = x // y
    rest = x - quotient * y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)


@triton.jit
def floor_rest(x, y):
    """x mod y of integers, with the sign of y."""
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)
