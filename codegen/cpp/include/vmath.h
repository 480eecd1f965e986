// Own elementary functions, so that no bit depends on the machine's libm. exp works in float; the others widen to
// double, where plain polynomials are more than accurate enough, and round once.
#pragma once
#include "vec.h"

namespace octavo {

namespace coef {
// erfc(z) exp(z^2) (1 + 2z) for z >= 0 as a polynomial in (z - 2) / (z + 2): Chebyshev fit, relative error 4e-11.
constexpr double ERFC[] = {
    1.2769783815525289,      -0.09276382659767667,   -0.16603039760697258,    0.16405128075738068,
    -0.054220001489098654,   -0.00803402816818691,   0.00872266254769381,     0.0012714483976877375,
    -0.0014568822169963626,  -0.000454847703554253,  0.00020665475560492066,  0.00015246115276850979,
    -2.204319799542808e-06,  -3.8946740137035125e-05, -1.253435895104861e-05, 6.576199349696855e-06,
    4.564980275114671e-06,   -5.337496505540891e-07, -6.602970664091693e-07};
// erf(x) / x in x^2 around 0: 2/sqrt(pi) (-1)^n / (n! (2n+1)).
constexpr double ERF[] = {1.1283791670955126,     -0.37612638903183754,   0.11283791670955126,
                          -0.026866170645131252,  0.005223977625442187,   -0.0008548327023450852,
                          0.00012055332981789664, -1.4925650358406252e-05, 1.6462114365889246e-06,
                          -1.6365844691234924e-07};
// Taylor series: exp(r) for |r| <= ln(2)/2, sin and cos for |r| <= pi/4, atanh(s)/s in s^2.
constexpr double EXP[] = {1.0,       1.0,        1.0 / 2,     1.0 / 6,      1.0 / 24,      1.0 / 120,
                          1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800};
constexpr double SIN[] = {1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800};
constexpr double COS[] = {1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800};
constexpr double ATANH[] = {1.0, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15};
constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low bits
constexpr double LN2_HI = 0.6931471803691238, LN2_LO = 1.9082149292705877e-10, LOG2E = 1.4426950408889634;
}  // namespace coef

template <int N>
INLINE D poly(D x, const double (&c)[N]) {
  D r = splat_d(c[N - 1]);
  _Pragma("GCC unroll 32") for (int j = N - 2; j >= 0; j--) r = fma(r, x, splat_d(c[j]));
  return r;
}

INLINE D clamp_d(D x, double low, double high) {
  D lo = splat_d(low), hi = splat_d(high);
  x = select(x > hi, hi, x);
  return select(x < lo, lo, x);
}

// Relative error below 1e-13 where the result fits a float's range.
INLINE D exp_d(D x) {
  x = clamp_d(x, -700, 700);
  D t = fma(x, splat_d(coef::LOG2E), splat_d(coef::MAGIC));
  D n = t - splat_d(coef::MAGIC);
  D r = fma(n, splat_d(-coef::LN2_HI), x);
  r = fma(n, splat_d(-coef::LN2_LO), r);
  L scale = shift_left(bits_l(t) + splat_l(1023), 52);
  return poly(r, coef::EXP) * bits_d(scale);
}

INLINE D log_d(D x) {
  L bits = bits_l(x);
  L e = shift_right(bits - splat_l(0x3fe6a09e667f3bcd), 52);
  D m = bits_d(bits - shift_left(e, 52));
  D n = bits_d(e + bits_l(splat_d(coef::MAGIC))) - splat_d(coef::MAGIC);
  D s = (m - splat_d(1)) / (m + splat_d(1));
  D r = (s + s) * poly(s * s, coef::ATANH);
  r = fma(n, splat_d(coef::LN2_HI), fma(n, splat_d(coef::LN2_LO), r));
  D zero = splat_d(0), inf = splat_d(__builtin_inf());
  r = select(x == inf, inf, r);
  r = select(x == zero, zero - inf, r);
  r = select(x < zero, splat_d(__builtin_nan("")), r);
  return select(x != x, x, r);
}

// exp(x) - 1 without cancellation, for any x.
INLINE D expm1_d(D x) {
  D small = x * fma(x, fma(x, fma(x, splat_d(1.0 / 24), splat_d(1.0 / 6)), splat_d(0.5)), splat_d(1));
  L near = (x < splat_d(1e-3)) & (x > splat_d(-1e-3));
  return select(near, small, exp_d(x) - splat_d(1));
}

INLINE D tanh_d(D x) {
  D e = expm1_d(clamp_d(x + x, -80, 80));
  return e / (e + splat_d(2));
}

INLINE D sigmoid_d(D x) { return splat_d(1) / (splat_d(1) + exp_d(splat_d(0) - x)); }

INLINE D erfc_d(D x) {
  D zero = splat_d(0);
  L negative = x < zero;
  D z = clamp_d(select(negative, zero - x, x), 0, 26);
  D t = (z - splat_d(2)) / (z + splat_d(2));
  D y = exp_d(zero - z * z) * poly(t, coef::ERFC) / (splat_d(1) + (z + z));
  y = select(negative, splat_d(2) - y, y);
  return select(x != x, x, y);
}

INLINE D erf_d(D x) {
  L near = (x < splat_d(0.5)) & (x > splat_d(-0.5));
  return select(near, x * poly(x * x, coef::ERF), splat_d(1) - erfc_d(x));
}

// About 1 ulp; 0 below -104, infinity above 88.73, denormals kept.
INLINE F exp(F x) {
  x = select(x > splat(89.0f), splat(89.0f), x);
  x = select(x < splat(-104.0f), splat(-104.0f), x);
  F t = fma(x, splat(1.44269504f), splat(12582912.0f));
  F n = t - splat(12582912.0f);
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  F out;
  EACH(NV) {
#if defined(__AVX512F__)
    out.v[i] = (nf)_mm512_scalef_ps((__m512)p.v[i], (__m512)n.v[i]);
#else
    ni e = (ni)t.v[i] - 0x4b400000;  // the integer n, held in the low bits of t
    ni half = e >> 1;
    nf a = (nf)((half + 127) << 23), b = (nf)((e - half + 127) << 23);
    out.v[i] = p.v[i] * a * b;
#endif
  }
  return out;
}

// 2^x for x <= 0, relative error below 2e-7 down to 2^-126; exactly 0 from -127 on, 1 at 0; NaN stays NaN.
INLINE F exp2(F x) {
  x = larger(splat(-127.0f), x);
  F t = x + splat(12583039.0f);  // 1.5 * 2^23 + 127: the low bits hold the biased exponent
  F r = x - (t - splat(12583039.0f));
  F p = splat(1.3264727e-3f);
  p = fma(p, r, splat(9.6715128e-3f));
  p = fma(p, r, splat(5.5507337e-2f));
  p = fma(p, r, splat(2.4022242e-1f));
  p = fma(p, r, splat(6.9314698e-1f));
  p = fma(p, r, splat(1.0f));
  F scale;
  EACH(NV) scale.v[i] = (nf)((ni)t.v[i] << 23);
  return p * scale;
}

INLINE F log(F x) { return narrow(log_d(widen(x))); }
INLINE F tanh(F x) { return narrow(tanh_d(widen(x))); }
INLINE F erf(F x) { return narrow(erf_d(widen(x))); }
INLINE F sigmoid(F x) { return splat(1.0f) / (splat(1.0f) + exp(neg(x))); }
INLINE F silu(F x) { return x / (splat(1.0f) + exp(neg(x))); }
INLINE F relu(F x) { return select(x < splat(0.0f), splat(0.0f), x); }
INLINE F rsqrt(F x) { return splat(1.0f) / sqrt(x); }
INLINE F gelu(F x) {
  D d = widen(x);
  return narrow(splat_d(0.5) * d * erfc_d(d * splat_d(-0.7071067811865476)));
}
// 0.5 x (1 + tanh(u)) is x sigmoid(2u).
INLINE F gelu_tanh(F x) {
  D d = widen(x);
  D u = d * fma(d * d, splat_d(0.044715), splat_d(1)) * splat_d(1.5957691216057308);
  return narrow(d * sigmoid_d(u));
}
INLINE F softplus(F x) {
  D d = widen(x), zero = splat_d(0);
  D e = exp_d(select(d < zero, d, zero - d));
  D small = e * fma(e, fma(e, splat_d(1.0 / 3), splat_d(-0.5)), splat_d(1));
  D tail = select(e < splat_d(1e-4), small, log_d(splat_d(1) + e));
  return narrow(select(d < zero, zero, d) + tail);
}
INLINE F floor(F x) {
  F t;
  EACH(NV) t.v[i] = __builtin_convertvector(__builtin_convertvector(x.v[i], ni), nf);
  F down = select(t > x, t - splat(1.0f), t);
  return select(abs(x) < splat(8388608.0f), down, x);
}

// r in [-pi/4, pi/4] and the quadrant (mod 4) of each angle; pi/2 in three parts, good beyond 1e6 rad.
struct Angle { D r; L quadrant; };
INLINE Angle reduce_angle(D x) {
  D t = fma(x, splat_d(0.6366197723675814), splat_d(coef::MAGIC));
  D n = t - splat_d(coef::MAGIC);
  D r = fma(n, splat_d(-1.5707963267341256), x);
  r = fma(n, splat_d(-6.077100506303966e-11), r);
  r = fma(n, splat_d(-2.0222662487959506e-21), r);
  return {r, bits_l(t)};
}
INLINE D sin_quadrant(Angle a, int64_t turn) {
  D r2 = a.r * a.r;
  D s = a.r * poly(r2, coef::SIN), c = poly(r2, coef::COS);
  L q = a.quadrant + splat_l(turn);
  D y = select((q & splat_l(1)) == splat_l(1), c, s);
  return select((q & splat_l(2)) == splat_l(2), splat_d(0) - y, y);
}
INLINE F sin(F x) { return narrow(sin_quadrant(reduce_angle(widen(x)), 0)); }
INLINE F cos(F x) { return narrow(sin_quadrant(reduce_angle(widen(x)), 1)); }

// |x|^y, with the sign of x where y is an odd integer; NaN for a negative x and a fractional y.
INLINE F pow(F x, F y) {
  D magnitude = exp_d(widen(y) * log_d(widen(abs(x))));
  F r = narrow(magnitude);
  r = select(y == splat(0.0f), splat(1.0f), r);
  F whole = floor(y), odd = y - floor(y * splat(0.5f)) * splat(2.0f);
  F negative = select(whole == y, select(odd == splat(1.0f), neg(r), r), splat(__builtin_nanf("")));
  return select(x < splat(0.0f), negative, r);
}
INLINE F mod(F x, F y) { return x - floor(x / y) * y; }

// Scalar spellings, with the bits of the vector ones.
#define OCTAVO_SCALAR(f) inline float f(float x) { return lane0(f(splat(x))); }
OCTAVO_SCALAR(exp) OCTAVO_SCALAR(exp2) OCTAVO_SCALAR(log) OCTAVO_SCALAR(tanh) OCTAVO_SCALAR(erf) OCTAVO_SCALAR(sigmoid)
OCTAVO_SCALAR(silu) OCTAVO_SCALAR(relu) OCTAVO_SCALAR(rsqrt) OCTAVO_SCALAR(gelu) OCTAVO_SCALAR(gelu_tanh)
OCTAVO_SCALAR(softplus) OCTAVO_SCALAR(sin) OCTAVO_SCALAR(cos) OCTAVO_SCALAR(sqrt) OCTAVO_SCALAR(floor)
OCTAVO_SCALAR(abs) OCTAVO_SCALAR(neg)
#undef OCTAVO_SCALAR
inline float pow(float x, float y) { return lane0(pow(splat(x), splat(y))); }
inline float mod(float x, float y) { return lane0(mod(splat(x), splat(y))); }

}  // namespace octavo
