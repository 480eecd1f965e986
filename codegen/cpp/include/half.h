// f16, a type of storage: 16 of them become floats at once, and a float becomes the nearest of them.
#pragma once
#include "vec.h"

namespace octavo {

struct f16 {
  uint16_t bits;
};

INLINE nf native_load(const f16* p) {
#if defined(__AVX512F__)
  return (nf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (nf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  half_u16 h;
  memcpy(&h, p, sizeof h);
  nu bits = __builtin_convertvector(h, nu), magnitude = bits & 0x7fff;
  nu sign = (bits & 0x8000) << 16;
  nf x = (nf)(magnitude << 13) * 0x1p112f;  // exact: subnormals become normal
  nu found = magnitude >= 0x7c00 ? magnitude << 13 | 0x7f800000u : (nu)x;
  return (nf)(found | sign);
#endif
}

INLINE F load_halves(const f16* low, const f16* high) {
  F r;
#if defined(__AVX512F__)
  r.v[0] = (nf)_mm512_cvtph_ps(_mm256_loadu2_m128i((const __m128i*)high, (const __m128i*)low));
#else
  EACH(NV) r.v[i] = native_load(i < NV / 2 ? low + i * LANES : high + i * LANES - W / 2);
#endif
  return r;
}

// Round to nearest even; too large a number becomes infinite.
inline f16 to_f16(float x) {
  uint32_t bits, r;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x47800000) return {uint16_t(sign | 0x7c00)};  // 2^16
  if (magnitude < 0x38800000) {                                   // 2^-14: adding 2^-1 leaves units of 2^-24
    float a;
    memcpy(&a, &magnitude, 4);
    a += 0.5f;
    memcpy(&r, &a, 4);
    return {uint16_t(sign | (r - 0x3f000000))};
  }
  r = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
  return {uint16_t(sign | r >> 13)};
}

inline float to_float(f16 x) {
  f16 tmp[W] = {x};
  return lane0(load(tmp));
}

}  // namespace octavo
