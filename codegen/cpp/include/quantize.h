// Quantising and dequantising rows where no other kernel does it on its way.
#pragma once
#include "qfloat.h"

namespace octavo {

INLINE void encode(nf x, int8_t* p) { for (int j = 0; j < LANES; j++) p[j] = int8_t(x[j]); }
// Of numbers of e4m3.
INLINE void encode(nf x, f8* p) {
  nf scaled = x * 0x1p-120f;  // the exponent's offset; what is subnormal in e4m3 is so in f32 too
  nu bits = (nu)scaled;
  for (int j = 0; j < LANES; j++) p[j].bits = uint8_t((bits[j] >> 20 & 0x7f) | (bits[j] >> 24 & 0x80));
}
INLINE void convert(float x, f16* out) { *out = to_f16(x); }

template <class C>
using GridOf = std::conditional_t<std::is_same_v<C, f8>, Float8, Int8>;

// Codes of x [rows, K] and scales [rows, groups], in groups of `group` elements (0: all).
template <class T, class C, class S>
KERNEL void quantize_groups(Thread& th, const T* x, int64_t ld, int64_t rows, int64_t K, int64_t group, C* codes, S* scales) {
  using Grid = GridOf<C>;
  int64_t step = group == 0 ? K : group, groups = (K + step - 1) / step;
  for (int64_t t = th.first(rows); t < th.last(rows); t++)
    for (int64_t g = 0; g < groups; g++) {
      int64_t k0 = g * step, n = K - k0 < step ? K - k0 : step;
      const T* from = x + t * ld + k0;
      convert(largest_of(from, n) / Grid::LARGEST, &scales[t * groups + g]);
      nf inverse = native_splat(inverse_of(to_float(scales[t * groups + g])));
      for (int64_t k = 0; k < n; k += W) {
        F v = load_n(from + k, n - k);
        C found[W];
        EACH(NV) encode(Grid::round(scaled(v.v[i], inverse, native_splat(Grid::LARGEST))), found + i * LANES);
        memcpy(codes + t * K + k0 + k, found, size_t(n - k < W ? n - k : W));
      }
    }
}

INLINE float number(int8_t code) { return code; }
INLINE float number(uint8_t code) { return code; }
INLINE float number(f8 code) { return decode_f8(splat_i(code.bits))[0]; }

// (code - zero) * scale + offset of codes [rows, K]; zeros and offsets may be null.
template <class C, class S, class Z, class O, class Y>
KERNEL void dequantize_groups(Thread& th, const C* codes, int64_t rows, int64_t K, int64_t group, const S* scales,
                            const Z* zeros, int32_t zero, const O* offsets, Y* y) {
  int64_t step = group == 0 ? K : group, groups = (K + step - 1) / step;
  for (int64_t t = th.first(rows); t < th.last(rows); t++)
    for (int64_t k = 0; k < K; k++) {
      int64_t g = t * groups + k / step;
      float x = number(codes[t * K + k]) - float(zeros ? int32_t(zeros[g]) : zero);
      x = x * to_float(scales[g]);
      convert(offsets ? x + to_float(offsets[g]) : x, &y[t * K + k]);
    }
}

}  // namespace octavo
