"""What kernels of quantised weights, activations and caches have in common; a part of every kernels.py.

An e4m3 number lies in a byte: sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinity. The same bits
7 places higher are a half-precision number (5 bits of exponent, bias 15) 256 times smaller, subnormals too.
"""

import triton
import triton.language as tl


@triton.jit
def from_e4m3(code):
    """f32 of bytes, exactly. No code is NaN: what is not finite has such a scale instead."""
    bits = code.to(tl.uint16)
    half = ((bits & 127) << 7 | (bits & 128) << 8).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def bounded(x, most):
    """x with NaN as 0 and the rest from -most to most."""
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -most), most)


@triton.jit
def to_e4m3(x):
    """The byte of the nearest number, of two equally near ones the even one; NaN as 0."""
    x = bounded(x, 448.0)
    # Adding 1.5 * 2^23 units of x's last place rounds to whole units; below 2^-6 they do not shrink further.
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) >> 23 & 255, 121)
    units = ((exponent + 20) << 23 | 0x400000).to(tl.float32, bitcast=True)
    half = (((x + units) - units) * 0.00390625).to(tl.float16).to(tl.uint16, bitcast=True)
    sign = (x.to(tl.uint32, bitcast=True) >> 24 & 128).to(tl.uint16)
    return ((half >> 7 & 127) | sign).to(tl.uint8)


@triton.jit
def to_whole(x):
    """The nearest whole number, of two equally near ones the even one; x is below 2^22 in size.

    x must be no product: the sum would round once with it where the device has such an instruction.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_i8(x):
    return to_whole(bounded(x, 127.0)).to(tl.int8)


@triton.jit
def to_unsigned(x, most):
    """A code from 0 to `most`."""
    return to_whole(tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), 0.0), most)).to(tl.uint8)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """The largest along an axis; NaN where one is."""
    broken = tl.max((x != x).to(tl.int32), AXIS)
    return tl.where(broken != 0, float("nan"), tl.max(x, AXIS))


@triton.jit
def inverse_of(scale):
    """What elements are multiplied by to be codes: 1 / scale, and 0 where all of a group are equal."""
    return tl.where(scale == 0.0, 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))


@triton.jit
def nth_part(x, n):
    return tl.div_rn(x, tl.full(x.shape, n, tl.float32))
