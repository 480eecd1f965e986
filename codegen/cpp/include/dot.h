// One step of a dot product along K, for 16 outputs and R rows.
#pragma once
#include "vec.h"

namespace octavo {

// Values of k that lie side by side, in packed rows [K/STEP][R][STEP] as in weights [K/STEP][16][STEP].
template <class T>
constexpr int STEP = 4 / sizeof(T);

constexpr int64_t padded(int64_t K, int64_t step) { return (K + step - 1) / step * step; }

// Whether tiles of several rows multiply in T; else both sides are widened to f32, which is exact.
template <class T>
constexpr bool DOTS = true;
#if !defined(__AVX512BF16__)
template <>
constexpr bool DOTS<bf16> = false;
#endif

template <int R>
INLINE void dot_step(const float* x, const float* w, nf (&acc)[R][NV]) {
  F wv = load(w);
  _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
    nf xv = native_splat(x[r]);
    EACH(NV) acc[r][i] = native_fma(wv.v[i], xv, acc[r][i]);
  }
}

INLINE nf even_of(nu pairs) { return (nf)(pairs << 16); }
INLINE nf odd_of(nu pairs) { return (nf)(pairs & 0xffff0000u); }

template <int R>
INLINE void dot_step(const bf16* x, const bf16* w, nf (&acc)[R][NV]) {
#if defined(__AVX512BF16__)
  __m512bh wv = (__m512bh)_mm512_loadu_si512(w);
  _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
    int32_t pair;
    memcpy(&pair, x + r * 2, sizeof pair);
    acc[r][0] = (nf)_mm512_dpbf16_ps((__m512)acc[r][0], wv, (__m512bh)_mm512_set1_epi32(pair));
  }
#else
  EACH(NV) {
    nu pairs;
    memcpy(&pairs, w + i * LANES * 2, sizeof pairs);
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
      acc[r][i] = native_fma(even_of(pairs), native_splat(to_float(x[r * 2])), acc[r][i]);
      acc[r][i] = native_fma(odd_of(pairs), native_splat(to_float(x[r * 2 + 1])), acc[r][i]);
    }
  }
#endif
}

// The same of rows that lie apart, in f32: element k of row r is x[r * ld].
template <int R>
INLINE void few_step(const float* x, int64_t ld, const float* w, nf (&acc)[R][NV]) {
  F wv = load(w);
  _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
    nf xv = native_splat(x[r * ld]);
    EACH(NV) acc[r][i] = native_fma(wv.v[i], xv, acc[r][i]);
  }
}

template <int R>
INLINE void few_step(const float* x, int64_t ld, const bf16* w, nf (&acc)[R][NV]) {
  nu pairs[NV];
  EACH(NV) memcpy(&pairs[i], w + i * LANES * 2, sizeof pairs[i]);
  _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
    nf even = native_splat(x[r * ld]), odd = native_splat(x[r * ld + 1]);
    EACH(NV) acc[r][i] = native_fma(even_of(pairs[i]), even, acc[r][i]);
    EACH(NV) acc[r][i] = native_fma(odd_of(pairs[i]), odd, acc[r][i]);
  }
}

// Pairs [K/2][16][2] as [K][16].
INLINE void widen_pairs(const bf16* w, int64_t K, float* out) {
  for (int64_t k = 0; k < K; k += 2)
    EACH(NV) {
      nu pairs;
      memcpy(&pairs, w + k * W + i * LANES * 2, sizeof pairs);
      nf even = even_of(pairs), odd = odd_of(pairs);
      memcpy(out + k * W + i * LANES, &even, sizeof even);
      memcpy(out + (k + 1) * W + i * LANES, &odd, sizeof odd);
    }
}

}  // namespace octavo
