// F: 16 floats. D: 16 doubles. I: 16 int32, also masks (-1 where true). Each lane's result depends on that lane alone.
#pragma once
#include "isa.h"

namespace octavo {

constexpr int W = 16;             // lanes of every vector above this header
constexpr int NV = W / LANES;     // native vectors in it

struct F { nf v[NV]; };
struct I { ni v[NV]; };
struct D { nd v[2 * NV]; };
struct L { nl v[2 * NV]; };

struct bf16 {
  uint16_t bits;
};

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

#define EACH(n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

#define OCTAVO_BINARY(T, n, op)                                                     \
  INLINE T operator op(T a, T b) { T r; EACH(n) r.v[i] = a.v[i] op b.v[i]; return r; }
#define OCTAVO_COMPARE(T, M, n, op)                                                 \
  INLINE M operator op(T a, T b) { M r; EACH(n) r.v[i] = a.v[i] op b.v[i]; return r; }
OCTAVO_BINARY(F, NV, +) OCTAVO_BINARY(F, NV, -) OCTAVO_BINARY(F, NV, *) OCTAVO_BINARY(F, NV, /)
OCTAVO_BINARY(D, 2 * NV, +) OCTAVO_BINARY(D, 2 * NV, -) OCTAVO_BINARY(D, 2 * NV, *) OCTAVO_BINARY(D, 2 * NV, /)
OCTAVO_BINARY(I, NV, +) OCTAVO_BINARY(I, NV, -) OCTAVO_BINARY(I, NV, &) OCTAVO_BINARY(I, NV, |)
OCTAVO_BINARY(L, 2 * NV, +) OCTAVO_BINARY(L, 2 * NV, -) OCTAVO_BINARY(L, 2 * NV, &) OCTAVO_BINARY(L, 2 * NV, |)
OCTAVO_COMPARE(F, I, NV, <) OCTAVO_COMPARE(F, I, NV, <=) OCTAVO_COMPARE(F, I, NV, >) OCTAVO_COMPARE(F, I, NV, >=)
OCTAVO_COMPARE(F, I, NV, ==) OCTAVO_COMPARE(F, I, NV, !=)
OCTAVO_COMPARE(D, L, 2 * NV, <) OCTAVO_COMPARE(D, L, 2 * NV, >) OCTAVO_COMPARE(D, L, 2 * NV, ==)
OCTAVO_COMPARE(D, L, 2 * NV, !=) OCTAVO_COMPARE(L, L, 2 * NV, ==)
INLINE I operator~(I a) { I r; EACH(NV) r.v[i] = ~a.v[i]; return r; }

INLINE F splat(float x) { F r; EACH(NV) r.v[i] = native_splat(x); return r; }
INLINE D splat_d(double x) { D r; EACH(2 * NV) r.v[i] = x - nd{}; return r; }
INLINE L splat_l(int64_t x) { L r; EACH(2 * NV) r.v[i] = x - nl{}; return r; }
INLINE F fma(F a, F b, F c) { F r; EACH(NV) r.v[i] = native_fma(a.v[i], b.v[i], c.v[i]); return r; }
INLINE D fma(D a, D b, D c) { D r; EACH(2 * NV) r.v[i] = native_fma(a.v[i], b.v[i], c.v[i]); return r; }
INLINE F select(I m, F a, F b) { F r; EACH(NV) r.v[i] = m.v[i] ? a.v[i] : b.v[i]; return r; }
INLINE D select(L m, D a, D b) { D r; EACH(2 * NV) r.v[i] = m.v[i] ? a.v[i] : b.v[i]; return r; }
INLINE F bits_f(I a) { F r; EACH(NV) r.v[i] = (nf)a.v[i]; return r; }
INLINE I bits_i(F a) { I r; EACH(NV) r.v[i] = (ni)a.v[i]; return r; }
INLINE D bits_d(L a) { D r; EACH(2 * NV) r.v[i] = (nd)a.v[i]; return r; }
INLINE L bits_l(D a) { L r; EACH(2 * NV) r.v[i] = (nl)a.v[i]; return r; }
INLINE L shift_left(L a, int n) { L r; EACH(2 * NV) r.v[i] = a.v[i] << n; return r; }
INLINE L shift_right(L a, int n) { L r; EACH(2 * NV) r.v[i] = a.v[i] >> n; return r; }
INLINE F sqrt(F a) { F r; EACH(NV) r.v[i] = native_sqrt(a.v[i]); return r; }
// NaN in either operand gives NaN, as numpy and torch do.
INLINE F maximum(F a, F b) { return select(a != a, a, select(a > b, a, b)); }
INLINE F minimum(F a, F b) { return select(a != a, a, select(a < b, a, b)); }
INLINE F abs(F a) { I r; EACH(NV) r.v[i] = (ni)a.v[i] & 0x7fffffff; return bits_f(r); }
INLINE F neg(F a) { I r; EACH(NV) r.v[i] = (ni)a.v[i] ^ int32_t(0x80000000); return bits_f(r); }
// The larger; b where either is NaN.
INLINE F larger(F a, F b) { F r; EACH(NV) r.v[i] = native_larger(a.v[i], b.v[i]); return r; }

INLINE nf native_load(const float* p) { nf r; memcpy(&r, p, sizeof r); return r; }
INLINE nf native_load(const bf16* p) {
  half_u16 h;
  memcpy(&h, p, sizeof h);
  return (nf)(__builtin_convertvector(h, nu) << 16);
}

// Vector by vector: a copy of the whole struct goes through memory where it is more than one.
template <class T>
INLINE F load(const T* p) { F r; EACH(NV) r.v[i] = native_load(p + i * LANES); return r; }
INLINE void store(float* p, F a) { EACH(NV) memcpy(p + i * LANES, &a.v[i], sizeof(nf)); }
// Lanes 0 to 7 from one place, 8 to 15 from another.
template <class T>
INLINE F load_halves(const T* low, const T* high) {
  F r;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {
    __m256i bits = _mm256_loadu2_m128i((const __m128i*)high, (const __m128i*)low);
    r.v[0] = (nf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
  } else {
    __m256d first = _mm256_loadu_pd((const double*)low), second = _mm256_loadu_pd((const double*)high);
    r.v[0] = (nf)_mm512_insertf64x4(_mm512_castpd256_pd512(first), second, 1);
  }
#else
  EACH(NV) r.v[i] = native_load(i < NV / 2 ? low + i * LANES : high + i * LANES - W / 2);
#endif
  return r;
}
// Round to nearest even; NaN stays NaN.
INLINE void store(bf16* p, F a) {
  EACH(NV) {
    nu b = (nu)a.v[i];
    nu rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    nu quiet = (b >> 16) | 0x40;
    rounded = (a.v[i] != a.v[i]) ? quiet : rounded;
    half_u16 h = __builtin_convertvector(rounded, half_u16);
    memcpy(p + i * LANES, &h, sizeof h);
  }
}

INLINE bf16 to_bf16(float x) {
  bf16 r[W];
  store(r, splat(x));
  return r[0];
}
INLINE void convert(float x, float* out) { *out = x; }
INLINE void convert(float x, bf16* out) { *out = to_bf16(x); }
INLINE void convert(bf16 x, float* out) { *out = to_float(x); }
INLINE void convert(bf16 x, bf16* out) { *out = x; }

// The first n lanes of memory, the rest zero; n in 0..16. Nothing past p + n is touched.
template <class T>
INLINE F load_n(const T* p, int64_t n) {
  if (n >= W) return load(p);
  T tmp[W] = {};
  memcpy(tmp, p, size_t(n) * sizeof(T));
  return load(tmp);
}
template <class T>
INLINE void store_n(T* p, F a, int64_t n) {
  if (n >= W) return store(p, a);
  T tmp[W];
  store(tmp, a);
  memcpy(p, tmp, size_t(n) * sizeof(T));
}

INLINE D widen(F a) {
  float tmp[W];
  store(tmp, a);
  D r;
  EACH(2 * NV) {
    half_f h;
    memcpy(&h, tmp + i * (LANES / 2), sizeof h);
    r.v[i] = __builtin_convertvector(h, nd);
  }
  return r;
}
INLINE F narrow(D a) {
  float tmp[W];
  EACH(2 * NV) {
    half_f h = __builtin_convertvector(a.v[i], half_f);
    memcpy(tmp + i * (LANES / 2), &h, sizeof h);
  }
  return load(tmp);
}

INLINE float lane0(F a) { return a.v[0][0]; }
INLINE double lane0(D a) { return a.v[0][0]; }

// Lanes i and i+8, then i and i+4, and so on: one order, always.
INLINE float reduce_sum(F a) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256 x = (__m256)(a.v[0] + a.v[1]);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
#else
  float t[W];
  store(t, a);
  _Pragma("GCC unroll 4") for (int w = W / 2; w > 0; w /= 2)
    _Pragma("GCC unroll 8") for (int j = 0; j < w; j++) t[j] += t[j + w];
  return t[0];
#endif
}
INLINE double reduce_sum(D a) {
  double t[W];
  memcpy(t, &a, sizeof a);
  for (int w = W / 2; w > 0; w /= 2)
    for (int j = 0; j < w; j++) t[j] += t[j + w];
  return t[0];
}
INLINE float reduce_max(F a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a.v[0]);
#elif defined(__AVX2__)
  __m256 x = (__m256)native_larger(a.v[0], a.v[1]);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
#else
  float t[W];
  store(t, a);
  for (int w = W / 2; w > 0; w /= 2)
    for (int j = 0; j < w; j++) t[j] = t[j] > t[j + w] ? t[j] : t[j + w];
  return t[0];
#endif
}

// a where the lane's bit is set, else b.
INLINE F select_bits(uint32_t bits, F a, F b) {
#if defined(__AVX512F__)
  F r;
  r.v[0] = (nf)_mm512_mask_blend_ps((__mmask16)bits, (__m512)b.v[0], (__m512)a.v[0]);
  return r;
#else
  int32_t m[W];
  for (int j = 0; j < W; j++) m[j] = -int32_t((bits >> j) & 1);
  I mask;
  memcpy(&mask, m, sizeof mask);
  return select(mask, a, b);
#endif
}

}  // namespace octavo
